"""What each reader of a shard holds, where groups hold different versions: x^_g.

In ssp and async a reply goes to one group, whose last one was of another version than the other
groups'. So a server keeps, of every chunk and every worker that has it in its slice, the sum of
what it was sent; a reply is the codec's C(x - x^_g), encoded for that reader alone, and what it
will decode is added to x^_g. What one reply leaves out is in the next difference. A reader that
does not hold what was sent to it last (it has joined, it has said that it differs, it was sent that
by a server that has died) gets all.

    copies = ReaderCopies(wire)
    num_bytes = copies.encode(coding, reply, payload, values=buffer, memory=chunk_memory)
    copies.held_by(worker_id(3), chunk)        # what that worker computes on

Costs the parameters once for each group, in the workers' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psdist.codecs.chunks import ChunkCoding, Form
from psdist.codecs.seeds import seed_of, sender_to
from psdist.codecs.wire import Wire
from psdist.protocol.ids import worker_of
from psdist.servers.protocol.actions import Reply
from psdist.servers.shard.chunk_memory import ChunkMemory


@dataclass(slots=True)
class _Copy:
    values: torch.Tensor
    """In the workers' dtype, on the CPU."""
    version: int
    """Of the reply that was sent last."""


class ReaderCopies:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._copies: dict[int, dict[int, _Copy]] = {}
        """Chunk -> peer."""

    def encode(
        self,
        coding: ChunkCoding,
        reply: Reply,
        into: memoryview,
        *,
        values: torch.Tensor,
        memory: ChunkMemory,
    ) -> int:
        """The payload of ``reply``; its bytes. ``values``: the buffer that the reply reads, in the
        workers' dtype."""
        chunk, peer = reply.token.chunk, reply.token.peer
        of_chunk = self._copies.setdefault(chunk, {})
        copy = of_chunk.get(peer)
        if copy is None or reply.held != copy.version:
            of_chunk[peer] = _Copy(values.clone(), reply.version)
            return coding.encode_raw(values, into)
        whole = memory.values.to("cpu")
        seed = seed_of(self._wire.seed, sender_to(worker_of(peer)), chunk, reply.clock)
        num_bytes = coding.encode(
            whole - copy.values.to(torch.float32), into, whole=whole, seed=seed, form=Form.CHANGE
        )
        coding.read(into[:num_bytes]).change(copy.values)
        copy.version = reply.version
        if self._wire.is_compared(chunk, reply.clock):
            coding.add_checksum(into, copy.values)
        return num_bytes

    def held_by(self, peer: int, chunk: int) -> torch.Tensor | None:
        """None where it holds all of what the buffers have, or nothing."""
        copy = self._copies.get(chunk, {}).get(peer)
        return copy.values if copy is not None else None

    def forget(self, chunk: int) -> None:
        """Its values were set: they come in full."""
        self._copies.pop(chunk, None)

    @property
    def num_bytes(self) -> int:
        return sum(copy.values.nbytes for each in self._copies.values() for copy in each.values())
