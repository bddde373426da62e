"""Gradients that leave during backward in groups of several: the same bits, and no rank hangs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.job import Job
from tests.support.jobs import trainers_of
from tests.support.programs.training.cases import Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance
from tests.training.overlap.test_overlap import (
    BATCH,
    LATE,
    PROBLEM,
    STEPS,
    WATCHED,
    Meddle,
    Pause,
    Turn,
    both,
    clip_to_much,
    late,
    parameters,
    run,
    training,
)

GROUPS = {
    2: ((0, 1), (2, 3)),
    3: ((0, 1, 2), (3,)),
    4: ((0, 1, 2, 3),),
}
TOGETHER = GROUPS[3]


def deep() -> nn.Sequential:
    """A model of many chunks, so that some are reduced while others are made."""
    inner = [each for _ in range(10) for each in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(
        nn.Linear(PROBLEM.num_inputs, 32), *inner, nn.Linear(32, PROBLEM.num_classes)
    )


def only(meddle: Meddle, *workers: int) -> Meddle:
    return lambda turn: meddle(turn) if turn.job.worker in workers else None


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "servers", "seed"),
    [
        *((2, 1, 0), (3, 3, 1), (4, 3, 2)),
        *(
            pytest.param(size, servers, seed, marks=pytest.mark.slow)
            for size in GROUPS
            for servers in (1, 3)
            for seed in range(3, 6)
        ),
    ],
)
def test_sync_gives_the_same_bits(size: int, servers: int, seed: int, tmp_path: Path) -> None:
    script = training(layers=deep, max_grad_norm=0.05 if seed % 2 else None)
    auto, _ = both(script, tmp_path, groups=GROUPS[size], servers=servers, seed=seed)
    assert auto.summary["early_pushes"] > 2 * (STEPS - WATCHED)


@pytest.mark.parametrize(
    ("hosts", "mode"),
    [
        ((0, 0, 1, 1), "sync"),
        pytest.param((0, 1, 1, 0), "sync", marks=pytest.mark.slow),
        pytest.param((0, 1, 1, 1), "sync", marks=pytest.mark.slow),
        pytest.param((0, 0, 1, 1), "ssp", marks=pytest.mark.slow),
    ],
)
def test_chunks_of_a_group_on_several_hosts_leave_early(
    hosts: tuple[int, ...], mode: str, tmp_path: Path
) -> None:
    script = training(layers=deep)
    auto, _ = both(script, tmp_path, groups=GROUPS[4], hosts=hosts, mode=mode, seed=6)
    assert auto.summary["early_pushes"] > 2 * (STEPS - WATCHED)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_in_ssp_and_async_chunks_leave_early_and_the_modes_rules_hold(
    mode: str, tmp_path: Path
) -> None:
    script = training(layers=deep)
    outcome = run(script, tmp_path, mode=mode, staleness=1, groups=GROUPS[2])
    assert outcome.summary["early_pushes"] > 2 * (STEPS - WATCHED)


@pytest.mark.parametrize("is_busy", [False, True])
def test_where_backward_is_too_short_to_hide_it_nothing_leaves_a_group_early(
    is_busy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="psdist")
    bucket_s = 1e-6 if is_busy else 60.0
    monkeypatch.setattr("psdist.workers.early.group_overlap.BUCKET_S", bucket_s)
    if is_busy:  # the computation uses all of the cores
        monkeypatch.setattr("psdist.ranks.rank.Rank.free_s", lambda _rank: 0.0)
    auto, _ = both(training(layers=deep), tmp_path, groups=TOGETHER)
    assert auto.summary["early_pushes"] == 12 * (STEPS - WATCHED)  # worker 3's
    said = [text for text in caplog.messages if "overlap stays off: backward passes leave" in text]
    assert len(said) == 3
    assert len({text.partition("passes")[2] for text in said}) == 1  # by the same figures


def test_a_worker_that_sends_nothing_early_keeps_its_group_from_it(tmp_path: Path) -> None:
    meddle = only(clip_to_much, 1)  # it stays off there, and not a bit is another
    auto, _ = both(training(layers=deep, between=meddle), tmp_path, groups=TOGETHER)
    assert auto.summary["early_pushes"] == 12 * (STEPS - WATCHED)  # worker 3's


def test_what_is_frozen_on_some_workers_of_a_group_counts_as_zero_there(tmp_path: Path) -> None:
    def freeze(turn: Turn) -> None:
        layers = next(iter(turn.model.children()))
        assert isinstance(layers, nn.Sequential)
        # Two layers each: a chunk lies in both.
        frozen = {19: {0, 1}, 17: {0, 1}, 15: {0, 1, 2, 3}, 13: {0, 1, 2, 3}}
        for layer, workers in frozen.items():
            for parameter in layers[layer].parameters():
                is_frozen = turn.step % 4 >= 2 and turn.job.worker in workers
                parameter.requires_grad_(not is_frozen)

    script = training(layers=deep, before=freeze, steps=14)
    auto, _ = both(script, tmp_path, groups=GROUPS[4])
    assert auto.summary["early_pushes"] >= 14 - WATCHED


def two_sets(job: Job, stage: Stage) -> Result:
    """Layers of two optimizers in turn."""
    torch.manual_seed(5)
    pick = torch.Generator().manual_seed(job.worker)
    model: nn.Module = Wide(lambda: stage.sleep(float(torch.rand(1, generator=pick)) * 1e-3))
    layers: Any = model.layers
    made: list[Any] = [
        torch.optim.SGD([p for layer in layers[first::2] for p in layer.parameters()], lr=0.01)
        for first in (0, 1)
    ]
    model, optimizers = job.prepare(model, made)
    count = WATCHED_OF_SETS + STEPS
    for x, _ in PROBLEM.batches(size=BATCH, count=count, part=job.worker, num_parts=4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"parameters": flat(model), "clock": job.clock}


WATCHED_OF_SETS = 16


def test_sets_whose_gradients_come_in_turn_give_the_same_bits(tmp_path: Path) -> None:
    """Each has an end of the group of its own."""
    auto, _ = both(two_sets, tmp_path, groups=TOGETHER)
    sets = auto.summary["sets"]
    assert all(each["early_pushes"] > each["chunks"] * STEPS for each in sets)


# -- what is sent too soon -------------------------------------------------------------------------


class Wide(nn.Module):
    """Its loss is linear in its parameters: a gradient does not depend on their values."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(PROBLEM.num_inputs, 48) for _ in range(12))
        self.pause = pause

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = Pause.apply(total, self.pause) + layer(x).sum()
        return total


def linear(between: Meddle = lambda _: None, after: Meddle = lambda _: None) -> Script:
    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Wide(lambda: stage.sleep(1e-3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        turn = None
        batches = PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=4)
        for step, (x, _) in enumerate(batches):

            def loss(x: Tensor = x) -> Tensor:
                return model(x)

            turn = Turn(job, step, model, optimizer, loss)
            optimizer.zero_grad()
            loss().backward()
            between(turn)
            optimizer.step()
        assert turn is not None
        result = {"parameters": flat(model), "clock": job.clock}
        after(turn)
        return result

    return script


SENT = r"iteration 6: .* had been sent.*; set transfer.overlap = off \(job\.prepare"


@pytest.mark.parametrize("who", [(0, 1, 2, 3), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("name", list(LATE))
def test_what_changes_after_it_was_sent_is_an_error(
    name: str, who: tuple[int, ...], tmp_path: Path
) -> None:
    if name == "clipped in the job" and len(who) == 1:
        return  # an error with overlap or without: all clip, or none
    script = linear(late(only(LATE[name], *who)))
    with pytest.raises(UsageError, match=SENT):
        run(script, tmp_path, record=False, groups=GROUPS[4])


@pytest.mark.parametrize("who", [(0, 1, 2, 3), (0, 1, 2), (1,)], ids=["all", "group", "one"])
def test_an_iteration_that_is_open_when_the_script_ends_is_an_error_if_gradients_have_left(
    who: tuple[int, ...], tmp_path: Path
) -> None:
    def once_more(turn: Turn) -> None:
        turn.optimizer.zero_grad()  # gradients that are added to others do not leave early
        turn.loss().backward()  # type: ignore[no-untyped-call]

    script = linear(after=only(once_more, *who))
    if len(who) == 1:  # of one worker alone nothing leaves: the others have not come
        outcome = run(script, tmp_path, groups=TOGETHER)
        assert outcome.summary["clocks"] == [STEPS, STEPS]
        return
    with pytest.raises(UsageError, match=rf"iteration {STEPS}: backward was not followed by step"):
        run(script, tmp_path, record=False, groups=TOGETHER)


# -- errors, ends and calls in the middle ----------------------------------------------------------


@pytest.mark.parametrize("who", [{1}, {0, 1, 2}])
def test_a_gradient_that_is_not_finite_is_told_in_the_group_which_can_go_on(
    who: Collection[int], tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Wide(lambda: stage.sleep(1e-3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        told = ""
        batches = PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=4)
        for step, (x, _) in enumerate(batches):
            optimizer.zero_grad()
            is_bad = step == 6 and job.worker in who
            layers: Any = model.layers
            hook = layers[3].weight.register_hook(lambda gradient: gradient * math.nan)
            if not is_bad:
                hook.remove()
            model(x).backward()
            hook.remove()
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                told = str(error)
                assert not trainers_of(job)[0].is_open, "that iteration has ended"
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
        return {"parameters": flat(model), "clock": job.clock, "told": told}

    auto = run(script, tmp_path / "auto", groups=TOGETHER)
    off = run(script, tmp_path / "off", overlap="off", groups=TOGETHER)
    assert [bool(each["told"]) for each in auto.results] == [True, True, True, False]
    assert "iteration 6: the gradient of layers.3.weight" in auto.results[1]["told"]
    assert "infinity; nothing more was pushed" in auto.results[1]["told"]
    assert "infinity; nothing was pushed" in off.results[1]["told"]
    assert {each["clock"] for each in auto.results} == {STEPS}
    assert relative_distance(parameters(auto), parameters(off)) < 1e-6


@pytest.mark.parametrize("pause_s", [1e-3, 0.0], ids=["left", "opened"])
@pytest.mark.parametrize("call", ["mean", "save"])
def test_gradients_that_a_group_drops_hold_up_nobody_in_a_collective_or_are_an_error(
    call: str, pause_s: float, tmp_path: Path
) -> None:
    """Whether some have left, or the group has only said that they would."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Wide(lambda: stage.sleep(pause_s) if pause_s else None)
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, made)
        batches = PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=4)
        for step, (x, _) in enumerate(batches):
            optimizer.zero_grad()
            model(x).backward()
            is_dropped = step == 6 and job.worker < 2
            if is_dropped:
                optimizer.zero_grad()
            if not is_dropped or job._config.overlap == "off":
                optimizer.step()
            if step == 6 and call == "mean":
                job.mean(1.0)
            elif step == 6:
                job.save(str(tmp_path / "model.safetensors"))
        return {"parameters": flat(model), "clock": job.clock}

    if pause_s:
        with pytest.raises(UsageError, match=r"iteration 6: backward was not followed by step\(\)"):
            run(script, tmp_path / "run", record=False, groups=GROUPS[2])
        return
    outcome = run(script, tmp_path / "run", groups=GROUPS[2])
    assert outcome.summary["clocks"] == [STEPS - 1, STEPS]
    assert outcome.summary["early_pushes"] == 0


class Stream(IterableDataset[Tensor]):
    """Workers get different numbers of samples from it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(self.num_samples):
            yield torch.randn(PROBLEM.num_inputs, generator=generator)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_worker_whose_data_has_ended_takes_part_in_what_others_have_opened(
    is_open: bool, tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Wide(lambda: stage.sleep(1e-3))
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(Stream(4 * 9 * 2 + 1), batch_size=2)
        model, optimizer, loader = job.prepare(model, made, loader)
        for _ in range(2):
            for number, x in enumerate(loader):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                if is_open and number == 8:  # the last of all but worker 0, which has less to give
                    layers: Any = model.layers
                    some = layers[6:] if job.worker == 0 else layers
                    optimizer.zero_grad()  # gradients that are added to others do not leave early
                    loss = model(torch.ones(1, PROBLEM.num_inputs))
                    loss.backward(inputs=list(some.parameters()))
        return {"parameters": flat(model), "clock": job.clock}

    if is_open:
        with pytest.raises(UsageError, match=r"iteration 9: backward was not followed by step\(\)"):
            run(script, tmp_path / "auto", record=False, groups=GROUPS[4])
        return
    auto = run(script, tmp_path / "auto", groups=GROUPS[4])
    off = run(script, tmp_path / "off", overlap="off", groups=GROUPS[4])
    assert auto.summary["clocks"] == off.summary["clocks"] == [20]
    assert auto.summary["early_pushes"] > 0
    assert torch.equal(parameters(auto), parameters(off))


def test_means_and_barriers_go_on_between_backward_and_step(tmp_path: Path) -> None:
    def meet(turn: Turn) -> None:
        assert turn.job.mean(float(turn.job.worker)) == 1.5
        turn.job.barrier()
        turn.job.log(loss=1.0)

    both(training(layers=deep, between=meet), tmp_path, groups=GROUPS[2])


@pytest.mark.parametrize("call", ["pull", "save"])
def test_what_needs_a_whole_iteration_is_refused_between_backward_and_step(
    call: str, tmp_path: Path
) -> None:
    def interrupt(turn: Turn) -> None:
        path = [str(tmp_path / "model.safetensors")] if call == "save" else []
        getattr(turn.job, call)(*path)

    script = training(layers=deep, between=late(interrupt))
    with pytest.raises(UsageError, match="overlap"):
        run(script, tmp_path / "run", record=False, groups=GROUPS[2])
