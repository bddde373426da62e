"""Workers as actors of the virtual network: what a schedule says, by the code that really trains.

A :class:`VirtualWorker` runs the Trainer and the flat memory of a real job, in a group of any size.
Its methods are there to be overridden by tests that break one on purpose.

    job = VirtualJob(schedule, make_worker=SkipsAnAllGather)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from psdist.history.writers import WorkerHistory
from psdist.protocol.control import Setup
from psdist.protocol.ids import worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop, make_trainer
from psdist.workers.protocol.actions import Action
from psdist.workers.protocol.core import WorkerCore, WorkerEvent
from psdist.workers.protocol.seat import Seat

if TYPE_CHECKING:
    from tests.support.protocol import VirtualJob

FULL_BATCH = 8


class VirtualWorker:
    """What workers of a group may have apart they draw apart."""

    def __init__(self, job: VirtualJob, worker: int, group: int) -> None:
        schedule = job.schedule
        self.job, self.worker, self.group = job, worker, group
        self.seat = Seat(
            worker=worker, group=group, members=job.groups[group], num_servers=schedule.servers
        )
        self.history = WorkerHistory(None, worker)
        self.pick_together = random.Random(f"{schedule.seed} {group}")
        self.pick_apart = random.Random(f"{schedule.seed} {group} {self.seat.place}")
        self.clock = 0
        self.lr = schedule.lr
        self.loop = make_loop(
            job.network.endpoint(worker_id(worker)),
            self.seat,
            waiting=Waiting(is_spinning=False),
        )
        self.core = self.loop.core
        check_after_every_event(self.core)
        self.take_slice()
        self.mine = self.core.mine

    def take_slice(self) -> None:
        """Make the memory, and what trains in it."""
        job, partition = self.job, self.job.partition
        self.model = [nn.Parameter(torch.zeros(piece.shape)) for piece in partition.pieces]
        self.trainer = make_trainer(
            self.loop,
            job.channels[self.group][self.seat.place],
            partition=partition,
            owners=job.owners,
            credits=job.schedule.credits,
            wire=job.wire,
            parameters=self.model,
            hyperparameters=lambda: self.hyper(self.lr),
            on_nonfinite="skip",
            history=self.history,
        )
        flat = self.trainer.flat
        self.parameters = [flat.parameter_bytes(chunk) for chunk in partition.chunks]

    @property
    def staleness_seen(self) -> Collection[int]:
        return self.trainer.statistics().staleness

    # -- the script, as a generator ------------------------------------------------------------

    def script(self) -> Iterator[float | None]:  # type: ignore[return]
        job, loop, schedule = self.job, self.loop, self.job.schedule
        if self.seat.is_chief:
            self._send_setup()
        if self.seat.is_leader:
            loop.begin_register()
            yield from self._until(lambda: not self.core.is_joining)
        yield from self.bring()
        yield from self._collective("prepare")
        collectives = list(schedule.collectives[self.group]) if schedule.collectives else []
        for clock in range(schedule.iterations[self.group]):
            while collectives and collectives[0] <= clock:
                collectives.pop(0)
                yield from self._collective("barrier")
            self.note_use()
            yield schedule.compute_s[self.group] * (0.5 + job.random.random())
            yield from self.iterate()
            self.clock += 1
        while collectives:
            collectives.pop(0)
            yield from self._collective("barrier")
        self.history.close()
        loop.finish({})
        yield from self._until(lambda: self.core.is_stopped)

    def _send_setup(self) -> None:
        self.fill_parameters()
        self.loop.begin_setup(
            Setup(
                partition=self.job.partition.encode(),
                optimizer="torch.optim.SGD",
                hyper=self.hyper(self.job.schedule.lr),
            )
        )

    def fill_parameters(self) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model):
                parameter.copy_(initial_values(index, parameter))

    def hyper(self, lr: float) -> bytes:
        return pack_hyperparameters([{"lr": lr}])

    def bring(self) -> Iterator[float | None]:
        """The first parameters."""
        for wait in self.trainer.bring():
            yield from self._until(wait.is_done)

    def note_use(self) -> None:
        """A forward pass."""
        is_short = self.pick_apart.random() < self.job.schedule.short_rate
        num_samples = self.pick_apart.randrange(FULL_BATCH) if is_short else FULL_BATCH
        self.trainer.on_batch(num_samples, FULL_BATCH)
        self.trainer.note_use()

    def iterate(self) -> Iterator[float | None]:
        """A backward pass and ``optimizer.step()``."""
        schedule, apart, together = self.job.schedule, self.pick_apart, self.pick_together
        self.lr = self.draw_lr()
        for index, parameter in enumerate(self.model):
            lack_rate = schedule.absent_rate / 2
            is_absent = together.random() < lack_rate or apart.random() < lack_rate
            parameter.grad = None if is_absent else self.gradient(index, parameter)
            if parameter.grad is not None and apart.random() < schedule.nan_rate:
                parameter.grad[apart.randrange(len(parameter))] = math.nan
        is_skipped = apart.random() < schedule.empty_rate / len(self.job.groups[self.group])
        for wait in self.trainer.iterate(gradient_scale=1.0, is_skipped=is_skipped):
            yield from self._until(wait.is_done)

    def draw_lr(self) -> float:
        schedule = self.job.schedule
        # In sync all groups must agree on it: a function of the clock.
        is_now = self.pick_together.random() < schedule.settings_rate
        if is_now or (schedule.mode == "sync" and schedule.settings_rate):
            return schedule.lr / (1 + self.clock % 3)
        return schedule.lr

    def gradient(self, index: int, parameter: Tensor) -> Tensor:
        """For piece ``index``; a test may give others."""
        return gradient_of(self.worker, self.clock, index, parameter)

    def _collective(self, name: str) -> Iterator[float | None]:
        self.loop.begin_collective(name)
        yield from self._until(lambda: self.core.is_collected)
        self.core.take_collected()

    def _until(self, is_done: Callable[[], bool]) -> Iterator[float | None]:
        self.loop.turn()
        while not is_done():
            yield None
            self.loop.turn()


def check_after_every_event(core: WorkerCore) -> None:
    """From now on a worker's machine looks at itself whenever it has handled something."""
    handle = core.handle

    def handle_and_check(event: WorkerEvent) -> list[Action]:
        actions = handle(event)
        core.check_invariants()
        return actions

    core.handle = handle_and_check  # type: ignore[method-assign]


def initial_values(index: int, parameter: Tensor) -> Tensor:
    """What the chief's piece ``index`` begins with."""
    return torch.arange(len(parameter)) + float(index)


def gradient_of(worker: int, clock: int, index: int, parameter: Tensor) -> Tensor:
    """A worker's gradient of piece ``index``: multiples of 1/16, so that sums over few workers, and
    their means over 1, 2 or 4, are exact in every order."""
    pattern = torch.arange(len(parameter)) % 7 * (index + 1)
    return 1.0 + worker + clock % 2 + pattern / 16
