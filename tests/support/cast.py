"""Codecs for tests: float32 values in 16 bits on the wire. Runs are not configured with them.

Cast("float16")             # rounded to nearest
Dithered()                  # bfloat16, up or down by chance, right on average: uses the seed
Remembering("bfloat16")     # what is left out is added the next time: uses the state
"""

from __future__ import annotations

import torch

from psdist.codecs.base import Encoded
from psdist.errors import ProtocolError
from psdist.protocol.memory import as_tensor, torch_dtype
from psdist.protocol.partition import Chunk

CODES = {"float16": 200, "bfloat16": 201}


class Cast:
    has_state = False

    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self.code = CODES[dtype]
        self._dtype = torch_dtype(dtype)

    def sizes(self, chunk: Chunk) -> tuple[int, int]:
        return 2 * chunk.length, 2 * chunk.length

    def encode(
        self, values: torch.Tensor, into: memoryview, *, state: torch.Tensor | None, seed: int
    ) -> Encoded:
        assert state is None
        as_tensor(into, self.name, len(values)).copy_(self.rounded(values, seed))
        return Encoded(2 * len(values))

    def decode(self, payload: memoryview, into: torch.Tensor) -> None:
        if len(payload) != 2 * len(into):
            raise ProtocolError(f"{len(payload)} bytes are not {len(into)} values of {self.name}")
        into.copy_(as_tensor(payload, self.name, len(into)))

    def rounded(self, values: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002
        """``values`` as a receiver will have them, in their own dtype."""
        return values.to(self._dtype).to(values.dtype)


class Dithered(Cast):
    def __init__(self) -> None:
        super().__init__("bfloat16")

    def rounded(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        # bfloat16 is the upper half of a float32: whatever is added to the lower half may carry.
        chance = torch.randint(
            0,
            1 << 16,
            values.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.int32,
        )
        return ((values.view(torch.int32) + chance) & ~0xFFFF).view(torch.float32)


class Remembering(Cast):
    has_state = True

    def encode(
        self, values: torch.Tensor, into: memoryview, *, state: torch.Tensor | None, seed: int
    ) -> Encoded:
        wanted = values if state is None else values + state
        encoded = super().encode(wanted, into, state=None, seed=seed)
        return Encoded(encoded.num_bytes, wanted - self.rounded(wanted, seed))
