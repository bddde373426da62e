"""Blocks of 256 values, each with a scale of its own: what int8, int4, int2 and sign share.

A payload is one float32 scale for each block, then the codes of all blocks, behind one another. The
last block is filled up with zeros, which cost their bits.

    blocks = blocks_of(values)                 # [num_blocks, 256]
    payload = joined(scales, codes)
    scales, codes = parted(codec, payload, num_values)
"""

from __future__ import annotations

from typing import Final

import torch

from psdist.codecs.base import Codec, require_size
from psdist.errors import ProtocolError

BLOCK: Final = 256


def num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def blocks_of(values: torch.Tensor) -> torch.Tensor:
    missing = -len(values) % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK)


def counts_of(num_values: int) -> torch.Tensor | int:
    """How many values each block has: a number, or [num_blocks, 1] where the last has fewer."""
    rest = num_values % BLOCK
    if not rest:
        return BLOCK
    counts = torch.full((num_blocks(num_values), 1), BLOCK)
    counts[-1] = rest
    return counts


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
