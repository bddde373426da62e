"""A script that is cut at any boundary and continues sees and draws what it would have without.

Every script here is played as a whole, then cut at each of its boundaries and continued in what is
another process: the batches, the random numbers of its "dropout" and of the augmentation of its
samples, its scheduler, its batch norm and its own values must be those of the whole run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from psdist.errors import CheckpointError, UsageError
from tests.support.mpirun import STARTUP
from tests.support.script_runs import Script, Worker, play, resume


class Augmented(Dataset[Any]):
    """Samples with three random numbers each, drawn where the sample is made."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1).item(), random.random(), float(np.random.rand())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def loop(make: Any, epochs: int = 3) -> Script:
    def script(job: Worker) -> None:
        loader = make(job)
        for epoch in job.epochs(epochs):
            for batch in loader:
                job.step(epoch, *batch)

    return script


def of_own(**options: Any) -> Script:
    return loop(lambda job: job.loaders.share_out(DataLoader(Augmented(9), **options)))


def with_everything(job: Worker) -> None:
    loader = job.loader(Augmented(10))
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7, 11], gamma=0.5)
    per_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.prepare(model, optimizer)
    job.attach(scheduler=scheduler, per_epoch=per_epoch)
    for epoch in job.epochs(3):
        per_epoch.step()  # before the loop, so it is executed again in an epoch that continues
        job.state["begun"] = job.state.get("begun", 0) + 1
        for _, *drawn in loader:
            model(torch.stack(drawn, dim=1).float().mean(dim=1, keepdim=True))
            optimizer.step()
            scheduler.step()
            job.state.setdefault("seen", []).append(epoch)
            norm = model[1].running_mean.clone()
            job.step(epoch, optimizer.param_groups[0]["lr"], norm, list(job.state["seen"]))
        job.step("end of epoch", job.state["begun"])


def evaluated(job: Worker) -> None:
    """Before, within and behind the passes that train."""
    loader, validation = job.loader(Augmented(8)), job.loader(Augmented(4), shuffle=True)
    once = job.loader(Augmented(3), shard=False)
    for epoch in job.epochs(3):
        evaluate(validation)
        for batch in loader:
            job.step(epoch, *batch)
            if job.clock % 4 == 2:
                evaluate(validation)
                evaluate(once)
        evaluate(validation)


@torch.no_grad()
def evaluate(loader: Any) -> list[Any]:
    return [torch.rand(1) for _ in loader]


def two_passes_in_an_epoch(job: Worker) -> None:
    first, second = job.loader(Augmented(5)), job.loader(Augmented(6))
    for epoch in job.epochs(2):
        for batch in first:
            job.step(epoch, 1, *batch)
        for batch in second:
            job.step(epoch, 2, *batch)


def side_by_side(job: Worker) -> None:
    first, second = job.loader(Augmented(6)), job.loader(Augmented(6))
    for epoch in job.epochs(2):
        for one, other in zip(first, second, strict=True):
            job.step(epoch, *one, *other)


def two_loops(job: Worker) -> None:
    loader = job.loader(Augmented(4))
    for phase, count in enumerate((2, 3)):
        for epoch in job.epochs(count):
            for batch in loader:
                job.step(phase, epoch, *batch)


def stopped_early(job: Worker) -> None:
    loader = job.loader(Augmented(8))
    for epoch in job.epochs(3):
        for batch in loader:
            job.step(epoch, *batch)
            if job.clock % 4 == 3:
                break


def stopped_before_another(job: Worker) -> None:
    first, second = job.loader(Augmented(8)), job.loader(Augmented(6))
    for epoch in job.epochs(2):
        for batch in first:
            job.step(epoch, 1, *batch)
            if job.clock % 5 == 2:  # with the 3 of the second pass an epoch has 5
                break
        for batch in second:
            job.step(epoch, 2, *batch)


def accumulated(job: Worker) -> None:
    loader = job.loader(Augmented(12))
    for epoch in job.epochs(2):
        held = []
        for batch in loader:
            held.append(batch)
            if len(held) == 2:
                job.step(epoch, *(part for each in held for part in each))
                held = []


def by_clock(job: Worker) -> None:
    """Without job.epochs: the loader counts."""
    loader, validation = job.loader(Augmented(6)), job.loader(Augmented(4))
    while job.clock < 8:
        for batch in loader:
            job.step(*batch)
            if job.clock % 2:
                evaluate(validation)
            if job.clock == 8:
                break


def by_own_epochs(job: Worker) -> None:
    for epoch in range(job.state.get("epoch", 0), 3):
        job.state["epoch"] = epoch
        for batch in job.loader(Augmented(6), epoch=epoch):
            job.step(epoch, *batch)


def made_in_the_loop(job: Worker) -> None:
    dataset = Augmented(6)
    for epoch in job.epochs(3):
        for batch in job.loader(dataset):
            job.step(epoch, *batch)


def new_in_every_epoch(make: Callable[[], Any], *, is_own: bool = False) -> Script:
    def script(job: Worker) -> None:
        for epoch in job.epochs(3):
            dataset = make()
            loader = (
                job.loaders.share_out(DataLoader(dataset, batch_size=2, shuffle=True))
                if is_own
                else job.loader(dataset)
            )
            for batch in loader:
                job.step(epoch, *batch)

    return script


def all_new_in_every_epoch(job: Worker) -> None:
    """With an evaluation before and within the pass, of as many samples, and a second pass."""
    for epoch in job.epochs(3):
        validation = job.loader(Augmented(6))
        evaluate(validation)
        loader = job.loader(Augmented(6))
        for batch in loader:
            job.step(epoch, *batch)
            if job.clock % 2:
                evaluate(job.loader(Augmented(6)))
        for batch in loader:
            job.step(epoch, "again", *batch)


def new_without_epochs(job: Worker) -> None:
    while job.clock < 9:
        for batch in job.loader(Augmented(6)):
            job.step(*batch)


SCRIPTS: dict[str, Script] = {
    "in order": loop(lambda job: job.loader(Augmented(7), shuffle=False)),
    "shuffled": loop(lambda job: job.loader(Augmented(7))),
    "drop_last": loop(lambda job: job.loader(Augmented(7), drop_last=True)),
    "all samples": loop(lambda job: job.loader(Augmented(7), shard=False)),
    "stream": loop(lambda job: job.loader(Stream(), shuffle=False)),
    "own, shuffled": of_own(batch_size=2, shuffle=True),
    "own sampler": of_own(batch_size=2, sampler=WeightedRandomSampler([0.1] * 9, 7)),
    "own batch sampler": of_own(batch_sampler=BatchSampler(RandomSampler(range(9)), 2, True)),
    "everything": with_everything,
    "evaluated": evaluated,
    "two passes": two_passes_in_an_epoch,
    "side by side": side_by_side,
    "two loops": two_loops,
    "stopped early": stopped_early,
    "stopped before another": stopped_before_another,
    "accumulated": accumulated,
    "by clock": by_clock,
    "by own epochs": by_own_epochs,
    "made in the loop": made_in_the_loop,
    "new datasets": new_in_every_epoch(lambda: Augmented(6)),
    "new lists": new_in_every_epoch(lambda: [torch.tensor([each]) for each in range(6)]),
    "new loaders": new_in_every_epoch(lambda: Augmented(6), is_own=True),
    "all new": all_new_in_every_epoch,
    "new without epochs": new_without_epochs,
}


@pytest.mark.filterwarnings("ignore:Detected call of")  # of the scheduler: servers make the steps
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_that_goes_on_from_any_boundary_is_the_whole_run(name: str) -> None:
    script = SCRIPTS[name]
    whole = play(script)
    assert whole.num_boundaries > 4
    for cut_at in range(whole.num_boundaries):
        first = play(script, cut_at=cut_at)
        assert first.tree is not None
        rest = resume(script, first.tree)
        assert first.trace + rest.trace == whole.trace, f"cut at boundary {cut_at}"
        assert rest.lines == []


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ["evaluated", "two passes", "everything", "by clock", "all new"])
def test_so_is_one_that_was_cut_twice(name: str) -> None:
    script = SCRIPTS[name]
    whole = play(script)
    for cut_at in range(2, whole.num_boundaries, 3):
        first = play(script, cut_at=cut_at)
        assert first.tree is not None
        for again_at in range(2):
            second = resume(script, first.tree, cut_at=again_at)
            if second.tree is None:
                continue  # it had ended
            third = resume(script, second.tree)
            assert first.trace + second.trace + third.trace == whole.trace


def checkpointed(where: str) -> Script:
    def script(job: Worker) -> None:
        loader, stream = job.loader(Augmented(6)), job.loader(Stream(), shuffle=False)
        for epoch in job.epochs(3):
            for batch in loader:
                job.step(epoch, *batch)
                if where == "body":
                    job.checkpoint()
            if where == "between":
                job.checkpoint()
            for numbers in stream:
                job.step(epoch, numbers)
            job.step("end of epoch", epoch)
            if where == "end":
                job.checkpoint()

    return script


@pytest.mark.parametrize(("where", "calls"), [("body", 9), ("between", 3), ("end", 3)])
def test_a_checkpoint_that_the_script_calls_for_is_where_it_goes_on(where: str, calls: int) -> None:
    script = checkpointed(where)
    whole = play(script)
    assert whole.num_checkpoints == calls
    for number in range(calls):
        first = play(script, checkpoint_at=number)
        assert first.tree is not None
        rest = resume(script, first.tree)
        if where == "between":  # no pass is open: the epoch counts as over
            missing = len(whole.trace) - len(first.trace) - len(rest.trace)
            assert missing == 6  # 5 batches of the stream, and the end of the epoch
            continue
        assert first.trace + rest.trace == whole.trace, f"at checkpoint {number}"


def test_every_pass_of_an_epoch_that_trains_has_boundaries() -> None:
    # Before the first epoch, in each before 3 + 3 batches, and behind each.
    assert play(two_passes_in_an_epoch).num_boundaries == 1 + 2 * (6 + 1)


def looking(job: Worker) -> None:
    """At all samples before each epoch's training and behind it."""
    loader, validation = job.loader(Augmented(6)), job.loader(Augmented(5), shuffle=True)
    for epoch in job.epochs(3):
        with torch.no_grad():
            job.looked_at.append((epoch, [numbers.tolist() for numbers, *_ in validation]))
        for batch in loader:
            job.step(epoch, *batch)


def test_an_evaluation_before_training_is_made_again_in_full_and_in_its_order() -> None:
    whole = play(looking)
    assert [len(seen) for _, seen in whole.looked_at] == [3, 3, 3]
    orders = dict(whole.looked_at)
    assert orders[0] != orders[1]
    for cut_at in range(whole.num_boundaries):
        first = play(looking, cut_at=cut_at)
        assert first.tree is not None
        again = resume(looking, first.tree).looked_at
        assert again == [(epoch, orders[epoch]) for epoch, _ in again]
        assert len(first.looked_at) + len(again) in (3, 4)


def test_loader_processes_draw_what_they_would_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", STARTUP)
    script = loop(lambda job: job.loader(Augmented(10), num_workers=2), epochs=2)
    whole = play(script)
    first = play(script, cut_at=4)
    assert first.tree is not None
    rest = resume(script, first.tree)
    assert first.trace + rest.trace == whole.trace
    drawn = {tuple(tuple(part) for part in line[2:5]) for line in whole.trace}
    assert len(drawn) == len(whole.trace)


def samples(workers: list[Worker]) -> list[int]:
    return sorted(n for worker in workers for line in worker.trace for n in line[1])


class Pairs(Sampler[list[int]]):
    """Batches of two."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(22).tolist()
        return iter([order[at : at + 2] for at in range(0, 22, 2)])

    def __len__(self) -> int:
        return 11


LEFT: dict[str, tuple[Script, int]] = {
    "shuffled": (loop(lambda job: job.loader(Augmented(23)), epochs=1), 23),
    "in order": (loop(lambda job: job.loader(Augmented(23), shuffle=False), epochs=1), 23),
    "drop_last": (loop(lambda job: job.loader(Augmented(23), drop_last=True), epochs=1), 18),
    "own sampler": (
        loop(
            lambda job: job.loaders.share_out(
                DataLoader(Augmented(23), 2, sampler=RandomSampler(range(50), num_samples=23))
            ),
            epochs=1,
        ),
        23,
    ),
    "own batch sampler": (
        loop(
            lambda job: job.loaders.share_out(DataLoader(Augmented(23), batch_sampler=Pairs())),
            epochs=1,
        ),
        22,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_workers_share_out_what_is_left_of_the_epoch(name: str) -> None:
    script, count = LEFT[name]
    first = [play(script, cut_at=4, share=(worker, 2)) for worker in range(2)]
    tree = first[0].tree
    assert tree is not None
    rest = [resume(script, tree, share=(worker, 3), is_moved=True) for worker in range(3)]
    seen = samples([*first, *rest])
    assert len(seen) == len(set(seen)) == count
    assert len(samples(rest)) < count
    assert any("of other workers" in line for line in rest[0].lines)


GLOBAL = {
    "shuffled": lambda job: job.loader(Augmented(23)),
    "drop_last": lambda job: job.loader(Augmented(22), drop_last=True),
    "own sampler": lambda job: job.loaders.share_out(
        DataLoader(Augmented(23), 2, sampler=RandomSampler(range(50), num_samples=23))
    ),
}


def joint_batches(workers: list[Worker]) -> list[list[int]]:
    """By iteration, what all workers together have seen."""
    lines = zip(*(worker.trace for worker in workers), strict=True)
    return [sorted(n for line in each for n in line[1]) for each in lines]


@pytest.mark.parametrize("name", GLOBAL)
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_with_a_global_batch_other_workers_make_the_same_iterations(
    name: str, workers: int
) -> None:
    script = loop(GLOBAL[name], epochs=2)
    whole = joint_batches([play(script, share=(each, 2), global_batch=5) for each in range(2)])
    assert [len(each) for each in whole] == ([5, 5, 5, 5] + [3] * (name != "drop_last")) * 2
    for cut_at in (3, 8):
        first = [play(script, cut_at=cut_at, share=(w, 2), global_batch=5) for w in range(2)]
        tree = first[0].tree
        assert tree is not None
        if name != "drop_last" and workers == 4:  # of which the last batch has too few samples
            with pytest.raises(UsageError, match="leave 3 for the last joint batch"):
                resume(script, tree, share=(0, 4), is_moved=True, global_batch=5)
            continue
        rest = [
            resume(script, tree, share=(w, workers), is_moved=True, global_batch=5)
            for w in range(workers)
        ]
        assert joint_batches(first) + joint_batches(rest) == whole


def test_a_global_batch_that_begins_in_the_middle_of_an_epoch_leaves_no_sample_out() -> None:
    script = loop(lambda job: job.loader(Augmented(24)), epochs=1)
    first = [play(script, cut_at=3, share=(w, 2)) for w in range(2)]  # 2 batches of 4
    tree = first[0].tree
    assert tree is not None
    # 16 are left: 7, 7, and 2 for three workers, which join the batch before.
    rest = [resume(script, tree, share=(w, 3), is_moved=True, global_batch=7) for w in range(3)]
    assert samples([*first, *rest]) == list(range(24))
    assert [len(each) for each in joint_batches(rest)] == [7, 9]


def test_of_a_pass_that_was_over_other_workers_see_nothing_and_nothing_is_lost() -> None:
    first = [play(two_passes_in_an_epoch, cut_at=2, share=(worker, 2)) for worker in range(2)]
    tree = first[0].tree
    assert tree is not None
    assert [line[1] for line in first[0].trace] == [1]  # the first pass has ended
    rest = [
        resume(two_passes_in_an_epoch, tree, share=(worker, 3), is_moved=True)
        for worker in range(3)
    ]
    assert rest[0].trace[0][:2] == (0, 2)
    assert not any("begins again" in line for line in rest[0].lines)


def test_where_too_few_samples_are_left_other_workers_go_on_behind_the_loop() -> None:
    def script(job: Worker) -> None:
        loader = job.loader(Augmented(6))
        for epoch in job.epochs(2):
            for batch in loader:
                job.step(epoch, *batch)
            job.state["ended"] = job.state.get("ended", 0) + 1
        job.step("end", job.state["ended"])

    first = play(script, cut_at=2, share=(0, 2))  # 2 of 6 are left
    assert first.tree is not None
    rest = resume(script, first.tree, share=(0, 3), is_moved=True)
    assert [line[0] for line in rest.trace] == [1, "end"]
    assert rest.trace[-1][1] == 2


def test_a_stream_of_other_workers_begins_its_pass_anew_and_says_so() -> None:
    script = loop(lambda job: job.loader(Stream(), shuffle=False), epochs=1)
    first = play(script, cut_at=2)
    assert first.tree is not None
    rest = resume(script, first.tree, share=(0, 2), is_moved=True)
    assert any("without indices begins again" in line for line in rest.lines)


@pytest.mark.parametrize("key", ["left", "rest"])
def test_a_checkpoint_with_samples_that_were_dealt_to_others_is_refused(key: str) -> None:
    script = loop(lambda job: job.loader(list(range(8))))
    tree = play(script, cut_at=2).tree
    assert tree is not None
    tree["data"]["passes"][0] |= {"left": None, "rest": None}  # as psdist wrote them
    assert resume(script, tree).trace
    tree["data"]["passes"][0][key] = [[2, 4]]
    with pytest.raises(CheckpointError) as caught:
        resume(script, tree)
    assert str(caught.value) == (
        "checkpoint step-00000007: its epoch has samples of a failed worker that were dealt to "
        "other workers (samples_of_dead = return), which this psdist cannot continue; delete this "
        "checkpoint to resume from an earlier one"
    )
