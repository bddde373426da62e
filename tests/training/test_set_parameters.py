"""job.set_parameters: values that a script set in the middle reach servers and workers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import CollectiveError, PsdistError, UsageError
from psdist.history import EventFlag, EventKind
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually

Groups = tuple[tuple[int, ...], ...]
APART: Groups = ((0,), (1,))
TOGETHER: Groups = ((0, 1),)
MIXED: Groups = ((0, 1), (2,))
BATCH = 4
STEPS = 6
PUSHED_AT = 3


def run(script: Script, path: Path, *, groups: Groups, **settings: object) -> Outcome:
    """Proved, too."""
    settings = {"mode": "sync", "record": True, "checksum_every": 1, **settings}
    case = Case(name="set_parameters", script=script, groups=groups, servers=2, settings=settings)
    outcome = run_virtually(case, path)
    assert outcome.checked().proved
    return outcome


def refused(error: type[PsdistError], told: str, script: Script, path: Path) -> None:
    with pytest.raises(error, match=told):
        run_virtually(Case(name="refused", script=script, groups=APART), path)


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """More than one chunk, and buffers."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 70), nn.BatchNorm1d(70), nn.Tanh(), nn.Linear(70, 40))
    model.eval().to(dtype)  # statistics as they were set, on all workers alike
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def other_values(seed: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = make()[0].state_dict()
    return {
        name: (torch.rand(value.shape, generator=generator) + 0.5).to(value.dtype)
        for name, value in state.items()
    }


def batch(step: int, workers: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    parts = []
    for worker in workers:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        parts.append(torch.randn(BATCH, 9, generator=generator))
    return torch.cat(parts).to(dtype)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).sin().mean().backward()
    optimizer.step()


def pushes_in_the_middle(job: Job, _stage: Stage) -> Result:
    model, optimizer = job.prepare(*make())
    for step in range(STEPS):
        if step == PUSHED_AT:
            if job.is_chief:
                model.load_state_dict(other_values())
            job.set_parameters()
        train_step(model, optimizer, batch(step, [job.worker]))
    return {"model": flat(model), "mean": model[1].running_mean}


@pytest.mark.parametrize("groups", [APART, TOGETHER, MIXED])
def test_values_loaded_in_the_middle_train_on_as_in_one_process_with_its_momentum(
    groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [worker for group in groups for worker in group]
    plain, momentum = make()
    for step in range(STEPS):
        if step == PUSHED_AT:
            plain.load_state_dict(other_values())
        train_step(plain, momentum, batch(step, workers))
    without_momentum, fresh = make()
    without_momentum.load_state_dict(other_values())
    for step in range(PUSHED_AT, STEPS):
        train_step(without_momentum, fresh, batch(step, workers))
    assert relative_distance(flat(without_momentum), flat(plain)) > 1e-3

    outcome = run(pushes_in_the_middle, tmp_path, groups=groups)
    for result in outcome.results:
        assert relative_distance(result["model"], flat(plain)) < 1e-5
        assert torch.equal(result["mean"], other_values()["1.running_mean"])
    assert not caplog.records, "what was pushed is the truth"


def test_every_chunk_has_one_event_of_the_push_with_the_checksum_of_what_was_set(
    tmp_path: Path,
) -> None:
    outcome = run(pushes_in_the_middle, tmp_path, groups=APART)
    history = outcome.history
    events = [log.events[log.events["kind"] == EventKind.LOAD] for log in history.servers]
    chunks = [chunk for each in events for chunk in each["chunk"].tolist()]
    assert sorted(chunks) == list(range(history.run.num_chunks))
    for log, each in zip(history.servers, events, strict=True):
        assert (each["clock"] == PUSHED_AT).all()
        assert (each["flags"] == EventFlag.CRC).all()
        for event in each:
            position = int(np_position(log.events, event))
            sums = log.checksums[log.checksums["chunk"] == event["chunk"]]
            behind = sums[sums["position"] > position][0]
            assert behind["crc"] == event["weight"]


def np_position(events: Any, event: Any) -> int:
    (found,) = (index for index, each in enumerate(events) if each == event)
    return int(found)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_go_ahead_push_and_keep_their_rules(mode: str, tmp_path: Path) -> None:
    """Each worker has written something else: the chief's is taken."""

    def script(job: Job, stage: Stage) -> Result:
        model, optimizer = job.prepare(*make())
        for step in range(10):
            stage.sleep(0.01 * (1 + job.group))
            if step in (3, 7 - job.group):
                model.load_state_dict(other_values(job.worker + step))
                job.set_parameters()
            train_step(model, optimizer, batch(step, [job.worker]))
        model.load_state_dict(other_values(job.worker))
        job.set_parameters()
        return {"model": flat(model)}

    outcome = run(script, tmp_path, groups=MIXED, mode=mode, staleness=1)
    expected = other_values(0)
    plain, _ = make()
    plain.load_state_dict(expected)
    for result in outcome.results:
        assert torch.equal(result["model"], flat(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_pushed_in_half_precision_is_what_servers_train_on(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(*make(dtype))
        train_step(model, optimizer, batch(0, [job.worker], dtype))
        values = {name: value.to(dtype) for name, value in other_values().items()}
        model.load_state_dict(values)
        job.set_parameters()
        pushed = flat(model).clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train_step(model, optimizer, batch(1, [job.worker], dtype))
        return {"pushed": pushed, "model": flat(model)}

    for result in run(script, tmp_path, groups=APART).results:
        assert torch.equal(result["pushed"], result["model"])
        plain, _ = make(dtype)
        plain.load_state_dict({name: v.to(dtype) for name, v in other_values().items()})
        assert torch.equal(result["model"], flat(plain))


def test_one_of_two_models_is_pushed_and_the_other_stays(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        (first, steps), (second, _) = job.prepare(*make()), job.prepare(*make())
        before = flat(second).clone()
        train_step(first, steps, batch(0, [job.worker]))
        first.load_state_dict(other_values())
        job.set_parameters(first)
        return {"first": flat(first), "second": flat(second), "before": before}

    expected, _ = make()
    expected.load_state_dict(other_values())
    for result in run(script, tmp_path, groups=APART).results:
        assert torch.equal(result["first"], flat(expected))
        assert torch.equal(result["second"], result["before"])


def test_a_load_that_is_not_pushed_is_still_refused_after_a_push(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(*make())
        model.load_state_dict(other_values())
        job.set_parameters()
        model.load_state_dict(other_values(8))
        train_step(model, optimizer, batch(0, [job.worker]))
        return {}

    told = r"iteration 0: load_state_dict\(\) has changed .*job\.set_parameters\(\)"
    refused(UsageError, told, script, tmp_path)


def test_push_before_prepare_or_of_a_model_that_was_not_prepared_is_refused(
    tmp_path: Path,
) -> None:
    def too_early(job: Job, _stage: Stage) -> Result:
        job.set_parameters()
        return {}

    def of_another(job: Job, _stage: Stage) -> Result:
        job.prepare(*make())
        job.set_parameters(make()[0])
        return {}

    def of_two(job: Job, _stage: Stage) -> Result:
        job.prepare(*make())
        job.prepare(*make())
        job.set_parameters()
        return {}

    refused(UsageError, r"job\.set_parameters\(\) was called before job\.prepare\(\)", too_early,
            tmp_path / "early")  # fmt: skip
    refused(
        UsageError,
        r"job\.set_parameters: this model was not prepared",
        of_another,
        tmp_path / "other",
    )
    refused(UsageError, r"name one, job\.set_parameters\(model=\.\.\.\)", of_two,
            tmp_path / "two")  # fmt: skip


def test_a_push_of_which_workers_name_different_models_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        models = [job.prepare(*make())[0] for _ in range(2)]
        job.set_parameters(models[job.worker])
        return {}

    refused(UsageError, "worker [01] names another model than this worker", script, tmp_path)


def test_a_push_that_not_all_workers_call_is_told(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        job.prepare(*make())
        job.set_parameters() if job.is_chief else job.barrier()
        return {}

    refused(CollectiveError, "set_parameters", script, tmp_path)


def test_parameters_that_are_not_in_their_memory_any_more_cannot_be_pushed(tmp_path: Path) -> None:
    def assigned(job: Job, _stage: Stage) -> Result:
        model, _ = job.prepare(*make())
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        job.set_parameters()
        return {}

    def moved(job: Job, _stage: Stage) -> Result:
        model, _ = job.prepare(*make())
        model[0].weight.data = torch.zeros_like(model[0].weight)
        job.set_parameters()
        return {}

    refused(UsageError, "is not any more what job.prepare.. was given", assigned, tmp_path / "a")
    refused(UsageError, "no longer uses the memory", moved, tmp_path / "m")


def test_the_old_name_sends_the_values_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, _ = job.prepare(*make())
        for seed in (6, 8):
            if job.is_chief:
                model.load_state_dict(other_values(seed))
            job.push()
        return {"values": flat(model)}

    expected, _ = make()
    expected.load_state_dict(other_values(8))
    for result in run(script, tmp_path, groups=APART).results:
        assert torch.equal(result["values"], flat(expected))
    warnings = [each for each in caplog.messages if "job.push" in each]
    assert warnings == ["job.push is deprecated; write job.set_parameters"]
