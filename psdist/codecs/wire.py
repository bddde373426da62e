"""What a run's messages carry: the codec of each direction, and where its seeds and states are.

wire = Wire(push=codec, reply=RAW, seed=config.seed)     # or RAW_WIRE
rule = payload_rule(wire.push, partition)                # for the receiver's state machine
encoder = Encoder(codec, seed=wire.seed, sender=group)   # for the sender, one for all its chunks
num_bytes = encoder.encode(chunk, clock, values, frame_memory)
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psdist.codecs.base import Codec
from psdist.codecs.checks import NO_CHECKS, Checks
from psdist.codecs.raw import RAW, Raw
from psdist.errors import InvariantError
from psdist.protocol.partition import DTYPE_CODES, Partition
from psdist.protocol.payloads import PayloadRule

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Initial values are always raw."""

    push: Codec | Raw
    reply: Codec | Raw
    seed: int
    """The run's: whatever is random in an encoding is the same when the run is repeated."""
    checks: Checks = NO_CHECKS

    def __post_init__(self) -> None:
        if not isinstance(self.reply, Raw) and self.reply.has_state:
            raise InvariantError(
                f"replies by {self.reply.name}: they go to several workers, who have not all had "
                "the ones before, so an encoding must not depend on those"
            )


ANY_SERVER = -1
"""The sender of a reply, for its seed: the same parameters get the same bytes from whoever has
them."""
RAW_WIRE = Wire(push=RAW, reply=RAW, seed=0)


def payload_rule(codec: Codec | Raw, partition: Partition) -> PayloadRule:
    """What a receiver of this codec takes."""
    sizes = [codec.sizes(chunk) for chunk in partition.chunks]
    return PayloadRule(
        codec=codec.code,
        name=codec.name,
        dtypes=tuple(int(DTYPE_CODES[chunk.dtype]) for chunk in partition.chunks),
        smallest=tuple(smallest for smallest, _ in sizes),
        largest=tuple(largest for _, largest in sizes),
    )


class Encoder:
    """A sender's encodings of its chunks, one after the other."""

    def __init__(self, codec: Codec, *, seed: int, sender: int) -> None:
        """``sender``: whose values these are; different ones get different seeds."""
        self.codec = codec
        self._seed = seed
        self._sender = sender
        self._states: dict[int, Tensor | None] = {}

    def encode(self, chunk: int, clock: int, values: Tensor, into: memoryview) -> int:
        """Encode what ``chunk`` is at ``clock``; the bytes used."""
        encoded = self.codec.encode(
            values,
            into,
            state=self._states.get(chunk),
            seed=seed_of(self._seed, self._sender, chunk, clock),
        )
        if self.codec.has_state:
            self._states[chunk] = encoded.state
        return encoded.num_bytes


def seed_of(run_seed: int, sender: int, chunk: int, clock: int) -> int:
    """63 bits that look independent for different arguments, and are the same on all machines."""
    text = struct.pack("<4q", run_seed, sender, chunk, clock)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
