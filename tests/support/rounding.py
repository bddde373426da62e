"""Codecs for tests: float32 values in 16 bits on the wire. Runs are not configured with them.

Rounding("float16")         # to nearest
Dithered()                  # bfloat16, up or down by chance, right on average: uses the seed
"""

from __future__ import annotations

import torch

from psdist.codecs import require_size
from psdist.protocol.memory import torch_dtype

CODES = {"float16": 200, "bfloat16": 201}


class Rounding:
    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self.code = CODES[dtype]
        self._dtype = torch_dtype(dtype)

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        return self.rounded(values, seed).to(self._dtype).view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        return payload.view(self._dtype).to(torch.float32)

    def rounded(self, values: torch.Tensor, seed: int) -> torch.Tensor:  # noqa: ARG002
        """``values`` as a receiver will have them, in their own dtype."""
        return values.to(self._dtype).to(values.dtype)


class Dithered(Rounding):
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
