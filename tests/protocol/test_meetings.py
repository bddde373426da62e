"""Meetings in random schedules: all workers hold at one moment, or continue; no worker waits for
ever.

Scripts of several workers, with steps that wait as the mode has it, collectives in the middle, and
reasons to meet at any boundary, are played on queues whose messages are delivered at any time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import Blocked, Held, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import COORDINATOR, worker_id, worker_of
from psdist.servers.protocol.pauses import Pauses, waits_within
from psdist.workers.protocol.actions import Action, SendControl
from psdist.workers.protocol.meetings import Meetings
from tests.support.coordinators import assemble


@dataclass
class Play:
    """A job of ``len(lengths)`` workers; worker w makes lengths[w] iterations."""

    seed: int
    mode: str
    groups: list[list[int]]
    lengths: list[int]
    every: int = 0
    """The leader holds at multiples of this clock."""
    chance: float = 0.0
    """Probability of a signal, at a boundary."""
    collective_every: int = 0
    staleness: int = 2
    commits: list[list[int]] = field(default_factory=list)
    """Clocks of all workers, by pause."""
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.count = len(self.lengths)
        bound = {"sync": 0, "ssp": self.staleness}.get(self.mode)
        self.coordinator = Pauses(
            num_workers=self.count,
            groups=self.groups,
            waits=[] if bound is None else [waits_within(bound)],
        )
        self.workers = [Meetings(worker) for worker in range(self.count)]
        self.up: list[deque[object]] = [deque() for _ in range(self.count)]
        self.down: list[deque[object]] = [deque() for _ in range(self.count)]
        self.begun = [0] * self.count
        self.clocks = [0] * self.count
        self.entered = [0] * self.count
        self.next_due = [self.every] * self.count
        self.done: set[int] = set()
        self.met = [0] * self.count
        self.group_of = {worker: each for each in self.groups for worker in each}

    def run(self) -> None:
        scripts = [self.script(worker) for worker in range(self.count)]
        left = set(range(self.count))
        waits = {worker: next(scripts[worker]) for worker in left}
        idle = 0
        while left:
            worker = self.random.randrange(self.count)
            moved = self.deliver(worker)
            if worker in left and waits[worker]():
                moved = True
                try:
                    waits[worker] = next(scripts[worker])
                except StopIteration:
                    left.discard(worker)
                    self.up[worker].append("done")
            idle = 0 if moved else idle + 1
            assert idle < 400 * self.count, f"stuck: {self}"
        assert len(set(self.met)) == 1 or self.done

    def deliver(self, worker: int) -> bool:
        moved = False
        if self.up[worker] and self.random.random() < 0.5:
            moved = True
            message = self.up[worker].popleft()
            if message == "done":
                self.done.add(worker)
                self.tell(self.coordinator.on_done(worker))
            elif message == "enter":
                self.entered[worker] += 1
                self.tell(self.coordinator.on_entered())
            else:
                assert isinstance(message, Held | Blocked)
                is_collecting = len(set(self.entered)) > 1
                self.tell(self.coordinator.on_told(worker, message, is_collecting=is_collecting))
        if self.down[worker] and self.random.random() < 0.5:
            moved = True
            message = self.down[worker].popleft()
            meetings = self.workers[worker]
            if isinstance(message, PauseRequest):
                self.send(worker, meetings.on_propose(COORDINATOR, message))
            elif isinstance(message, Proceed):
                meetings.on_release(COORDINATOR, message)
            elif isinstance(message, Paused):
                assert all(each.is_held for each in self.workers) or worker in self.committed
                if not self.committed:
                    self.commits.append(list(self.clocks))
                    self.committed = set(range(self.count))
                self.committed.discard(worker)
                meetings.on_commit(COORDINATOR, message)
            else:
                assert isinstance(message, PauseAborted)
                self.cancelled += 1
                meetings.on_cancel(COORDINATOR, message)
        return moved

    committed: set[int] = field(default_factory=set)

    def tell(self, actions: list[SendControl]) -> None:
        for action in actions:
            self.down[worker_of(action.peer)].append(action.message)

    def send(self, worker: int, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, SendControl)
            self.up[worker].append(action.message)

    def script(self, worker: int) -> Iterator:  # type: ignore[type-arg]
        meetings = self.workers[worker]
        is_leading = self.mode == "sync" or worker == 0
        for clock in range(self.lengths[worker]):
            is_due = self.every and is_leading and clock >= self.next_due[worker]
            if is_due or meetings.is_open or self.random.random() < self.chance:
                self.send(worker, meetings.hold("checkpoint", clocks=[clock]))
                yield lambda: not meetings.is_held
                found = meetings.take()
                self.met[worker] += found is not None
                if not meetings.is_open and self.every:
                    self.next_due[worker] = (clock // self.every + 1) * self.every
            if self.collective_every and clock and clock % self.collective_every == 0:
                self.send(worker, meetings.begin(0, clock))
                yield lambda: True
                number = clock // self.collective_every
                self.up[worker].append("enter")
                yield lambda number=number: min(self.entered) >= number  # type: ignore[misc]
            yield lambda: True
            self.send(worker, meetings.begin(0, clock))
            self.begun[worker] = clock + 1
            yield lambda clock=clock: self.may_end(worker, clock)  # type: ignore[misc]
            self.clocks[worker] = clock + 1
        self.send(worker, meetings.begin(0, self.lengths[worker]))
        group = self.group_of[worker]
        yield lambda: all(self.clocks[each] == self.lengths[each] for each in group)

    def may_end(self, worker: int, clock: int) -> bool:
        if any(self.begun[each] <= clock for each in self.group_of[worker]):
            return False
        needed = {"sync": clock + 1, "ssp": clock + 1 - self.staleness}.get(self.mode, 0)
        return all(
            begun >= min(needed, length)  # no worker waits for one that has left
            for begun, length in zip(self.begun, self.lengths, strict=True)
        )


MODES = ["sync", "ssp", "async"]
APART = [[0], [1], [2], [3]]
MIXED = [[0, 1], [2], [3]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [APART, MIXED])
def test_signals_at_any_time_make_all_meet_or_nobody(mode: str, groups: list[list[int]]) -> None:
    met = 0
    for seed in range(60):
        play = Play(seed, mode, groups, [14] * 4, chance=0.03, collective_every=5)
        play.run()
        met += len(play.commits)
        if mode == "sync":
            assert all(len(set(clocks)) == 1 for clocks in play.commits)
    assert met > 30


@pytest.mark.parametrize("groups", [APART, MIXED])
def test_in_sync_every_nth_iteration_is_met_at_exactly(groups: list[list[int]]) -> None:
    for seed in range(60):
        play = Play(seed, "sync", groups, [14] * 4, every=4, collective_every=3)
        play.run()
        assert play.commits == [[4] * 4, [8] * 4, [12] * 4]


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_elsewhere_the_chief_says_when_and_each_group_comes_at_its_own_clock(mode: str) -> None:
    for seed in range(60):
        play = Play(seed, mode, APART, [14] * 4, every=4)
        play.run()
        assert [clocks[0] >= 4 for clocks in play.commits] == [True] * len(play.commits)
        assert play.commits or play.cancelled


@pytest.mark.parametrize("mode", MODES)
def test_scripts_that_end_at_different_clocks_end_all_the_same(mode: str) -> None:
    cancelled = 0
    for seed in range(60):
        play = Play(seed, mode, APART, [5, 9, 12, 7], every=6, chance=0.02)
        play.run()
        cancelled += play.cancelled
    assert cancelled


def held(worker: int, number: int = 1, hold: int = 1, clock: int = 3) -> Held:
    return Held(worker=worker, number=number, hold=hold, what="checkpoint", clocks=[clock])


def test_the_strongest_reason_counts() -> None:
    coordinator = Pauses(num_workers=2, groups=(), waits=[waits_within(0)])
    coordinator.on_told(0, held(0), is_collecting=False)
    requeue = Held(worker=1, number=1, hold=1, what="requeue", clocks=[3])
    actions = coordinator.on_told(1, requeue, is_collecting=False)
    assert [action.message for action in actions] == [Paused(number=1, what="requeue")] * 2
    assert [action.peer for action in actions] == [worker_id(0), worker_id(1)]


@pytest.mark.parametrize(
    ("backup", "busy_at", "is_released"),
    [(1, 5, True), (1, 6, False), (1, 7, True), (0, 5, False)],
)
def test_who_has_missed_several_rounds_waits_for_those_who_hold(
    backup: int, busy_at: int, is_released: bool
) -> None:
    """It sits out the round before which they hold; a group that missed one is informed at once."""
    coordinator = assemble(num_workers=3, num_servers=1, backup=backup).pause
    coordinator.on_told(0, held(0, clock=7), is_collecting=False)
    late = Blocked(worker=2, number=1, set_index=0, clock=busy_at)
    for actions in (
        coordinator.on_told(2, late, is_collecting=False),
        coordinator.on_told(1, held(1, clock=7), is_collecting=False),
    ):
        assert [action.message for action in actions] == [Proceed(number=1, hold=1)] * is_released
    actions = coordinator.on_told(2, held(2, clock=8), is_collecting=False)
    actions += coordinator.on_told(0, held(0, hold=2, clock=8), is_collecting=False)
    messages = [action.message for action in actions]
    assert not any(isinstance(each, Proceed) for each in messages), "it holds by now"


def test_a_second_delivery_changes_nothing() -> None:
    coordinator = Pauses(num_workers=2, groups=(), waits=[waits_within(0)])
    assert coordinator.on_told(0, held(0), is_collecting=False)
    assert coordinator.on_told(0, held(0), is_collecting=False) == []


@pytest.mark.parametrize(
    "message",
    [
        held(0, number=2),
        Held(worker=0, number=1, hold=1, what="lunch", clocks=[1]),
        Held(worker=0, number=1, hold=1, what="checkpoint", clocks=[]),
        Held(worker=0, number=1, hold=1, what="checkpoint", clocks=[-1]),
        Blocked(worker=0, number=1, set_index=0, clock=1),
    ],
)
def test_what_no_worker_says_is_refused(message: Held | Blocked) -> None:
    coordinator = Pauses(num_workers=2, groups=(), waits=[waits_within(0)])
    with pytest.raises(ProtocolError, match="worker 0"):
        coordinator.on_told(0, message, is_collecting=False)


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (worker_id(1), PauseRequest(number=1)),
        (COORDINATOR, PauseRequest(number=2)),
        (COORDINATOR, Paused(number=1, what="checkpoint")),
        (COORDINATOR, Proceed(number=1, hold=1)),
    ],
)
def test_what_the_coordinator_does_not_say_is_refused(peer: int, message: object) -> None:
    meetings = Meetings(3)
    handlers = {
        PauseRequest: meetings.on_propose,
        Paused: meetings.on_commit,
        Proceed: meetings.on_release,
    }
    with pytest.raises(ProtocolError, match="worker 3"):
        handlers[type(message)](peer, message)  # type: ignore[index, operator]
