"""Reports a worker's progress to the coordinator, for the display and for detecting missed
collective calls.

    standing = ProgressReports(worker, transport, now_s=now_s)
    standing.on_batch(position)                # of a loader that is so far in its pass
    standing.end_iteration(trainers, 0)        # sends a few times a second
    standing.send(trainers)                    # sends now: before every collective, and at the end

The coordinator judges a missed call by the last report before it, which must never be skipped.

    losses = Losses(skips_nonfinite=False, may_be_negative=False)      # of job.report
    losses.add(0.5)
    losses.take()                              # (1, 0.5): count and sum since the last time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psdist.controller.loss_steps import MOST_LOSS
from psdist.errors import UsageError
from psdist.protocol.control import LossReported, Progress
from psdist.protocol.ids import COORDINATOR
from psdist.transport import Transport
from psdist.workers.data.position import EqualPasses, Position
from psdist.workers.trainer import Trainer

_EVERY_S = 0.25


class Losses:
    """The losses that a script has reported and the coordinator has not received."""

    def __init__(
        self, *, skips_nonfinite: bool, may_be_negative: bool, counts_nonfinite: bool = False
    ) -> None:
        """``skips_nonfinite``: a loss of NaN or infinity is left out, as its step is;
        ``counts_nonfinite``: it is the largest that there may be."""
        self._skips_nonfinite = skips_nonfinite
        self._counts_nonfinite = counts_nonfinite
        self._may_be_negative = may_be_negative
        self._count, self._total = 0, 0.0

    def add(self, loss: float) -> None:
        """Add a loss. Raises :class:`UsageError` for a value that cannot be one."""
        if self._counts_nonfinite and not abs(loss) <= MOST_LOSS and not loss < 0:
            loss = MOST_LOSS
        if abs(loss) <= MOST_LOSS and (loss >= 0 or self._may_be_negative):
            self._count += 1
            self._total += loss
        elif loss < 0 and not self._may_be_negative:
            raise UsageError(
                f"job.report: a loss of {loss!r}; expected 0 or more, since losses are compared by "
                "their ratio (local.steps_by = loss, training.rollback): report another one, or "
                "leave those settings out"
            )
        elif not self._skips_nonfinite:
            raise UsageError(
                f"job.report: a loss of {loss!r}, by which nothing can be decided: the training "
                "has gone wrong; look at the step before (training.on_nonfinite = skip leaves such "
                "steps and losses out)"
            )

    def take(self) -> tuple[int, float]:
        """Return the count and the sum since the last call."""
        count, total = self._count, self._total
        self._count, self._total = 0, 0.0
        return count, total


class Rounds:
    """The times of a set's rounds that are not reported yet."""

    def __init__(self) -> None:
        self._ended: tuple[int, float, float] | None = None
        """The round that has ended last, when, and how long the worker had waited until then."""
        self._own_us: list[int] = []
        self._waits_us: list[int] = []
        self._errors_ppm: list[int] = []

    def end(self, clock: int, waited_s: float, now_s: float, error: float) -> None:
        """Note the end of round ``clock``; the time of the first round is unknown. ``waited_s``:
        how long this worker has waited for servers so far, in all sets; ``error``: the part that
        codecs have left out of its pushes in this round, ||p - C(p)|| / ||p||."""
        before, self._ended = self._ended, (clock, now_s, waited_s)
        if before is not None:
            wait_s = max(0.0, waited_s - before[2])
            self._waits_us.append(round(1e6 * wait_s))
            self._own_us.append(round(1e6 * max(0.0, now_s - before[1] - wait_s)))
            self._errors_ppm.append(round(1e6 * error))

    def take(self) -> tuple[int, list[int], list[int], list[int]]:
        """Return the first round, and of each its own time, its wait and its coding error."""
        own_us, waits_us, errors_ppm = self._own_us, self._waits_us, self._errors_ppm
        self._own_us, self._waits_us, self._errors_ppm = [], [], []
        ended = self._ended[0] if self._ended is not None else 0
        return ended - len(own_us), own_us, waits_us, errors_ppm


class ProgressReports:
    def __init__(
        self,
        worker: int,
        transport: Transport,
        *,
        now_s: Callable[[], float],
        tells_rounds: bool = False,
        leads: Callable[[], bool] = lambda: True,
        tells_errors: bool = False,
        losses: Losses | None = None,
    ) -> None:
        """``now_s()``: the job's clock; ``tells_rounds``: report the time of each round while this
        worker ``leads()`` its group; ``tells_errors``: and its coding error; ``losses``: report
        these, which come from the script."""
        self._worker = worker
        self._transport = transport
        self._passes = EqualPasses()
        self._position = Position()
        self._now_s = now_s
        self._sent_s = float("-inf")
        self._rounds = Rounds() if tells_rounds else None
        self._leads = leads
        self._tells_errors = tells_errors
        self._losses = losses

    def begin_at(self, clock: int) -> None:
        """Begin after ``clock`` iterations of a checkpoint."""
        self._passes = EqualPasses(clock)

    def on_batch(self, position: Position, *, is_of_equal_passes: bool = True) -> None:
        """Note a training batch of a loader at ``position``. ``is_of_equal_passes``: its passes
        are equally long on all workers."""
        self._position = position
        if is_of_equal_passes:
            self._passes.on_batch(position.batches)

    def miss(self, rounds: int) -> None:
        """Note that the group misses ``rounds`` rounds after the iteration that is about to end."""
        self._passes.miss(rounds)

    def end_iteration(self, trainers: Sequence[Trainer], set_index: int) -> None:
        """Note the end of an iteration of this set; the first set's clock is the job's."""
        if not set_index:
            self._passes.end_iteration()
            if self._rounds is not None and self._leads():
                first, now_s = trainers[0], self._now_s()
                self._rounds.end(first.clock, _waited_s(trainers), now_s, first.coding_error)
        if self._now_s() - self._sent_s >= _EVERY_S:
            self.send(trainers)

    def send(self, trainers: Sequence[Trainer]) -> None:
        """Send a report. ``trainers``: of every set, none before ``job.prepare``."""
        self._sent_s = self._now_s()
        clock = trainers[0].clock if trainers else 0
        if self._losses is not None:
            tell_losses(self._losses, self._worker, clock, self._transport)
        position = self._position
        told = self._rounds.take() if self._rounds else (0, [], [], [])
        first_round, own_us, waits_us, errors_ppm = told
        progress = Progress(
            worker=self._worker,
            clock=clock,
            samples=max((each.num_samples for each in trainers), default=0),
            loader_batches=self._passes.num_batches,
            loader_until=self._passes.until,
            epoch=position.epoch,
            epochs=position.epochs,
            batch=position.batch,
            batches=position.batches,
            staleness=max((each.staleness for each in trainers), default=0),
            waited_s=_waited_s(trainers),
            first_round=first_round,
            own_us=own_us,
            waits_us=waits_us,
            errors_ppm=errors_ppm if self._tells_errors else [],
        )
        self._transport.send_control(COORDINATOR, progress)


def tell_losses(losses: Losses, worker: int, clock: int, transport: Transport) -> None:
    """Send the losses since the last call to the coordinator."""
    count, total = losses.take()
    if count:
        message = LossReported(worker=worker, round=clock, count=count, total=total)
        transport.send_control(COORDINATOR, message)


def _waited_s(trainers: Sequence[Trainer]) -> float:
    return sum(each.waited_s for each in trainers)
