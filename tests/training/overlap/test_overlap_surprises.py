"""Late or hidden actions of a script while its gradients leave during backward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from psdist.errors import UsageError
from psdist.job import Job
from tests.support.jobs import trainers_of
from tests.support.programs.training.cases import Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.training.overlap.test_overlap import (
    BATCH,
    LATE,
    NUM_CHUNKS,
    PROBLEM,
    STEPS,
    WATCHED,
    Linear,
    Pause,
    Turn,
    both,
    late,
    linear,
    run,
    training,
)

Way = Literal["scaled", "overflow", "overflow of one"]


def scaled(way: Way, *, at: int = 6) -> Script:
    """From iteration ``at`` on a GradScaler takes part. The loss is linear in the parameters."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Linear()
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, made)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, (x, _) in enumerate(
            PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=job.num_workers)
        ):
            optimizer.zero_grad()
            loss = Pause.apply(model(x), lambda: stage.sleep(1e-3)).sum()
            if step < at:
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            first, *_ = model.parameters()
            has_overflow = way == "overflow" or (way == "overflow of one" and job.worker == 1)
            if has_overflow and step == at:
                assert first.grad is not None
                first.grad.view(-1)[0] = math.inf
            if way != "scaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return {"parameters": flat(model), "clock": job.clock}

    return script


@pytest.mark.parametrize("way", ["scaled", "overflow", "overflow of one"])
@pytest.mark.parametrize("at", [WATCHED, 6])
def test_a_scaler_that_comes_after_gradients_have_begun_to_leave_is_an_error(
    at: int, way: Way, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError,
        match=rf"iteration {at}: .* had been sent.*; set transfer.overlap = off",
    ):
        run(scaled(way, at=at), tmp_path, record=False)


def test_what_is_written_to_a_parameter_that_gets_no_gradient_is_replaced(tmp_path: Path) -> None:
    """The server sends the version once more that it has sent before."""

    def freeze(turn: Turn) -> None:
        for parameter in list(turn.model.parameters())[:2]:
            parameter.requires_grad_(turn.step < 5)

    def write(turn: Turn) -> None:
        if turn.step == 7:
            with torch.no_grad():
                for parameter in list(turn.model.parameters())[:2]:
                    parameter.mul_(0.5)

    auto, _ = both(training(before=freeze, between=write), tmp_path)
    assert auto.summary["early_pushes"] == 3 * NUM_CHUNKS * (STEPS - WATCHED)


def test_batches_of_passes_that_were_not_seen_count(tmp_path: Path) -> None:
    """A forward pass of a part of the model tells psdist nothing."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(3)
        model: Any = nn.Sequential(PROBLEM.model())
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in PROBLEM.batches(
            size=BATCH, count=STEPS, part=job.worker, num_parts=job.num_workers
        ):
            trainers_of(job)[0].on_batch(BATCH, BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model[0](x), y).backward()
            optimizer.step()
        return {"parameters": flat(model), "clock": job.clock}

    auto, off = both(script, tmp_path)
    assert auto.summary["samples"] == off.summary["samples"] == 3 * BATCH * STEPS
    assert auto.summary["early_pushes"] > 0


@pytest.mark.parametrize("name", ["clamped", "clipped in the job"])
def test_a_change_of_one_worker_alone_is_an_error(name: str, tmp_path: Path) -> None:
    def of_one(turn: Turn) -> None:
        if turn.job.worker == 1:
            late(LATE[name])(turn)

    with pytest.raises(UsageError, match=r"iteration 6: .* changed after it had been sent"):
        run(linear(of_one), tmp_path, record=False)
