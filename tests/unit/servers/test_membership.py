"""Who takes part, who is suspended, who has left: as a machine, and what it refuses of whom."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Leave, Register, Suspend
from psdist.protocol.header import NEVER
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.membership import GroupState, Membership

GROUPS = ((0, 1), (2,), (3, 4, 5))
NUM_CHUNKS = 3


def contain(membership: Membership, group: int, clock: int) -> None:
    """Every chunk contains so many updates of the group."""
    membership.limits.contained[group] = clock * NUM_CHUNKS


class Groups(RuleBasedStateMachine):
    """Registrations, iterations, collectives and leaves of three groups, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(server=2, groups=GROUPS)
        self.standing = dict.fromkeys(range(3), "away")
        self.clock = dict.fromkeys(range(3), 0)
        self.stopped_at = dict.fromkeys(range(3), 0)
        self.seq = 0
        """Collectives that have ended."""

    def of(self, standing: str) -> list[int]:
        return [group for group, each in self.standing.items() if each == standing]

    @precondition(lambda self: self.of("away"))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.of("away")))
        workers = list(GROUPS[group])
        message = Register(group=group, workers=workers, clock=0)
        self.membership.join(worker_id(workers[0]), message)
        assert self.membership.limits.count(group) == 0
        self.standing[group] = "counts"

    @precondition(lambda self: self.of("counts"))
    @rule(data=st.data())
    def iterate(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.of("counts")))
        self.clock[group] += 1
        contain(self.membership, group, self.clock[group])

    @precondition(lambda self: self.of("counts"))
    @rule(data=st.data(), ahead=st.integers(0, 2))
    def suspend(self, data: st.DataObject, ahead: int) -> None:
        """In a collective that may be over already, because Resume comes from somebody else."""
        group = data.draw(st.sampled_from(self.of("counts")))
        seq = max(1, self.seq - 1 + ahead)
        message = Suspend(group=group, clock=self.clock[group], seq=seq)
        peer = worker_id(GROUPS[group][0])
        is_suspended = self.membership.suspend(peer, message, num_chunks=NUM_CHUNKS)
        assert is_suspended == (seq > self.seq)
        if is_suspended:
            self.standing[group] = "suspended"
            self.stopped_at[group] = self.clock[group]

    @rule()
    def resume(self) -> None:
        self.seq += 1
        resumed = self.membership.resume(self.seq)
        assert resumed == self.of("suspended")
        for group in resumed:
            assert self.membership.limits.count(group) == self.clock[group]
            self.standing[group] = "counts"

    @precondition(lambda self: self.of("counts"))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.of("counts")))
        peer = worker_id(GROUPS[group][0])
        message = Leave(group=group, clock=self.clock[group])
        self.membership.leave(peer, message, num_chunks=NUM_CHUNKS)
        self.standing[group] = "left"
        self.stopped_at[group] = self.clock[group]

    @invariant()
    def everybody_stands_where_they_should(self) -> None:
        membership = self.membership
        membership.check_invariants()
        active = [*self.of("counts"), *self.of("suspended")]
        assert membership.num_active_workers == sum(len(GROUPS[group]) for group in active)
        counting = self.of("counts")
        assert membership.pushing == {
            worker_id(worker) for group in counting for worker in GROUPS[group]
        }
        assert membership.limits.of == [
            NEVER if group in counting else self.stopped_at[group] for group in range(3)
        ]


TestGroups = Groups.TestCase


def joined(*groups: int, clock: int = 0) -> Membership:
    membership = Membership(server=2, groups=GROUPS)
    for group in groups:
        workers = list(GROUPS[group])
        membership.join(worker_id(workers[0]), Register(group=group, workers=workers, clock=0))
        membership.limits.count(group)
        contain(membership, group, clock)
    return membership


def test_the_plan_says_who_is_in_which_group() -> None:
    membership = Membership(server=2, groups=GROUPS)
    assert [membership.require_worker(worker_id(worker)) for worker in range(6)] == [
        *(0, 0, 1, 2, 2, 2),
    ]
    assert [membership.num_workers_of(group) for group in range(3)] == [2, 1, 3]
    for peer in (worker_id(6), server_id(0)):
        with pytest.raises(ProtocolError, match=r"server 2: (worker 6|server 0) sent what workers"):
            membership.require_worker(peer)


WRONG_REGISTERS: dict[str, tuple[int, Register]] = {
    "registered group 3; this run has 3 groups": (
        worker_id(0), Register(group=3, workers=[0], clock=0)),
    "registered group -1; this run has 3 groups": (
        worker_id(0), Register(group=-1, workers=[0], clock=0)),
    "worker 1 registered group 0, for which worker 0 speaks": (
        worker_id(1), Register(group=0, workers=[0, 1], clock=0)),
    "server 0 registered group 0, for which worker 0 speaks": (
        server_id(0), Register(group=0, workers=[0, 1], clock=0)),
    "registered group 0 with 2 workers that are not those of the plan, workers 0, 1": (
        worker_id(0), Register(group=0, workers=[1, 0], clock=0)),
    "registered group 0 at clock 1, not at 0": (
        worker_id(0), Register(group=0, workers=[0, 1], clock=1)),
    "registered group 0 at clock -1, not at 0": (
        worker_id(0), Register(group=0, workers=[0, 1], clock=-1)),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_REGISTERS)
def test_a_registration_that_is_not_the_plans_is_refused_and_changes_nothing(words: str) -> None:
    membership = Membership(server=2, groups=GROUPS)
    with pytest.raises(ProtocolError, match=f"^server 2: .*{words}"):
        membership.join(*WRONG_REGISTERS[words])
    membership.check_invariants()
    assert membership.num_active_workers == 0
    assert membership.pushing == set()


@pytest.mark.parametrize("what", ["active", "suspended", "left"])
def test_a_group_registers_once(what: str) -> None:
    membership = joined(0, 1)
    if what == "suspended":
        membership.suspend(worker_id(0), Suspend(group=0, clock=0, seq=1), num_chunks=3)
    if what == "left":
        membership.leave(worker_id(0), Leave(group=0, clock=0), num_chunks=3)
    stands = {"active": "is active", "suspended": "is suspended", "left": "has left"}[what]
    with pytest.raises(ProtocolError, match=f"worker 0 registered group 0, which {stands}"):
        membership.join(worker_id(0), Register(group=0, workers=[0, 1], clock=0))


@pytest.mark.parametrize(
    ("clock", "num_chunks", "contained", "is_right"),
    [
        (2, 3, 6, True),
        (2, 3, 5, False),
        (2, 3, 7, False),
        (1, 3, 6, False),
        (3, 3, 6, False),
        (0, 3, 0, True),
        (0, None, 0, True),  # there is no shard yet
        (1, None, 0, False),
        (-1, 3, -3, False),
        (5, 0, 0, True),  # a server that holds nothing
    ],
)
@pytest.mark.parametrize("verb", ["suspended", "took leave of"])
def test_a_group_stops_after_exactly_what_every_chunk_contains(
    verb: str, clock: int, num_chunks: int | None, contained: int, is_right: bool
) -> None:
    membership = joined(0, 2)
    membership.limits.contained[0] = contained
    membership.limits.contained[2] = 99

    def stop() -> None:
        if verb == "suspended":
            message = Suspend(group=0, clock=clock, seq=1)
            assert membership.suspend(worker_id(0), message, num_chunks=num_chunks)
        else:
            membership.leave(worker_id(0), Leave(group=0, clock=clock), num_chunks=num_chunks)

    if is_right:
        stop()
        assert membership.limits.of[0] == clock
        return
    words = f"worker 0 {verb} group 0 after {clock} iterations; the {num_chunks or 0} chunks here "
    with pytest.raises(ProtocolError, match=f"{words}contain {contained} updates of it"):
        stop()
    assert membership.limits.of[0] == NEVER
    membership.check_invariants()


def test_only_a_group_that_counts_is_suspended_or_takes_its_leave() -> None:
    for message in (Suspend(group=1, clock=0, seq=9), Leave(group=1, clock=0)):

        def stop(membership: Membership, message: Suspend | Leave = message) -> None:
            if isinstance(message, Suspend):
                membership.suspend(worker_id(2), message, num_chunks=3)
            else:
                membership.leave(worker_id(2), message, num_chunks=3)

        with pytest.raises(ProtocolError, match="group 1, which has not registered"):
            stop(joined(0))
        membership = joined(0, 1)
        membership.suspend(worker_id(2), Suspend(group=1, clock=0, seq=1), num_chunks=3)
        with pytest.raises(ProtocolError, match="group 1, which is suspended"):
            stop(membership)
        membership = joined(0, 1)
        membership.leave(worker_id(2), Leave(group=1, clock=0), num_chunks=3)
        with pytest.raises(ProtocolError, match="group 1, which has left"):
            stop(membership)


def test_nobody_but_its_leader_stops_a_group() -> None:
    membership = joined(0, 1, 2)
    for peer in (worker_id(1), worker_id(3), server_id(0)):
        with pytest.raises(ProtocolError, match="suspended group 0, for which worker 0 speaks"):
            membership.suspend(peer, Suspend(group=0, clock=0, seq=1), num_chunks=3)
        with pytest.raises(ProtocolError, match="took leave of group 0, for which worker 0 speaks"):
            membership.leave(peer, Leave(group=0, clock=0), num_chunks=3)
    with pytest.raises(ProtocolError, match="suspended group 3; this run has 3 groups"):
        membership.suspend(worker_id(0), Suspend(group=3, clock=0, seq=1), num_chunks=3)


def test_collectives_are_over_one_after_the_other() -> None:
    membership = joined(0)
    for seq in (0, 2, -1):
        with pytest.raises(ProtocolError, match=f"server 2: server 0 resumed collective {seq} "
                                                "after collective 0"):  # fmt: skip
            membership.resume(seq)
    assert membership.resume(1) == []
    with pytest.raises(ProtocolError, match="resumed collective 1 after collective 1"):
        membership.resume(1)


def test_only_workers_of_groups_that_count_push_what_is_new() -> None:
    membership = joined(0, 1)
    for worker in (0, 1, 2):
        membership.require_pushing(worker_id(worker))
    membership.suspend(worker_id(0), Suspend(group=0, clock=0, seq=1), num_chunks=3)
    membership.leave(worker_id(2), Leave(group=1, clock=0), num_chunks=3)
    for worker, words in ((1, "0 is suspended"), (2, "1 has left"), (5, "2 has not registered")):
        with pytest.raises(ProtocolError, match=f"worker {worker} pushed, but group {words}"):
            membership.require_pushing(worker_id(worker))
    with pytest.raises(ProtocolError, match="worker 9 sent what workers of this run send"):
        membership.require_pushing(worker_id(9))


def test_settings_may_come_behind_what_the_leader_of_the_group_has_said_since() -> None:
    membership = joined(0, 1)
    membership.suspend(worker_id(0), Suspend(group=0, clock=0, seq=1), num_chunks=3)
    membership.leave(worker_id(2), Leave(group=1, clock=0), num_chunks=3)
    for worker in (0, 1, 2):
        membership.require_registered(worker_id(worker))
    with pytest.raises(ProtocolError, match="worker 5 told its settings, but group 2 has not reg"):
        membership.require_registered(worker_id(5))
    with pytest.raises(ProtocolError, match="worker 9 sent what workers of this run send"):
        membership.require_registered(worker_id(9))


def test_a_membership_goes_on_from_the_state_of_a_failed_server() -> None:
    groups = ((0, 1), (2,), (3,), (4,))
    membership = Membership(server=2, groups=groups, num_substitutes=2, is_out=all)
    states = [GroupState.DEAD, GroupState.LEFT, GroupState.ACTIVE, GroupState.WAITING]
    membership.take_over(
        states, [2, 5, 0, 0], [(2, 5, 4, 0)] * NUM_CHUNKS, resumed_up_to=7, first=[0, 0, 3, 0],
        generation=2, dead=[0, 1],
    )  # fmt: skip
    membership.check_invariants()
    assert (membership.generation, membership.resumed_up_to) == (2, 7)
    assert (membership.num_active_groups, membership.num_active_workers) == (1, 1)
    assert membership.pushing == {worker_id(3)}
    assert membership.chief == worker_id(2), "its group has left, and has not failed"
    without = Membership(server=2, groups=groups[:3], num_substitutes=1)
    states = [GroupState.DEAD, GroupState.DEAD, GroupState.ACTIVE]
    without.take_over(states, [2, 2, 0], [(2, 2, 4)], resumed_up_to=0, first=[0, 0, 3], dead=[0, 2])
    assert without.chief == worker_id(3), "a substitute that has joined"


def count_who_is_suspended(membership: Membership) -> None:
    membership.limits.count(1)


def let_nobody_of_a_group_push(membership: Membership) -> None:
    membership.pushing.discard(worker_id(0))
    membership.pushing.discard(worker_id(1))


def let_half_a_group_push(membership: Membership) -> None:
    membership.pushing.discard(worker_id(1))


def forget_who_is_suspended(membership: Membership) -> None:
    membership._suspended.clear()


def suspend_who_is_active(membership: Membership) -> None:
    membership._suspended.add(0)


def miscount_who_has_stopped(membership: Membership) -> None:
    membership.limits.stopped[8] = 1


def let_a_group_come_back(membership: Membership) -> None:
    membership._standing[1] = GroupState.ACTIVE


@pytest.mark.parametrize(
    "break_it",
    [
        *(count_who_is_suspended, let_nobody_of_a_group_push, let_half_a_group_push),
        *(forget_who_is_suspended, suspend_who_is_active, miscount_who_has_stopped),
        let_a_group_come_back,
    ],
    ids=lambda each: each.__name__,
)
def test_a_membership_that_contradicts_itself_is_caught(
    break_it: Callable[[Membership], None],
) -> None:
    membership = joined(0, 1)
    membership.suspend(worker_id(2), Suspend(group=1, clock=0, seq=1), num_chunks=3)
    membership.check_invariants()
    break_it(membership)
    with pytest.raises(InvariantError):
        membership.check_invariants()
