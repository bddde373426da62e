"""sign: one bit for each value, and the mean magnitude of its block of 256.

The error is the vector less its projection on its signs, so it is never larger than the vector:
|x - C(x)|^2 = |x|^2 - n mean|x|^2 (Karimireddy et al., arXiv 1901.09847, with scaled signs). A zero
has the sign that its sign bit says, so it is decoded as plus or minus the mean: this codec is of
use with feedback only.
"""

from __future__ import annotations

import numpy as np
import torch

from psdist.codecs import OnDevice
from psdist.codecs.blocks import (
    BLOCK,
    DOWN,
    LARGEST,
    blocks_of,
    counts_of,
    joined,
    num_blocks,
    parted,
    sums_of,
)
from psdist.protocol.header import CodecCode

_SIGNS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype("f4")
"""[256, 8]: the signs of each byte."""


class Sign(OnDevice):
    code = int(CodecCode.SIGN)
    name = "sign"

    def num_bytes(self, num_values: int) -> int:
        return num_blocks(num_values) * (4 + BLOCK // 8)

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        blocks, counts = blocks_of(values), counts_of(values)
        magnitudes = blocks.abs()
        scales = sums_of(magnitudes).div_(counts)
        if not bool(scales.isfinite().all()):
            scales = _of_any_size(scales, magnitudes, counts)
        bits = np.packbits(np.signbit(blocks.numpy()).reshape(-1))
        return joined(scales, torch.from_numpy(bits))

    def encode_on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, counts = blocks_of(values), counts_of(values)
        magnitudes = blocks.abs()
        scales = _of_any_size(sums_of(magnitudes).div_(counts), magnitudes, counts)
        is_negative = blocks.view(torch.int32) < 0  # the sign bit, also of zeros
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=values.device)
        bits = is_negative.view(-1, 8).to(torch.uint8) << places
        packed = bits.sum(dim=1, dtype=torch.uint8)  # whole numbers: in any order
        seen = torch.where(is_negative, -scales, scales)
        return joined(scales, packed), seen.view(-1)[: len(values)]

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        scales, bits = parted(self, payload, num_values)
        signs = np.take(_SIGNS, bits.numpy().reshape(-1), axis=0)
        return torch.from_numpy(signs).view(-1, BLOCK).mul_(scales).view(-1)[:num_values]


def _of_any_size(
    means: torch.Tensor, magnitudes: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """``means``, but where their sum has overflowed; NaN where a value is not finite."""
    small = sums_of(magnitudes * DOWN).div_(counts)
    again = small.clamp(max=LARGEST * DOWN) / DOWN
    return means.where(means.isfinite(), again.where(small.isfinite(), torch.nan))
