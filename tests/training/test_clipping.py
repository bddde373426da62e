"""Clipping the gradient of a group: against one process that clips that of the joined batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem()
ITERATIONS = 12
JOINT_BATCH = 24
Groups = tuple[tuple[int, ...], ...]
TOGETHER: Groups = ((0, 1, 2),)
APART: Groups = ((0,), (1,), (2,))
ALWAYS, NEVER = 0.05, 1e3
"""Norms that clip in every step, and in none."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def run(
    script: Script,
    tmp_path: Path,
    *,
    groups: Groups = TOGETHER,
    mode: str = "sync",
    servers: int = 2,
) -> Outcome:
    case = Case(
        name="clipping", script=script, groups=groups, servers=servers, settings={"mode": mode}
    )
    return run_virtually(case, tmp_path / f"run-{servers}-{len(groups)}-{mode}")


def clipped(
    *, prepared: float | None = None, called: float | None = None, scale: float | None = None
) -> Script:
    """``scale``: of a GradScaler that never unscales before ``step()``."""

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model), max_grad_norm=prepared)
        norms = []
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        size = JOINT_BATCH // job.num_workers
        for x, y in PROBLEM.batches(
            size=size, count=ITERATIONS, part=job.worker, num_parts=job.num_workers
        ):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if called is not None:
                norms.append(float(job.clip_grad_norm_(called)))
            scaler.step(optimizer)
            scaler.update()
        return {"parameters": flat(model), "norms": norms}

    return script


def one_process(max_norm: float) -> tuple[Tensor, list[float]]:
    model = PROBLEM.model()
    optimizer = sgd(model)
    norms = []
    for x, y in PROBLEM.batches(size=JOINT_BATCH, count=ITERATIONS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    assert all((norm > max_norm) == (max_norm == ALWAYS) for norm in norms)
    return flat(model), norms


@pytest.mark.parametrize("max_norm", [ALWAYS, NEVER])
@pytest.mark.parametrize("groups", [((0,),), TOGETHER])
def test_a_group_clips_as_one_process_with_the_joined_batch(
    groups: Groups, max_norm: float, tmp_path: Path
) -> None:
    expected, norms = one_process(max_norm)
    for way in ("prepared", "called"):
        for servers in (1, 3):
            outcome = run(
                clipped(**{way: max_norm}), tmp_path / way, groups=groups, servers=servers
            )
            for result in outcome.results:
                assert relative_distance(result["parameters"], expected) < 1e-5
                if way == "called":
                    assert result["norms"] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_gradients_that_a_scaler_has_scaled_are_clipped_unscaled(mode: str, tmp_path: Path) -> None:
    """A power of two as the scale changes no bit."""
    scaled, plain = (
        run(clipped(prepared=ALWAYS, scale=scale), tmp_path / str(scale), mode=mode)
        for scale in (2.0**10, None)
    )
    for one, other in zip(scaled.results, plain.results, strict=True):
        assert torch.equal(one["parameters"], other["parameters"])


@pytest.mark.parametrize("max_norm", [ALWAYS, NEVER])
@pytest.mark.parametrize("groups", [((0,),), APART, ((0, 1), (2,))])
def test_in_sync_the_joint_batch_is_clipped_as_one_process_clips_it(
    groups: Groups, max_norm: float, tmp_path: Path
) -> None:
    expected, _ = one_process(max_norm)
    runs = [
        run(clipped(prepared=max_norm), tmp_path, groups=groups, servers=servers)
        for servers in (1, 3)
    ]
    for outcome in runs:
        for result in outcome.results:
            assert relative_distance(result["parameters"], expected) < 1e-5
            assert torch.equal(result["parameters"], runs[0].results[0]["parameters"])


@pytest.mark.parametrize("groups", [TOGETHER, APART])
def test_a_norm_that_is_never_reached_changes_no_bit(groups: Groups, tmp_path: Path) -> None:
    first, second = (
        run(clipped(prepared=norm), tmp_path / str(norm), groups=groups).results[0]["parameters"]
        for norm in (NEVER, None)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("way", ["prepared", "called"])
def test_the_bits_do_not_depend_on_the_number_of_servers(way: str, tmp_path: Path) -> None:
    first, second = (
        run(clipped(**{way: ALWAYS}), tmp_path, servers=servers).results[0]["parameters"]
        for servers in (1, 3)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_in_ssp_and_async_every_group_clips_its_own_gradient(mode: str, tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        before = flat(model)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = job.prepare(model, plain, max_grad_norm=ALWAYS)
        x, y = next(PROBLEM.batches(size=4, count=1, part=job.worker, num_parts=2))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        job.barrier()
        job.pull()
        return {"moved": float(torch.linalg.vector_norm(flat(model) - before))}

    outcome = run(script, tmp_path, groups=((0,), (1,)), mode=mode)
    for result in outcome.results:  # each group moved by 1/2 of a vector of length ALWAYS
        assert 0 < result["moved"] < ALWAYS * (1 + 1e-4)


def test_with_several_groups_in_sync_a_group_clips_its_own_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "psdist"):
        run(clipped(called=ALWAYS), tmp_path, groups=((0, 1), (2,)))
    assert (
        sorted(caplog.messages)
        == [
            "job.clip_grad_norm_ clips the gradient of this worker's group: with 2 groups in sync "
            "that is not the norm of the joint batch; job.prepare(..., max_grad_norm=0.05) clips "
            "that"
        ]
        * 3
    )


def one_step(act: Callable[[Job, nn.Sequential, torch.optim.Optimizer], object]) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        x, y = next(PROBLEM.batches(size=8, count=1))
        nn.functional.cross_entropy(model(x), y).backward()
        act(job, model, optimizer)
        return {"clock": job.clock}

    return script


def refused(
    error: type[Exception], told: str, script: Script, tmp_path: Path, groups: Groups = TOGETHER
) -> None:
    with pytest.raises(error, match=told):
        run(script, tmp_path, groups=groups)


def twice(job: Job, _model: nn.Sequential, _optimizer: torch.optim.Optimizer) -> None:
    job.clip_grad_norm_(1.0)
    job.clip_grad_norm_(1.0)


def changed_after(job: Job, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    job.clip_grad_norm_(1.0)
    model[0].weight.grad.mul_(2)
    optimizer.step()


def replaced_after(job: Job, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    job.clip_grad_norm_(1.0)
    model[0].weight.grad = None
    optimizer.step()


def on_one_worker(job: Job, _model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if job.is_chief:
        job.clip_grad_norm_(1.0)
    optimizer.step()


def to_no_norm(job: Job, _model: nn.Sequential, _optimizer: torch.optim.Optimizer) -> None:
    job.clip_grad_norm_(math.nan)


def of_nan(job: Job, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if job.worker == 1:
        model[0].weight.grad[0, 0] = math.nan
    assert math.isnan(job.clip_grad_norm_(1.0))
    optimizer.step()


@pytest.mark.parametrize(
    ("error", "told", "act"),
    [
        (UsageError, "job.clip_grad_norm_ was called a second time", twice),
        (
            UsageError,
            "gradients have changed since job.clip_grad_norm_",
            changed_after,
        ),
        (
            UsageError,
            "gradients have changed since job.clip_grad_norm_",
            replaced_after,
        ),
        (
            UsageError,
            "workers of one group clip to different norms: none, 1",
            on_one_worker,
        ),
        (
            UsageError,
            "the norm to clip to must be above 0, got nan",
            to_no_norm,
        ),
        (NonFiniteGradientError, "the gradient of 0.weight holds NaN", of_nan),
    ],
)
def test_a_wrong_use_is_refused(
    error: type[Exception],
    told: str,
    act: Callable[[Job, nn.Sequential, torch.optim.Optimizer], object],
    tmp_path: Path,
) -> None:
    refused(error, told, one_step(act), tmp_path)


def test_clipping_both_ways_is_refused(tmp_path: Path) -> None:
    told = r"max_grad_norm=0.05\) clips in every step; leave job.clip_grad_norm_ out"
    refused(UsageError, told, clipped(prepared=ALWAYS, called=ALWAYS), tmp_path)


def test_an_overflow_that_a_scaler_finds_leaves_the_iteration_out(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        before = flat(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        moved = []
        for number, (x, y) in enumerate(PROBLEM.batches(size=8, count=3)):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if number == 1 and job.worker == 2:
                model[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            job.clip_grad_norm_(ALWAYS)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(flat(model), before))
            before = flat(model)
        return {"moved": moved, "clock": job.clock}

    def without_unscaling(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x, y = next(PROBLEM.batches(size=8, count=1))
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        job.clip_grad_norm_(ALWAYS)
        scaler.step(optimizer)
        return {}

    for result in run(script, tmp_path).results:
        assert result == {"moved": [True, False, True], "clock": 3}
    refused(UsageError, "call scaler.unscale_", without_unscaling, tmp_path / "other")
