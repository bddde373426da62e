"""Which offered push is received into which of a server's few buffers, and when; pure.

A server has a fixed number of receive slots, whatever the number of workers. An offer that finds
no slot stays with its sender (it is not received), so memory is bounded by the slots.

Each offer *needs* a number of free slots, told by the state machine:

    1  it will be folded at once into an accumulator that exists, and its slot is then free again
    2  it starts the accumulator of the frontier chunk (the first one of the lowest iteration)
    3  it starts another accumulator
    4  it comes before its turn and would only wait in the slot

and one that is too far ahead of the frontier needs more than there are: it would take the slots of
groups that are behind, and all other groups wait for these.

Why that cannot deadlock, with 2 slots or more. A chunk is *passed* in an iteration when it is
stepped, or (clipping) held for the joint norm: either way the pushes of all groups that count were
received, and no slot holds anything of it. The *frontier* is the first chunk that is not passed,
of the lowest iteration, in the order of 1.

1. All groups send a server's chunks in one order that they share, any one, iteration after
   iteration: the order in which the frontier moves. A push out of it is refused (state).
2. A credit comes back when a push is received (by its reply, or by a receipt where the reply must
   wait; who may push everything at once needs no receipt). So a push that is not received keeps
   its credit, every other one has given it back, and with 1 each group's push of the frontier
   chunk is offered, or is still to be pushed, or its sender has stopped.
3. A group that is still to push it computes, or waits for replies to the iteration before:
   chunks leave one by one as they become ready, each after its own reply. No group waits for a
   reply to an iteration that it has not pushed to the end (the worker's
   ``require_handed_over``), nor in a collective. So by induction over
   iterations the frontier's push comes.
4. The last slot always folds and the last but one always serves the frontier, so the push of the
   group in turn is received, then the next one's. The chunk completes and is passed.

Nothing in this waits for another server or another set: slots and credits are those of one server
in one set. Only when every chunk here is passed are held ones waited for, and then the pushes of
no server wait for slots or credits of this one: each server passes all its chunks, tells its
squares, and every server steps. In ssp and async every push is applied on arrival and needs 1.

Payloads of varying size (rows of tables) change nothing in this: a slot has the capacity of the
largest, a push takes one slot whatever its size, and the system gives a slot's pages when they are
first written. Pulls of rows, and messages before a push that have more of its rows, take no slot:
psdist.servers.tables.service receives each at once, in memory of its own. So the receipts that a
worker awaits before such a push (3) need nothing of any other group.

Credits bound the offers of a worker that wait to be received. Parked replies are bookkeeping, a few
words each. Groups that send in opposite orders are played in
tests/unit/servers/chunks/test_shared_order.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.errors import InvariantError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import Accept, Action

ADDS, FRONTIER, STARTS, EARLY = 1, 2, 3, 4
TOO_FAR = 2**31

Key = tuple[int, int | None]
"""Chunk and group. None: the chief's initial values, whose slot is free again at once."""


@dataclass(slots=True)
class _WaitingOffers:
    """The offers of one group about one chunk, in their order."""

    tickets: deque[tuple[int, Any]]
    """Each with the peer whose it is."""
    need: int = 0
    """In whose queue they wait; 0 for none, until they are considered again."""


class ReceivePool:
    def __init__(self, slots: Sequence[Frame], *, need: Callable[[int, int | None], int]) -> None:
        """``need(chunk, group)`` tells how many free slots the next offer of the group needs."""
        self.num_slots = len(slots)
        self._free = list(slots)
        self._need = need
        self._held: dict[int, dict[int | None, _WaitingOffers]] = {}
        # Ordered sets, by what the offers needed when they were looked at last.
        self._queues: dict[int, dict[Key, None]] = {
            n: {} for n in (ADDS, FRONTIER, STARTS, EARLY, TOO_FAR)
        }
        self.holds_too_far = self._queues[TOO_FAR]
        """Not empty if offers wait that were too far ahead when they were looked at last."""
        self._coming: dict[Frame, int] = {}
        """Slot that is being filled -> its sender."""
        self.most_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_held_of(self, chunk: int, group: int | None) -> int:
        held = self._held.get(chunk, {}).get(group)
        return len(held.tickets) if held else 0

    def holds(self, chunk: int) -> bool:
        """Whether an offer about the chunk is held."""
        return chunk in self._held

    def offer(self, chunk: int, group: int | None, ticket: Any, peer: int = -1) -> list[Action]:
        """``peer`` offers a message: receive it now, or hold its ticket."""
        held = self._held.get(chunk)
        if (held is None or group not in held) and len(self._free) >= self._need(chunk, group):
            return [Accept(ticket, self._use_slot(peer))]
        if held is None:
            held = self._held[chunk] = {}
        if group not in held:
            held[group] = _WaitingOffers(deque())
        held[group].tickets.append((peer, ticket))
        return self.reconsider(chunk, group)

    def has_come(self, slot: Frame) -> bool:
        """The slot is filled; False if its message was given up."""
        return self._coming.pop(slot, None) is not None

    def forget_offers(self, peers: Collection[int]) -> None:
        """Nothing that these peers offer is received any more."""
        for chunk, groups in tuple(self._held.items()):
            for group, held in tuple(groups.items()):
                others = deque(each for each in held.tickets if each[0] not in peers)
                if len(others) == len(held.tickets):
                    continue
                held.tickets = others
                if not others:
                    self._forget(chunk, group)

    def give_up(self, peers: Collection[int]) -> list[Action]:
        """No payload of these peers comes any more: the slots that wait for one are free."""
        lost = [slot for slot, sender in self._coming.items() if sender in peers]
        actions: list[Action] = []
        for slot in lost:
            del self._coming[slot]
            actions += self.release(slot)
        return actions

    def reconsider(self, chunk: int, group: int | None) -> list[Action]:
        """The need of this group's offer may have changed (its turn came)."""
        held = self._held.get(chunk)
        if held is None or group not in held:
            return []
        need = self._need(chunk, group)
        if len(self._free) >= need:
            return [self._take(chunk, group)]
        self._wait((chunk, group), held[group], need)
        return []

    def reconsider_all(self, chunk: int) -> list[Action]:
        """As :meth:`reconsider`, for the offers of all groups about the chunk."""
        groups = tuple(self._held.get(chunk, ()))
        return [action for group in groups for action in self.reconsider(chunk, group)]

    def release(self, slot: Frame) -> list[Action]:
        """A slot is free again: accept held offers that now fit."""
        self._free.append(slot)
        if len(self._free) > self.num_slots:
            raise InvariantError("a receive slot was released twice")
        accepts: list[Action] = []
        if not self._held:
            return accepts
        for need, queue in self._queues.items():
            while queue and len(self._free) >= need:
                chunk, group = key = next(iter(queue))
                now_needs = self._need(chunk, group)
                if len(self._free) >= now_needs:
                    accepts.append(self._take(chunk, group))
                else:
                    self._wait(key, self._held[chunk][group], now_needs)
        return accepts

    def _wait(self, key: Key, held: _WaitingOffers, need: int) -> None:
        if need != held.need:
            if held.need:
                del self._queues[held.need][key]
            self._queues[need][key] = None
            held.need = need

    def _take(self, chunk: int, group: int | None) -> Accept:
        held = self._held[chunk][group]
        peer, ticket = held.tickets.popleft()
        if held.need:
            del self._queues[held.need][chunk, group]
            held.need = 0
        if not held.tickets:
            self._forget(chunk, group)
        return Accept(ticket, self._use_slot(peer))

    def _forget(self, chunk: int, group: int | None) -> None:
        """No offer of the group about the chunk is held any more."""
        groups = self._held[chunk]
        if need := groups[group].need:
            del self._queues[need][chunk, group]
        del groups[group]
        if not groups:
            del self._held[chunk]

    def _use_slot(self, peer: int) -> Frame:
        slot = self._free.pop()
        self._coming[slot] = peer
        num_used = self.num_slots - len(self._free)
        if num_used > self.most_used:
            self.most_used = num_used
        return slot

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in what is held."""
        queued = {key: need for need, queue in self._queues.items() for key in queue}
        held = {
            (chunk, group): each.need
            for chunk, groups in self._held.items()
            for group, each in groups.items()
        }
        if queued != {key: need for key, need in held.items() if need}:
            raise InvariantError(f"offers wait as {queued}, but are held as {held}")
        if not all(self._held.values()) or not all(
            each.tickets for groups in self._held.values() for each in groups.values()
        ):
            raise InvariantError("an offer is held without a ticket")
        if len({id(slot) for slot in self._free}) != len(self._free):
            raise InvariantError("a receive slot is free twice")
