"""``local_steps``: rounds of several steps of the script's optimizer, and what servers make of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from psdist.errors import ConfigError, NonFiniteGradientError, UsageError, UserError
from psdist.job import Job
from tests.support.late_transfers import on_a_device
from tests.support.programs.training.cases import (
    Case,
    Outcome,
    Result,
    Script,
    Stage,
    cases_of,
)
from tests.support.programs.training.problems import Batch, Problem, flat, train
from tests.support.programs.training.virtual_job import JobFailedError, run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "rounds_cases"
PROBLEM = Problem()
STEPS = 12
SIZE = 8
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def run(script: Script, path: Path, *, seed: int = 0, servers: int = 2, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0,), (1,)))
    given = {"local_steps": 4, "record": True, "checksum_every": 1, **settings}
    case = Case(name="rounds", script=script, groups=groups, servers=servers, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=WILD)
    if given["record"]:
        outcome.checked()
    return outcome


def fails(script: Script, path: Path, **settings: Any) -> None:
    """Raise the job's error."""
    run(script, path, record=False, **settings)


def training(
    make: Make = sgd,
    after_step: Callable[[Job, nn.Module, int], None] = lambda *_: None,
    steps: int = STEPS,
    max_norm: float | None = None,
) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, make(model.parameters()), max_grad_norm=max_norm)
        batches = PROBLEM.batches(
            size=SIZE, count=steps, part=job.worker, num_parts=job.num_workers
        )
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            after_step(job, model, step)
        job.barrier()
        return {"parameters": flat(model), "clock": job.clock}

    return script


def in_torch(
    make: Make,
    make_outer: Make,
    *,
    groups: tuple[tuple[int, ...], ...],
    local_steps: int = 4,
    cuts: tuple[int, ...] = (),
    max_norm: float | None = None,
) -> Tensor:
    """The same by torch alone: every group's own optimizer, and one of the differences."""
    num_workers = sum(map(len, groups))
    models = [PROBLEM.model() for _ in groups]
    inner = [make(model.parameters()) for model in models]
    anchor = PROBLEM.model()
    outer = make_outer(anchor.parameters())
    parts = [
        list(PROBLEM.batches(size=SIZE, count=STEPS, part=worker, num_parts=num_workers))
        for worker in range(num_workers)
    ]
    in_round = 0
    for step in range(STEPS):
        for members, model, optimizer in zip(groups, models, inner, strict=True):
            optimizer.zero_grad()
            for worker in members:
                x, y = parts[worker][step]
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / len(members)).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        in_round += 1
        if in_round == local_steps or step in cuts or step == STEPS - 1:
            in_round = 0
            for index, parameter in enumerate(anchor.parameters()):
                there = [list(model.parameters())[index].detach() for model in models]
                parameter.grad = sum(parameter.detach() - each for each in there) / len(there)
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return flat(anchor)


OUTERS: dict[str, Make] = {
    "average": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "nesterov:lr=0.5,momentum=0.8": lambda parameters: torch.optim.SGD(
        parameters, lr=0.5, momentum=0.8, nesterov=True
    ),
    "adam:lr=0.01": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize(
    "groups", [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (2,))], ids=["alone", "of-two", "uneven"]
)
def test_rounds_are_what_torch_computes_of_the_same_steps(
    outer: str, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    outcome = run(training(adamw), tmp_path, groups=groups, outer=outer)
    wanted = in_torch(adamw, OUTERS[outer], groups=groups)
    for result in outcome.results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)
        assert result["clock"] == STEPS // 4
    summary = outcome.summary
    assert summary["local_steps"] == STEPS * outcome.num_workers
    assert summary["rounds_cut"] == 0
    first = outcome.results[0]["parameters"]
    assert all(torch.equal(each["parameters"], first) for each in outcome.results)


def test_a_collective_ends_a_round_early_and_so_does_the_end(tmp_path: Path) -> None:
    def after_step(job: Job, _model: nn.Module, step: int) -> None:
        if step == 5:
            job.mean(1.0)

    outcome = run(training(sgd, after_step), tmp_path)
    # 0-3, 4-5 cut by the mean, 6-9, 10-11 cut by the barrier
    wanted = in_torch(sgd, OUTERS["average"], groups=((0,), (1,)), cuts=())
    rounds = in_torch_with_rounds([4, 2, 4, 2])
    for result in outcome.results:
        assert torch.allclose(result["parameters"], rounds, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)
        assert result["clock"] == 4
    assert outcome.summary["rounds_cut"] == 4  # two of each worker


def in_torch_with_rounds(lengths: list[int]) -> Tensor:
    """Two groups of one that exchange after these numbers of steps of SGD with momentum."""
    models = [PROBLEM.model(), PROBLEM.model()]
    inner = [sgd(model.parameters()) for model in models]
    parts = [
        iter(PROBLEM.batches(size=SIZE, count=STEPS, part=part, num_parts=2)) for part in range(2)
    ]
    for length in lengths:
        for _ in range(length):
            for model, optimizer, part in zip(models, inner, parts, strict=True):
                x, y = next(part)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                one.copy_((one + other) / 2)
                other.copy_(one)
    return flat(models[0])


@pytest.mark.parametrize("call", ["pull", "save", "barrier", "checkpoint-less end"])
def test_no_local_progress_is_lost(call: str, tmp_path: Path) -> None:
    def after_step(job: Job, _model: nn.Module, step: int) -> None:
        if step != STEPS - 2:
            return
        if call == "pull":
            job.pull()
        elif call == "save":
            job.save(tmp_path / "model.safetensors")
        elif call == "barrier":
            job.barrier()

    outcome = run(training(sgd, after_step), tmp_path / "run", groups=((0,),), local_steps=5)
    model = PROBLEM.model()
    optimizer = sgd(model.parameters())
    for x, y in PROBLEM.batches(size=SIZE, count=STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    (result,) = outcome.results
    assert torch.allclose(result["parameters"], flat(model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [{"mode": "ssp", "staleness": 1}, {"mode": "async"}])
@pytest.mark.parametrize("seed", range(3))
def test_in_ssp_and_async_rounds_are_proved_and_bring_the_same_on_average(
    mode: dict[str, object], seed: int, tmp_path: Path
) -> None:
    groups = ((0, 1), (2,), (3,))
    outcome = run(training(adamw), tmp_path, groups=groups, seed=seed, **mode)
    start = flat(PROBLEM.model())
    wanted = in_torch(adamw, OUTERS["average"], groups=groups) - start
    for result in outcome.results:
        moved = result["parameters"] - start
        # Not the same order of updates: but as far, and in the same direction.
        assert 0.5 < float(moved.norm() / wanted.norm()) < 2.0
        assert float(moved @ wanted / moved.norm() / wanted.norm()) > 0.8


class Stream(torch.utils.data.IterableDataset[Batch]):
    """21 samples in order: the first worker of two gets 11."""

    def __iter__(self) -> Iterator[Batch]:
        x, y = PROBLEM.data()
        yield from zip(x[:21], y[:21], strict=True)


def test_a_worker_whose_data_ends_takes_part_in_its_group_s_steps(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer, loader = job.prepare(
            model, sgd(model.parameters()), DataLoader(Stream(), batch_size=2)
        )
        for _ in range(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        state = optimizer.state_dict()["state"]
        momentum = torch.cat([each["momentum_buffer"].flatten() for each in state.values()])
        local = flat(model)
        job.barrier()
        return {"parameters": flat(model), "local": local, "momentum": momentum}

    outcome = run(script, tmp_path, groups=((0, 1),), local_steps=5)
    first, second = outcome.results
    assert torch.equal(first["local"], second["local"])
    assert torch.equal(first["momentum"], second["momentum"])
    assert torch.allclose(first["parameters"], first["local"], rtol=1e-6, atol=1e-7)
    assert outcome.summary["samples"] == 2 * 21
    assert outcome.summary["clocks"] == [3]  # twelve steps, in rounds of five


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)], ids=["alone", "of-two"])
def test_a_step_clips_the_gradient_of_its_group(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    outcome = run(training(sgd, max_norm=0.1), tmp_path / "given", groups=groups)
    wanted = in_torch(sgd, OUTERS["average"], groups=groups, max_norm=0.1)

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for x, y in PROBLEM.batches(
            size=SIZE, count=STEPS, part=job.worker, num_parts=job.num_workers
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            job.clip_grad_norm_(0.1)
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    called = run(script, tmp_path / "called", groups=groups)
    for result in (*outcome.results, *called.results):
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)


def test_a_gradient_is_clipped_once(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, _optimizer = job.prepare(model, sgd(model.parameters()))
        (x, y), *_ = PROBLEM.batches(size=SIZE, count=1)
        nn.functional.cross_entropy(model(x), y).backward()
        job.clip_grad_norm_(0.1)
        job.clip_grad_norm_(0.1)
        return {"clock": job.clock}

    with pytest.raises(UsageError, match=r"clip_grad_norm_ was called a second time"):
        fails(script, tmp_path)


def test_samples_count_whether_or_not_the_forward_pass_is_the_models_own_call(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer, loader = job.prepare(
            model, sgd(model.parameters()), DataLoader(Stream(), batch_size=2)
        )
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.forward(inputs), labels).backward()
            optimizer.step()
        return {"clock": job.clock}

    assert run(script, tmp_path).summary["samples"] == 21


def test_a_step_with_nan_is_an_error_or_is_left_out(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=STEPS)):
            optimizer.zero_grad()
            scale = torch.nan if step == 6 and job.worker == 0 else 1.0
            (nn.functional.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    with pytest.raises((JobFailedError, NonFiniteGradientError), match="round 1, step 2"):
        fails(script, tmp_path / "error")
    outcome = run(script, tmp_path / "skip", on_nonfinite="skip")
    first, second = (each["parameters"] for each in outcome.results)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


NAMED_AS_TORCH_S = {"__module__": "torch.optim"}


class Exploding(torch.optim.SGD):
    """Its second step ends in infinity."""

    def step(self, closure: Any = None) -> Any:
        self.num_steps = getattr(self, "num_steps", 0) + 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.fill_(torch.inf if self.num_steps == 2 else 0.5)
        return closure


def test_a_difference_that_is_not_finite_is_an_empty_push_and_a_return(tmp_path: Path) -> None:
    def explode(parameters: Any) -> torch.optim.Optimizer:
        return Exploding(parameters, lr=0.1)

    given: dict[str, Any] = {"groups": ((0,),), "local_steps": 2}
    with pytest.raises((JobFailedError, NonFiniteGradientError), match="after 2 local steps"):
        fails(training(explode, steps=2), tmp_path / "error", **given)
    outcome = run(training(explode, steps=2), tmp_path / "skip", **given, on_nonfinite="skip")
    assert torch.equal(outcome.results[0]["parameters"], flat(PROBLEM.model()))


def test_a_group_whose_difference_is_not_finite_weighs_nothing(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        # Workers compare the names of their optimizers' classes.
        kind = torch.optim.SGD if job.worker else type("SGD", (Exploding,), NAMED_AS_TORCH_S)
        model, optimizer = job.prepare(model, kind(model.parameters(), lr=0.1))
        for x, y in PROBLEM.batches(size=SIZE, count=2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    outcome = run(script, tmp_path, local_steps=2, on_nonfinite="skip")
    model = PROBLEM.model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in PROBLEM.batches(size=SIZE, count=2):
        plain.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        plain.step()
    for result in outcome.results:
        assert torch.allclose(result["parameters"], flat(model), rtol=1e-5, atol=1e-7)


def test_the_end_of_the_script_ends_the_last_round(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for x, y in PROBLEM.batches(size=SIZE, count=6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return {}

    outcome = run(script, tmp_path)
    assert outcome.summary["clocks"] == [2, 2]
    assert outcome.summary["rounds_cut"] == 2


# -- what a script does with its model and optimizer ---------------------------------------------


def test_averaged_weights_are_swapped_in_behind_a_pull_and_not_else(tmp_path: Path) -> None:
    def swapping(pulls: bool) -> Script:
        def after_step(job: Job, model: nn.Module, step: int) -> None:
            if step != 5:
                return
            if pulls:
                job.pull()
            own = {name: each.clone() for name, each in model.state_dict().items()}
            model.load_state_dict({name: each * 0.5 for name, each in own.items()})
            job.mean(0.0)  # of an evaluation
            model.load_state_dict(own)

        return training(sgd, after_step)

    with pytest.raises((JobFailedError, UsageError), match=r"0\.weight was written.*job\.pull"):
        fails(swapping(pulls=False), tmp_path / "error")
    outcome = run(swapping(pulls=True), tmp_path / "right")
    wanted = in_torch_with_rounds([4, 2, 4, 2])
    for result in outcome.results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)


def test_values_set_between_rounds_are_the_servers_or_an_error(tmp_path: Path) -> None:
    def setting(pushes: bool) -> Script:
        def after_step(job: Job, model: nn.Module, step: int) -> None:
            if step == 3:
                other = PROBLEM.model(seed=5)
                model.load_state_dict(other.state_dict())
                if pushes:
                    job.set_parameters()

        return training(lambda parameters: torch.optim.SGD(parameters, lr=0.0), after_step)

    with pytest.raises((JobFailedError, UsageError), match=r"load_state_dict.*job\.set_parameters"):
        fails(setting(pushes=False), tmp_path / "error")
    outcome = run(setting(pushes=True), tmp_path / "right")
    for result in outcome.results:
        assert torch.equal(result["parameters"], flat(PROBLEM.model(seed=5)))


def test_values_written_by_hand_between_rounds_are_told(tmp_path: Path) -> None:
    def after_step(_job: Job, model: nn.Module, step: int) -> None:
        if step == 3:
            with torch.no_grad():
                next(model.parameters()).mul_(2)

    with pytest.raises(
        (JobFailedError, UsageError), match=r"0\.weight was written.*job\.set_parameters"
    ):
        fails(training(sgd, after_step), tmp_path)


def test_values_written_within_a_round_are_its_progress(tmp_path: Path) -> None:
    def after_step(_job: Job, model: nn.Module, step: int) -> None:
        if step == 4:
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)

    none = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    outcome = run(training(none, after_step), tmp_path)
    wanted = PROBLEM.model()
    with torch.no_grad():
        next(wanted.parameters()).clamp_(-0.1, 0.1)
    for result in outcome.results:
        assert torch.allclose(result["parameters"], flat(wanted), rtol=1e-6, atol=1e-7)


def test_a_frozen_part_stays_whatever_the_outer_momentum(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        frozen = model[0].weight
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=STEPS)):
            if step == 4:
                frozen.requires_grad_(False)
                before = frozen.detach().clone()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        job.barrier()
        return {"is_same": torch.equal(before, frozen)}

    outcome = run(script, tmp_path, outer="nesterov")
    assert all(each["is_same"] for each in outcome.results)


def test_what_has_moved_in_any_step_of_a_round_counts_in_it(tmp_path: Path) -> None:
    def moved(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Tensor:
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=8)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if step % 4 == 3:
                model[0].weight.grad = None
            optimizer.step()
        return flat(model)

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        moved(model, optimizer)
        job.barrier()
        return {"parameters": flat(model)}

    model = PROBLEM.model()
    wanted = moved(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (result,) = run(script, tmp_path, groups=((0,),)).results
    assert torch.allclose(result["parameters"], wanted, rtol=1e-6, atol=1e-7)


def test_hooks_schedulers_and_state_are_those_of_the_script_s_optimizer(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        own = adamw(model.parameters())
        called = []
        own.register_step_pre_hook(lambda *_: called.append("pre"))
        model, optimizer = job.prepare(model, own)
        optimizer.register_step_post_hook(lambda *_: called.append("post"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for x, y in PROBLEM.batches(size=SIZE, count=4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return {
            "called": called,
            "lr": own.param_groups[0]["lr"],
            "step": float(state["state"][0]["step"]),
            "num": len(optimizer.state),
        }

    for result in run(script, tmp_path).results:
        assert result["called"] == ["pre", "post"] * 4
        assert result["lr"] == pytest.approx(0.001)
        assert (result["step"], result["num"]) == (4.0, 6)


def test_gradients_that_a_scaler_has_scaled_are_unscaled_before_the_step(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for x, y in PROBLEM.batches(
            size=SIZE, count=STEPS, part=job.worker, num_parts=job.num_workers
        ):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        job.barrier()
        return {"parameters": flat(model)}

    wanted = in_torch(sgd, OUTERS["average"], groups=((0,), (1,)))
    for result in run(script, tmp_path).results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)], ids=["alone", "of-two"])
def test_an_overflow_before_clipping_is_a_step_that_all_leave_out(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        moved = []
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=3)):
            before = flat(model)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if step == 1 and job.worker == 1:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            job.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(flat(model), before))
        return {"moved": moved, "scale": scaler.get_scale()}

    first, second = run(script, tmp_path, groups=groups).results
    assert first == {"moved": [True, len(groups) == 2, True], "scale": 4.0}
    assert second == {"moved": [True, False, True], "scale": 2.0}


def test_state_of_before_goes_on(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = PROBLEM.model()
        optimizer = sgd(model.parameters())
        train(model, optimizer, PROBLEM.batches(size=SIZE, count=3))
        return model, optimizer

    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(*make())
        train(model, optimizer, PROBLEM.batches(size=SIZE, count=STEPS))
        return {"parameters": flat(model)}

    model, optimizer = make()
    train(model, optimizer, PROBLEM.batches(size=SIZE, count=STEPS))
    for result in run(script, tmp_path).results:
        assert torch.allclose(result["parameters"], flat(model), rtol=1e-5, atol=1e-6)


def test_workers_that_begin_with_other_states_are_told(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        optimizer = sgd(model.parameters())
        if job.worker:
            model(PROBLEM.data()[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        job.prepare(model, optimizer)
        return {}

    with pytest.raises((JobFailedError, UserError), match=r"local optimizer torch\.optim\.SGD"):
        fails(script, tmp_path)


def test_what_the_servers_do_not_have_is_not_asked_of_them(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, sgd(model.parameters()))
        job.optimizer_state()
        return {}

    with pytest.raises((JobFailedError, UsageError), match=r"optimizer\.state_dict\(\)"):
        fails(script, tmp_path, groups=((0,),))


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.LBFGS(model.parameters()))
        return {}

    with pytest.raises((JobFailedError, UserError), match=r"LBFGS with local.steps"):
        fails(script, tmp_path, groups=((0,),))


@pytest.mark.parametrize("outer", ["nesterov:momentum=0", "sgd:lr=-1", "adam:beta=3"])
def test_numbers_that_the_outer_optimizer_does_not_take_are_told(
    outer: str, tmp_path: Path
) -> None:
    with pytest.raises((JobFailedError, ConfigError), match=f"local.outer = '{outer}'"):
        fails(training(), tmp_path, groups=((0,),), outer=outer)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_model_on_a_device_has_the_same_rounds(
    seed: int, num_workers: int, tmp_path: Path
) -> None:
    groups = (tuple(range(num_workers)), tuple(range(num_workers, 2 * num_workers)))
    given: dict[str, Any] = {"groups": groups, "seed": seed, "outer": "nesterov"}
    with on_a_device(seed=seed, rate=0.5) as devices:
        there = run(training(adamw), tmp_path / "device", **given)
    here = run(training(adamw), tmp_path / "cpu", **given)
    for ours, plain in zip(there.results, here.results, strict=True):
        assert torch.equal(ours["parameters"], plain["parameters"])
    assert len(devices) == 2 * num_workers


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1), (2, 3))], ids=["alone", "of-two"])
def test_codecs_save_in_rounds_what_they_save_in_iterations(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    plain = run(training(adamw), tmp_path / "plain", groups=groups)
    coded = run(training(adamw), tmp_path / "coded", groups=groups, codec="int8")
    start = flat(PROBLEM.model())
    wanted = plain.results[0]["parameters"] - start
    for result in coded.results:
        assert torch.equal(result["parameters"], coded.results[0]["parameters"])
        assert float((result["parameters"] - start - wanted).norm() / wanted.norm()) < 0.05
    # Beside the values of two dimensions there are biases, and headers count for nothing here.
    assert plain.summary["bytes_pushed"] > 3 * coded.summary["bytes_pushed"]
    # The first values come in full, and so do the last of a job: replies to three rounds do not.
    saved = plain.summary["bytes_pulled"] - coded.summary["bytes_pulled"]
    assert saved > 0.6 * plain.summary["bytes_pushed"]


def test_over_mpi_rounds_have_the_same_bits(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    there = outcomes["rounds"]
    there.checked()
    (case,) = cases_of(OVER_MPI)
    here = run_virtually(case, tmp_path / "run", link=WILD)
    for ours, plain in zip(there.results, here.results, strict=True):
        assert torch.equal(ours["parameters"], plain["parameters"])
        assert ours["clock"] == plain["clock"] == 3
    assert there.summary["rounds_cut"] == 3  # the last round of each worker, by the barrier
