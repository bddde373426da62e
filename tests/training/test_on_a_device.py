"""Models whose memory MPI does not see: copies come late, and nothing is used before it is there.

The device is none (tests/support/late_transfers.py). On a real one tests/gpu compares the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from psdist.errors import UsageError
from tests.support.jobs import run_directory_of
from tests.support.late_transfers import LateTransfers, on_a_device
from tests.support.programs.training.cases import Outcome, Script
from tests.training.overlap.test_overlap import (
    LATE,
    NUM_CHUNKS,
    STEPS,
    WATCHED,
    Meddle,
    Turn,
    clip_in_the_job,
    gan,
    late,
    linear,
    nothing,
    parameters,
    run,
    training,
)

MOST = 3 * NUM_CHUNKS * (STEPS - WATCHED)
"""Chunks that may leave early."""


def on_device(
    script: Script, path: Path, *, seed: int = 0, rate: float = 0.5, **options: Any
) -> tuple[Outcome, list[LateTransfers]]:
    with on_a_device(seed=seed, rate=rate) as devices:
        return run(script, path / "device", seed=seed, **options), devices


def on_cpu(script: Script, path: Path, **options: Any) -> Tensor:
    return parameters(run(script, path / "cpu", overlap="off", **options))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_overlap_gives_the_bits_of_the_cpu_whenever_copies_come(
    rate: float, seed: int, tmp_path: Path
) -> None:
    ours, devices = on_device(training(), tmp_path, seed=seed, rate=rate)
    assert torch.equal(parameters(ours), on_cpu(training(), tmp_path))
    assert 0 < ours.summary["early_pushes"] < MOST  # what is late leaves in step()
    assert all(device.num_late for device in devices)


def test_all_chunks_leave_early_whose_copies_are_done_in_time(tmp_path: Path) -> None:
    ours, _ = on_device(training(), tmp_path, rate=1.0)
    assert ours.summary["early_pushes"] == MOST


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_the_modes_rules_hold_with_what_lay_on_the_device(mode: str, tmp_path: Path) -> None:
    ours, _ = on_device(training(), tmp_path, mode=mode, staleness=1)  # run() proves it
    assert ours.summary["early_pushes"] > 0


def skip_and_thaw(turn: Turn) -> None:
    """A chunk has no gradient for a while, and its replies no bytes."""
    for parameter in list(turn.model.parameters())[:2]:
        parameter.requires_grad_(turn.step not in (4, 5))


def write(turn: Turn) -> None:
    if turn.step in (5, 7):
        with torch.no_grad():
            next(turn.model.parameters()).mul_(0.5)


def push(turn: Turn) -> None:
    if turn.step == 6:
        with torch.no_grad():
            for parameter in turn.model.parameters():
                parameter.mul_(0.5)
        turn.job.set_parameters()


def pull_and_save(turn: Turn) -> None:
    turn.job.pull()
    turn.job.save(run_directory_of(turn.job) / "model.safetensors")


SCRIPTS: dict[str, Script] = {
    "frozen for a while": training(before=skip_and_thaw),
    "written to": training(between=write),
    "pushed": training(before=push),
    "pulled and saved": training(before=pull_and_save),
}


@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_whatever_a_script_does_gives_the_bits_of_the_cpu(
    name: str, overlap: str, tmp_path: Path
) -> None:
    script = SCRIPTS[name]
    ours, _ = on_device(script, tmp_path, overlap=overlap)
    assert torch.equal(parameters(ours), on_cpu(script, tmp_path))
    assert (ours.summary["early_pushes"] > 0) == (overlap == "auto")


@pytest.mark.parametrize("between", [nothing, clip_in_the_job])
def test_groups_of_several_give_the_bits_of_the_cpu(between: Meddle, tmp_path: Path) -> None:
    script, groups = training(between=between), ((0, 1), (2,))
    ours, _ = on_device(script, tmp_path, overlap="off", groups=groups)
    assert torch.equal(parameters(ours), on_cpu(script, tmp_path, groups=groups))


def test_two_optimizers_over_one_loop_give_the_bits_of_the_cpu(tmp_path: Path) -> None:
    ours, _ = on_device(gan(1), tmp_path, rate=0.8)
    assert torch.equal(parameters(ours), on_cpu(gan(1), tmp_path))
    assert ours.summary["early_pushes"] > 0


@pytest.mark.parametrize("name", [name for name in LATE if name != "learning rate"])
def test_what_changes_after_it_was_sent_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"iteration 6: .* changed after it had been sent"):
        on_device(linear(late(LATE[name])), tmp_path, rate=0.8, record=False)


@pytest.mark.parametrize("name", [name for name in LATE if name != "learning rate"])
def test_what_changes_before_its_copy_is_done_is_sent_as_it_is_in_step(
    name: str, tmp_path: Path
) -> None:
    script = linear(late(LATE[name]))
    ours, _ = on_device(script, tmp_path, rate=0.0)
    assert torch.equal(parameters(ours), on_cpu(script, tmp_path))


def test_after_overlap_goes_off_a_reply_without_bytes_means_what_is_in_place(
    tmp_path: Path,
) -> None:
    def meddle(turn: Turn) -> None:
        first, *_, last, bias = turn.model.parameters()
        if turn.step == 6:
            assert first.grad is not None
            first.grad = first.grad.clone()  # another tensor with the same bits
        elif turn.step > 6:
            last.grad = bias.grad = None

    script = linear(meddle)
    # Nothing is recorded: checksums of what is used are of what the host sees.
    ours, _ = on_device(script, tmp_path, rate=1.0, record=False)
    assert torch.equal(parameters(ours), on_cpu(script, tmp_path))
