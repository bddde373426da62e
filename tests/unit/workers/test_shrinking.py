"""Where the workers of a group stand when one of them has failed, and what follows from that."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from psdist.errors import MemberLostError, ProtocolError
from psdist.workers.group.channel import AloneChannel, Done, GroupChannel, Pending
from psdist.workers.group.shrinking import Agreed, ShrinkingChannel
from psdist.workers.protocol import Seat
from psdist.workers.protocol.membership import Regrouping
from psdist.workers.shrinking import GroupShrinker, MemberState, Outcome

STEP = "optimizer.step"


def at(number: int, *, is_open: bool) -> MemberState:
    return MemberState(Agreed(number, STEP, [[float(number)]]), is_open, [])


@pytest.mark.parametrize(
    "standing",
    [
        MemberState(Agreed(0, STEP, []), False, []),
        MemberState(Agreed(7, "save", [[1.5, -2.0], [], [0.1]]), True, [4.0, 2.0**53 - 1]),
    ],
)
def test_what_is_told_is_what_was_told(standing: MemberState) -> None:
    assert MemberState.unpack(standing.pack()) == standing


@pytest.mark.parametrize(
    "values",
    [
        (),
        (1.0, 0.0, 0.0, 0.0),
        (1.0, 0.0, 0.0, 0.0, 1.0),
        (1.0, 99.0, 0.0, 0.0, 0.0),
        (1.0, 0.0, 0.0, -1.0, 0.0),
        (1.0, 0.0, 0.0, 1.0, 0.0),
        (1.0, 0.0, 0.0, 0.0, 0.0, 5.0),
        (float("inf"), 0.0, 0.0, 0.0, 0.0),
        (float("nan"), 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_what_nobody_tells_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ProtocolError, match="is damaged"):
        MemberState.unpack(struct.pack(f"={len(values)}d", *values))
    with pytest.raises(ProtocolError):
        MemberState.unpack(b"abc")


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        # Nobody is in an iteration; some may have still to hear of the last agreement.
        ([(3, False), (3, False)], (3, None, False)),
        ([(2, False), (3, False)], (3, None, False)),
        # All are in one, and some have still to hear that it has begun.
        ([(3, True), (3, True)], (3, None, True)),
        ([(2, False), (3, True)], (3, None, True)),
        # Somebody has ended it.
        ([(3, True), (3, False), (3, False)], (3, 1, False)),
        ([(3, False), (3, True)], (3, 0, False)),
    ],
)
def test_what_follows_from_where_all_stand(
    standings: Sequence[tuple[int, bool]], expected: tuple[int, int | None, bool]
) -> None:
    outcome = Outcome.of([at(number, is_open=is_open) for number, is_open in standings])
    assert (outcome.newest.number, outcome.giver, outcome.is_given_up) == expected
    assert outcome.newest.rows == [[float(outcome.newest.number)]]


class Late(Done[GroupChannel]):
    """What a thread makes, when it is told."""

    def __init__(self) -> None:
        super().__init__(AloneChannel())
        self.is_made = False

    def is_done(self) -> bool:
        return self.is_made


class ChannelRebuilder:
    def __init__(self) -> None:
        self.formed: list[Any] = []
        self.error: Exception | None = None
        self.late: list[Late] = []
        """What it makes next, where that takes time."""

    def offer(self, place: int) -> list[float]:
        assert place == 0, "of those who are left"
        return [8.0]

    def form(
        self, members: Sequence[int], place: int, offers: list[list[float]]
    ) -> Pending[GroupChannel]:
        if self.error is not None:
            raise self.error
        self.formed.append((tuple(members), place, offers))
        return self.late.pop(0) if self.late else Done(AloneChannel())


class Loop:
    """Of worker 1, of a group of workers 0 and 1 that has lost worker 0."""

    def __init__(self) -> None:
        self.seat = Seat(worker=1, group=0, members=(1,), num_servers=1, group_reforms=True)
        self.regrouping = Regrouping(self.seat)
        self.core = SimpleNamespace(seat=self.seat, regrouping=self.regrouping)
        self.told: list[MemberState] = []

    def tell_group(self, standing: bytes) -> None:
        self.regrouping.tell(standing)
        self.told.append(MemberState.unpack(standing))

    def answer(self, *standings: MemberState) -> None:
        self.regrouping._answer = [each.pack() for each in standings]


class Trainer:
    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.taken: list[bool] = []

    def take_over_from_the_dead(self, *, is_given_up: bool) -> None:
        self.taken.append(is_given_up)


def reforming(*, is_open: bool = False) -> tuple[GroupShrinker, Loop, ChannelRebuilder, Trainer]:
    loop, rebuilder, trainer = Loop(), ChannelRebuilder(), Trainer(is_open=is_open)
    channel = ShrinkingChannel(AloneChannel())
    made = GroupShrinker(loop, channel, rebuilder, trainers=lambda: [trainer])  # type: ignore[arg-type,list-item]
    return made, loop, rebuilder, trainer


def test_without_a_death_nothing_is_told() -> None:
    made, loop, rebuilder, trainer = reforming()
    made.advance()
    assert [*loop.told, *rebuilder.formed, *trainer.taken] == []


@pytest.mark.parametrize("is_open", [False, True])
def test_a_worker_tells_where_it_stands_and_goes_on_when_all_have_told(is_open: bool) -> None:
    made, loop, rebuilder, trainer = reforming(is_open=is_open)
    loop.regrouping.num_lost = 1
    made.advance()
    assert [(each.is_open, each.offer) for each in loop.told] == [(is_open, [8.0])]
    made.advance()
    assert not rebuilder.formed, "nobody has answered"
    loop.answer(MemberState(Agreed(0, STEP, []), is_open, [8.0]))
    made.advance()
    assert rebuilder.formed == [((1,), 0, [[8.0]])]
    assert trainer.taken == [is_open]
    made.advance()
    assert len(rebuilder.formed) == 1, "once"


def test_a_death_meanwhile_begins_it_again() -> None:
    made, loop, rebuilder, trainer = reforming()
    loop.regrouping.num_lost = 1
    made.advance()
    loop.regrouping.num_lost = 2
    made.advance()
    assert len(loop.told) == 2
    loop.answer(MemberState(Agreed(0, STEP, []), False, [8.0]))
    made.advance()
    assert len(rebuilder.formed) == len(trainer.taken) == 1


def test_a_group_that_takes_time_is_formed_once_and_anew_behind_another_death() -> None:
    made, loop, rebuilder, trainer = reforming()
    first, second = rebuilder.late = [Late(), Late()]
    standing = MemberState(Agreed(0, STEP, []), False, [8.0])
    for num_lost in (1, 2):
        loop.regrouping.num_lost = num_lost
        made.advance()
        loop.answer(standing)
        made.advance()
        made.advance()
        assert (len(rebuilder.formed), trainer.taken) == (num_lost, [])
    first.is_made = True
    made.advance()
    assert not trainer.taken, "nobody wants that one any more"
    second.is_made = True
    made.advance()
    assert trainer.taken == [False]


def test_who_is_not_there_any_more_is_waited_for_until_its_death_is_declared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, loop, rebuilder, trainer = reforming()
    rebuilder.error = MemberLostError("its memory cannot be opened")
    loop.regrouping.num_lost = 1
    made.advance()
    loop.answer(MemberState(Agreed(0, STEP, []), False, [8.0]))
    made.advance()
    made.advance()
    assert [each.message for each in caplog.records] == ["its memory cannot be opened"]
    assert not trainer.taken
    rebuilder.error = None
    loop.regrouping.num_lost = 2
    made.advance()
    loop.answer(MemberState(Agreed(0, STEP, []), False, [8.0]))
    made.advance()
    assert trainer.taken == [False]
