"""Pushes that are encoded on the device of the gradients: whole jobs have the bits, and the
history, of jobs whose host encodes.

The device is none, and late (tests/support/late_transfers.py). On a real one tests/gpu compares.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import ModelError, NonFiniteGradientError, UsageError
from psdist.job import Job
from tests.support.late_transfers import LateTransfers, on_a_device
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually
from tests.training.overlap.test_overlap import (
    LATE,
    NUM_CHUNKS,
    STEPS,
    WATCHED,
    Turn,
    late,
    linear,
    nothing,
    parameters,
    run,
    training,
)

SLOW = pytest.mark.slow
CODECS = (
    *("sign", "topk:0.05"),
    *(pytest.param(each, marks=SLOW) for each in ("int4/sign", "int2", "fp16")),
    pytest.param("int8+burst:3/int8", marks=SLOW),
)
MOST = 3 * NUM_CHUNKS * (STEPS - WATCHED)


def on_device(
    script: Script, path: Path, *, seed: int = 0, rate: float = 0.5, **options: Any
) -> tuple[Outcome, list[LateTransfers]]:
    with on_a_device(seed=seed, rate=rate) as devices:
        options = {"codec_exact": ("vectors",), "encode_on": "device", **options}
        return run(script, path, seed=seed, **options), devices


def each_way(script: Script, path: Path, **options: Any) -> tuple[Outcome, Outcome]:
    """Encoded on the device, and on the host of it."""
    return tuple(  # type: ignore[return-value] # of two
        on_device(script, path / where, encode_on=where, **options)[0]
        for where in ("device", "host")
    )


def require_same_history(one: Outcome, other: Outcome) -> None:
    """But for the order in which messages of several workers have come."""
    for ours, theirs in zip(one.history.servers, other.history.servers, strict=True):
        assert sorted(ours.events.tolist()) == sorted(theirs.events.tolist())
    for mine, its in zip(one.history.workers, other.history.workers, strict=True):
        assert mine.pushes.tobytes() == its.pushes.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_bits_and_history_are_those_of_the_host(codec: str, tmp_path: Path) -> None:
    ours, its = each_way(training(), tmp_path, codec=codec, overlap="off")
    assert torch.equal(parameters(ours), parameters(its))
    require_same_history(ours, its)
    for key in ("bytes_pushed", "bytes_pulled", "clocks"):
        assert ours.summary[key] == its.summary[key]
    coding, hosts = ours.summary["coding"], its.summary["coding"]
    assert (coding["encodes_on_device"], hosts["encodes_on_device"]) == (3, 0)
    assert hosts["bytes_to_host"] == hosts["bytes_pushed_before"]
    assert coding["bytes_pushed_before"] == hosts["bytes_pushed_before"]
    assert coding["error"] == pytest.approx(hosts["error"], rel=1e-5)
    # Eight numbers for each chunk, and one chunk in 64 as it was decoded.
    more = coding["bytes_to_host"] - ours.summary["bytes_pushed"]
    assert more < 0.05 * coding["bytes_pushed_before"]


def test_step_begins_all_encodings_before_it_waits_for_one(tmp_path: Path) -> None:
    _, devices = on_device(training(steps=2), tmp_path, codec="sign", overlap="off")
    assert [each.most_under_way for each in devices] == [NUM_CHUNKS] * 3


@pytest.mark.parametrize("rate", [0.3, pytest.param(1.0, marks=SLOW)])
def test_with_overlap_the_same_bits_whenever_copies_come(rate: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"codec": "int4/sign", "seed": 2}
    ours, devices = on_device(training(), tmp_path / "device", rate=rate, **options)
    its = run(training(), tmp_path / "cpu", overlap="off", codec_exact=("vectors",), **options)
    assert torch.equal(parameters(ours), parameters(its))
    assert ours.summary["early_pushes"] == MOST if rate == 1.0 else ours.summary["early_pushes"] > 0
    assert rate == 1.0 or all(device.num_late for device in devices)


def freeze_and_pause(turn: Turn) -> None:
    """A chunk has no gradient for a while; in other steps none moves anything."""
    for parameter in list(turn.model.parameters())[:2]:
        parameter.requires_grad_(turn.step not in (4, 5))
    turn.optimizer.param_groups[0]["lr"] = 0.0 if turn.step in (2, 7) else 0.1


def test_what_stays_out_of_a_push_stays_on_the_device_and_nothing_is_encoded_twice(
    tmp_path: Path,
) -> None:
    script = training(before=freeze_and_pause)
    ours, off = (
        on_device(script, tmp_path / overlap, codec="sign", overlap=overlap, rate=1.0)[0]
        for overlap in ("auto", "off")
    )
    its = run(script, tmp_path / "cpu", overlap="off", codec="sign", codec_exact=("vectors",))
    assert torch.equal(parameters(ours), parameters(its))
    assert torch.equal(parameters(off), parameters(its))
    copied, at_once = (each.summary["coding"]["bytes_to_host"] for each in (ours, off))
    assert copied == at_once
    assert ours.summary["early_pushes"] > off.summary["early_pushes"] == 0


@pytest.mark.parametrize("name", ["clamped", pytest.param("set to none", marks=SLOW)])
def test_what_changes_before_it_leaves_is_encoded_once_more(name: str, tmp_path: Path) -> None:
    """Its encoding was begun during backward, and is not done before step()."""
    script = linear(late(LATE[name]))
    ours, _ = on_device(script, tmp_path / "device", rate=0.0, codec="int8")
    its = run(script, tmp_path / "cpu", overlap="off", codec="int8", codec_exact=("vectors",))
    assert torch.equal(parameters(ours), parameters(its))
    assert ours.summary["early_pushes"] == 0


@pytest.mark.parametrize("name", ["clamped", pytest.param("set to none", marks=SLOW)])
def test_what_changes_after_it_has_left_is_an_error_as_on_the_host(
    name: str, tmp_path: Path
) -> None:
    script, sent = linear(late(LATE[name])), r"iteration 6: .* changed after it had been sent"
    with pytest.raises(UsageError, match=sent):
        on_device(script, tmp_path / "device", rate=1.0, codec="int8")
    with pytest.raises(UsageError, match=sent):
        run(script, tmp_path / "cpu", codec="int8", codec_exact=("vectors",), record=False)


def test_groups_of_several_encode_what_they_have_reduced(tmp_path: Path) -> None:
    options: dict[str, Any] = {"groups": ((0, 1), (2,)), "codec": "int4", "overlap": "off"}
    ours, its = each_way(training(), tmp_path, **options)
    assert torch.equal(parameters(ours), parameters(its))
    require_same_history(ours, its)


STORY = "0: sync none; 3: sync topk:0.05/sign; 5: sync int8; 8: sync none"


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": STORY},
        pytest.param({"codec": "sign", "feedback": "off"}, marks=SLOW),
        pytest.param({"push_codec": "int8", "local_steps": 2}, marks=SLOW),
    ],
    ids=["schedule", "no feedback", "local steps"],
)
def test_whatever_is_beside_it_is_as_on_the_host(settings: dict[str, Any], tmp_path: Path) -> None:
    ours, its = each_way(training(), tmp_path, overlap="off", **settings)
    for one, other in zip(ours.results, its.results, strict=True):
        assert torch.equal(one["parameters"], other["parameters"])


@pytest.mark.parametrize("mode", ["ssp", pytest.param("async", marks=SLOW)])
def test_the_modes_rules_hold(mode: str, tmp_path: Path) -> None:
    ours, _ = on_device(training(), tmp_path, mode=mode, staleness=1, push_codec="sign")
    assert ours.summary["early_pushes"] > 0  # run() proves the rest


def poison(turn: Turn) -> None:
    """Once everything leaves during backward."""
    if turn.step == 6:
        *_, last = turn.model.parameters()
        last.register_hook(lambda gradient: gradient * float("nan"))


def test_a_gradient_that_is_not_finite_does_not_leave_early_and_step_names_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"iteration 6: the gradient of .* holds NaN"):
        on_device(training(before=poison), tmp_path, rate=1.0, codec="sign", record=False)


def test_auto_encodes_on_a_device_what_has_a_form_for_it_and_the_rest_on_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="psdist")
    why = "codec.push = int8:stochastic: its random numbers are those of the host"
    for codec, number, where in (
        ("sign", 3, "the device"),
        ("int8:stochastic", 0, f"the host: {why}"),
    ):
        caplog.clear()
        ours, _ = on_device(
            training(steps=2), tmp_path / codec[:4], codec=codec, encode_on="auto", overlap="off"
        )
        assert ours.summary["coding"]["encodes_on_device"] == number
        assert f"parameter set 0: pushes are encoded on {where}" in caplog.messages


def test_a_model_on_the_cpu_has_no_device_that_could_encode(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"codec.encode_on = device, but the model is on cpu, where the"
    ):
        run(training(between=nothing), tmp_path, codec="sign", encode_on="device", record=False)


# -- checkpoints -----------------------------------------------------------------------------------


def stopping(at: int) -> Script:
    """A checkpoint is made after ``at`` steps."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 4))
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.state.setdefault("step", 0)
        while job.state["step"] < 8:
            generator = torch.Generator().manual_seed(10 * job.state["step"] + job.worker)
            optimizer.zero_grad()
            model(torch.randn(4, 24, generator=generator)).square().mean().backward()
            optimizer.step()
            job.state["step"] += 1
            if job.state["step"] == at:
                job.checkpoint()
        return {"parameters": torch.cat([each.detach().flatten() for each in model.parameters()])}

    return script


def play(path: Path, encode_on: str, *, resumes: bool = False) -> Tensor:
    settings = {"codec": "topk:0.05/sign", "encode_on": encode_on, "record": True}
    case = Case(
        name="resumed",
        script=stopping(4),
        servers=2,
        groups=((0,), (1,)),
        settings={**settings, "overlap": "off"},
    )
    with on_a_device():
        outcome = run_virtually(case, path, resumes=resumes)
    outcome.checked()
    return parameters(outcome)


def test_what_was_left_out_goes_on_from_a_checkpoint_on_either_side(tmp_path: Path) -> None:
    wanted = play(tmp_path / "host", "host")
    assert torch.equal(play(tmp_path / "device", "device"), wanted)
    for before, after in (("device", "device"), ("device", "host"), ("host", "device")):
        path = Path(shutil.copytree(tmp_path / before, tmp_path / f"{before}-{after}"))
        assert torch.equal(play(path, after, resumes=True), wanted)
