"""Pulls of any codec in ssp and async: whole jobs of eight groups on the virtual network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS, STEPS, WIDTH = 8, 40, 128


def train(job: Job, stage: Stage) -> Result:
    """A linear map to be learnt; groups of different speed."""
    torch.manual_seed(0)
    target = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=8.0))
    generator = torch.Generator().manual_seed(job.worker)
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        stage.sleep(1e-3 * (1 + job.worker % 3))
    job.barrier()
    file = stage.path / "model.safetensors"
    job.save(file)
    return {"loss": loss.item()}


def play(path: Path, **settings: Any) -> Outcome:
    case = Case(
        name="copies",
        script=train,
        servers=2,
        groups=tuple((worker,) for worker in range(GROUPS)),
        settings={"chunk_bytes": 32768, "record": True, **settings},
    )
    return run_virtually(case, path)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_int8_pulls_of_eight_groups_are_three_and_a_half_times_smaller(
    mode: str, tmp_path: Path
) -> None:
    plain = play(tmp_path / "plain", mode=mode, staleness=3)
    coded = play(tmp_path / "coded", mode=mode, staleness=3, pull_codec="int8", pull_copies="on")
    for outcome in (plain, coded):
        outcome.checked()
    summary = coded.summary
    assert plain.summary["bytes_pulled"] > 3.5 * summary["bytes_pulled"]
    assert summary["coding"]["bytes_pulled_before"] > 3.5 * summary["bytes_pulled"]
    servers = [each for one in summary["sets"] for each in one["per_server"]]
    copies = sum(each["copy_bytes"] for each in servers)
    assert copies == GROUPS * 4 * WIDTH * WIDTH
    # Not to a few percent: in which order pushes are applied depends on the replies' bytes.
    uncoded, loss = (max(each["loss"] for each in one.results) for one in (plain, coded))
    assert loss < 1.25 * uncoded
