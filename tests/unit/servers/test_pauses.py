"""Pauses: what is refused, and whom a worker that waits releases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import Blocked, Held, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import CoordinatorPart
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.missed_rounds import MissedRounds
from psdist.servers.protocol.pauses import Pauses, Waits, waits_within
from tests.unit.servers.test_coordinator_machine import tell


def held(worker: int, *clocks: int, hold: int = 1, what: str = "checkpoint") -> Held:
    return Held(worker=worker, number=1, hold=hold, what=what, clocks=list(clocks))


def blocked(worker: int, clock: int, set_index: int = 0) -> Blocked:
    return Blocked(worker=worker, number=1, set_index=set_index, clock=clock)


def told(pauses: Pauses, *messages: Held | Blocked) -> list[tuple[int, object]]:
    """Return what the coordinator sends after the last of these messages."""
    actions: list[SendControl] = []
    for each in messages:
        actions = pauses.on_told(each.worker, each, is_collecting=False)
    return [(each.peer, each.message) for each in actions]


def pauses_of(
    *groups: tuple[int, ...], waits: Sequence[Waits] = (), num_workers: int = 4
) -> Pauses:
    return Pauses(num_workers=num_workers, groups=groups, waits=waits)


@pytest.mark.parametrize(
    "message", [held(1, -1), held(1, 3, -1), held(1), held(1, 3, what="lunch")]
)
def test_a_hold_without_valid_clocks_or_reason_is_refused(message: Held) -> None:
    with pytest.raises(ProtocolError, match=r"worker 1 holds for '.*' at clocks"):
        told(pauses_of(), message)


def test_the_pause_begins_when_all_hold() -> None:
    pauses = pauses_of(num_workers=2)
    assert told(pauses, held(1, 0)) == [(worker_id(0), PauseRequest(number=1))]
    both = [(worker_id(each), Paused(number=1, what="checkpoint")) for each in range(2)]
    assert told(pauses, held(0, 0)) == both


def test_no_pause_begins_after_a_script_has_finished() -> None:
    pauses = pauses_of(num_workers=2)
    assert pauses.on_done(1) == []
    assert told(pauses, held(0, 3, hold=5)) == [(worker_id(0), PauseAborted(number=1))]


def test_nothing_waits_in_a_pause_that_is_not_open() -> None:
    with pytest.raises(ProtocolError, match="worker 1 waits in iteration 3 of a meeting that is n"):
        told(pauses_of(), blocked(1, 3))
    with pytest.raises(ProtocolError, match="worker 1 waits in iteration -1 of a meeting that is "):
        told(pauses_of(), held(0, 3), blocked(1, -1))


def test_a_group_that_missed_several_rounds_waits_for_the_open_one() -> None:
    part = MissedRounds()
    assert [part.waits(5, held) for held in (5, 6, 7)] == [False, False, True]
    assert part.resume_at({0: (3, 2), 1: (5, 1)}) == {0: (5, 2), 1: (5, 2)}


PROCEED = Proceed(number=1, hold=1)


@pytest.mark.parametrize("clock", [6, 7, 8])
def test_a_worker_of_the_same_group_that_waits_for_its_push_is_in_the_way(clock: int) -> None:
    pauses = pauses_of((0, 1), (2, 3))
    is_released = told(pauses, held(2, 7), blocked(3, clock)) == [(worker_id(2), PROCEED)]
    assert is_released == (clock >= 7)
    assert told(pauses_of((0, 1), (2, 3)), held(2, 7), blocked(1, clock)) == [], "another group"
    assert told(pauses_of((0, 1), (2, 3)), held(2, 7), blocked(3, clock, 1)) == [], "a later set"


@pytest.mark.parametrize(("staleness", "first"), [(0, 7), (2, 9)])
def test_another_group_waits_from_the_iteration_that_the_mode_says(
    staleness: int, first: int
) -> None:
    for clock in (first - 1, first):
        pauses = pauses_of((0,), (1,), num_workers=2, waits=[waits_within(staleness)])
        is_released = told(pauses, held(0, 7), blocked(1, clock)) == [(worker_id(0), PROCEED)]
        assert is_released == (clock == first)


class Idle(CoordinatorPart):
    NAME = "idle"


@pytest.mark.parametrize(
    ("mode", "clock", "is_released"),
    [
        ("sync", 7, True),
        ("sync", 6, False),
        ("ssp", 9, True),
        ("ssp", 8, False),
        ("async", 9, False),
    ],
)
def test_a_coordinator_releases_holding_workers_by_its_mode_alone(
    mode: str, clock: int, *, is_released: bool
) -> None:
    coordinator = assemble(num_workers=2, num_servers=1, mode=mode, staleness=2, parts=[Idle()])
    tell(coordinator, held(0, 7))
    actions = tell(coordinator, blocked(1, clock))
    assert actions == [SendControl(worker_id(0), PROCEED)] * is_released
