"""Which offered push is received into which of a server's few buffers, and when; pure.

A server has a fixed number of receive slots, whatever the number of workers. An offer that finds
no slot stays with its sender (it is not received), so memory is bounded by the slots.

Each offer *needs* a number of free slots, told by the state machine:

    1  it will be folded at once into an accumulator that exists, and its slot is then free again
    2  it starts the accumulator of the frontier chunk (the lowest one of the lowest iteration)
    3  it starts another accumulator
    4  it comes before its turn and would only wait in the slot

So the last slot always serves folding and the last but one always serves the frontier. Workers
send a server's chunks in ascending order, hence every group has the frontier chunk on its way, it
completes, and the next chunk becomes the frontier: no deadlock with 2 slots or more. In ssp and
async every push is applied on arrival and needs 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from psdist.errors import InvariantError
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import Accept, Action

ADDS, FRONTIER, STARTS, EARLY = 1, 2, 3, 4

NO_GROUP = -1
"""Whose offer the chief's initial values are; they need one slot, which is free again at once."""

Key = tuple[int, int]  # (chunk, group)


class ReceivePool:
    def __init__(self, slots: Sequence[Frame], *, need: Callable[[int, int], int]) -> None:
        """``need(chunk, group)`` tells how many free slots the next offer of the group needs."""
        self.num_slots = len(slots)
        self._free = list(slots)
        self._need = need
        self._held: dict[Key, deque[Any]] = {}
        # Entries may be stale (taken meanwhile, or of another need by now): looked at when popped.
        self._queues: dict[int, deque[Key]] = {n: deque() for n in (ADDS, FRONTIER, STARTS, EARLY)}
        self.most_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return sum(len(tickets) for tickets in self._held.values())

    def offer(self, chunk: int, group: int, ticket: Any) -> list[Action]:
        """A message is offered: receive it now, or hold its ticket."""
        if (chunk, group) not in self._held and len(self._free) >= self._need(chunk, group):
            return [Accept(ticket, self._use_slot())]
        self._held.setdefault((chunk, group), deque()).append(ticket)
        return self.reconsider(chunk, group)

    def reconsider(self, chunk: int, group: int) -> list[Action]:
        """The need of this group's offer may have changed (its turn came)."""
        key = (chunk, group)
        if key not in self._held:
            return []
        need = self._need(chunk, group)
        if len(self._free) >= need:
            return [self._take(key)]
        self._queues[need].append(key)
        return []

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
                key = queue.popleft()
                if key not in self._held:
                    continue
                now_needs = self._need(*key)
                if len(self._free) >= now_needs:
                    accepts.append(self._take(key))
                else:
                    self._queues[now_needs].append(key)
        return accepts

    def _take(self, key: Key) -> Accept:
        tickets = self._held[key]
        ticket = tickets.popleft()
        if not tickets:
            del self._held[key]
        return Accept(ticket, self._use_slot())

    def _use_slot(self) -> Frame:
        slot = self._free.pop()
        used = self.num_slots - len(self._free)
        if used > self.most_used:
            self.most_used = used
        return slot
