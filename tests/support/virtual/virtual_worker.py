"""Workers as actors of the virtual network: what a schedule says, by the code that really trains.

A :class:`VirtualWorker` runs the Trainer and the flat memory of a real job, in a group of any size,
and keeps what it drew and what its forward passes found in memory, for the oracle of values
(``reference``). Its methods are there to be overridden by tests that break one on purpose.

    job = VirtualJob(schedule, make_worker=SkipsAnAllGather)
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from psdist.protocol.checkpoints import pack_clocks
from psdist.protocol.collected import PREPARED, SET_MODE, Brought, pack_mode
from psdist.protocol.control import Progress, Setup, Written
from psdist.protocol.events import Frame
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.protocol.memory import allocate
from psdist.protocol.optimizers import pack_hyperparameters, unpack_hyperparameters
from psdist.protocol.partition import Chunk
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import Layout, SetMemory, lay_out, make_loop
from psdist.workers.blocking import Blocking, Iteration, Parts
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.missed_rounds import MissedRounds, WorkerRule
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Warn
from psdist.workers.protocol.core import ANY_TIME
from psdist.workers.trainer import Trainer
from tests.support.history.memory import WorkerHistory
from tests.support.virtual.numbers import gradient_of, hyperparameters_of, initial_values, lr_of
from tests.support.virtual.reference import Draw
from tests.support.virtual.self_checks import check_worker_after_every_event
from tests.support.virtual.shrinking import form_anew, note_what_counts

if TYPE_CHECKING:
    from tests.support.virtual.job import VirtualJob
    from tests.support.virtual.schedule import Schedule

FULL_BATCH = 8
NAMES = ("barrier", "save", "mean")
CHECKPOINT_NAMES = ("checkpoint", "save", "checkpoint")
"""Names of a script's collectives, in turn."""


def pieces_of(chunk: Chunk) -> set[int]:
    return {segment.piece for segment in chunk.segments}


def pick_of_modes(schedule: Schedule, seq: int) -> random.Random:
    return random.Random(f"{schedule.seed} modes {seq}")


class VirtualWorker:
    """Workers of a group draw independently where they may differ. One parameter set; the first
    set's worker plays the script."""

    def __init__(
        self, job: VirtualJob, worker: int, group: int, first: VirtualWorker | None = None
    ) -> None:
        """``first``: the same worker in the first set, where this is another."""
        schedule = job.schedule
        self.job, self.worker, self.group, self.first = job, worker, group, first
        self.set_index = job.set_index
        seed = f"{schedule.seed}" if first is None else f"{schedule.seed} set {self.set_index}"
        self.seat = Seat(
            worker=worker,
            group=group,
            members=job.groups[group],
            num_servers=schedule.servers,
            num_spares=schedule.spares,
            servers_have_buddies=schedule.has_buddies,
            is_substitute=group >= len(job.groups) - job.num_substitutes,
            group_reforms=job.reforms,
        )
        self.history = WorkerHistory(None, worker)
        self.pick_together = random.Random(f"{seed} {group}")
        self.pick_apart = random.Random(f"{seed} {group} {self.seat.place}")
        self.pick_more = random.Random(f"{seed} {worker} more")
        self.pick_more_together = random.Random(f"{seed} {group} more")
        self.pick_single = random.Random(f"{seed} {worker} single")
        self.empty: Collection[int] | None = None
        """While an iteration leaves one by one, its chunks without a gradient."""
        self.early: list[int] = []
        """Its chunks that leave before the others."""
        self.absent: Sequence[int] = ()
        self.num_meetings = 0
        """Collectives that were put off to the middle of the next iteration."""
        self.clock = 0
        self.left_out = 0
        """Rounds after one that the group had missed."""
        self.lr = schedule.lr
        self.batch = (0, 0)
        self.draws: list[Draw] = []
        """Contributions to each iteration."""
        self.used: list[npt.NDArray[Any]] = []
        """The flat parameters that each recorded use found in memory."""
        self.pushed: list[list[npt.NDArray[Any]]] = []
        """Values that the chief has set in the middle, by piece."""
        self.kept: list[list[int]] = []
        """Clocks of this worker at each checkpoint, of all sets."""
        self.warnings: list[str] = []
        self.num_lines = 0
        self.loop = (
            first.loop.next_set()
            if first is not None
            else make_loop(
                job.transport(worker_id(worker)),
                self.seat,
                waiting=Waiting(is_spinning=False),
                now_s=lambda: job.network.now_s,
                survives_workers=job.max_deaths > 0,
            )
        )
        self.loop._execute[Warn] = lambda action: self.warnings.append(action.text)
        self.core = self.loop.core
        check_worker_after_every_event(self.core)
        if schedule.has_model and not self.seat.is_substitute:
            self.take_slice()
        self.others: list[VirtualWorker] = []
        """This worker in the sets after the first."""
        if first is None:
            for other in job.others:
                self.others.append(type(self)(other, worker, group, self))  # type: ignore[arg-type]
                other.workers.append(self.others[-1])

    @property
    def in_first(self) -> VirtualWorker:
        """This worker's part in the first set, which plays the script."""
        return self.first or self

    @property
    def mine(self) -> Sequence[int]:
        """Chunks of its slice, once it has one."""
        return self.core.mine

    def take_slice(self, **more: Any) -> None:
        """Make the memory, and what trains in it."""
        job, partition = self.job, self.job.partition
        self.model = [nn.Parameter(torch.zeros(piece.shape)) for piece in partition.pieces]
        layout = Layout(partition=partition, owners=job.owners, order=job.order)
        memory = lay_out(
            self.loop,
            job.channels[self.group][self.seat.place],
            layout,
            self.model,
            credits=job.schedule.credits,
            wire=job.wire,
            history=self.history,
            reduces_early=self.reduces_early,
            **more,
        )
        iteration = Iteration(
            self.loop.core.clock,
            hyperparameters=lambda: self.hyper(self.lr),
            on_end=lambda: None,
        )
        rule = WorkerRule()
        if job.schedule.backup > 0:
            rule = MissedRounds(
                memory.group, self.loop, memory.values.uses, on_missed=self.leave_out
            )
        parts = Parts(iteration, memory.group, memory.flat, self.loop, memory.values, rule)
        self.trainer = Trainer(
            *parts[:5],
            self.strategy(parts, memory),
            look_for_changes=lambda _flat, _clock: None,
            skips_nonfinite=self.skips_nonfinite,
            clips_to=0.0,
        )
        if job.schedule.single_rate or job.schedule.middle_rate:
            self.loop.begin_push = self.begin_push  # type: ignore[method-assign]
            self.loop.wait_for_replies = self.wait_for_replies  # type: ignore[method-assign]
        if job.reforms:
            note_what_counts(self)
            if self.first is None:
                form_anew(self)
        flat = self.trainer.flat
        self.parameters = [flat.parameter_bytes(chunk) for chunk in partition.chunks]

    skips_nonfinite = True

    @property
    def reduces_early(self) -> bool:
        """True if the group reduces gradients that leave early."""
        return False

    def strategy(self, parts: Parts, memory: SetMemory) -> Blocking:  # noqa: ARG002
        """How gradients leave; a test may have another one."""
        return Blocking(parts)

    def leave_out(self, rounds: int) -> None:
        """The group leaves out ``rounds`` rounds: its script gets no batches of them."""
        self.left_out += rounds

    @property
    def staleness_seen(self) -> Collection[int]:
        return self.trainer.statistics().staleness

    # -- the script, as a generator ------------------------------------------------------------

    def script(self) -> Iterator[float | None]:  # type: ignore[return]
        schedule = self.job.schedule
        if not schedule.has_model:
            yield from self._meet_only()
            return
        for each in (self, *self.others):
            yield from each.enter()
            is_last = each is (self, *self.others)[-1]
            yield from self._collective("prepare", PREPARED if is_last else b"")
        collectives = schedule.collectives[self.group] if schedule.collectives else ()
        yield from self.train(list(collectives))

    def train(self, collectives: list[int]) -> Iterator[float | None]:
        """All iterations that are left, and these collectives; then the script's end."""
        loop, schedule = self.loop, self.job.schedule
        while (clock := self.num_batches) < schedule.iterations[self.group]:
            while collectives and collectives[0] <= clock:
                collectives.pop(0)
                yield from self.meet(is_last=not collectives)
            yield from self.train_once()
            for other in self.others:
                for _ in range(schedule.steps_of(other.set_index, clock)):
                    yield from other.train_once()
            if self.pick_more.random() < schedule.report_rate:
                self.report()
                self.num_lines += 1
                values = {"loss": clock / 8, "by piece": [{"norm": 1.0}, None]}
                loop.log({"worker": self.worker, "clock": clock, "values": values})
        while collectives:
            collectives.pop(0)
            yield from self.meet(is_last=not collectives)
        for each in (self, *self.others):
            each.history.close()
        if schedule.report_rate:
            self.report()
        loop.finish({})
        yield from self._until(lambda: self.core.membership.is_stopped)

    @property
    def num_batches(self) -> int:
        """That the script has had, or that were left out."""
        return self.clock - (0 if self.job.schedule.leaves_out_batches else self.left_out)

    def enter(self) -> Iterator[float | None]:
        """Come into the set."""
        if self.seat.is_chief:
            self._send_setup()
        if self.seat.is_leader:
            self.loop.begin_register()
            yield from self._until(lambda: not self.core.membership.is_joining)
        yield from self.bring()

    def train_once(self) -> Iterator[float | None]:
        schedule = self.job.schedule
        if schedule.pull_rate and self.pick_more_together.random() < schedule.pull_rate:
            yield from self.bring()
        self.record_use()
        yield schedule.compute_s[self.group] * (0.5 + self.job.random.random())
        yield from self.iterate()
        self.clock = self.next_clock()
        # No check needs a group's contribution to rounds that it has left out.
        self.draws += self.draws[-1:] * (self.clock - len(self.draws))

    def next_clock(self) -> int:
        """With which the group continues."""
        return self.trainer.clock

    def _meet_only(self) -> Iterator[float | None]:
        """A script without a model."""
        for _ in self.job.schedule.collectives[self.group]:
            yield self.job.random.random() * self.job.schedule.compute_s[self.group]
            yield from self._collective("barrier")
        self.history.close()
        self.loop.finish({})
        yield from self._until(lambda: self.core.membership.is_stopped)

    def _send_setup(self) -> None:
        self.fill_parameters()
        self.loop.begin_setup(
            Setup(
                partition=self.job.partition.encode(),
                optimizer="torch.optim.SGD",
                hyper=self.hyper(self.job.schedule.lr),
                max_norm=self.job.schedule.max_norm(self.set_index),
            )
        )

    def fill_parameters(self) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model):
                parameter.copy_(initial_values(index + self.set_index, parameter))

    def hyper(self, lr: float) -> bytes:
        schedule = self.job.schedule
        return pack_hyperparameters(
            hyperparameters_of(
                lr / schedule.lr,
                lr=schedule.lr,
                momentum=schedule.momentum,
                weight_decay=schedule.weight_decay,
                num_groups=schedule.optimizer_groups,
            )
        )

    # -- iterations ----------------------------------------------------------------------------

    def bring(self) -> Iterator[float | None]:
        """The newest parameters that the mode allows; the first ones, too."""
        for wait in self.trainer.bring():
            yield from self._until(wait.is_done)

    def record_use(self) -> None:
        """A forward pass."""
        is_short = self.pick_apart.random() < self.job.schedule.short_rate
        num_samples = self.pick_apart.randrange(FULL_BATCH) if is_short else FULL_BATCH
        self.batch = num_samples, FULL_BATCH
        self.trainer.on_batch(num_samples, FULL_BATCH)
        self.trainer.record_use()
        self.used.append(np.concatenate([flat.numpy() for flat in self.trainer.flat.values]))

    def iterate(self) -> Iterator[float | None]:
        """A backward pass and ``optimizer.step()``."""
        schedule, apart, together = self.job.schedule, self.pick_apart, self.pick_together
        self.lr = self.draw_lr()
        for index, parameter in enumerate(self.model):
            lack_rate = schedule.absent_rate / 2
            is_absent = together.random() < lack_rate or apart.random() < lack_rate
            is_absent = is_absent or self.is_frozen(index)
            parameter.grad = None if is_absent else self.gradient(index, parameter)
            if parameter.grad is not None and apart.random() < schedule.nan_rate:
                parameter.grad[apart.randrange(len(parameter))] = math.nan
        is_skipped = apart.random() < schedule.empty_rate / len(self.job.groups[self.group])
        self.draws.append(
            Draw(
                *self.batch,
                is_skipped,
                unpack_hyperparameters(self.hyper(self.lr)),
                [None if each.grad is None else each.grad.numpy().copy() for each in self.model],
            )
        )
        yield from self.backward()
        for wait in self.trainer.iterate(gradient_scale=1.0, is_skipped=is_skipped):
            if self.empty is not None:
                yield from self.push_one_by_one()
            yield from self._until(wait.is_done)

    def backward(self) -> Iterator[float | None]:
        """Gradients are there; how they come a test may say."""
        yield from ()

    def begin_push(self, *, empty: Collection[int], absent: Sequence[int], **terms: Any) -> None:
        """In place of the loop's: the chunks may leave one by one, from now on, the first ones when
        nothing is known yet of the gradients of the others."""
        pick = self.pick_single
        if not self.num_meetings and pick.random() >= self.job.schedule.single_rate:
            self.loop.begin_iteration(absent=absent, **terms)
            self.loop.finish_push(empty=empty)
            return
        self.empty, self.absent, self.early = empty, absent, []
        for chunk in sorted(self.mine, key=self.job.order.index):
            if pick.random() < 0.1:
                break
            self.early.append(chunk)
        partition = self.job.partition
        known = {piece for chunk in self.early for piece in pieces_of(partition.chunks[chunk])}
        rate = self.job.schedule.absent_rate
        guessed = [
            piece
            for piece in range(len(partition.pieces))
            if (piece in absent if piece in known else pick.random() < rate)
        ]
        self.loop.begin_iteration(absent=guessed, **terms)

    def wait_for_replies(self) -> Wait:
        """In place of the loop's, which refuses to wait before everything was pushed."""
        if self.empty is None:
            return WorkerLoop.wait_for_replies(self.loop)
        return Wait(lambda: self.core.is_idle, lambda: "")

    def push_one_by_one(self) -> Iterator[float | None]:
        """Each when its gradient is there, those after the last one together; then the script waits
        for some before all others."""
        pick, empty = self.pick_single, self.empty
        assert empty is not None
        while self.early or self.num_meetings:
            if self.num_meetings and (not self.early or pick.random() < 0.3):
                self.job.num_half_pushed += 1
                yield from self.meet_in_the_middle()
                continue
            yield pick.random() * self.job.schedule.compute_s[self.group]
            self.loop.turn()
            chunk = self.early.pop(0)
            self.loop.push_chunk(chunk, is_empty=chunk in empty)
        self.loop.finish_push(empty=empty, absent=self.absent)
        self.empty = None
        for chunk in self.mine:
            if pick.random() < 0.3:
                yield from self._until(self.loop.wait_for_chunk(chunk).is_done)
                assert self.core.versions[chunk].clock == self.core.clock - 1

    def is_frozen(self, index: int) -> bool:
        """Piece ``index`` is, in this iteration and its neighbours, on all workers alike."""
        schedule = self.job.schedule
        pick = random.Random(f"{schedule.seed} frozen {index} {self.clock // 3}")
        return pick.random() < schedule.frozen_rate

    def draw_lr(self) -> float:
        schedule = self.job.schedule
        is_last = (self.group, self.clock + 1) == (
            len(self.job.groups) - 1,
            schedule.iterations[-1],
        )
        if is_last and self.first is None and schedule.mistake == "other lr":
            return schedule.lr / 3
        # In sync all groups must agree on it: a function of the clock.
        is_now = self.pick_together.random() < schedule.settings_rate
        if is_now or ("sync" in schedule.modes and schedule.settings_rate):
            return lr_of(self.clock, schedule.lr)
        return schedule.lr

    def gradient(self, index: int, parameter: Tensor) -> Tensor:
        """For piece ``index``; a test may give others."""
        return gradient_of(self.worker, self.clock, index + 3 * self.set_index, parameter)

    # -- collectives ---------------------------------------------------------------------------

    def meet(self, *, is_last: bool) -> Iterator[float | None]:
        """The script's next collective; ``save`` is two, and the chief copies between them."""
        if self.is_put_off():
            return
        seq, seed = self.core.collectives.seq, self.job.schedule.seed
        is_kept = random.Random(f"{seed} kept {seq}").random() < self.job.schedule.checkpoint_rate
        name = (CHECKPOINT_NAMES if is_kept else NAMES)[seq % len(NAMES)]
        is_wrong = is_last and self.group == len(self.job.groups) - 1
        mistake = self.job.schedule.mistake if is_wrong else ""
        if mistake == "absent":
            return
        if name == "checkpoint" and not mistake:
            yield from self.make_checkpoint()
        else:
            yield from self._collective("prepare" if mistake else name)
        if name == "save":
            for each in (self, *self.others):
                if each.seat.is_leader:
                    each.job.note_clock_at_save(each.group, each.clock, seq)
                if each.seat.worker == each.core.chief:
                    yield from each._copy()
            yield from self._collective(name)
        if pick_of_modes(self.job.schedule, seq).random() < self.job.schedule.mode_rate:
            another = self.job.schedule.another_mode(seq)
            yield from self._collective(SET_MODE, pack_mode(another.mode, another.staleness))
        pick = random.Random(f"{self.job.schedule.seed} push {self.core.collectives.seq}")
        if not self.job.schedule.mistake and pick.random() < self.job.schedule.push_rate:
            yield from self.push()

    def make_checkpoint(self) -> Iterator[float | None]:
        """As job.checkpoint."""
        if self.job.schedule.report_rate:
            self.report()
        sets = [self, *self.others]
        self.loop.begin_collective("checkpoint", pack_clocks([each.clock for each in sets]))
        yield from self._until(lambda: self.core.collectives.is_answered)
        (name,) = self.core.collectives.take().payloads
        self.kept.append([each.clock for each in sets])
        told = Written(checkpoint=name.decode(), num_bytes=1, crc32=self.worker)
        self.loop.transport.send_control(COORDINATOR, told)

    def is_put_off(self) -> bool:
        """Whether the next collective comes in the middle of the next iteration, on all workers."""
        schedule, clocks = self.job.schedule, self.job.schedule.collectives
        seq = self.core.collectives.seq
        is_common = len(set(clocks)) == 1 and self.clock < min(schedule.iterations)
        pick = random.Random(f"{schedule.seed} middle {seq}")
        if not is_common or schedule.mistake or pick.random() >= schedule.middle_rate:
            return False
        self.num_meetings += 1
        return True

    def meet_in_the_middle(self) -> Iterator[float | None]:
        self.num_meetings -= 1
        names = sorted(ANY_TIME)
        yield from self._collective(names[self.core.collectives.seq % len(names)])

    def push(self) -> Iterator[float | None]:
        """As job.set_parameters, of all sets: what others have in memory is the chief's then."""
        yield from self._collective("push")
        for each in (self, *self.others):
            each.draw_values()
            if each.seat.worker == each.core.chief:
                for wait in each.trainer.begin_setting_values():
                    yield from self._until(wait.is_done)
        yield from self._collective("push")
        for each in (self, *self.others):
            yield from each.bring()

    def draw_values(self) -> None:
        """The script writes to the model, each worker something else."""
        number = 7 * len(self.pushed) + 3 + self.set_index + 5 * self.worker
        with torch.no_grad():
            for index, parameter in enumerate(self.model):
                parameter.copy_(initial_values(index + number, parameter))
        self.pushed.append([each.detach().numpy().copy() for each in self.model])

    def _copy(self) -> Iterator[float | None]:
        frames = [Frame(allocate(chunk.num_bytes)) for chunk in self.job.partition.chunks]
        self.loop.begin_copy(frames, clock=self.clock)
        yield from self._until(lambda: self.core.is_idle)
        self.job.note_copy([frame.payload for frame in frames])

    def _collective(self, name: str, same: bytes | None = None) -> Iterator[float | None]:
        """Each brings numbers of its own, and all ``same`` or what is different for some."""
        if self.job.schedule.report_rate:
            self.report()
        number = self.core.collectives.seq + 1
        num_workers = sum(map(len, self.job.groups))
        payloads = [b"%d" % (number + worker // 3 * 10) for worker in range(num_workers)]
        if same is not None:
            payloads = [same] * num_workers
        mine, numbers = payloads[self.worker], [self.worker + 1.0, number / 8]
        self.loop.begin_collective(name, mine, values=struct.pack("<2d", *numbers))
        yield from self._until(lambda: self.core.collectives.is_answered)
        brought = self.core.collectives.take()
        told = [
            payload if worker < 24 or same is not None else None
            for worker, payload in enumerate(payloads)
        ]
        if self.job.max_deaths and brought.num_workers < num_workers:
            self._check_brought_by_the_living(brought, told)
            return
        assert brought.num_workers == num_workers
        assert [brought.of(worker) for worker in range(num_workers)] == told
        assert brought.unlike(mine) == [
            worker for worker, payload in enumerate(told) if payload != mine
        ]
        total = struct.pack("<2d", sum(range(num_workers + 1)), num_workers * number / 8)
        is_summed = num_workers <= 3 or same is not None
        assert brought.values == (total if is_summed else b"")

    def _check_brought_by_the_living(self, brought: Brought, told: Sequence[bytes | None]) -> None:
        """Failed workers are left out, of the numbers as well."""
        absent = [
            worker for worker, payload in enumerate(told) if brought.of(worker) not in (payload,)
        ]
        seq = self.core.collectives.seq
        welcomes = {each.worker: each.core.membership.welcome for each in self.job.workers}
        later = {each for each, welcome in welcomes.items() if welcome and welcome.seq >= seq}
        assert set(absent) <= self.job.out_of_the_job | later
        assert brought.num_workers == len(told) - len(absent)
        if brought.values:
            (total, _) = struct.unpack("<2d", brought.values)
            assert total == sum(w + 1.0 for w in range(len(told)) if w not in absent)

    def report(self) -> None:
        """Tell the coordinator where this worker stands."""
        schedule = self.job.schedule
        uses_loader = schedule.has_every_worker_in_step and schedule.leaves_out_batches
        progress = Progress(
            worker=self.worker,
            clock=self.clock,
            samples=self.trainer.num_samples if self.job.schedule.has_model else 0,
            loader_batches=5 if uses_loader else 0,
            loader_until=self.clock if uses_loader else 0,
        )
        self.loop.transport.send_control(COORDINATOR, progress)

    # -- waiting -------------------------------------------------------------------------------

    def _until(self, is_done: Callable[[], bool]) -> Iterator[float | None]:
        self.loop.turn()
        rate = self.job.schedule.ask_rate
        if rate and not is_done() and self.pick_more.random() < rate:
            self.job.network.schedule(
                10 ** self.pick_more.uniform(-6, -2),
                worker_id(self.worker),
                self._ask,
            )
        while not is_done():
            yield None
            self.loop.turn()

    def _ask(self) -> None:
        """As WorkerLoop.carry_on after ``warn_s``."""
        if worker_id(self.worker) not in self.job.network.unfinished:
            return  # it has ended meanwhile, or failed
        self.warnings.append(f"still waiting for {self.core.awaits()}")
        self.loop._ask_who_is_missing()
