"""A worker's iterations in rounds: several steps of the script, then one exchange with the servers.

A *round* is what the clock counts. Its steps reduce gradients in the group, as every step does; the
rest is up to a derived class: ``differences``, where the script's optimizer steps on the worker, or
``sums``, where gradients are added up. At its end each worker pushes, of its slice, the result of
the round; with the replies the next round begins.

A round ends when its length says so (psdist.workers.rounds.lengths), and earlier before every
collective, ``pull`` and the end of the script: others may wait for it, and its result is not on
the servers yet.

The exchange is made by another strategy, which is wrapped: psdist.workers.blocking, or with
``pipeline = 1`` psdist.workers.late.pipelined. Then a round's replies are awaited at the end of the
next one, whose steps continue with what is in memory; their gradients are collected in
other memory than the push.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.workers.blocking import NON_FINITE_REMEDY, Blocking
from psdist.workers.loop import Wait
from psdist.workers.reduction import CALL, Reduced, Row
from psdist.workers.rounds.lengths import RoundLength


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The settings of rounds."""

    length: RoundLength
    hyperparameters: Callable[[], bytes]
    """Packed hyperparameters of the servers' optimizer."""
    on_step: Callable[[], None]
    """Called after each step."""
    skips_nonfinite: bool
    """A round with NaN or infinity is skipped; else it is an error."""


class LocalSteps(Blocking):
    def __init__(self, inner: Blocking, rounds: Rounds) -> None:
        """``inner`` exchanges with the servers; its iteration has the hyperparameters of the
        script's optimizer, on which the workers of a group must agree in each step."""
        super().__init__(inner.parts)
        self._inner = inner
        self._rounds = rounds
        self._in_round = 0
        """Steps of this round so far."""
        self._num_steps = self._num_cut = 0
        self._touched: set[int] = set()
        """Pieces that had a gradient in a step of this round."""

    # -- what a round is made of ---------------------------------------------------------------

    @abstractmethod
    def _take(self, reduced: Reduced) -> None:
        """Use the group's gradient of a step."""

    @abstractmethod
    def _make_push(self) -> Row:
        """Put the result of the round into the flat gradients; return what the group must agree on
        before it is pushed."""

    @abstractmethod
    def _reduce_step(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Reduce the gradients of a step. ``table``: the row of each worker, by place."""

    @abstractmethod
    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Reduce this worker's slice of the result to that of the group."""

    def _before_exchange(self, reduced: Reduced) -> None:
        """Values that the servers have sent are about to be put in place: of this round, or with a
        pipeline of the one before."""

    # -- while the script computes -------------------------------------------------------------

    def use_batch(self) -> None:
        self._rounds.length.use_batch()

    def take_over(self) -> None:
        self._inner.take_over()

    def resume(self) -> None:
        self._inner.resume()

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def counts(self) -> dict[str, Any]:
        steps = {"local_steps": self._num_steps, "rounds_cut": self._num_cut}
        return {**self._inner.counts(), **steps}

    # -- a step --------------------------------------------------------------------------------

    consequence = "no step was made of it"

    def describe(self) -> str:
        return f"round {self.iteration.clock}, step {self._in_round}"

    def before_step(self) -> Generator[Wait, None, None]:
        self.take_over()
        yield from ()

    def require_ready(self) -> None:
        self._rounds.length.require_batches()

    def reduce(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        if not self._in_round:
            # After the group's agreement on a step, which includes workers without data: a worker
            # that waits here for another one waits for none that waits in that agreement.
            yield from self._rounds.length.begin(self.iteration.clock)
        return (yield from self._reduce_step(table, mine))

    def note_clipped(self) -> None:
        """Gradients that have come back to the script may change."""

    def require_as_clipped(self) -> None:
        """Gradients that have come back to the script may change."""

    @property
    def _untouched(self) -> frozenset[int]:
        """Pieces without a gradient on any worker of the group in this round."""
        return frozenset(range(len(self.group.partition.pieces))) - self._touched

    def end_step(self, reduced: Reduced, *, is_skipped: bool) -> Generator[Wait, None, None]:
        if not is_skipped:
            self._take(reduced)
            pieces = range(len(self.group.partition.pieces))
            self._touched.update(set(pieces) - reduced.absent)
        self._in_round += 1
        self._num_steps += 1
        self._rounds.on_step()
        if self._rounds.length.end_step(self._in_round):
            yield from self.end_round(CALL, is_cut=False)

    # -- the end of a round --------------------------------------------------------------------

    def end_round(self, call: str, *, is_cut: bool = True) -> Generator[Wait, None, None]:
        if not self._in_round:
            return
        iteration, length = self.iteration, self._rounds.length
        yield from self._inner.land()
        self.loop.begin_waiting(iteration.clock)
        if is_cut:
            self._require_cut(call)
        if self.flat.is_diverted:
            self.flat.rejoin_gradients(keeps=True)
        mine = self._make_push()
        table = yield from self.group.gather(mine)
        if not all(row.is_finite for row in table) and not self._rounds.skips_nonfinite:
            raise NonFiniteGradientError(
                f"round {iteration.clock}: after {self._in_round} local steps their result holds "
                f"NaN or infinity; nothing was pushed. {NON_FINITE_REMEDY}"
            )
        reduced = yield from self._reduce_round(table, mine)
        length.end_round(iteration.clock)
        self._in_round = 0
        self._num_cut += is_cut
        self._touched.clear()
        self._before_exchange(reduced)
        yield from self._inner.exchange(reduced)
        if self._inner.is_pending:
            self.flat.divert_gradients()
        length.exchanged()
        self.after_replies()

    def _require_cut(self, call: str) -> None:
        """Raises :class:`UsageError` if the round may not end with ``call``."""
        if written := self.flat.written_by_others():
            raise UsageError(
                f"{call}: parameter {self.group.partition.pieces[written[0]].name} was written "
                "since the last optimizer.step(), in the middle of a round of local steps, which "
                f"ends here, after {self._in_round}; call job.pull(), which "
                "ends it, before the script writes to parameters (averaged weights for an "
                "evaluation, load_state_dict)"
            )

    def place(self, chunks: Sequence[int]) -> None:
        self._inner.place(chunks)

    def land(self) -> Generator[Wait, None, None]:
        return self._inner.land()

    def finish(self) -> Generator[Wait, None, None]:
        """Within a round replies land; they are put in place when it ends."""
        if self._in_round:
            yield from self._inner.land()
            return
        was_pending = self._inner.is_pending
        yield from self._inner.finish()
        if was_pending:
            self.after_replies()
