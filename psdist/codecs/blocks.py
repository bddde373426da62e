"""Blocks of 256 values, each with a scale of its own: what int8, int4, int2 and sign share.

A payload is one float32 scale for each block, then the codes of all blocks. The
last block is filled up with zeros, which cost their bits.

    blocks = blocks_of(values)                 # [num_blocks, 256]
    payload = joined(scales, codes)
    scales, codes = parted(codec, payload, num_values)
    sums_of(blocks)                            # [num_blocks, 1], the same bits on every device
"""

from __future__ import annotations

from typing import Final

import torch

from psdist.codecs import Codec, require_size
from psdist.errors import ProtocolError

BLOCK: Final = 256
DOWN: Final = 2.0**-8
"""Times this a sum of 256 values cannot overflow."""
LARGEST: Final = torch.finfo(torch.float32).max


def num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def blocks_of(values: torch.Tensor) -> torch.Tensor:
    missing = -len(values) % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK)


def counts_of(values: torch.Tensor) -> torch.Tensor:
    """How many values each block has, in float32: [1, 1], or [num_blocks, 1] where the last has
    fewer. A tensor where the values lie: by a number a GPU multiplies with its reciprocal, whose
    bits are others than those of a division."""
    rest = len(values) % BLOCK
    counts = values.new_full((num_blocks(len(values)) if rest else 1, 1), BLOCK)
    if rest:
        counts[-1:].fill_(rest)
    return counts


def sums_of(blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 1]. Halves are added, value by value, until one is left: torch's own sum has an
    order for each kind of processor."""
    width = BLOCK
    while width > 1:
        width //= 2
        blocks = blocks[:, :width] + blocks[:, width:]
    return blocks


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """L2, float64, of a vector of float32: one number where the values lie, the same bits on every
    device."""
    exact = values.to(torch.float64)
    sums = sums_of(blocks_of(exact * exact)).view(-1)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.nn.functional.pad(sums, (0, 1))
        middle = len(sums) // 2
        sums = sums[:middle] + sums[middle:]
    return sums.sqrt()[0]


def joined(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([scales.view(-1).view(torch.uint8), codes.reshape(-1).view(torch.uint8)])


def parted(
    codec: Codec, payload: torch.Tensor, num_values: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, [num_blocks, 1], and the bytes of the codes, [num_blocks, bytes of a block]."""
    require_size(codec, payload, num_values)
    num = num_blocks(num_values)
    scales = payload[: 4 * num].view(torch.float32).view(-1, 1)
    if bool((scales < 0).any()):
        raise ProtocolError(f"codec {codec.name}: a scale is below 0")
    return scales, payload[4 * num :].view(num, -1)
