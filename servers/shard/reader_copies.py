"""Relative replies where groups hold different versions (ssp, async): one copy per reader, x^_g.

A reply goes to one group, whose previous reply had another version than the other groups'. So a
server keeps, for each chunk and each worker that has it in its slice, the sum of all replies to it.
A reply is the codec's C(x - x^_g), encoded for that reader alone, and the decoded result is added
to x^_g. The next difference contains the part that a reply leaves out. A reader whose version is
not that of its last reply gets all values: it has joined, or a check failed, or a server that has
failed since had sent the reply.

    copies = ReaderCopies(wire, codings)
    num_bytes = copies.encode(reply, chunk_memory, payload)
    copies.held_by(worker_id(3), chunk)        # the parameters that the worker computes on

Costs the parameters once for each group, in the workers' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psdist.codecs import seed_of, sender_to
from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.wire import Wire
from psdist.protocol.ids import worker_of
from psdist.servers.protocol.actions import Reply
from psdist.servers.shard.chunk_memory import ChunkMemory
from psdist.servers.shard.replies import CodedReplies


@dataclass(slots=True)
class _Copy:
    values: torch.Tensor
    """In the workers' dtype, on the CPU."""
    version: int
    """The version of the last reply."""


class ReaderCopies(CodedReplies):
    def __init__(self, wire: Wire, codings: ChunkCodings) -> None:
        super().__init__(wire, codings)
        self._copies: dict[int, dict[int, _Copy]] = {}
        """Chunk -> peer."""

    def encode(self, reply: Reply, memory: ChunkMemory, into: memoryview) -> int:
        chunk, peer, values = reply.token.chunk, reply.token.peer, memory.buffer(reply.token.buffer)
        coding = self.coding(chunk, reply.clock)
        of_chunk = self._copies.setdefault(chunk, {})
        copy = of_chunk.get(peer)
        if copy is None or reply.held != copy.version:
            of_chunk[peer] = _Copy(values.clone(), reply.version)
            return coding.encode_raw(values, into)
        whole = memory.values.to("cpu")
        seed = seed_of(self._wire.seed, sender_to(worker_of(peer)), chunk, reply.clock)
        num_bytes = self.encode_change(coding, whole, copy.values, into, seed=seed)
        copy.version = reply.version
        if self._wire.is_compared(chunk, reply.clock):
            coding.add_checksum(into, copy.values)
        return num_bytes

    def held_by(self, peer: int, chunk: int) -> torch.Tensor | None:
        copy = self._copies.get(chunk, {}).get(peer)
        return copy.values if copy is not None else None

    def on_load(self, chunk: int) -> None:
        """The next reply to each reader has all values."""
        self._copies.pop(chunk, None)

    @property
    def num_bytes(self) -> int:
        return sum(copy.values.nbytes for each in self._copies.values() for copy in each.values())
