"""Calls that a script may make while only some gradients of an iteration have left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist.errors import UsageError
from psdist.job import Job
from tests.support.jobs import sets_of
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually


def run(script: Callable[[Job, Path], Any], tmp_path: Path) -> None:
    def of_job(job: Job, stage: Stage) -> Result:
        script(job, stage.path)
        return {}

    settings = {"overlap": "off"}  # the test pushes early
    case = Case(name="half", script=of_job, groups=((0,), (1,)), settings=settings)
    run_virtually(case, tmp_path / "run")


def push_half(job: Job) -> None:
    """As with overlap after a backward pass: the first chunk of iteration 0 has left."""
    (each,) = sets_of(job).sets
    each.loop.begin_iteration(
        clock=0, hyper=each.trainer.iteration.hyperparameters(), absent=(), weight=1.0
    )
    each.loop.push_chunk(each.loop.core.mine[0], is_empty=False)


def prepare(job: Job) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    job.prepare(model, optimizer)


CALLS: dict[str, Callable[[Job, Path], Any]] = {
    "prepare": lambda job, _path: prepare(job),
    "pull": lambda job, _path: job.pull(),
    "set_parameters": lambda job, _path: job.set_parameters(),
    "save": lambda job, path: job.save(path / "model.safetensors"),
    "optimizer_state": lambda job, _path: job.optimizer_state(),
    "checkpoint": lambda job, _path: job.checkpoint(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_moves_parameters_is_refused_with_the_remedy(call: str, tmp_path: Path) -> None:
    def script(job: Job, path: Path) -> None:
        prepare(job)
        push_half(job)
        CALLS[call](job, path)

    told = (
        rf"^job\.{call}\(\) was called between backward\(\) and optimizer\.step\(\), when "
        r"gradients have left already; call it after optimizer\.step\(\), or .*overlap=.off.\)$"
    )
    with pytest.raises(UsageError, match=told):
        run(script, tmp_path)


def test_means_and_barriers_are_allowed_and_the_iteration_goes_on_behind_them(
    tmp_path: Path,
) -> None:
    def script(job: Job, path: Path) -> None:
        prepare(job)
        push_half(job)
        assert job.mean(job.worker) == 0.5
        job.barrier()
        assert job.any(job.worker == 1)
        assert not job.all(job.worker == 1)
        (each,) = sets_of(job).sets
        each.loop.finish_push(empty=())
        each.loop.carry_on(each.loop.wait_for_replies())
        each.trainer.iteration.clock += 1
        job.save(path / "model.safetensors")

    run(script, tmp_path)
