"""Offers and receive slots: who is received, who waits, and who is next when a slot is free."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.errors import InvariantError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import Accept, Action
from psdist.servers.protocol.chunks.receive_pool import (
    ADDS,
    EARLY,
    FRONTIER,
    STARTS,
    TOO_FAR,
    ReceivePool,
)

Key = tuple[int, int | None]


class Offers:
    """A pool with the needs that a test sets: 1 by default."""

    def __init__(self, num_slots: int) -> None:
        self.needs: dict[Key, int] = defaultdict(lambda: ADDS)
        self.slots = [Frame() for _ in range(num_slots)]
        self.pool = ReceivePool(self.slots, need=lambda chunk, group: self.needs[chunk, group])
        self.taken: list[Frame] = []

    def tickets(self, actions: list[Action]) -> list[str]:
        """Tickets of the accepted offers, in order; their slots are taken from now on."""
        accepted = []
        for action in actions:
            assert isinstance(action, Accept)
            assert any(action.slot is slot for slot in self.slots)
            assert not any(action.slot is slot for slot in self.taken), "a slot is taken twice"
            self.taken.append(action.slot)
            accepted.append(str(action.ticket))
        return accepted

    def offer(self, ticket: str, chunk: int, group: int = 0, *, need: int = ADDS) -> list[str]:
        self.needs[chunk, group] = need
        return self.tickets(self.pool.offer(chunk, group, ticket))

    def release(self, index: int = 0) -> list[str]:
        return self.tickets(self.pool.release(self.taken.pop(index)))


def test_what_an_offer_needs_is_the_order_in_which_a_chunk_is_served() -> None:
    assert (ADDS, FRONTIER, STARTS, EARLY) == (1, 2, 3, 4)


@pytest.mark.parametrize("need", [ADDS, FRONTIER, STARTS, EARLY])
@pytest.mark.parametrize("num_slots", [2, 3, 4, 5])
def test_an_offer_is_received_while_as_many_slots_are_free_as_it_needs(
    num_slots: int, need: int
) -> None:
    offers = Offers(num_slots)
    received = [offers.offer(f"{chunk}", chunk, need=need) for chunk in range(num_slots + 2)]
    num_received = max(0, num_slots - need + 1)
    assert received == [[f"{chunk}"] for chunk in range(num_received)] + [[]] * (
        num_slots + 2 - num_received
    )
    assert offers.pool.num_free == num_slots - num_received
    held = [chunk for chunk in range(num_slots + 2) if offers.pool.holds(chunk)]
    assert held == list(range(num_received, num_slots + 2))
    assert offers.pool.most_used == num_received


def test_what_is_too_far_ahead_gets_no_slot_however_many_are_free_until_it_is_near() -> None:
    offers = Offers(9)
    assert offers.offer("a", 5, 0, need=TOO_FAR) == offers.offer("b", 5, 1, need=TOO_FAR) == []
    assert offers.offer("near", 1, need=EARLY) == ["near"]
    assert offers.release() == []
    assert len(offers.pool.holds_too_far) == 2
    offers.needs[5, 0] = offers.needs[5, 1] = EARLY
    assert offers.tickets(offers.pool.reconsider_all(5)) == ["a", "b"]
    assert not offers.pool.holds_too_far
    assert offers.pool.reconsider_all(5) == []


def test_who_needs_least_is_received_first_and_among_alike_who_came_first() -> None:
    offers = Offers(4)
    for chunk in range(4):
        offers.offer("first", chunk)
    waiting = [("early", EARLY), ("start a", STARTS), ("start b", STARTS), ("front", FRONTIER),
               ("add a", ADDS), ("add b", ADDS)]  # fmt: skip
    for chunk, (ticket, need) in enumerate(waiting, 10):
        assert offers.offer(ticket, chunk, need=need) == []
    received = [offers.release() for _ in range(9)]
    assert received == [
        *(["add a"], ["add b"], [], ["front"], [], ["start a"], ["start b"], [], ["early"]),
    ]
    assert not any(offers.pool.holds(chunk) for chunk in range(20))


def test_offers_of_one_chunk_and_group_are_received_in_the_order_in_which_they_came() -> None:
    """The next is considered when its predecessor has arrived; a notice is needed for that."""
    offers = Offers(1)
    assert [offers.offer(ticket, 0) for ticket in "abcd"] == [["a"], [], [], []]
    assert offers.release() == ["b"]
    for ticket in "cd":
        assert offers.tickets(offers.pool.reconsider(0, 0)) == []
        assert offers.release() == [ticket]
    assert (offers.pool.num_held_of(0, 0), offers.pool.num_free) == (0, 0)


def test_a_later_offer_of_the_same_push_never_overtakes_one_that_is_held() -> None:
    offers = Offers(2)
    offers.offer("other", 9)
    assert offers.offer("a", 0, need=FRONTIER) == []
    # Its need has changed without a notice: the new offer gives it, for the first in line.
    assert offers.offer("b", 0, need=ADDS) == ["a"]
    assert offers.tickets(offers.pool.reconsider(0, 0)) == []
    assert offers.release(1) == ["b"]


def test_an_offer_whose_turn_has_come_is_received_when_that_is_said() -> None:
    offers = Offers(2)
    offers.offer("other", 9)
    assert offers.offer("a", 0, need=EARLY) == []
    offers.needs[0, 0] = ADDS
    assert offers.tickets(offers.pool.reconsider(0, 0)) == ["a"]
    assert offers.tickets(offers.pool.reconsider(0, 0)) == []
    assert (offers.release(), offers.release()) == ([], [])


def test_whoever_is_looked_at_in_vain_keeps_its_place() -> None:
    offers = Offers(1)
    offers.offer("first", 9)
    assert [offers.offer("a", 0), offers.offer("b", 1)] == [[], []]
    assert offers.tickets(offers.pool.reconsider(0, 0)) == []
    assert offers.release() == ["a"]


def test_groups_of_one_chunk_and_chunks_of_one_group_wait_apart() -> None:
    offers = Offers(1)
    offers.offer("first", 0, 0)
    assert [offers.offer(f"{chunk}{group}", chunk, group) for chunk, group in
            ((1, 2), (2, 1), (1, 1))] == [[], [], []]  # fmt: skip
    assert offers.tickets(offers.pool.reconsider(2, 2)) == []
    assert [offers.release() for _ in range(3)] == [["12"], ["21"], ["11"]]


def test_an_offer_whose_need_has_grown_waits_for_that() -> None:
    offers = Offers(3)
    for chunk in range(3):
        offers.offer("first", chunk)
    assert offers.offer("grows", 10, need=ADDS) == []
    offers.needs[10, 0] = STARTS
    assert offers.release() == []
    assert offers.release() == []
    assert offers.release() == ["grows"]


def test_a_slot_that_comes_back_twice_is_an_error() -> None:
    offers = Offers(2)
    offers.offer("a", 0)
    (slot,) = offers.taken
    offers.release()
    with pytest.raises(InvariantError, match="a receive slot was released twice"):
        offers.pool.release(slot)


def test_the_most_slots_that_were_ever_used_are_remembered() -> None:
    offers = Offers(3)
    assert offers.pool.most_used == 0
    offers.offer("a", 0)
    offers.offer("b", 1)
    offers.release()
    offers.release()
    offers.offer("c", 2)
    assert (offers.pool.most_used, offers.pool.num_free, offers.pool.num_slots) == (2, 2, 3)


class AnyOrder(RuleBasedStateMachine):
    """Offers, slots that come back and needs that change, in any order. An offer is received only
    while as many slots are free as it needs, and none that fits is left waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.offers = Offers(4)
        self.held: dict[Key, deque[str]] = defaultdict(deque)
        self.num_offers = 0

    keys = st.tuples(st.integers(0, 2), st.integers(0, 1))
    needs = st.sampled_from([ADDS, FRONTIER, STARTS, EARLY])

    def take(self, actions: list[Action]) -> None:
        free = self.offers.pool.num_free + len(actions)
        for ticket in self.offers.tickets(actions):
            key = next(key for key, held in self.held.items() if held and held[0] == ticket)
            self.held[key].popleft()
            assert free >= self.offers.needs[key], "a slot was kept for others"
            free -= 1
            if self.held[key]:  # what has arrived makes room for the group's next
                self.take(self.offers.pool.reconsider(*key))

    @rule(key=keys)
    def offer(self, key: Key) -> None:
        self.num_offers += 1
        self.held[key].append(f"{self.num_offers}")
        self.take(self.offers.pool.offer(*key, f"{self.num_offers}"))

    @precondition(lambda self: self.offers.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.offers.taken) - 1))
        self.take(self.offers.pool.release(self.offers.taken.pop(slot)))

    @rule(key=keys, need=needs)
    def change_need(self, key: Key, need: int) -> None:
        """A smaller need comes with a notice; a larger one is noticed when it is looked at."""
        is_smaller = need < self.offers.needs[key]
        self.offers.needs[key] = need
        if is_smaller:
            self.take(self.offers.pool.reconsider(*key))

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        pool = self.offers.pool
        waiting = {key for key, held in self.held.items() if held}
        assert pool.num_free == 4 - len(self.offers.taken)
        assert not [key for key in waiting if self.offers.needs[key] <= pool.num_free]
        for chunk in range(3):
            of_groups = [len(self.held[chunk, group]) for group in range(2)]
            assert [pool.num_held_of(chunk, group) for group in range(2)] == of_groups
            assert pool.holds(chunk) == (sum(of_groups) > 0)
        pool.check_invariants()


TestAnyOrder = AnyOrder.TestCase


def hold_without_a_queue(pool: ReceivePool) -> None:
    for queue in pool._queues.values():
        queue.clear()


def queue_what_is_not_held(pool: ReceivePool) -> None:
    pool._held.clear()


def hold_no_ticket(pool: ReceivePool) -> None:
    pool._held[0][0].tickets.clear()


def hold_no_group(pool: ReceivePool) -> None:
    pool._held[5] = {}


def free_twice(pool: ReceivePool) -> None:
    pool._free += pool._free


@pytest.mark.parametrize(
    "break_it",
    [hold_without_a_queue, queue_what_is_not_held, hold_no_ticket, hold_no_group, free_twice],
    ids=lambda each: each.__name__,
)
def test_a_pool_that_contradicts_itself_is_caught(break_it: Callable[[ReceivePool], None]) -> None:
    offers = Offers(2)
    offers.offer("a", 9)
    offers.offer("b", 8)
    offers.offer("c", 0)
    offers.needs[0, 0] = EARLY
    offers.release()
    offers.needs[0, 0] = ADDS
    offers.pool.check_invariants()
    break_it(offers.pool)
    with pytest.raises(InvariantError):
        offers.pool.check_invariants()
