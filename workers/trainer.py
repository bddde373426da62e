"""One iteration of a worker in a parameter set, from ``p.grad`` to the next parameters in place.

``optimizer.step()`` runs: collect -> agree in the group -> reduce this worker's slice in the group
-> push it and receive the reply -> gather the slices of the group. How gradients leave and replies
come in is decided by a step strategy (psdist.workers.blocking); the trainer never asks which.

    trainer = ...                          # psdist.workers.assembly
    trainer.step(gradient_scale=1.0, is_skipped=False)

The same without blocking, for an actor of a virtual network:

    for wait in trainer.iterate(gradient_scale=1.0, is_skipped=False):
        ...                                   # until wait.is_done()

It decides nothing about consistency: a reply that the mode does not allow yet does not come.

Longer than other modules: a step, the iterations of other workers and the calls between iterations
use the same agreement and the same strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psdist.codecs.feedback import CodingErrors
from psdist.errors import NonFiniteGradientError, UsageError
from psdist.protocol.ids import describe_workers
from psdist.workers.batches import Storage
from psdist.workers.blocking import NON_FINITE_REMEDY, Blocking, Iteration
from psdist.workers.group.channel import GroupChannel, Pending
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.reduction import Reduced, Row, WorkerGroup, in_group, set_of
from psdist.workers.values import Values


@dataclass(frozen=True, kw_only=True)
class WorkerStatistics:
    """A snapshot of one parameter set."""

    clock: int
    samples: int
    bytes_pushed: int
    bytes_pulled: int
    max_staleness_seen: int
    staleness: dict[int, int]
    """Chunk uses of this worker, by staleness."""
    early_pushes: int = 0
    """Chunks that left during backward."""
    local_steps: int = 0
    """Steps of the script's own optimizer, if a round has several."""
    rounds_cut: int = 0
    """Rounds that ended before all of their local steps were made."""
    rounds_missed: int = 0
    """Rounds that closed without this worker's group, or that it left out after one."""
    bytes_before_coding: tuple[int, int] = (0, 0)
    """Bytes of coded pushes and pulls without a codec."""
    coding_missed: tuple[float, ...] = ()
    """Squared norms of what codecs have left out of pushes, by bins of iterations."""
    coding_wanted: tuple[float, ...] = ()
    """Squared norms of everything that was to be pushed, by the same bins."""
    pushes_skipped: int = 0
    """Pushes of chunks that were left for later."""
    encodes_there: bool = False
    """True if gradients are encoded on their device."""
    bytes_to_host: int = 0
    """Bytes copied from a device for pushes."""

    def as_told(self) -> dict[str, Any]:
        """Return the fields as a control message carries them."""
        return {**asdict(self), "staleness": {str(key): n for key, n in self.staleness.items()}}


class Trainer:
    def __init__(
        self,
        iteration: Iteration,
        group: WorkerGroup,
        flat: FlatModel,
        loop: WorkerLoop,
        values: Values,
        strategy: Blocking,
        *,
        look_for_changes: Callable[[FlatModel, int], None],
        skips_nonfinite: bool,
        clips_to: float,
    ) -> None:
        """``look_for_changes(flat, clock)`` raises if the model is not what was prepared;
        ``skips_nonfinite``: iterations with NaN or infinity are skipped, else they are errors;
        ``clips_to``: the clipping norm of the group's gradient in every step, 0 for none."""
        self.iteration = iteration
        self.flat = flat
        """The memory that the model lies in."""
        self.strategy = strategy
        self._group = group
        self._loop = loop
        self._values = values
        self._look_for_changes = look_for_changes
        self._skips_nonfinite = skips_nonfinite
        self._clips_to = clips_to
        self._reduced: Reduced | None = None
        """The gradients that job.clip_grad_norm_ has reduced for the next step."""

    @property
    def clock(self) -> int:
        """Finished iterations."""
        return self.iteration.clock

    # -- a group that continues without its failed workers --------------------------------------

    @property
    def is_open(self) -> bool:
        """See :attr:`Iteration.is_open`."""
        return self.iteration.is_open

    def give_values(self, channel: GroupChannel, giver: int) -> Pending[None]:
        """Begin to copy the values of the iteration that has ended at place ``giver``."""
        return self._values.give(channel, giver)

    def take_over_from_the_dead(self, *, is_given_up: bool) -> None:
        """Share out what failed workers pushed and pulled. ``is_given_up``: the iteration under
        way counts only with what has been pushed of it."""
        self._group.share_out(self._loop.core.seat.members)
        self._loop.take_over(self._group.mine)
        if is_given_up and self.is_open and self._loop.core.clock > self.clock:
            self._loop.push_for_the_dead()

    # -- the batches of an iteration -----------------------------------------------------------

    def on_batch(
        self,
        num_samples: int,
        nominal: float,
        *,
        source: Hashable = None,
        storages: Iterable[Storage] = (),
    ) -> None:
        """A loader (``source``) hands out a batch, whose tensors have these storages. It weighs in
        the iteration of the forward pass over it that backward follows."""
        batches = self.iteration.batches
        batches.hand_out(num_samples, nominal, source=source, storages=storages)
        self.strategy.use_batch()

    def record_use(self, num_samples: int = 0, storages: Iterable[Storage] = ()) -> None:
        """A forward pass, whose inputs have these storages, uses the parameters in memory; passes
        over the same parameters are one use. ``num_samples``: of the pass; they are counted, and
        do not weigh, if the script has batches of its own."""
        batches = self.iteration.batches
        if batches.has_counted and self.flat.is_without_gradients:
            batches.drop_gradients()
        batches.use(num_samples, storages)
        self.strategy.record_use()

    # -- a step --------------------------------------------------------------------------------

    def _carry_on(self, waits: Iterable[Wait]) -> None:
        for wait in waits:
            self._loop.carry_on(wait)

    def step(self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False) -> None:
        """End iteration ``clock``: push, and bring the parameters for the next one.

        ``gradient_scale`` multiplies the gradients; ``is_skipped``: this worker has none to give
        (GradScaler found an overflow); ``has_scaler``: there is one, which decides that in step().
        Raises :class:`NonFiniteGradientError`, :class:`HyperparameterError` if the group's
        workers disagree, and :class:`UsageError` if the model is no longer what was prepared.
        """
        self._carry_on(self.iterate(gradient_scale, is_skipped, has_scaler))

    def iterate(
        self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False
    ) -> Iterator[Wait]:
        """Do :meth:`step`, and yield what there is to wait for."""
        strategy = self.strategy
        yield from strategy.before_step()
        self._loop.begin_waiting(self.clock)
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            reduced = yield from self._reduce(
                gradient_scale,
                max_norm=self._clips_to,
                is_skipped=is_skipped,
                has_scaler=has_scaler,
            )
        elif gradient_scale != 1.0:
            raise UsageError(
                f"{strategy.describe()}: job.clip_grad_norm_ has clipped gradients that a "
                "GradScaler had scaled; call scaler.unscale_(optimizer) before it"
            )
        else:
            strategy.require_as_clipped()
        if reduced.problem and not is_skipped and not self._skips_nonfinite:
            self.iteration.is_open = False
            raise NonFiniteGradientError(
                f"{strategy.describe()}: the gradient of {reduced.problem} holds NaN or infinity; "
                f"{strategy.consequence}. {NON_FINITE_REMEDY}"
            )
        yield from self._end_step(reduced, is_skipped=is_skipped or reduced.is_skipped)
        strategy.resume()

    def clip(self, max_norm: float) -> float:
        """Reduce this iteration's gradients in the group and clip the result: the push of the next
        step. Return the norm before, NaN if a gradient of the group is not finite.

        L2, as torch.nn.utils.clip_grad_norm_: coefficient min(1, max_norm / (norm + 1e-6)). Raises
        :class:`UsageError` if workers of the group clip differently.
        """
        if self._reduced is not None:
            raise UsageError(
                f"{self.strategy.describe()}: job.clip_grad_norm_ was called a second time; it is "
                "called once, last before optimizer.step()"
            )
        self._carry_on(self.strategy.before_step())
        self._loop.begin_waiting(self.clock)
        self._carry_on(self._reduce_and_keep(max_norm))
        self.strategy.note_clipped()
        assert self._reduced is not None
        return self._reduced.norm

    def _reduce_and_keep(self, max_norm: float) -> Iterator[Wait]:
        self._reduced = yield from self._reduce(1.0, max_norm=max_norm, is_clipped=True)

    def _reduce(
        self,
        gradient_scale: float,
        *,
        max_norm: float,
        is_skipped: bool = False,
        has_scaler: bool = False,
        is_clipped: bool = False,
    ) -> Generator[Wait, None, Reduced]:
        """Collect the gradients and reduce them in the group. ``is_clipped``: the script clips;
        its scaler decides later if an overflow is skipped."""
        strategy, iteration = self.strategy, self.iteration
        self._look_for_changes(self.flat, iteration.clock)
        strategy.require_ready()
        iteration.batches.end_forwards()
        strategy.record_use()
        terms = iteration.terms()
        absent = strategy.collect(
            terms,
            scale=gradient_scale,
            is_skipped=is_skipped,
            has_scaler=has_scaler,
            is_clipped=is_clipped,
        )
        non_finite = [] if is_skipped else strategy.non_finite()
        mine = Row(
            weight=terms.weight,
            set_index=self._loop.core.set_index,
            hyper=terms.hyper,
            is_skipped=is_skipped or (is_clipped and bool(non_finite)),
            is_finite=is_clipped or not non_finite,
            max_norm=max_norm,
            absent=frozenset(absent),
            num_begun=strategy.num_begun,
            is_changed=strategy.is_changed,
            is_retermed=strategy.is_retermed,
            backward_s=strategy.backward_s,
        )
        table = yield from self._group.gather(mine)
        set_of(table)
        iteration.is_open = True
        reduced = yield from strategy.reduce(table, mine)
        reduced.problem = self._problem(non_finite, table)
        return reduced

    def _problem(self, non_finite: Sequence[int], table: Sequence[Row]) -> str:
        """Return whose gradient is not finite; "" if all are."""
        if non_finite:
            name = self._group.partition.pieces[non_finite[0]].name
            more = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
            return f"{name}{more}"
        bad = [row.worker for row in table if not row.is_finite]
        return f"{describe_workers(bad)}, in this worker's group," if bad else ""

    def _end_step(self, reduced: Reduced, *, is_skipped: bool) -> Generator[Wait, None, None]:
        self.iteration.batches.end_iteration()
        return self.strategy.end_step(reduced, is_skipped=is_skipped)

    # -- a worker without data takes part for the others ----------------------------------------

    def sit_out(self, others: Sequence[Trainer] = ()) -> None:
        """This worker has no more data in this pass: take part with weight 0 in the iterations of
        the group's others, until all are out of data. ``others``: the trainers of this worker's
        other parameter sets, in order after this one, the first."""
        self._carry_on(self.iterate_for_others(others))

    def iterate_for_others(self, others: Sequence[Trainer] = ()) -> Iterator[Wait]:
        """Do :meth:`sit_out`, and yield what there is to wait for."""
        trainers = (self, *others)
        for trainer in trainers:
            yield from trainer.strategy.land()
        while True:
            self._loop.begin_waiting(self.clock)
            begun = [each.strategy.num_begun for each in trainers]
            mine = Row(weight=0.0, set_index=0, hyper=b"", has_ended=True, begun=begun)
            table = yield from self._group.gather(mine)
            if all(row.has_ended for row in table):
                return
            yield from trainers[set_of(table)]._take_part(table, mine)

    def _take_part(self, table: Sequence[Row], mine: Row) -> Iterator[Wait]:
        self.iteration.is_open = True
        yield from self.strategy.before_step()
        self.flat.clear_gradients()
        reduced = yield from self.strategy.reduce(table, mine)
        if not self._skips_nonfinite and not all(row.is_finite for row in table):
            self.iteration.is_open = False
            return  # the other workers raise, and nothing is pushed
        # The workers that contribute a gradient may all have failed.
        reduced.hyper = reduced.hyper or self.iteration.hyperparameters()
        self.strategy.record_use()
        yield from self._end_step(reduced, is_skipped=reduced.is_skipped)

    # -- between iterations --------------------------------------------------------------------

    def finish_late(self) -> None:
        """Finish what the last step() has left to be done, before a call that needs it."""
        self.strategy.finish_reads()
        self._carry_on(self.strategy.finish())

    def wait_pending_pulls(self) -> None:
        """Do what of :meth:`finish_late` waits for other groups; it waits for no worker of its
        own group."""
        self.strategy.take_over()
        self._carry_on(self.strategy.land())

    def end_round(self, call: str, *, is_cut: bool) -> int:
        """End the round of several steps under way. Return its number, -1 if none is under way.
        ``is_cut``: some of its steps were not made."""
        before = self.clock
        self._carry_on(self.strategy.end_round(call, is_cut=is_cut))
        return before if self.clock != before else -1

    def abort_iteration(self, call: str) -> None:
        """The script calls ``call``, which others may reach only after their step(). End the round
        under way; an iteration whose gradients the script has dropped has not begun, and no worker
        waits for it. Raises :class:`UsageError` if some of its gradients have left."""
        self._carry_on(self.strategy.end_round(call))
        self.finish_late()
        self._carry_on(self.strategy.meet_dropped(call))

    def pull(self) -> None:
        """Bring the freshest parameters that the mode allows; every worker of the group calls it.

        Parameters in memory are allowed, so this waits for other groups only if they were
        suspended in a collective while this one continued: they count again, and the next use is
        of these parameters.
        """
        self._carry_on(self.bring())

    def bring(self) -> Iterator[Wait]:
        """Do :meth:`pull`, and yield what there is to wait for."""
        strategy, group = self.strategy, self._group
        yield from strategy.end_round("job.pull")
        yield from strategy.finish()
        self._loop.begin_waiting(self.clock)
        yield from in_group(group.channel.agree("pull"), "pull")
        self._values.look_for_writes()
        self._loop.begin_pull(clock=self.clock, chunks=group.mine, is_fresh=False)
        yield self._loop.wait_for_replies()
        yield from self._values.take_new("pull", strategy.place)
        strategy.after_replies()

    def set_values(self) -> None:
        """Make the parameters in this worker's memory the servers'; on the chief, while all
        workers are in a collective."""
        self._carry_on(self.begin_setting_values())

    def begin_setting_values(self) -> Iterator[Wait]:
        """Do :meth:`set_values`, and yield what there is to wait for."""
        yield from self.strategy.finish()
        self.flat.values_to_host()
        self._loop.begin_load(clock=self.clock)
        yield self._loop.wait_for_replies()

    def close(self) -> None:
        """The script ends. Raises :class:`UsageError` if gradients have left of an iteration
        without ``step()``: servers may have applied them."""
        self.strategy.take_over()
        self._carry_on(self.strategy.end_round("finish"))
        self.finish_late()
        self._carry_on(self.strategy.meet_at_end())
        self.strategy.stop()

    # -- what is reported ----------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Samples in this worker's finished iterations."""
        return self.iteration.batches.samples

    @property
    def staleness(self) -> int:
        """The largest staleness of the values in memory."""
        return self.strategy.staleness()

    @property
    def waited_s(self) -> float:
        """Seconds in which this worker has waited for replies."""
        return self.strategy.waited_s

    @property
    def coding_error(self) -> float:
        """||p - C(p)|| / ||p|| of this worker's push of the last iteration; 0 without codecs."""
        encoder = self._loop.pushes.encoding.encoder
        return encoder.errors.of_newest(self.clock - 1) if encoder is not None else 0.0

    def statistics(self) -> WorkerStatistics:
        counts = self._loop.core.counts()
        pushes = self._loop.pushes.encoding
        encoder = pushes.encoder
        errors = encoder.errors if encoder is not None else CodingErrors()
        staleness = self._values.uses.staleness
        return WorkerStatistics(
            clock=self.clock,
            samples=self.num_samples,
            bytes_pushed=counts.bytes_pushed,
            bytes_pulled=counts.bytes_pulled,
            max_staleness_seen=max(staleness, default=0),
            staleness=dict(sorted(staleness.items())),
            bytes_before_coding=(
                pushes.bytes_before_coding,
                self._loop.replies.bytes_before_coding,
            ),
            coding_missed=tuple(errors.missed),
            coding_wanted=tuple(errors.wanted),
            pushes_skipped=encoder.num_skipped if encoder is not None else 0,
            encodes_there=pushes.on_device is not None,
            bytes_to_host=self.flat.num_bytes_to_host
            + (encoder.coder.num_bytes_to_host if encoder is not None else 0),
            **self.strategy.counts(),
        )
