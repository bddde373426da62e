"""How a server writes the payload of a reply: raw, coded by itself, or as the last step's change.

    replies = CodedReplies(wire, codings)
    num_bytes = replies.encode(reply, chunk_memory, payload)

Replies relative to each reader's own copy: psdist.servers.shard.reader_copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psdist.codecs import ANY_SERVER, seed_of
from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Form
from psdist.codecs.wire import Wire
from psdist.errors import InvariantError
from psdist.protocol.memory import allocate, as_bytes
from psdist.servers.protocol.actions import Reply, Step
from psdist.servers.shard import ShardStage
from psdist.servers.shard.chunk_memory import ChunkMemory
from psdist.servers.shard.regions import HELD


class RawReplies(ShardStage):
    """The payload is the parameter buffer itself."""

    def payload(self, memory: ChunkMemory, buffer: int) -> memoryview:
        """Return memory for the payload of replies that read this buffer."""
        return as_bytes(memory.buffer(buffer))

    def coding(self, chunk: int, clock: int) -> ChunkCoding:
        """Return the coding of replies of this round."""
        raise InvariantError(f"chunk {chunk}: replies of round {clock} are raw")

    def encode(self, reply: Reply, memory: ChunkMemory, into: memoryview) -> int:
        """Write a coded payload, and return its bytes."""
        del memory, into
        raise InvariantError(f"chunk {reply.token.chunk}: its replies are raw")

    def held_by(self, peer: int, chunk: int) -> torch.Tensor | None:
        """Return the parameters that ``peer`` alone holds: 1-D, the workers' dtype, on the CPU.
        None if it holds a buffer's content."""
        del peer, chunk
        return None


class CodedReplies(RawReplies):
    """Each payload encodes the parameters themselves."""

    def __init__(self, wire: Wire, codings: ChunkCodings) -> None:
        from psdist.codecs.host_kernels import kernels_for  # compiles; only for a codec

        self._wire = wire
        self.codings = codings
        self._kernels = kernels_for(codings.codecs)

    def payload(self, memory: ChunkMemory, buffer: int) -> memoryview:  # noqa: ARG002 - one size
        return allocate(self.codings.largest(memory.chunk.index))

    def coding(self, chunk: int, clock: int) -> ChunkCoding:
        return self.codings.at(clock)[chunk]

    def encode(self, reply: Reply, memory: ChunkMemory, into: memoryview) -> int:
        chunk, values = reply.token.chunk, memory.buffer(reply.token.buffer)
        seed = seed_of(self._wire.seed, ANY_SERVER, chunk, reply.clock)
        coding = self.coding(chunk, reply.clock)
        return coding.encode(values.to(torch.float32), into, whole=values, seed=seed)

    def encode_change(
        self,
        coding: ChunkCoding,
        values: torch.Tensor,
        held: torch.Tensor,
        into: memoryview,
        *,
        seed: int,
    ) -> int:
        """Encode how ``values`` (1-D, the server's dtype, on the CPU) differ from ``held`` (in the
        workers'), which becomes the result of decoding it. Return the bytes of the payload."""
        if self._kernels is not None:
            num_bytes = self._kernels.encode_change(coding, values, held, into)
            if num_bytes:
                return num_bytes
        change = values - held.to(torch.float32)
        num_bytes = coding.encode(change, into, whole=values, seed=seed, form=Form.CHANGE)
        coding.read(into[:num_bytes]).change(held)
        return num_bytes


class ChangeReplies(CodedReplies):
    """The change of each step is encoded once for all readers, which hold the same (sync)."""

    def after_step(self, step: Step, memory: ChunkMemory) -> None:
        """Encode how the values differ from the values that workers hold. ``memory.held`` becomes
        the result of decoding it."""
        chunk, clock = memory.chunk.index, step.contributions[0].clock
        coding = self.coding(chunk, clock)
        held, values = memory.held, memory.values.to("cpu")
        if step.target != step.source:
            held.copy_(memory.buffer(step.source))
        if memory.change_memory is None:
            memory.change_memory = self.payload(memory, step.target)
        payload = memory.change_memory
        seed = seed_of(self._wire.seed, ANY_SERVER, chunk, clock)
        num_bytes = self.encode_change(coding, values, held, payload, seed=seed)
        memory.change, memory.change_clock = payload[:num_bytes], clock
        if self._wire.is_compared(chunk, clock):
            coding.add_checksum(memory.change, held)

    def encode(self, reply: Reply, memory: ChunkMemory, into: memoryview) -> int:
        chunk, change = reply.token.chunk, memory.change
        coding = self.coding(chunk, reply.clock)
        # The round of the reply chooses its coding, and may be later than the round of the step.
        is_same = self.coding(chunk, memory.change_clock) is coding
        if change is None or reply.held != reply.version - 1 or not is_same:
            return coding.encode_raw(memory.buffer(reply.token.buffer), into)
        into[: len(change)] = change
        return len(change)

    def saved(self, memory: ChunkMemory) -> Mapping[str, torch.Tensor]:
        return {HELD: memory.held}

    def restore(
        self, memory: ChunkMemory, saved: Sequence[tuple[slice, Mapping[str, torch.Tensor]]]
    ) -> None:
        memory.held.copy_(memory.values)
        for place, tensors in saved:
            if HELD in tensors:
                memory.held[place].copy_(tensors[HELD])
