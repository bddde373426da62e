"""Scripts that train past the servers: job.prepare's result thrown away, or never stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from psdist.errors import ModelError, UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem, flat, train
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem()
LINE = r"model, optimizer = job\.prepare\(model, optimizer\)"


def run(script: Callable[[Job, Path], Any], tmp_path: Path, *, workers: int = 1) -> None:
    def of_job(job: Job, stage: Stage) -> Result:
        script(job, stage.path)
        return {}

    groups = tuple((worker,) for worker in range(workers))
    run_virtually(Case(name="unused", script=of_job, groups=groups), tmp_path / "run")


def make() -> tuple[nn.Sequential, torch.optim.SGD]:
    model = PROBLEM.model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int = 2) -> Any:
    return PROBLEM.batches(size=24, count=count)


# -- the optimizer that was passed to prepare ------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["none", "before", "after"])
def test_the_original_optimizer_refuses_to_step_with_the_line_to_write(
    scheduler: str, tmp_path: Path
) -> None:
    def script(job: Job, _path: Path) -> None:
        model, optimizer = make()
        if scheduler == "before":
            StepLR(optimizer, step_size=1)
        job.prepare(model, optimizer)
        if scheduler == "after":
            StepLR(optimizer, step_size=1)
        start = flat(model)
        with pytest.raises(UsageError, match=LINE):
            train(model, optimizer, batches())
        with pytest.raises(UsageError, match=LINE):
            optimizer.step(closure=lambda: 0.0)
        assert torch.equal(flat(model), start)
        raise UsageError("as a script that catches nothing would end")

    with pytest.raises(UsageError, match="catches nothing"):
        run(script, tmp_path)


def test_a_failed_prepare_leaves_the_original_optimizer_as_it_was(tmp_path: Path) -> None:
    def script(job: Job, _path: Path) -> None:
        model, optimizer = make()
        with pytest.raises(ModelError, match="not in the model passed to prepare"):
            job.prepare(nn.Linear(2, 2), optimizer)
        train(model, optimizer, batches())

    run(script, tmp_path)


def test_a_scheduler_of_the_original_is_followed_and_warns_of_nothing(tmp_path: Path) -> None:
    def script(job: Job, _path: Path) -> None:
        model, original = make()
        before = StepLR(original, step_size=1)
        model, optimizer = job.prepare(model, original)
        after = StepLR(original, step_size=1)
        # Any warning is an error in these tests.
        train(model, optimizer, batches(), after_step=lambda: (before.step(), after.step()))
        assert original.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**4)
        assert optimizer.param_groups[0]["lr"] == original.param_groups[0]["lr"]

    run(script, tmp_path)


def test_hooks_on_the_steps_of_the_original_run_as_before(tmp_path: Path) -> None:
    def script(job: Job, _path: Path) -> None:
        seen: list[str] = []

        def note(name: str) -> Callable[..., None]:
            return lambda *_: seen.append(name)

        model, original = make()
        removed = original.register_step_pre_hook(note("removed"))
        original.register_step_pre_hook(note("pre"))
        model, optimizer = job.prepare(model, original)
        original.register_step_post_hook(note("post"))
        removed.remove()
        train(model, optimizer, batches(count=2))
        assert seen == ["pre", "post"] * 2

    run(script, tmp_path)


def test_copies_of_the_original_are_optimizers_of_their_own(tmp_path: Path) -> None:
    def script(job: Job, _path: Path) -> None:
        model, original = make()
        job.prepare(model, original)
        state = original.state_dict()
        assert state["state"] == {}
        assert state["param_groups"][0]["lr"] == 0.1
        twin, twins_optimizer = copy.deepcopy((model, original))
        start = flat(model)
        train(twin, twins_optimizer, batches())
        assert torch.equal(flat(model), start)
        assert not torch.equal(flat(twin), start)

    run(script, tmp_path)


# -- what never was trained ------------------------------------------------------------------------

AT_THE_END = r"^the script has ended: worker"
UNTRAINED = rf"workers 0, 1 computed gradients and never called optimizer\.step\(\).*{LINE}"


def never_steps(model: nn.Module, _job: Job) -> None:
    for x, y in batches():
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()


def has_an_optimizer_of_its_own(model: nn.Module, _job: Job) -> None:
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())


@pytest.mark.parametrize("past_the_servers", [never_steps, has_an_optimizer_of_its_own])
def test_a_save_after_gradients_without_any_step_is_an_error_on_every_worker(
    past_the_servers: Callable[[nn.Module, Job], None], tmp_path: Path
) -> None:
    def script(job: Job, path: Path) -> None:
        model, _ = job.prepare(*make())
        past_the_servers(model, job)
        with pytest.raises(UsageError, match=UNTRAINED):
            job.save(path / "model.safetensors")
        assert not list(path.glob("model*"))

    with pytest.raises(UsageError, match=AT_THE_END):
        run(script, tmp_path, workers=2)


@pytest.mark.parametrize("past_the_servers", [never_steps, has_an_optimizer_of_its_own])
def test_an_end_after_gradients_without_any_step_is_an_error(
    past_the_servers: Callable[[nn.Module, Job], None], tmp_path: Path
) -> None:
    def script(job: Job, _path: Path) -> None:
        model, _ = job.prepare(*make())
        past_the_servers(model, job)

    told = rf"{AT_THE_END} 0 computed gradients and never called optimizer\.step\(\).*{LINE}"
    with pytest.raises(UsageError, match=told):
        run(script, tmp_path)


def test_one_worker_that_never_stepped_is_named_to_all(tmp_path: Path) -> None:
    def script(job: Job, path: Path) -> None:
        model, optimizer = job.prepare(*make())
        if job.worker == 1:
            never_steps(model, job)
        else:
            train(model, optimizer, batches(count=0))
        with pytest.raises(UsageError, match=r"worker 1 computed gradients"):
            job.save(path / "model.safetensors")

    with pytest.raises(UsageError, match=AT_THE_END):
        run(script, tmp_path, workers=2)


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)])
def test_an_optimizer_that_is_made_again_during_training_ends_the_job(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model: Any
        model, original = make()
        model, optimizer = job.prepare(model, original)
        for epoch in range(2):
            if epoch == 1:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            train(model, optimizer, batches(count=5))
        return {}

    told = rf"^the script has ended: worker . computed .*{LINE}.* write to its param_groups"
    with pytest.raises(UsageError, match=told):
        run_virtually(Case(name="again", script=script, groups=groups), tmp_path / "run")


class Lookahead(torch.optim.Optimizer):
    """A wrapper of another optimizer."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def wrapped(_model: nn.Module, optimizer: Any) -> Callable[[], None]:
    outer = Lookahead(optimizer)
    return lambda: outer.step()


def after_an_inner_loop(model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Its steps are undone before the served one."""

    def step() -> None:
        start = [each.detach().clone() for each in model.parameters()]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        with torch.no_grad():
            for each, value in zip(model.parameters(), start, strict=True):
                each.copy_(value)
        optimizer.step()

    return step


@pytest.mark.parametrize("step_of", [wrapped, after_an_inner_loop])
def test_steps_of_other_optimizers_are_no_error_where_the_prepared_one_follows(
    step_of: Callable[[nn.Module, Any], Callable[[], None]], tmp_path: Path
) -> None:
    def script(job: Job, _path: Path) -> None:
        model: Any
        model, original = make()
        model, optimizer = job.prepare(model, original)
        step = step_of(model, optimizer)
        for x, y in batches(count=5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            step()
        plain, own = make()
        train(plain, own, batches(count=5))
        assert torch.allclose(flat(model), flat(plain), rtol=1e-6)

    run(script, tmp_path)


def test_a_save_before_training_is_none_of_that(tmp_path: Path) -> None:
    def script(job: Job, path: Path) -> None:
        model, optimizer = job.prepare(*make())
        model(PROBLEM.data()[0])  # an evaluation that forgot torch.no_grad()
        job.save(path / "first.safetensors")
        train(model, optimizer, batches())
        never_steps(model, job)
        job.save(path / "last.safetensors")

    run(script, tmp_path)
    saved = [each.name for each in (tmp_path / "run").glob("*.safetensors")]
    assert sorted(saved) == ["first.safetensors", "last.safetensors"]


def test_watching_for_gradients_ends_with_the_first_step(tmp_path: Path) -> None:
    def script(job: Job, _path: Path) -> None:
        model, optimizer = job.prepare(*make())
        assert all(parameter._backward_hooks for parameter in model.parameters())
        train(model, optimizer, batches(count=1))
        assert not any(parameter._backward_hooks for parameter in model.parameters())

    run(script, tmp_path)
