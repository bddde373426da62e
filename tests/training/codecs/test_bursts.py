"""Every N-th push has no codec, in whole jobs: over MPI and on the virtual network.

tests/support/programs/training/codec_cases.py has the jobs over MPI.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from psdist.history import EventKind
from psdist.job import Job
from psdist.protocol.header import CodecCode
from tests.support.programs.training import codec_cases
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.low_rank_task import learn
from tests.support.programs.training.virtual_job import run_virtually

OVER_MPI = "codec_cases"
STEPS, LENGTH, EVERY = 13, 40, 4
GRADIENTS = torch.randn(STEPS, LENGTH, generator=torch.Generator().manual_seed(1))


def codes_by_round(outcome: Outcome) -> dict[int, set[int]]:
    """By which codecs the pushes of each round came."""
    found: dict[int, set[int]] = {}
    for server in outcome.history.servers:
        events = server.events
        applies = events[events["kind"] == EventKind.APPLY]
        for clock, codec in zip(applies["clock"], applies["codec"], strict=True):
            found.setdefault(int(clock), set()).add(int(codec))
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["sgd-sync", "adam-async"])
def test_every_fifth_push_of_every_group_has_no_codec(
    outcomes: dict[str, Outcome], name: str, tmp_path: Path
) -> None:
    outcome = outcomes[name]
    outcome.checked()
    assert codes_by_round(outcome) == {
        clock: {CodecCode.PLAIN if clock % 5 == 4 else CodecCode.TOPK}
        for clock in range(codec_cases.ITERATIONS)
    }
    told = outcome.summary["codecs"]
    assert [each["push"] for each in told] == [codec_cases.PUSH_CODEC]
    if name == "sgd-sync":
        (case,) = (each for each in codec_cases.CASES if each.name == name)
        virtual = run_virtually(case, tmp_path)
        for one, other in zip(outcome.results, virtual.results, strict=True):
            assert torch.equal(one["parameters"], other["parameters"])


def train_by(optimizer: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
    """Values that servers should have: a twentieth of the values is pushed at a time."""
    weight = torch.nn.Parameter(torch.zeros(LENGTH))
    steps, left = optimizer([weight], lr=0.1), torch.zeros(LENGTH)
    for number, gradient in enumerate(GRADIENTS, start=1):
        wanted = gradient + left
        if number % EVERY:
            places = wanted.abs().topk(LENGTH // 20).indices
            weight.grad = torch.zeros(LENGTH).index_copy(0, places, wanted[places])
            left = wanted - weight.grad
        else:
            weight.grad = gradient.clone()
        steps.step()
    return weight.detach()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_burst_brings_the_gradient_and_what_was_left_out_comes_as_before(
    optimizer: Callable[..., torch.optim.Optimizer], mode: str, tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = torch.nn.Linear(LENGTH, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, served = job.prepare(model, optimizer(model.parameters(), lr=0.1))
        for gradient in GRADIENTS:
            model.weight.grad = gradient.view(1, LENGTH).clone()
            served.step()
        return {"weight": model.weight.detach().flatten().clone()}

    push_codec = f"topk:{1 / 20}+burst:{EVERY}"
    given = {"mode": mode, "push_codec": push_codec, "codec_exact": (), "record": True}
    outcome = run_virtually(Case(name="burst", script=script, settings=given), tmp_path)
    outcome.checked()
    expected = train_by(optimizer)
    assert torch.allclose(outcome.results[0]["weight"], expected, atol=1e-6)


def test_in_sync_the_same_bits_with_any_number_of_servers_in_a_schedule(tmp_path: Path) -> None:
    """With pulls that continue from x^, and parts with and without bursts."""
    schedule = "0: sync topk:0.05+burst:3/int4; 8: sync sign/int4; 14: sync sign+burst:2"
    runs = [learn(tmp_path / f"run-{at}", steps=20, servers=at, schedule=schedule) for at in (1, 3)]
    first, other = (each.results[0] for each in runs)
    assert other["losses"] == first["losses"]
    for outcome in runs:
        outcome.checked()
    codes = codes_by_round(runs[0])
    bursts = [clock for clock, found in sorted(codes.items()) if found == {CodecCode.PLAIN}]
    assert bursts == [2, 5, 15, 17, 19]
    assert first["losses"][-1] < 0.5 * first["losses"][0]


def test_the_check_notices_bursts_in_other_rounds(tmp_path: Path) -> None:
    outcome = learn(tmp_path / "run", steps=12, push_codec="sign+burst:3", mode="ssp", staleness=1)
    outcome.checked()
    file = next((tmp_path / "run").glob("history/**/run.json"))
    record = json.loads(file.read_text())
    (codecs,) = record["codecs"]
    assert (codecs["push_code"], codecs["burst"], codecs["burst_code"]) == (6, 3, 11)
    for burst, problem in ((4, "codec 11; run.json says 6"), (6, "codec 11; run.json says 6")):
        codecs["burst"] = burst
        file.write_text(json.dumps(record))
        with pytest.raises(AssertionError, match=f"came by {problem} of its round"):
            outcome.checked()


@pytest.mark.parametrize("local_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_sends_less_than_all_and_more_than_the_codec_alone(
    local_steps: int, tmp_path: Path
) -> None:
    """SGD with an outer optimizer, too, whose rounds are counted."""
    given = {"steps": 24, "local_steps": local_steps, "codec_exact": ()}
    with_bursts, without, plain = (
        learn(tmp_path / f"run-{number}", push_codec=codec, **given)  # type: ignore[arg-type]
        for number, codec in enumerate(("topk:0.05+burst:4", "topk:0.05", "none"))
    )
    with_bursts.checked()
    sent, coded, whole = (each.summary["bytes_pushed"] for each in (with_bursts, without, plain))
    assert sent == pytest.approx(0.75 * coded + 0.25 * whole, rel=0.01)
    errors = [each.results[0]["losses"][-1] for each in (with_bursts, without)]
    assert np.isfinite(errors).all()
