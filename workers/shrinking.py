"""How the surviving workers of a group continue after one of them has failed (docs/dev/design.md,
"Groups that re-form").

Each reports its state to the coordinator as soon as it learns of the failure, whatever its script
waits for, and receives the states of the others (psdist.workers.protocol.membership). All decide
the same from them:

* The group continues over another channel; the chunks of the failed worker are shared out.
* If a worker has ended the iteration that others are in, these get its values.
* Otherwise the iteration counts with the chunks that are pushed. The others are pushed without a
  gradient; the worker that takes over a chunk of the failed one asks again for its reply.

The loop calls it in every turn; no call waits.

    shrinker = GroupShrinker(loop, channel, rebuilder, trainers=lambda: sets.trainers)
    loop.on_turn = shrinker.advance
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from psdist.errors import MemberLostError, ProtocolError
from psdist.protocol.ids import describe_workers
from psdist.workers.group.channel import CALLS, GroupChannel, Pending
from psdist.workers.group.shrinking import Agreed, Rows, ShrinkingChannel
from psdist.workers.loop import WorkerLoop
from psdist.workers.trainer import Trainer

logger = logging.getLogger("psdist")


class ChannelRebuilder(Protocol):
    """Makes the channel of a group's surviving workers."""

    def offer(self, place: int) -> list[float]:
        """Return what the others need of the surviving worker at ``place``; a new offer in each
        call."""
        ...

    def form(
        self, members: Sequence[int], place: int, offers: list[list[float]]
    ) -> Pending[GroupChannel]:
        """Begin to make this worker's end of the group of ``members``; ``offers``: by place. Raises
        :class:`MemberLostError`, now or as the result, if one of them has failed since."""
        ...


class MemberState(NamedTuple):
    """The state of one worker when it learned of the failure."""

    agreed: Agreed
    is_open: bool
    """True within an iteration, between the agreement and the gathering of the values."""
    offer: list[float]

    def pack(self) -> bytes:
        numbers = [self.agreed.number, CALLS.index(self.agreed.call), self.is_open]
        numbers += [len(self.offer), len(self.agreed.rows), *map(len, self.agreed.rows)]
        values = [value for row in (self.offer, *self.agreed.rows) for value in row]
        return array("d", [*numbers, *values]).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> MemberState:
        """Raises :class:`ProtocolError`."""
        try:
            values = array("d", data).tolist()
            number, call, is_open, length, num_rows = map(int, values[:_NUM_HEAD])
            lengths = [length, *map(int, values[_NUM_HEAD : _NUM_HEAD + num_rows])]
            at, rows = _NUM_HEAD + num_rows, Rows()
            for each in lengths:
                rows.append(values[at : at + each])
                at += each
            if at != len(values) or len(lengths) != 1 + num_rows or min(lengths) < 0:
                raise ValueError(f"{len(values)} numbers")
            return cls(Agreed(number, CALLS[call], rows[1:]), bool(is_open), rows[0])
        except (ValueError, IndexError, OverflowError) as error:
            raise ProtocolError(
                f"the state of another worker of this group is damaged: {error}"
            ) from None


_NUM_HEAD: Final = 5


class Outcome(NamedTuple):
    """The decision from the states of all surviving workers, by place."""

    newest: Agreed
    """The newest agreement of any of them."""
    giver: int | None
    """The place of a worker that has ended the iteration that others are in."""
    is_given_up: bool
    """True if the iteration under way counts only with what has been pushed of it."""

    @classmethod
    def of(cls, standings: Sequence[MemberState]) -> Outcome:
        newest = max((each.agreed for each in standings), key=lambda agreed: agreed.number)
        there = [each for each in standings if each.agreed.number == newest.number]
        is_open = any(each.is_open for each in there)
        ended = [
            place
            for place, each in enumerate(standings)
            if each.agreed.number == newest.number and not each.is_open
        ]
        giver = ended[0] if is_open and ended else None
        return cls(newest, giver, is_open and giver is None)


class GroupShrinker:
    def __init__(
        self,
        loop: WorkerLoop,
        channel: ShrinkingChannel,
        rebuilder: ChannelRebuilder,
        *,
        trainers: Callable[[], Sequence[Trainer]],
    ) -> None:
        """``loop``: of the first parameter set; ``trainers()``: of all of them."""
        self._core = loop.core
        self._loop = loop
        self._channel = channel
        self._rebuilder = rebuilder
        self._trainers = trainers
        self._given: list[Pending[None]] = []
        """Copies of values that are under way."""
        self._forming: tuple[Pending[GroupChannel], Outcome] | None = None
        """The channel that is being made, and its use."""
        self._formed: tuple[GroupChannel, Outcome] | None = None
        self._num_lost = 0
        """Lost workers when the group was formed last."""

    def advance(self) -> None:
        """Advance as far as the others allow."""
        regrouping = self._core.regrouping
        if regrouping.is_due:
            self._given, self._forming, self._formed = [], None, None
            is_open = any(trainer.is_open for trainer in self._trainers())
            standing = MemberState(
                self._channel.cut(), is_open, self._rebuilder.offer(self._core.seat.place)
            )
            self._loop.tell_group(standing.pack())
            return
        if regrouping.num_lost == self._num_lost or (answer := regrouping.answer) is None:
            return
        try:
            if self._forming is None:
                self._forming = self._begin([MemberState.unpack(each) for each in answer])
            forming, outcome = self._forming
            if self._formed is None and forming.is_done():
                self._formed = self._take(forming.result(), outcome)
            if self._formed is not None and all(pending.is_done() for pending in self._given):
                self._go_on(*self._formed)
        except MemberLostError as error:
            # Another worker has failed, or is about to be evicted: nothing has changed.
            logger.warning("%s", error)
            self._num_lost = regrouping.num_lost

    def _begin(self, standings: Sequence[MemberState]) -> tuple[Pending[GroupChannel], Outcome]:
        seat, offers = self._core.seat, [each.offer for each in standings]
        return self._rebuilder.form(seat.members, seat.place, offers), Outcome.of(standings)

    def _take(self, inner: GroupChannel, outcome: Outcome) -> tuple[GroupChannel, Outcome]:
        if outcome.giver is not None:
            self._given = [
                trainer.give_values(inner, outcome.giver) for trainer in self._trainers()
            ]
        return inner, outcome

    def _go_on(self, inner: GroupChannel, outcome: Outcome) -> None:
        for pending in self._given:
            pending.result()
        self._given = []
        is_behind = self._channel.agreed.number < outcome.newest.number
        self._channel.go_on(
            inner,
            agreed=outcome.newest if is_behind else None,
            has_values=outcome.giver is not None,
            is_given_up=outcome.is_given_up,
        )
        for trainer in self._trainers():
            trainer.take_over_from_the_dead(is_given_up=outcome.is_given_up)
        self._num_lost, self._formed = self._core.regrouping.num_lost, None
        self._forming = None
        logger.info(
            "group %d continues with %s%s",
            self._core.seat.group,
            describe_workers(self._core.seat.members),
            "; of the iteration that was under way counts what had been pushed"
            * outcome.is_given_up,
        )
