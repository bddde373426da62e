"""Jobs whose servers have their shards on a device: the bits of servers on the CPU.

The device is none (tests/support/late_transfers.py): its copies come late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import run_directory_of
from tests.support.late_transfers import on_a_device, shards_on_a_device
from tests.support.programs.training.cases import Outcome, Script
from tests.training.overlap.test_overlap import Turn, parameters, run, training


def on_device(script: Script, path: Path, *, seed: int = 0, **options: Any) -> Outcome:
    with shards_on_a_device(seed=seed) as devices:
        outcome = run(script, path / "device", seed=seed, **options)
    assert len(devices) == 2  # of both servers
    return outcome


def meddling(turn: Turn) -> None:
    """Make all requests to servers that are possible between steps."""
    job, folder = turn.job, run_directory_of(turn.job)
    if turn.step == 3:
        with torch.no_grad():
            for parameter in turn.model.parameters():
                parameter.mul_(0.5)
        job.set_parameters()
    if turn.step == 5:
        job.save(folder / "model.safetensors")
        state = job.optimizer_state()
        if job.is_chief:
            torch.save(state, folder / "state.pt")
    if turn.step == 6:
        job.checkpoint()
    if turn.step == 7:
        job.pull()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_sync_gives_the_bits_of_the_cpu(max_norm: float | None, seed: int, tmp_path: Path) -> None:
    script = training(before=meddling, max_grad_norm=max_norm)
    ours = on_device(script, tmp_path, seed=seed)
    plain = run(script, tmp_path / "cpu")
    assert torch.equal(parameters(ours), parameters(plain))
    for name in ("model.safetensors", "state.pt"):
        files = [(each.path / name).read_bytes() for each in (ours, plain)]
        assert files[0] == files[1], name
    assert ours.summary["checkpoints"] == 1


def test_replies_wait_for_their_bytes_where_nothing_is_recorded(tmp_path: Path) -> None:
    ours = on_device(training(), tmp_path, record=False)
    assert torch.equal(parameters(ours), parameters(run(training(), tmp_path / "cpu")))


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_the_modes_rules_hold(mode: str, tmp_path: Path) -> None:
    on_device(training(), tmp_path, mode=mode, staleness=1)  # run() proves it


def test_models_may_lie_on_devices_too(tmp_path: Path) -> None:
    with on_a_device(seed=5):
        ours = on_device(training(), tmp_path, seed=5)
    assert torch.equal(parameters(ours), parameters(run(training(), tmp_path / "cpu")))
