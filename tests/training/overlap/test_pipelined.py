"""``pipeline = 1``: the next step awaits the replies; values come one iteration later, and no
later."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psdist.errors import ConfigError
from psdist.job import Job
from tests.support.jobs import sets_of, trainers_of
from tests.support.late_transfers import on_a_device
from tests.support.programs.training import ssp_cases
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

PROBLEM = Problem()
STEPS = 12
SIZE = 8
LR = 0.1
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)


def run(script: Script, path: Path, *, seed: int = 0, servers: int = 2, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0,),))
    mode = {"mode": "async", "pipeline": 1, "record": True, "checksum_every": 1}
    case = Case(
        name="pipelined",
        script=script,
        groups=groups,
        servers=servers,
        settings={**mode, **settings},
    )
    outcome = run_virtually(case, path, seed=seed, link=WILD)
    if case.settings["record"]:
        outcome.checked()
    return outcome


def training(after_step: Callable[[Job, nn.Module, int], None] = lambda *_: None) -> Script:
    """Also what each forward pass has read."""

    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        part, num_parts = job.worker, job.num_workers
        read = []
        batches = PROBLEM.batches(size=SIZE, count=STEPS, part=part, num_parts=num_parts)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            read.append(flat(model))
            nn.functional.cross_entropy(model(x), y).backward()
            assert torch.equal(flat(model), read[-1])
            stage.sleep(1e-3)
            optimizer.step()
            after_step(job, model, step)
        job.barrier()
        return {"parameters": flat(model), "read": read, "pipeline": job._config.pipeline}

    return script


def delayed(num_parts: int, fresh: tuple[int, ...] = ()) -> list[Tensor]:
    """Values that a group of ``num_parts`` workers reads, by torch alone: iteration c all updates
    before c - 1, and those before c in ``fresh``; at last all of them."""
    model = PROBLEM.model()
    start, values = [p.detach().clone() for p in model.parameters()], []
    newest = [each.clone() for each in start]
    before = newest
    parts = [
        list(PROBLEM.batches(size=SIZE, count=STEPS, part=part, num_parts=num_parts))
        for part in range(num_parts)
    ]
    for step in range(STEPS):
        used = newest if step in fresh else before
        before = newest
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), used, strict=True):
                parameter.copy_(value)
        values.append(flat(model))
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for part in parts:
            model.zero_grad()
            nn.functional.cross_entropy(model(part[step][0]), part[step][1]).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad * (1 / num_parts)
        newest = [value - LR * total for value, total in zip(newest, sums, strict=True)]
    return [*values, torch.cat([value.double().flatten() for value in newest])]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_iteration_reads_all_updates_of_its_group_but_the_last_one(
    num_workers: int, tmp_path: Path
) -> None:
    outcome = run(training(), tmp_path, groups=(tuple(range(num_workers)),))
    *read, last = delayed(num_workers)
    for result in outcome.results:
        for step, (ours, plain) in enumerate(zip(result["read"], read, strict=True)):
            assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-7), step
        assert torch.allclose(result["parameters"], last, rtol=1e-5, atol=1e-7)
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[1], read[2])
    assert outcome.summary["recorded"]["pipeline"] == 1


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_so_does_one_of_a_model_on_a_device_whose_copies_come_late(
    seed: int, num_workers: int, tmp_path: Path
) -> None:
    groups = (tuple(range(num_workers)),)
    with on_a_device(seed=seed, rate=0.5) as devices:
        there = run(training(), tmp_path / "device", seed=seed, groups=groups)
    here = run(training(), tmp_path / "cpu", seed=seed, groups=groups)
    for ours, plain in zip(there.results, here.results, strict=True):
        assert all(map(torch.equal, ours["read"], plain["read"]))
        assert torch.equal(ours["parameters"], plain["parameters"])
    assert len(devices) == num_workers


def test_what_lands_before_a_device_s_forward_pass_is_not_written_over_by_its_checksum(
    tmp_path: Path,
) -> None:
    """A reply is in host memory: a comparison would have to copy the model's values there."""

    def lands(job: Job, _model: nn.Module, _step: int) -> None:
        sets_of(job).take_over()
        for trainer in trainers_of(job):
            trainer.wait_pending_pulls()

    with on_a_device(seed=0, rate=0.5):
        there = run(training(lands), tmp_path)
    *read, _ = delayed(1)
    for ours, plain in zip(there.results[0]["read"], read, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("call", ["mean", "pull", "save", "log"])
def test_what_waits_for_others_or_reads_the_model_has_the_last_update(
    call: str, tmp_path: Path
) -> None:
    def after_step(job: Job, _model: nn.Module, step: int) -> None:
        if step != 4:
            return
        if call == "mean":
            job.mean(1.0)
        elif call == "pull":
            job.pull()
        elif call == "save":
            path = tmp_path / "model.safetensors"
            job.save(str(path))
        else:
            job.log(loss=1.0)

    outcome = run(training(after_step), tmp_path / "run")
    *read, _ = delayed(1, fresh=() if call == "log" else (5,))
    for ours, plain in zip(outcome.results[0]["read"], read, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-7)


def test_what_the_script_has_written_is_replaced_by_the_next_step(tmp_path: Path) -> None:
    def scribble(_job: Job, model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].bias.data.fill_(7.0)

    outcome = run(training(scribble), tmp_path, record=False)
    read = outcome.results[0]["read"]
    assert (read[4] == 7.0).sum() == PROBLEM.num_hidden
    assert not any((each == 7.0).any() for each in (*read[:4], *read[5:]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bound", [1, 4])
def test_the_bound_holds_with_collectives_and_a_slow_group(
    bound: int, seed: int, tmp_path: Path
) -> None:
    script = ssp_cases.with_a_slow_group(slow=1, has_collectives=True)
    groups = ((0,), (1,), (2,))
    outcome = run(script, tmp_path, seed=seed, groups=groups, mode="ssp", staleness=bound)
    report = outcome.checked()
    assert 0 < max(report.staleness) <= bound
    assert outcome.summary["clocks"] == [ssp_cases.ITERATIONS] * 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_clipped", [False, True])
def test_workers_of_a_group_whose_data_ends_earlier_sit_out(
    seed: int, is_clipped: bool, tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        x, y = PROBLEM.data()
        data = TensorDataset(x[: 7 * SIZE], y[: 7 * SIZE])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer, loader = job.prepare(model, optimizer, DataLoader(data, batch_size=SIZE))
        for _ in range(3):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                if is_clipped:
                    job.clip_grad_norm_(0.5)
                optimizer.step()
            job.mean(1.0)
        return {"parameters": flat(model), "clock": job.clock}

    outcome = run(script, tmp_path, seed=seed, groups=((0, 1), (2, 3)))
    first, *others = outcome.results
    assert [each["clock"] for each in outcome.results] == [6, 6, 6, 6]
    assert all(torch.equal(each["parameters"], first["parameters"]) for each in others[:1])


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_sits_out_several_iterations_brings_what_the_others_bring(
    seed: int, tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        read = []
        count = STEPS if job.worker == 0 else 3
        for x, y in PROBLEM.batches(size=SIZE, count=count):
            optimizer.zero_grad()
            read.append(flat(model))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        (trainer,) = trainers_of(job)
        trainer.sit_out()
        job.barrier()
        return {"parameters": flat(model), "clock": job.clock, "read": read}

    outcome = run(script, tmp_path, seed=seed, groups=((0, 1, 2),))
    assert [each["clock"] for each in outcome.results] == [STEPS] * 3
    first, *others = (each["parameters"] for each in outcome.results)
    assert all(torch.equal(each, first) for each in others)
    read = outcome.results[0]["read"]
    assert all(torch.equal(a, b) == (step == 0) for step, (a, b) in enumerate(pairwise(read)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mode", "bound"), [("async", 3), ("ssp", 1)])
def test_workers_meet_for_a_checkpoint_behind_outstanding_replies(
    mode: str, bound: int, seed: int, tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        x, y = PROBLEM.data()
        data = DataLoader(TensorDataset(x[: 36 * SIZE], y[: 36 * SIZE]), batch_size=SIZE)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer, loader = job.prepare(model, optimizer, data)
        for _ in job.epochs(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                stage.sleep(2e-3 if job.worker == 1 else 5e-4)
                optimizer.step()
        return {"clock": job.clock}

    outcome = run(
        script,
        tmp_path,
        seed=seed,
        groups=((0, 1), (2,)),
        mode=mode,
        staleness=bound,
        checkpoint_every="3",
        overlap="full",  # which pipeline = 1 leaves nothing to do
    )
    assert [each["clock"] for each in outcome.results] == [24, 24, 24]
    assert outcome.summary["checkpoints"] > 2


def test_two_sets_are_late_apart(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        front, back = list(model[0].parameters()), list(model[2:].parameters())
        made = [torch.optim.SGD(each, lr=LR) for each in (front, back)]
        model, (first, second) = job.prepare(model, made)
        batches = PROBLEM.batches(
            size=SIZE, count=STEPS, part=job.worker, num_parts=job.num_workers
        )
        for step, (x, y) in enumerate(batches):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            first.step()
            if step % 2:
                second.step()
        job.barrier()
        return {"parameters": flat(model), "clocks": [t.clock for t in trainers_of(job)]}

    outcome = run(script, tmp_path, groups=((0, 1), (2,)))
    assert [each["clocks"] for each in outcome.results] == [[STEPS, STEPS // 2]] * 3
    assert torch.equal(outcome.results[0]["parameters"], outcome.results[1]["parameters"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"mode": "sync"}, "mode = sync"), ({"mode": "ssp", "staleness": 0}, "staleness = 0")],
)
def test_what_does_not_go_together_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(training(), tmp_path, record=False, **settings)
