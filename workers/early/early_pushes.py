"""The chunks of an iteration that leave before ``step()``: each when its last gradient is there.

Gradients come from autograd's hooks (``begin``, ``add``, ``stop``). The owner of the worker's loop
at that moment pushes (``push_ready``): a thread, or the hook itself, through ``ParameterSets`` of
psdist/prepared.py, which serves all sets. Chunks leave strictly in the
order that all groups share, so an incomplete chunk delays all later ones. From a GPU a chunk leaves
when its copy to the host is done, encoded there or raw; the owner of the loop polls for it.

    early = EarlyPushes(parts, parts.group.order.sorted(parts.group.mine))
    early.allow(chunks)                        # those that may leave, the first of the order
    early.begin(terms, frozen={3}, expected={5})
    early.add(piece)
    early.push_ready()
    early.sent                                 # chunk -> whether it left without bytes
    early.reset()                              # the iteration has ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from psdist.transfers import DONE, Copy, Mark
from psdist.workers.blocking import Parts
from psdist.workers.reduction import Terms


class EarlyPushes:
    _is_shared: ClassVar = False
    """True if other workers of the group may have gradients of pieces that are frozen here."""

    def __init__(self, parts: Parts, order: Sequence[int]) -> None:
        """``order``: this worker's chunks, as they leave."""
        _, group, self._flat, self._loop, self._values, _ = parts
        self.order = order
        self.terms: Terms | None = None
        """The terms of the iteration whose gradients come; None before the first gradient."""
        self.sent: dict[int, bool] = {}
        self.absent: frozenset[int] = frozenset()
        """Pieces that were announced without a gradient when the first chunk left."""
        self.is_stopped = False
        """True if the remaining chunks wait for ``step()``."""
        self.num_pushed = 0
        """Chunks pushed early in all iterations."""
        self.pieces_of = {
            chunk: sorted({segment.piece for segment in group.partition.chunks[chunk].segments})
            for chunk in order
        }
        self._chunks = group.partition.chunks
        self._sendable: Sequence[int] = ()
        self._chunks_of: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}
        """Chunk -> number of its pieces whose gradient has not come."""
        self._frozen: frozenset[int] = frozenset()
        self._expected: frozenset[int] = frozenset()
        self._ready: deque[tuple[int, Mark]] = deque()
        """Pieces whose gradient has come, with a mark of the time."""
        self._begun: Mark = None
        """The mark of the time when the terms were set."""
        self._marks: dict[int, list[Mark]] = {}
        """Chunk -> marks of the times when its gradients came."""
        self._copies: list[Copy] = []
        """Copies to the host, of the first chunks of the order."""

    def allow(self, num_chunks: int) -> None:
        """Let the first ``num_chunks`` of the order leave before ``step()``."""
        self._sendable = self.order[:num_chunks]
        self._chunks_of = {}
        for chunk in self._sendable:
            for piece in self.pieces_of[chunk]:
                self._chunks_of.setdefault(piece, []).append(chunk)

    @property
    def has_begun(self) -> bool:
        """True if parts of an iteration have left, under the terms of the first part."""
        return bool(self.sent)

    @property
    def given(self) -> Mapping[int, bool]:
        """Chunks whose gradients have left this worker -> True if without a gradient."""
        return self.sent

    @property
    def is_under_way(self) -> bool:
        """True if operations are under way that end without this worker: copies to the host, or in
        a group operations that wait for other workers."""
        has_more = len(self._copies) > len(self.sent)
        return has_more and self.terms is not None and not self.is_stopped

    def whole(self, num_chunks: int) -> int:
        """Return how many of the first ``num_chunks`` of the order can leave."""
        return num_chunks

    @property
    def pieces(self) -> Collection[int]:
        """Pieces with a part in a chunk that may leave."""
        return self._chunks_of.keys()

    # -- called by hooks -----------------------------------------------------------------------

    def begin(self, terms: Terms, *, frozen: frozenset[int], expected: frozenset[int]) -> None:
        """Begin an iteration at its first gradient. ``frozen``: pieces that get no gradient;
        ``expected``: pieces of the other chunks that are announced without a gradient."""
        self._frozen, self._expected = frozen, expected
        self._missing = {
            chunk: sum(piece not in frozen for piece in self.pieces_of[chunk])
            for chunk in self._sendable
        }
        for chunk, missing in self._missing.items():
            if missing or self._is_shared:  # else it leaves without bytes
                for piece in frozen.intersection(self.pieces_of[chunk]):
                    self._flat.clear_gradient(piece)
        self._begun = self._flat.mark()
        self.is_stopped = not terms.weight
        self.terms = terms  # last: from here on the loop's owner looks, in its own thread

    def add(self, piece: int) -> None:
        """Note that the gradient of a piece is in the flat memory, or will be after the device has
        done what this thread has requested."""
        self._ready.append((piece, self._flat.mark()))

    def stop(self) -> None:
        """Keep what has not left until ``step()``."""
        self.is_stopped = True

    # -- called by the owner of the loop -------------------------------------------------------

    def push_ready(self) -> bool:
        """Push the chunks that are complete; return True if there were any."""
        terms = self.terms  # first: what else belongs to an iteration is there before them
        has_pushed = False
        while terms is not None and self._is_complete(len(self.sent), terms):
            chunk = self._sendable[len(self.sent)]
            self._push(terms, chunk, self._frozen)
            has_pushed = True
        return has_pushed

    def _is_complete(self, number: int, terms: Terms) -> bool:
        """True if chunk ``number`` of the order, after all chunks before it, may leave now."""
        missing, ready = self._missing, self._ready
        while ready:
            piece, mark = ready.popleft()
            for chunk in self._chunks_of.get(piece, ()):
                missing[chunk] -= 1
                self._marks.setdefault(chunk, []).append(mark)
        if self.is_stopped or number >= len(self._sendable) or missing[self._sendable[number]]:
            return False
        chunk = self._sendable[number]
        if not self._is_on_host(number, terms):
            return False
        if not self._is_frozen(chunk) and not self._is_finite(chunk):
            self.is_stopped = True  # no such value reaches a server: step() says so
        return not self.is_stopped

    def _is_finite(self, chunk: int) -> bool:
        pushes = self._loop.pushes.encoding.on_device
        if pushes is not None:
            return pushes.is_finite(chunk)
        return self._flat.is_finite(self._chunks[chunk])

    def _is_on_host(self, number: int, terms: Terms) -> bool:
        """True if the copy of a complete chunk is done. Begins copies of all complete chunks."""
        copies, sendable = self._copies, self._sendable
        while len(copies) < len(sendable) and not self._missing[sendable[len(copies)]]:
            chunk = sendable[len(copies)]
            after = self._begun, *self._marks.pop(chunk, ())
            copies.append(self._begin_to_host(chunk, terms, after))
        return copies[number].is_done()

    def _begin_to_host(self, chunk: int, terms: Terms, after: Sequence[Mark]) -> Copy:
        pushes = self._loop.pushes.encoding.on_device
        if pushes is None:
            return self._flat.begin_to_host(self._chunks[chunk], after=after)
        if self._is_frozen(chunk):
            return DONE
        return pushes.begin(
            chunk,
            clock=terms.clock,
            hyper=terms.hyper,
            weight=terms.weight,
            absent=self._frozen | self._expected,
            after=after,
        )

    def _is_frozen(self, chunk: int) -> bool:
        return self._frozen.issuperset(self.pieces_of[chunk])

    def _push(self, terms: Terms, chunk: int, absent: frozenset[int]) -> None:
        """``terms``: the group's; ``absent``: pieces without a gradient in the group."""
        if not self.sent:
            self.absent = absent
            self._values.look_for_writes()
            self._loop.begin_iteration(
                clock=terms.clock,
                hyper=terms.hyper,
                absent=sorted(absent | self._expected),
                weight=terms.weight,
            )
        is_empty = absent.issuperset(self.pieces_of[chunk])
        self.sent[chunk] = is_empty
        self.num_pushed += 1
        self._loop.push_chunk(chunk, is_empty=is_empty)

    def reset(self) -> None:
        """Forget the iteration: the next one has not begun."""
        self.terms, self.is_stopped = None, False
        self.sent = {}
        self._ready.clear()
        self._marks.clear()
        self._copies.clear()
