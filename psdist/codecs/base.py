"""The seam for codecs: from the values of one chunk to the bytes of a payload, and back.

A codec is *pure*: what it gives depends on its arguments alone. What it must know from one encoding
to the next is a state that the sender keeps for each chunk and hands in; what is random comes from
a seed. So an encoding can be taken back, repeated and tested.

    encoded = codec.encode(values, frame_memory, state=None, seed=7)
    codec.decode(frame_memory[: encoded.num_bytes], other_values)

:class:`psdist.codecs.raw.Raw` is no codec in this sense: there the values' own memory is the
payload, and nothing is encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from psdist.protocol.partition import Chunk

if TYPE_CHECKING:
    from torch import Tensor


class Encoded(NamedTuple):
    """``num_bytes`` of the memory were used; ``state`` is that for the chunk's next encoding."""

    num_bytes: int
    state: Tensor | None = None


class Codec(Protocol):
    @property
    def code(self) -> int:
        """Names the codec in headers; not 0, which is raw."""
        ...

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether an encoding depends on the ones before."""
        ...

    def sizes(self, chunk: Chunk) -> tuple[int, int]:
        """The smallest and the largest payload that the chunk may have, in bytes."""
        ...

    def encode(
        self, values: Tensor, into: memoryview, *, state: Tensor | None, seed: int
    ) -> Encoded:
        """``values``: 1-D, in the workers' dtype, unchanged here; ``into``: as many bytes as the
        chunk's largest payload; ``state``: what the chunk's last encoding gave, None at first."""
        ...

    def decode(self, payload: memoryview, into: Tensor) -> None:
        """Write what was encoded, rounded to the dtype of ``into``, to all of ``into`` (1-D).
        Raises :class:`ProtocolError` where the payload cannot be what ``encode`` made of so many
        values."""
        ...
