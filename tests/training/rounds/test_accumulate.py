"""``outer = accumulate``: gradients of a round are added up at unchanged parameters, and servers
run the script's own optimizer with their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psdist.errors import ConfigError, NonFiniteGradientError, UsageError
from psdist.job import Job
from tests.support.jobs import occasions_of
from tests.support.programs.training.cases import Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import JobFailedError
from tests.training.rounds.test_rounds import (
    PROBLEM,
    SIZE,
    STEPS,
    Make,
    adamw,
    fails,
    run,
    sgd,
    training,
)

ALONE, OF_TWO, UNEVEN = ((0,), (1,)), ((0, 1), (2, 3)), ((0, 1), (2,))


def accumulate(script: Script, path: Path, **settings: Any) -> Outcome:
    return run(script, path, outer="accumulate", **settings)


def in_torch(make: Make, lengths: list[int], *, workers: int, max_norm: float = 0.0) -> Tensor:
    """One optimizer, and so many batches of every worker for each of its steps."""
    model = PROBLEM.model()
    optimizer = make(model.parameters())
    parts = [
        iter(PROBLEM.batches(size=SIZE, count=STEPS, part=worker, num_parts=workers))
        for worker in range(workers)
    ]
    for length in lengths:
        optimizer.zero_grad()
        for part in parts:
            for _ in range(length):
                x, y = next(part)
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / (length * workers)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return flat(model)


def require_one_step(outcome: Outcome, x: Tensor, y: Tensor) -> None:
    """Every worker has come to where one step of all these samples leads."""
    model = PROBLEM.model()
    optimizer = sgd(model.parameters())
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for result in outcome.results:
        assert torch.allclose(result["parameters"], flat(model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("groups", [ALONE, OF_TWO, UNEVEN], ids=["alone", "of-two", "uneven"])
def test_a_round_is_one_step_of_all_its_samples(
    make: Make, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    outcome = accumulate(training(make), tmp_path, groups=groups)
    wanted = in_torch(make, [4, 4, 4], workers=outcome.num_workers)
    for result in outcome.results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)
        assert result["clock"] == STEPS // 4
    summary = outcome.summary
    assert summary["local_steps"] == STEPS * outcome.num_workers
    assert summary["rounds_cut"] == 0


def test_parameters_stay_as_they_are_within_a_round_and_bytes_go_once_a_round(
    tmp_path: Path,
) -> None:
    seen: list[Tensor] = []

    def after_step(job: Job, model: nn.Module, _step: int) -> None:
        if job.is_chief:
            seen.append(flat(model).clone())

    outcome = accumulate(training(sgd, after_step), tmp_path / "rounds")
    whole = run(training(sgd), tmp_path / "whole", local_steps=1)
    begin = flat(PROBLEM.model())
    for step, now in enumerate(seen):
        before = seen[step - 1] if step else begin
        assert torch.equal(now, before) == (step % 4 != 3)
    assert outcome.summary["bytes_pushed"] * 4 == whole.summary["bytes_pushed"]


def test_a_collective_ends_a_round_early_and_so_does_the_end(tmp_path: Path) -> None:
    def after_step(job: Job, _model: nn.Module, step: int) -> None:
        if step == 5:
            job.mean(1.0)

    outcome = accumulate(training(sgd, after_step), tmp_path)
    wanted = in_torch(sgd, [4, 2, 4, 2], workers=2)
    for result in outcome.results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)
    assert outcome.summary["rounds_cut"] == 4


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)], ids=["alone", "of-two"])
def test_a_short_batch_weighs_less(groups: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """40 samples: each worker has 20, and its third batch has 4."""
    x, y = (part[:40] for part in PROBLEM.data())

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        loader = job.loader(TensorDataset(x, y), batch_size=8, shuffle=True)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    outcome = accumulate(script, tmp_path, groups=groups, local_steps=3)
    require_one_step(outcome, x, y)


@pytest.mark.parametrize("groups", [((0, 1),)], ids=["of-two"])
def test_a_worker_whose_data_ends_takes_part_in_its_groups_rounds(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """9 samples in batches of 2: the first worker has 5 of them, the other one 4."""
    x, y = (part[:9] for part in PROBLEM.data())

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for _ in range(2):
            loader = job.loader(TensorDataset(x, y), batch_size=2)
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    outcome = accumulate(script, tmp_path, groups=groups, local_steps=6)
    require_one_step(outcome, x, y)


@pytest.mark.parametrize(
    "mode", [{"mode": "ssp", "staleness": 1}, {"mode": "async"}], ids=["ssp", "async"]
)
def test_in_ssp_and_async_rounds_are_proved(mode: dict[str, object], tmp_path: Path) -> None:
    outcome = accumulate(training(sgd), tmp_path, groups=UNEVEN, **mode)
    start = flat(PROBLEM.model())
    wanted = in_torch(sgd, [4, 4, 4], workers=3) - start
    for result in outcome.results:
        moved = result["parameters"] - start
        assert float(moved @ wanted / moved.norm() / wanted.norm()) > 0.8
        assert 0.5 < float(moved.norm() / wanted.norm()) < 2.0


@pytest.mark.parametrize("groups", [ALONE, OF_TWO], ids=["alone", "of-two"])
def test_what_is_clipped_is_the_mean(groups: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """In sync of all groups; in async each group's own, so there is one here."""
    joint = accumulate(training(sgd, max_norm=0.05), tmp_path / "sync", groups=groups)
    wanted = in_torch(sgd, [4, 4, 4], workers=joint.num_workers, max_norm=0.05)
    own = accumulate(
        training(sgd, max_norm=0.05), tmp_path / "async", groups=groups[:1], mode="async"
    )
    alone = in_torch(sgd, [4, 4, 4], workers=own.num_workers, max_norm=0.05)
    for result, right in ((joint.results[0], wanted), (own.results[0], alone)):
        assert torch.allclose(result["parameters"], right, rtol=1e-4, atol=1e-6)


def test_a_step_with_nan_is_an_error_or_is_left_out(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=4)):
            optimizer.zero_grad()
            scale = torch.nan if step == 2 else 1.0
            (nn.functional.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    with pytest.raises((JobFailedError, NonFiniteGradientError), match="round 0, step 2"):
        fails(script, tmp_path / "error", outer="accumulate")
    outcome = accumulate(script, tmp_path / "skip", groups=((0,),), on_nonfinite="skip")
    model = PROBLEM.model()
    optimizer = sgd(model.parameters())
    for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=4)):
        if step != 2:
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
    optimizer.step()
    assert torch.allclose(outcome.results[0]["parameters"], flat(model), rtol=1e-4, atol=1e-6)


def test_a_round_of_skipped_steps_moves_nothing(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for x, y in PROBLEM.batches(size=SIZE, count=4):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * torch.inf).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model), "clock": job.clock}

    (result,) = accumulate(script, tmp_path, groups=((0,),), on_nonfinite="skip").results
    assert torch.equal(result["parameters"], flat(PROBLEM.model()))
    assert result["clock"] == 1


def test_gradients_of_half_precision_are_added_up_in_float32(tmp_path: Path) -> None:
    """256 gradients of 1 and one of 257: in bfloat16 256 + 1 is 256."""

    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        nn.init.zeros_(model.weight)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(512):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        job.barrier()
        return {"weight": model.weight.detach().float().item()}

    (result,) = accumulate(script, tmp_path, groups=((0,),), local_steps=512).results
    assert result["weight"] == -1.0


def test_the_optimizers_state_is_the_servers(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, adamw(model.parameters()))
        for x, y in PROBLEM.batches(size=SIZE, count=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        state = job.optimizer_state()
        return {"step": None if state is None else float(state["state"][0]["step"])}

    first, second = accumulate(script, tmp_path).results
    assert (first["step"], second["step"]) == (2.0, None)


def test_what_would_train_otherwise_than_asked_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, _optimizer = job.prepare(model, sgd(model.parameters()))
        (x, y), *_ = PROBLEM.batches(size=SIZE, count=1)
        nn.functional.cross_entropy(model(x), y).backward()
        job.clip_grad_norm_(0.5)
        return {}

    with pytest.raises(UsageError, match=r"job\.prepare\(max_grad_norm=0\.5\) clips that"):
        fails(script, tmp_path / "clips", outer="accumulate")
    with pytest.raises(ConfigError, match=r"local.outer = accumulate with local.steps = 1"):
        fails(script, tmp_path / "alone", outer="accumulate", local_steps=1)
    with pytest.raises(ConfigError, match=r"local.outer = accumulate"):
        fails(script, tmp_path / "loss", outer="accumulate", steps_by="loss")


def test_a_prepared_loader_gives_the_same(tmp_path: Path) -> None:
    x, y = (part[:48] for part in PROBLEM.data())

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        model, optimizer, loader = job.prepare(model, sgd(model.parameters()), loader)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        job.barrier()
        return {"parameters": flat(model)}

    outcome = accumulate(script, tmp_path, local_steps=3)
    require_one_step(outcome, x, y)


def scripted(between: Callable[[Job, nn.Module, int], None], behind: bool) -> Script:
    """``between`` backward() and step(), or ``behind`` both."""

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for step, (x, y) in enumerate(PROBLEM.batches(size=SIZE, count=STEPS)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if not behind:
                between(job, model, step)
            optimizer.step()
            if behind:
                between(job, model, step)
        return {}

    return script


def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: each * 0.5 for name, each in model.state_dict().items()})


def test_a_gradient_is_of_the_parameters_that_its_round_began_with(tmp_path: Path) -> None:
    def mean_in(step_of_round: int) -> Callable[[Job, nn.Module, int], None]:
        def call(job: Job, _model: nn.Module, step: int) -> None:
            if step % 4 == step_of_round:
                job.mean(0.0)

        return call

    with pytest.raises(UsageError, match=r"mean between backward\(\) and optimizer\.step\(\)"):
        fails(scripted(mean_in(2), behind=False), tmp_path / "within", outer="accumulate")
    # Before a round's first step it ends none.
    first = accumulate(scripted(mean_in(0), behind=False), tmp_path / "first", groups=ALONE)
    assert first.summary["rounds_cut"] == 0


@pytest.mark.parametrize("call", ["set_parameters", "mean"])
def test_what_the_script_writes_in_a_round_is_refused_where_the_round_would_end(
    call: str, tmp_path: Path
) -> None:
    def write(job: Job, model: nn.Module, step: int) -> None:
        if step != 5:
            return
        load_others(model)
        if call == "set_parameters":
            job.set_parameters(model)
        else:
            job.mean(0.0)

    with pytest.raises(UsageError, match="in the middle of a round of local steps"):
        fails(scripted(write, behind=True), tmp_path, outer="accumulate")


def test_a_batch_that_is_under_way_when_a_round_is_cut_weighs_what_it_does(tmp_path: Path) -> None:
    """Local steps of a script that calls a collective between backward() and step()."""
    x, y = (part[:20] for part in PROBLEM.data())

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for inputs, labels in job.loader(TensorDataset(x, y), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            job.mean(0.0)
            optimizer.step()
        job.barrier()
        return {}

    assert run(script, tmp_path, groups=((0,),)).summary["samples"] == 20


def test_a_checkpoint_waits_for_the_step_that_uses_what_is_accumulated(tmp_path: Path) -> None:
    """A call by the script is an error, else the gradient would count in the next round."""

    def call(job: Job, _model: nn.Module, step: int) -> None:
        if step == 6:
            job.checkpoint()

    with pytest.raises(UsageError, match=r"job\.checkpoint between backward\(\) and optim"):
        fails(scripted(call, behind=False), tmp_path / "called", outer="accumulate")

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        x, y = (part[:24] for part in PROBLEM.data())
        loader, number, changed = job.loader(TensorDataset(x, y), batch_size=4), 0, 0
        for _ in job.epochs(6):
            for inputs, labels in loader:  # three, so the second one's step is in the next epoch
                if number % 6 == 2:
                    occasions_of(job).ask("checkpoint")  # as a signal does
                if number % 2 == 0:
                    optimizer.zero_grad(set_to_none=False)
                    began_with = flat(model)
                nn.functional.cross_entropy(model(inputs), labels).backward()
                if number % 2:
                    changed += not torch.equal(began_with, flat(model))
                    optimizer.step()
                number += 1
        return {"changed": changed}

    asked = accumulate(script, tmp_path / "own", groups=ALONE, local_steps=3)
    assert asked.summary["checkpoints"] == 3
    assert [each["changed"] for each in asked.results] == [0, 0]
