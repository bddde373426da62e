"""Whether two tensors hold the same bits.

same_bits(one, other)                     # NaN and -0 are told apart, as memory is
(as_bits(one) != as_bits(other)).any()    # the same, on a device
"""

from __future__ import annotations

from typing import Final

import torch

from psdist.protocol.memory import same_bytes

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal bit by bit, NaN and -0 included."""
    if one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return same_bytes(one, other)
    return torch.equal(as_bits(one), as_bits(other))
