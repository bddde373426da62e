"""Which payloads a receiver takes: those of one codec, of a size that the chunk may have.

    if not rule.takes(header):
        raise ProtocolError(f"worker 3: {describe_peer(peer)} {rule.refusal(header)}")

The codecs themselves are psdist.codecs; state machines know their numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.protocol.header import Header
from psdist.protocol.rounds import Turns


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadRule:
    codec: int
    name: str
    dtypes: tuple[int, ...]
    """Dtypes of the values before encoding, by chunk (psdist.protocol.header.Dtype)."""
    smallest: tuple[int, ...]
    """Bytes, by chunk."""
    largest: tuple[int, ...]
    keeps_versions: bool = True
    """Whether a receiver has the sender's values afterwards, bit by bit, so that it can say which
    version it holds."""
    levels: tuple[PayloadRule, ...] = ()
    """All that rule in some round, this one first; nothing where it is the same in every round."""
    turns: Turns | None = None
    """Which of them in which."""

    @classmethod
    def of_nothing(cls) -> PayloadRule:
        """Before there are chunks."""
        return cls(codec=0, name="raw", dtypes=(), smallest=(), largest=())

    @property
    def is_raw(self) -> bool:
        """Whether every payload is the values themselves."""
        return not self.codec

    def at(self, clock: int) -> PayloadRule:
        """Return the rule for messages of this round."""
        return self if self.turns is None else self.levels[self.turns.at(clock)]

    def takes(self, header: Header) -> bool:
        turns, chunk = self.turns, header.chunk
        rule = self if turns is None else self.levels[turns.at(header.clock)]
        return (
            header.codec == rule.codec
            and header.dtype == rule.dtypes[chunk]
            and rule.smallest[chunk] <= header.length <= rule.largest[chunk]
        )

    def refusal(self, header: Header) -> str:
        """Describe what the sender has done wrong, for people."""
        rule = self.at(header.clock)
        when = f" in round {header.clock}" if self.turns is not None else ""
        smallest, largest = rule.smallest[header.chunk], rule.largest[header.chunk]
        size = str(largest) if smallest == largest else f"{smallest} to {largest}"
        return (
            f"sent {header.length} bytes of chunk {header.chunk} by codec {header.codec}, dtype "
            f"{header.dtype}; {size} bytes by codec {rule.codec} ({rule.name}), dtype "
            f"{rule.dtypes[header.chunk]} are expected{when}; do all ranks run the same version of "
            "psdist with the same settings?"
        )
