"""Which payloads a receiver takes: those of one codec, of a size that the chunk may have.

    if not rule.takes(header):
        raise ProtocolError(f"worker 3: {describe_peer(peer)} {rule.refusal(header)}")

The codecs themselves are psdist.codecs; state machines know their numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.protocol.header import Header


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadRule:
    codec: int
    name: str
    dtypes: tuple[int, ...]
    """Of the values before they were encoded, by chunk (psdist.protocol.header.Dtype)."""
    smallest: tuple[int, ...]
    """Bytes, by chunk."""
    largest: tuple[int, ...]
    keeps_versions: bool = True
    """Whether a receiver has the sender's values afterwards, bit by bit, so that it can say which
    version it holds."""

    @classmethod
    def of_nothing(cls) -> PayloadRule:
        """Before there are chunks."""
        return cls(codec=0, name="raw", dtypes=(), smallest=(), largest=())

    def takes(self, header: Header) -> bool:
        chunk = header.chunk
        return (
            header.codec == self.codec
            and header.dtype == self.dtypes[chunk]
            and self.smallest[chunk] <= header.length <= self.largest[chunk]
        )

    def refusal(self, header: Header) -> str:
        """What the sender has done wrong, for people."""
        smallest, largest = self.smallest[header.chunk], self.largest[header.chunk]
        size = str(largest) if smallest == largest else f"{smallest} to {largest}"
        return (
            f"sent {header.length} bytes of chunk {header.chunk} by codec {header.codec}, dtype "
            f"{header.dtype}; {size} bytes by codec {self.codec} ({self.name}), dtype "
            f"{self.dtypes[header.chunk]} are expected; do all ranks run the same version of "
            "psdist with the same settings?"
        )
