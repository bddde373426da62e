"""A virtual worker whose gradients leave during backward, by the code that does so in a job.

    job = VirtualJob(early_schedule(7), make_worker=EarlyWorker)

Hooks are called as autograd would, piece by piece, in an order of the worker's own now and then,
and time passes between them. Nobody changes a gradient later: every value is what it is without.
A :class:`ChangingWorker` does so now and then, between backward and ``step()``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from psdist.workers.assembly import SetMemory
from psdist.workers.blocking import Blocking, Parts
from psdist.workers.early.group_overlap import GroupEarlyPush
from psdist.workers.early.overlap import EarlyPush
from psdist.workers.early.progress import Driver
from psdist.workers.group.channel import GroupChannel
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.virtual_worker import VirtualWorker


def early_schedule(seed: int) -> Schedule:
    """A small schedule in which gradients leave early now and then: long computations, few of them
    lacking, and no iteration that is left out as a whole."""
    schedule = Schedule.from_seed(seed)
    pick = random.Random(f"{seed} early")
    return replace(
        schedule,
        num_chunks=pick.randint(2, 8),
        iterations=tuple(count + 1 for count in schedule.iterations),
        compute_s=tuple(seconds * pick.choice([1, 100]) for seconds in schedule.compute_s),
        absent_rate=pick.choice([0.0, 0.0, schedule.absent_rate]),
        frozen_rate=pick.choice([0.0, schedule.frozen_rate]),
        has_model=True,
        single_rate=0.0,
        middle_rate=0.0,
        empty_rate=0.0,
        nan_rate=0.0,
        mistake="",
        death=None,
    )


class AnyTime(Driver):
    """The loop is driven wherever the script's time passes."""


class EarlyWorker(VirtualWorker):
    skips_nonfinite = False

    @property
    def reduces_early(self) -> bool:
        return len(self.job.channels[self.group]) > 1

    def strategy(self, parts: Parts, memory: SetMemory) -> Blocking:
        if memory.sums is None:
            return EarlyPush(parts, driver=AnyTime(), is_training=lambda: True)
        return GroupEarlyPush(
            parts,
            driver=AnyTime(),
            is_training=lambda: True,
            other_end=self._last_end().duplicate(),
            sums=memory.sums,
            free_s=parts.loop.now_s,
        )

    def _last_end(self) -> GroupChannel:
        """The last of this worker's ends of its group; it has one for each set."""
        end = self.job.channels[self.group][self.seat.place]
        for _ in range(self.set_index):
            end = end.duplicate()
        return end

    def backward(self) -> Iterator[float | None]:
        gradients = [parameter.grad for parameter in self.model]
        for index, parameter in enumerate(self.model):
            parameter.grad = None
            parameter.requires_grad_(not self.is_frozen(index))
        strategy = self.trainer.strategy
        assert isinstance(strategy, EarlyPush)
        hooks = strategy.hooks
        chunks, pick = self.job.partition.chunks, self.pick_single
        order = [segment.piece for chunk in self.job.order for segment in chunks[chunk].segments]
        pieces = list(dict.fromkeys(order))
        if pick.random() < 0.2:
            pick.shuffle(pieces)
        for piece in pieces:
            if gradients[piece] is None:
                continue
            self.model[piece].grad = gradients[piece]
            hooks._note(piece, self.model[piece])
            for _ in range(pick.choice([0, 1, 1, 3])):
                yield pick.random() * self.job.schedule.compute_s[self.group]
                self.loop.turn()
                for each in (self.first or self, *(self.first or self).others):
                    each.trainer.strategy.push_ready()


class ChangingWorker(EarlyWorker):
    """Changes gradients after backward; what it drew is what they are then."""

    num_replaced = 0
    """Changes that were no error, in iterations that had begun to leave."""
    is_changed = False

    def backward(self) -> Iterator[float | None]:
        yield from super().backward()
        self.is_changed = False
        there = [each for each in self.model if each.grad is not None]
        if not there or self.pick_single.random() > 0.2:
            return
        self.is_changed = self.trainer.strategy.is_half_pushed
        each = self.pick_single.choice(there)
        if self.pick_single.random() < 0.3:
            each.grad = None
        else:
            assert each.grad is not None
            each.grad.data.mul_(0.5)
        gradients = [None if each.grad is None else each.grad.numpy().copy() for each in self.model]
        self.draws[-1] = replace(self.draws[-1], gradients=gradients)

    def iterate(self) -> Iterator[float | None]:
        yield from super().iterate()
        self.num_replaced += self.is_changed
