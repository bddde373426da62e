"""``job.pull(exact=True)`` gets values that no codec has changed, for an evaluation. Training then
continues from the values before it, bit by bit. tests/support/programs/training/codec_cases.py has
the scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from psdist.codecs.wire import Wire
from psdist.errors import UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.codec_cases import PROBLEM, looking
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "codec_cases"
GROUPS = ((0,), (1, 2), (3,))
SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)


def play(path: Path, *, every: int = 3, seed: int = 0, script: Any = None, **given: Any) -> Outcome:
    settings = {"record": True, "codec_exact": (), "checksum_every": 1, **given}
    case = Case(
        name="looking",
        script=script or looking(every=every, steps=10),
        servers=2,
        groups=GROUPS,
        settings=settings,
    )
    return run_virtually(case, path, seed=seed, link=WILD)


def file_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "end.safetensors")


@pytest.fixture
def compares_every_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one of 64."""
    monkeypatch.setattr(Wire, "is_compared", lambda _wire, _chunk, _clock: True)


@pytest.mark.mpi
def test_over_mpi_it_is_what_is_saved_and_training_goes_on_from_what_it_was(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["exact-sync"]
    outcome.checked()
    assert_right(outcome, is_sync=True)


def assert_right(outcome: Outcome, *, is_sync: bool) -> None:
    for result in outcome.results:
        assert len(result["exact"]) == 3
        for held, exact, after, saved in zip(
            *(result[key] for key in ("held", "exact", "after", "saved")), strict=True
        ):
            assert not torch.equal(exact, held), "the codec has left nothing out"
            if is_sync:
                assert torch.equal(exact, saved)
                assert torch.equal(after, held)


@pytest.mark.usefixtures("compares_every_reply")
@SEEDS
@pytest.mark.parametrize(
    "given",
    [
        {"codec": "int4/sign"},
        {"pull_codec": "int8", "overlap": "full", "group": "rank"},
        {"schedule": "0: sync none/sign; 4: sync none; 7: sync int8/int4"},
        pytest.param(
            {"pull_codec": "sign", "local_steps": 3, "outer": "average"}, marks=pytest.mark.slow
        ),
    ],
    ids=["int4-sign", "overlap", "schedule", "local"],
)
def test_in_sync_nothing_of_the_training_changes(
    given: dict[str, Any], seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a network that reorders and repeats, with a checksum in every reply."""
    looked = play(tmp_path / "looked", seed=seed, **given)
    looked.checked()
    assert "are not what their servers have sent" not in caplog.text
    if "local_steps" in given:  # a look ends a round, as every pull does
        return
    never = play(tmp_path / "never", every=0, **given)
    for one, other in zip(looked.results, never.results, strict=True):
        assert one["losses"] == other["losses"]
        assert torch.equal(one["parameters"], other["parameters"])
    first, second = file_of(looked.path), file_of(never.path)
    assert all(torch.equal(first[name], second[name]) for name in second)
    if "schedule" not in given:
        assert_right(looked, is_sync=True)


@pytest.mark.usefixtures("compares_every_reply")
@SEEDS
@pytest.mark.parametrize("mode", ["async", pytest.param("ssp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "given",
    [{"pull_codec": "bf16"}, {"codec": "int4/sign", "pull_copies": "on"}, {"push_codec": "sign"}],
    ids=["casts", "copies", "none"],
)
def test_in_other_modes_groups_go_on_from_what_they_hold(
    given: dict[str, Any], mode: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = play(tmp_path / "run", seed=seed, mode=mode, staleness=2, **given)
    outcome.checked()
    assert "are not what their servers have sent" not in caplog.text
    losses = outcome.results[0]["losses"]
    assert losses[-1] < losses[0]
    for result in outcome.results:
        for exact, after in zip(result["exact"], result["after"], strict=True):
            assert torch.equal(after, after.bfloat16().float()) == ("pull_codec" in given)
            assert not torch.equal(exact, exact.bfloat16().float())


def test_what_is_saved_is_exact_with_casts_of_pulls_in_async(tmp_path: Path) -> None:
    """One worker: what its servers have can be computed here."""
    gradients = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, served = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for gradient in gradients:
            model.weight.grad = gradient.view(1, 40).clone()
            served.step()
        job.save(stage.path / "end.safetensors")
        held = flat(model)
        job.pull(exact=True)
        return {"held": held, "exact": flat(model)}

    settings = {"mode": "async", "pull_codec": "bf16"}
    outcome = run_virtually(Case(name="saved", script=script, settings=settings), tmp_path)
    weight = nn.Parameter(torch.zeros(40))
    plain = torch.optim.SGD([weight], lr=0.1)
    for gradient in gradients:
        weight.grad = gradient.clone()
        plain.step()
    assert torch.equal(outcome.results[0]["exact"], weight.detach())
    assert torch.equal(file_of(tmp_path)["weight"].flatten(), weight.detach())
    assert torch.equal(outcome.results[0]["held"], weight.detach().bfloat16().float())


def going_on(*, by: str) -> Any:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, served = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in PROBLEM.batches(size=8, count=3):
            served.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            served.step()
            job.pull(exact=True)
            if by == "step":
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                served.step()
        return {}

    return script


@pytest.mark.parametrize("by", ["forward", "step"])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_training_on_it_is_refused_in_one_line(by: str, local_steps: int, tmp_path: Path) -> None:
    is_written = local_steps > 1 and by == "step"
    problem = "was written" if is_written else "a gradient is made of the parameters that"
    with pytest.raises(UsageError, match=rf"{problem}.*job.(pull|set_parameters)"):
        play(
            tmp_path / "run",
            script=going_on(by=by),
            record=False,
            codec="int8",
            local_steps=local_steps,
        )


def test_without_a_codec_of_pulls_it_is_a_pull(tmp_path: Path) -> None:
    outcome = play(tmp_path / "run", script=going_on(by="forward"), push_codec="int8")
    outcome.checked()
