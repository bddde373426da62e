"""Codecs that keep each value by itself: as it is, or rounded to 16 bits.

Plain()            # float32; for pushes that are skipped without another codec
Exact()            # no codec, in rounds of a run that has one in others
Cast("fp16")       # to nearest; values that are too large become the largest
Cast("bf16")
"""

from __future__ import annotations

import torch

from psdist.codecs import OnDevice, require_size
from psdist.protocol.header import CodecCode


class Plain:
    code = int(CodecCode.PLAIN)
    name = "plain"

    def num_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        return values.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        return payload.view(torch.float32)


class Exact(Plain):
    """No codec, in rounds of a run that has one in others: values in the workers' dtype, after the
    head of every payload of such a run."""

    name = "none"


_DTYPES = {
    "fp16": (CodecCode.FP16, torch.float16),
    "bf16": (CodecCode.BF16, torch.bfloat16),
}


class Cast(OnDevice):
    def __init__(self, name: str) -> None:
        self.name = name
        code, self._dtype = _DTYPES[name]
        self.code = int(code)
        self._largest = torch.finfo(self._dtype).max

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        # Two maxima are read faster than infinities are looked for in what is rounded.
        if not float(torch.max(values.amax(), -values.amin())) <= self._largest:
            return self._rounded(values).view(torch.uint8)
        return values.to(self._dtype).view(torch.uint8)

    def encode_on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = self._rounded(values)
        return rounded.view(torch.uint8), rounded.to(torch.float32)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return any values rounded; NaN has the same bits on every processor."""
        clamped = values.clamp(-self._largest, self._largest)
        rounded = torch.where(values.isinf(), values, clamped).to(self._dtype)
        return rounded.masked_fill_(values.isnan(), torch.nan)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        return payload.view(self._dtype).to(torch.float32)
