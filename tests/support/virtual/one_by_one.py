"""A virtual worker with the largest overlap: every chunk leaves as soon as its own last
reply has come, whatever others still wait for, in all parameter sets at a time.

It has sizes alone, as its base. An iteration of the script is one of every set; while one is half
pushed, replies to the one before may be awaited, and only in a collective and at the end everything
is. A collective in the middle of an iteration finds some sets after it, the same ones on all
workers, and any number of chunks of the others pushed.

    job = VirtualJob(schedule, make_executor=..., make_worker=OneByOne)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from psdist.protocol.header import Header
from tests.support.virtual.size_worker import SizeWorker


class OneByOne(SizeWorker):
    def train_once(self) -> Iterator[float | None]:
        if self.first is not None:
            return  # its iterations are those of the first set
        sets: list[Any] = [self, *self.others]
        for each in sets:
            each.core.expect_iteration()
        while self.num_meetings:
            seed = f"{self.job.schedule.seed} behind {self.core.collectives.seq}"
            finished = sets[: random.Random(seed).randrange(len(sets) + 1)]
            yield from self.advance(sets, finished)
            for each in finished:
                yield from self._until(each.loop.wait_for_replies().is_done)
            self.job.num_half_pushed += sum(each.core.is_pushing for each in sets)
            yield from self.meet_in_the_middle()
        yield from self.advance(sets, sets)
        if self.clock == self.job.schedule.iterations[self.group]:
            yield from self.settle()

    def advance(self, sets: list[Any], finished: list[Any]) -> Iterator[float | None]:
        """Push chunks of any, and those of ``finished`` to the end."""
        while behind := [each for each in sets if each.core.is_open]:
            if not any(each in finished for each in behind) and self.pick_single.random() < 0.2:
                return
            each = self.pick_single.choice(behind)
            if not each.core.is_pushing:
                each.begin_iteration()
            elif each.left and self.pick_single.random() < 0.9:
                yield from each.push_next()
            elif each in finished:
                yield from each.push_the_rest()

    def begin_iteration(self) -> None:
        """Which pieces and chunks have no gradient is this worker's own, and may be another matter
        for the chunks that are left at the end."""
        rate = self.job.schedule.absent_rate
        self.left = sorted(self.mine, key=self.job.order.index)
        self.empty_now = {chunk for chunk in self.mine if self.pick_apart.random() < rate}
        self.used_now: dict[int, Header] = {}
        self.history.push(self.clock, 1.0, 1.0, self.empty_now, len(self.mine))
        hyper = self.hyper(self.draw_lr())
        absent = self.draw_absent()
        self.loop.begin_iteration(clock=self.clock, hyper=hyper, absent=absent, weight=1.0)

    def draw_absent(self) -> list[int]:
        rate, pieces = self.job.schedule.absent_rate, range(len(self.job.partition.pieces))
        return [piece for piece in pieces if self.pick_apart.random() < rate]

    def push_next(self) -> Iterator[float | None]:
        chunk = self.left.pop(0)
        yield from self.use(chunk)
        self.loop.push_chunk(chunk, is_empty=chunk in self.empty_now)

    def push_the_rest(self) -> Iterator[float | None]:
        for chunk in self.left:
            yield from self.use(chunk)
        absent = self.draw_absent() if self.pick_apart.random() < 0.5 else None
        self.loop.finish_push(empty=self.empty_now, absent=absent)
        self.record_use()
        self.clock += 1

    def use(self, chunk: int) -> Iterator[float | None]:
        """A gradient is made of the parameters that the last reply has brought."""
        yield from self._until(self.loop.wait_for_chunk(chunk).is_done)
        self.used_now[chunk] = self.core.versions[chunk]
        yield self.pick_single.random() * self.job.schedule.compute_s[self.group]
        self.loop.turn()

    def record_use(self) -> None:
        versions = [self.used_now[chunk] for chunk in self.mine]
        self._staleness_seen |= {max(0, self.clock - version.min_done) for version in versions}
        positions = np.array([version.position for version in versions])
        replies = np.array([version.clock for version in versions])
        chunks = np.array(self.mine)
        self.history.uses(self.clock, chunks, self.job.owners, positions, replies)

    def settle(self) -> Iterator[float | None]:
        sets: list[Any] = [self, *self.others]
        for each in sets:
            yield from self._until(each.loop.wait_for_replies().is_done)

    def meet(self, *, is_last: bool) -> Iterator[float | None]:
        if not self.is_put_off():
            yield from self.settle()
            yield from super().meet(is_last=is_last)
