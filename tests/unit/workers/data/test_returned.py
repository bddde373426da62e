"""Passes that are cut for those who live: every sample once, whoever dies when, in however many
passes; and what a checkpoint says of the rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.protocol.returns import Return, pack_refusal, pack_standing, unpack_return
from psdist.servers.protocol.returns import NO_ITERATION, Returns
from psdist.workers.data.loader import EpochLoader
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.returned import Cut, Deals, PassLayout
from psdist.workers.data.seen import Pass
from psdist.workers.data.sharding import BatchPlan

ALL = 2**62
"""More batches than any pass has."""


def layout_of(
    num_samples: int,
    num_workers: int,
    *,
    batch_size: int = 2,
    global_batch: int | None = None,
    drop_last: bool = False,
    spans: Any = None,
) -> PassLayout:
    def plan_of(samples: int, workers: int) -> BatchPlan | None:
        if samples < workers or (drop_last and samples < workers * batch_size):
            return None
        return BatchPlan(
            num_samples=samples,
            batch_size=batch_size,
            num_workers=workers,
            drop_last=drop_last,
            global_batch=global_batch,
        )

    return PassLayout(spans or [(0, num_samples)], plan_of=plan_of, workers=range(num_workers))


def positions(layout: PassLayout, worker: int, first: int, end: int) -> list[int]:
    return [int(at) for index in range(first, end) for at in layout.part(index, worker)]


def test_what_the_dead_had_not_brought_and_all_that_is_left_is_dealt_to_those_who_live() -> None:
    layout = layout_of(18, 3)
    assert (layout.num_batches, layout.is_cut) == (3, False)
    layout.cut(Cut(at=1, living=(0, 2), brought={1: 0}))
    assert layout.is_cut
    assert positions(layout, 0, 0, 1) + positions(layout, 2, 0, 1) == [0, 1, 4, 5]
    # Fourteen are left, of which worker 1's, 2 and 3, come first.
    assert layout.num_batches == 1 + 4
    assert positions(layout, 0, 1, 3) == [2, 3, 8, 9]
    assert positions(layout, 2, 1, 3) == [6, 7, 10, 11]
    assert layout.nominal(0) == layout.nominal(4) == 2.0
    assert layout.left(1) == [[2, 4], [6, 18]]
    assert layout.left(2) == [[8, 18]]
    assert layout.left(5) == []


def test_what_the_dead_had_brought_beyond_the_others_is_not_dealt_again() -> None:
    layout = layout_of(18, 3)
    layout.cut(Cut(at=1, living=(0, 1), brought={2: 2}))
    assert layout.left(1) == [[6, 10], [12, 18]]
    assert [*positions(layout, 0, 1, 2), *positions(layout, 1, 1, 2)] == [6, 7, 8, 9]


def test_who_died_and_was_never_decided_of_counts_as_having_brought_all() -> None:
    layout = layout_of(18, 3)
    layout.cut(Cut(at=1, living=(0,), brought={1: 1}, others=ALL))
    assert layout.left(1) == [[6, 10], [12, 16]]
    layout = layout_of(18, 3)
    layout.cut(Cut(at=0, living=(0,), brought={1: 1}))
    assert layout.left(0) == [[0, 2], [4, 18]]


def test_a_second_death_where_the_rest_is_being_trained() -> None:
    layout = layout_of(24, 3)
    layout.cut(Cut(at=2, living=(0, 1), brought={2: 1}))
    assert layout.left(2) == [[10, 24]]
    layout.cut(Cut(at=3, living=(0,), brought={1: 3}))
    # Behind batch 2 come 10 to 13 (10 and 11 were those of worker 2), of which all are brought.
    assert layout.left(3) == [[14, 24]]
    assert positions(layout, 0, 3, 5) == [14, 15, 16, 17]
    assert layout.num_batches == 3 + 5


def test_the_farthest_of_the_living_dies_and_the_pass_is_cut_in_front_of_where_it_was_cut() -> None:
    layout = layout_of(24, 3)
    layout.cut(Cut(at=3, living=(0, 1), brought={2: 0}))  # worker 1 is there, worker 0 behind
    assert layout.left(3) == [[4, 6], [10, 12], [16, 24]]
    layout.cut(Cut(at=1, living=(0,), brought={1: 4}))
    # Of worker 1: its first three batches, and one of the rest (10 and 11).
    assert layout.left(1) == [[4, 8], [12, 14], [16, 24]]
    assert positions(layout, 0, 0, 2) == [0, 1, 4, 5]


def test_a_global_batch_is_kept() -> None:
    layout = layout_of(30, 3, global_batch=6)
    layout.cut(Cut(at=2, living=(0, 2), brought={1: 2}))
    assert [layout.nominal(1), layout.nominal(2)] == [2.0, 3.0]
    assert positions(layout, 0, 2, 3) == [12, 13, 14]
    assert layout.num_batches == 5


def test_too_few_for_so_many_are_left_out() -> None:
    layout = layout_of(9, 3, batch_size=3)
    layout.cut(Cut(at=1, living=(0, 1), brought={2: 1}))
    assert layout.num_batches == 1
    layout = layout_of(10, 3, batch_size=3, drop_last=True)
    layout.cut(Cut(at=0, living=(0,), brought={}))
    assert layout.num_batches == 3  # with the one that three had to leave out


def test_a_pass_that_goes_on_from_a_checkpoint_is_of_its_spans() -> None:
    layout = layout_of(0, 2, spans=[(3, 5), (8, 8), (10, 14)])
    assert layout.num_batches == 2
    assert [positions(layout, worker, 0, 2) for worker in (0, 1)] == [[3, 4, 12], [10, 11, 13]]
    assert layout.left(1) == [[12, 14]]
    assert layout_of(0, 2, spans=[(3, 3)]).num_batches == 0


@given(st.integers(1, 60), st.integers(2, 5), st.integers(1, 4), st.booleans(), st.data())
def test_every_position_is_dealt_once(
    num_samples: int, num_workers: int, batch_size: int, drop_last: bool, data: st.DataObject
) -> None:
    layout = layout_of(num_samples, num_workers, batch_size=batch_size, drop_last=drop_last)
    brought = Counter[int]()
    at = dict.fromkeys(range(num_workers), 0)
    while at:
        # Each goes on from where it was; one dies, or it is the end.
        for worker in at:
            begun, at[worker] = at[worker], data.draw(st.integers(at[worker], layout.num_batches))
            brought.update(positions(layout, worker, begun, at[worker]))
        if len(at) == 1 or data.draw(st.booleans()):
            break
        dead = data.draw(st.sampled_from(sorted(at)))
        count, farthest = at.pop(dead), max(at.values())
        layout.cut(Cut(at=farthest, living=tuple(sorted(at)), brought={dead: count}))
        assert max(at.values()) <= layout.num_batches
    for worker, begun in at.items():
        brought.update(positions(layout, worker, begun, layout.num_batches))
    assert max(brought.values(), default=0) <= 1
    left = [each for span in layout.left(layout.num_batches) for each in range(*span)]
    assert sorted([*brought, *left]) == list(range(num_samples))
    assert len(left) < (len(at) * batch_size if drop_last else len(at)) or not layout.is_cut


# -- which passes are cut ------------------------------------------------------------------------

TOLD = Return(
    dataset=1, ordinal=3, at=5, num_batches=8, living=(0, 2), brought=((1, 6), (3, 18)), lost=0,
    counts=(2, 4),
)  # fmt: skip


def test_the_pass_that_is_told_is_cut_and_later_ones_are_of_the_living() -> None:
    deals = Deals()
    assert [*deals.cuts(1, 3)] == []
    deals.add(TOLD)
    assert [*deals.cuts(1, 2)] == []
    assert [*deals.cuts(1, 3)] == [Cut(at=5, living=(0, 2), brought={1: 6, 3: 18}, others=ALL)]
    # Worker 3 was two passes ahead.
    assert [*deals.cuts(1, 4)] == [Cut(at=0, living=(0, 2), brought={1: 0, 3: 10})]
    assert [*deals.cuts(1, 5)] == [Cut(at=0, living=(0, 2), brought={1: 0, 3: 2})]
    assert [*deals.cuts(1, 6)] == [Cut(at=0, living=(0, 2), brought={1: 0, 3: 0})]


def test_of_another_dataset_passes_that_nobody_has_begun_are_of_the_living() -> None:
    deals = Deals()
    deals.add(TOLD)
    assert [*deals.cuts(0, 1)] == []
    assert [*deals.cuts(0, 2)] == [*deals.cuts(7, 0)] == [Cut(at=0, living=(0, 2))]


def test_a_length_that_nobody_knows_cuts_no_later_pass() -> None:
    deals = Deals()
    deals.add(TOLD._replace(num_batches=0))
    assert [*deals.cuts(1, 4)] == [Cut(at=0, living=(0, 2), brought={1: 0, 3: 0})]


# -- loaders -------------------------------------------------------------------------------------


@dataclass
class Worker:
    number: int
    loaders: Loaders
    loader: EpochLoader
    batches: Iterator[Any] | None = None
    at: Pass | None = None
    """The pass that it is in."""
    clock: int = 0
    passes: int = 0
    told: list[Return] = field(default_factory=list)
    """That it takes in at its boundary."""
    lengths: list[int] = field(default_factory=list)
    """Batches that it has made of each pass."""

    @classmethod
    def of(cls, number: int, num_workers: int, samples: list[int], **options: Any) -> Worker:
        made: list[Worker] = []

        def boundary(a_pass: Pass | None) -> None:
            it = made[0]
            it.at = a_pass
            while it.told:
                it.loaders.deal_anew(it.told.pop(0), a_pass)

        loaders = Loaders(
            seed=3,
            worker=number,
            num_workers=num_workers,
            on_batch=lambda *_: None,
            on_end=lambda: None,
            collective=lambda *_: None,  # type: ignore[arg-type, return-value] # never called
            on_boundary=boundary,
            on_end_of_pass=boundary,
            global_batch=options.pop("global_batch", None),
        )
        loader = loaders.make(samples, shard=True, epoch=None, epochs=None, options={}, **options)
        made.append(cls(number, loaders, loader))
        return made[0]

    def take(self) -> list[int] | None:
        """The next batch; None where the pass is over."""
        if self.batches is None:
            self.batches = iter(self.loader)
            self.passes += 1
            self.lengths.append(0)
        batch = next(self.batches, None)
        if batch is None:
            self.batches = self.at = None
            return None
        self.lengths[-1] += 1
        return [int(each) for each in batch]

    def end_iteration(self) -> None:
        self.loaders.end_iteration()
        self.clock += 1

    def standing(self) -> bytes:
        found = self.loaders.standing(self.at, clock=self.clock)
        return pack_refusal(found) if isinstance(found, str) else pack_standing(found)


def play(seed: int) -> tuple[Counter[str], list[str]]:
    """Workers train, some die, and those who live meet at boundaries; what was met."""
    pick, met = random.Random(seed), Counter[str]()
    num_workers, is_sync = pick.randint(2, 5), pick.random() < 0.6
    samples = list(range(pick.randint(20, 70)))
    options: dict[str, Any] = {
        "batch_size": pick.randint(1, 4),
        "shuffle": pick.random() < 0.7,
        "drop_last": pick.random() < 0.3,
    }
    if pick.random() < 0.3:
        options["global_batch"] = num_workers * pick.randint(1, 3)
        options["drop_last"] = True
    num_passes, returns = 3, Returns()
    workers = [Worker.of(each, num_workers, samples, **options) for each in range(num_workers)]
    living, done = dict(enumerate(workers)), set[int]()
    seen: dict[int, Counter[int]] = {at: Counter() for at in range(1, num_passes + 2)}
    deaths = sorted(pick.sample(range(1, 60), min(num_workers - 1, pick.choice([1, 1, 2, 3]))))
    unsettled: dict[int, tuple[int, ...]] = {}
    problems: list[str] = []
    num_turns = 0

    def iterate(worker: Worker) -> None:
        batch = worker.take()
        if batch is None:
            if worker.passes == num_passes:
                done.add(worker.number)
            return
        seen[worker.passes].update(batch)
        worker.end_iteration()

    while len(done) < len(living):
        num_turns += 1
        turn = [each for each in living.values() if each.number not in done]
        pick.shuffle(turn)
        if not is_sync:
            turn = turn[:1]
        for index, worker in enumerate(turn):
            is_last_moment = is_sync and index < pick.choice([0, 0, len(turn)])
            if deaths and num_turns >= deaths[0] and len(living) > 1 and not done:
                # It may have come farther than the others, and died in an update that may count.
                deaths.pop(0)
                del living[worker.number]
                if is_last_moment:
                    iterate(worker)
                reached = worker.clock
                batch = worker.take()
                if batch is not None and worker.passes <= num_passes and pick.random() < 0.5:
                    seen[worker.passes].update(batch)
                    reached += 1
                unsettled[worker.number] = (reached,)
                continue
            if worker.number in living:
                iterate(worker)
        is_heard = not any(each.told for each in living.values())
        if unsettled and is_heard and not done and pick.random() < 0.5:
            returns.on_buried(unsettled)
            unsettled = {}
            answer = returns.decide({each: living[each].standing() for each in living})
            told = unpack_return(answer)
            assert told is not None
            if isinstance(told, str):
                problems.append(told)
                continue
            for worker in living.values():
                worker.told.append(told)
            met["returned"] += 1
            met["lost"] += told.lost > 0
            met["between passes"] += worker.at is None
            met["of several deaths"] += len(told.brought) > 1
    is_whole = not (problems or unsettled or met["lost"] or options["drop_last"])
    for number, counts in seen.items():
        assert max(counts.values(), default=0) <= 1, f"seed {seed}: {counts.most_common(3)}"
        if is_sync and is_whole and number <= num_passes and met["returned"]:
            missing = len(samples) - len(counts)
            met["whole"] += missing == 0
            assert missing <= num_workers * (1 + met["returned"]), f"seed {seed}: {missing} missing"
    if not unsettled:
        assert len({tuple(each.lengths) for each in living.values()}) == 1, f"seed {seed}"
    return met, problems


def test_whoever_dies_when_nobody_sees_a_sample_twice_and_all_make_as_many_iterations() -> None:
    met, problems = Counter[str](), list[str]()
    for seed in range(150):
        found, why = play(seed)
        met += found
        problems += why
    assert {*problems} <= {NO_ITERATION}
    for what in ("returned", "whole", "lost", "between passes", "of several deaths"):
        assert met[what] > 1, met


def train(worker: Worker, num_batches: int) -> list[int]:
    """The samples of so many batches, or of all that the pass has."""
    found: list[int] = []
    for _ in range(num_batches):
        batch = worker.take()
        if batch is None:
            break
        found += batch
        worker.end_iteration()
    return found


def kill_one(samples: list[int], **options: Any) -> tuple[list[Worker], list[int]]:
    """Three workers of which the first dies after one batch of a pass, and the others go on with
    what is left, up to its fifth batch; and all that was seen."""
    workers = [Worker.of(each, 3, samples, **options) for each in range(3)]
    seen = [*train(workers[0], 1), *train(workers[1], 2), *train(workers[2], 2)]
    returns = Returns()
    returns.on_buried({0: (1,)})
    told = unpack_return(returns.decide({each: workers[each].standing() for each in (1, 2)}))
    assert isinstance(told, Return)
    for worker in workers[1:]:
        worker.told.append(told)
        seen += train(worker, 3)
    return workers[1:], seen


OPTIONS: dict[str, Any] = {"batch_size": 2, "shuffle": True, "drop_last": False}


def test_loaders_tell_their_length_in_the_pass_and_of_the_next_one() -> None:
    samples = list(range(32))
    (first, second), seen = kill_one(samples, **OPTIONS)
    assert [len(first.loader), len(second.loader)] == [8, 8]  # 2 of 6, 5 of 4 and one of 2
    assert first.at is not None
    assert first.at.num_batches == 8
    seen += train(first, 99) + train(second, 99)
    assert sorted(seen) == samples
    assert len(first.loader) == 8
    assert sorted(train(first, 99) + train(second, 99)) == samples
    assert first.lengths == second.lengths == [8, 8]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_checkpoint_in_a_pass_that_was_cut_has_what_is_left(num_workers: int) -> None:
    samples = list(range(50))
    (first, second), seen = kill_one(samples, **OPTIONS)
    tree = first.loaders.seen.collect(at=first.at)
    assert tree["passes"][0]["consumed"] is None
    assert tree == second.loaders.seen.collect(at=second.at)
    later = [Worker.of(each, num_workers, samples, **OPTIONS) for each in range(num_workers)]
    for worker in later:
        assert worker.loaders.seen.restore(tree, is_moved=True) == []
    seen += [sample for worker in later for sample in train(worker, 2)]
    # And once more, in a run whose workers all live.
    assert later[0].at is not None
    tree = later[0].loaders.seen.collect(at=later[0].at)
    again = [Worker.of(each, num_workers, samples, **OPTIONS) for each in range(num_workers)]
    for worker in again:
        assert worker.loaders.seen.restore(tree, is_moved=False) == []
    half = [sample for worker in again for sample in train(worker, 1)]
    assert again[0].at is not None
    tree = again[0].loaders.seen.collect(at=again[0].at)
    last = Worker.of(0, 1, samples, **OPTIONS)
    last.loaders.seen.restore(tree, is_moved=True)
    seen += half + train(last, 99)
    assert sorted(seen) == samples
    assert len(train(last, 99)) == 50
