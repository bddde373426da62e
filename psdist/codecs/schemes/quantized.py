"""int8, int4 and int2: whole multiples of a scale, in blocks of 256 values.

    Quantized("int8")                          # multiples -127 .. 127
    Quantized("int4")                          # -7 .. 7, two in a byte
    Quantized("int2")                          # -1, 0, 1, four in a byte
    Quantized("int8", is_stochastic=True)      # up or down by chance: right on average

The scale is max|x| / levels, so what is decoded is wrong by half a scale at most (stochastic: by
less than one). int2 to nearest is better off with a smaller one: values above 0.7 mean|x| become
plus or minus their mean, the others 0 (Li and Liu, Ternary Weight Networks, arXiv 1605.04711);
that is a projection, so the error is never larger than the vector. A block whose scale would lie
below 2^-126 becomes zeros.
"""

from __future__ import annotations

from typing import Final

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
from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode

_SMALLEST: Final = torch.finfo(torch.float32).tiny
_LARGEST: Final = LARGEST * (1 - 2.0**-20)
_TERNARY: Final = 0.7

_KINDS: Final = {
    "int8": (CodecCode.INT8, 127, 8),
    "int4": (CodecCode.INT4, 7, 4),
    "int2": (CodecCode.INT2, 1, 2),
}
"""Code, levels on each side of 0, bits."""


class Quantized(OnDevice):
    def __init__(self, kind: str, *, is_stochastic: bool = False) -> None:
        code, self._levels, self._bits = _KINDS[kind]
        self.code = int(code)
        self._offset = 1 << self._bits - 1
        self.name = f"{kind}:stochastic" if is_stochastic else kind
        self._is_stochastic = is_stochastic
        self.has_device_form = not is_stochastic
        """Random numbers are those of torch's generator for the CPU, which no GPU has."""

    def num_bytes(self, num_values: int) -> int:
        return num_blocks(num_values) * (4 + BLOCK * self._bits // 8)

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        blocks = blocks_of(values)
        if self._bits == 2 and not self._is_stochastic:
            scales, multiples = _ternary(blocks, counts_of(values))
        else:
            scales, multiples = self._multiples(blocks)
            if self._is_stochastic:
                generator = torch.Generator().manual_seed(seed)
                multiples += torch.rand(blocks.shape, generator=generator)
                multiples.floor_().clamp_(-self._levels, self._levels)
            else:
                multiples.round_()
        return joined(scales, self._packed(self._codes(multiples)))

    def encode_on_device(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = blocks_of(values)
        if self._bits == 2:
            scales, multiples = _ternary(blocks, counts_of(values), asks=False)
        else:
            scales, multiples = self._multiples(blocks, asks=False)
            multiples.round_()
        codes = self._codes(multiples)
        seen = codes.to(torch.float32)
        if self._bits < 8:
            seen.sub_(self._offset)
        return joined(scales, self._packed(codes)), seen.mul_(scales).view(-1)[: len(values)]

    def _multiples(
        self, blocks: torch.Tensor, *, asks: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, and the values by them. ``asks``: whether the device may be asked for an
        answer."""
        largest = blocks.abs().amax(dim=1, keepdim=True)
        scales = largest / largest.new_full((1, 1), self._levels)  # as counts_of
        scales, blocks = _without_non_finite(scales, blocks, asks=asks)
        scales.masked_fill_(scales < _SMALLEST, 0)
        scales.clamp_(max=_LARGEST / self._levels)  # rounded up, its multiple would overflow
        return scales, blocks / scales.where(scales != 0, 1).nan_to_num(1.0)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        scales, codes = parted(self, payload, num_values)
        return self._unpacked(codes).mul_(scales).view(-1)[:num_values]

    def _codes(self, multiples: torch.Tensor) -> torch.Tensor:
        """Return the codes of multiples, one byte each."""
        if self._bits == 8:
            return multiples.to(torch.int8)
        return multiples.add_(self._offset).to(torch.uint8)

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Values of a block that lie a half (a quarter) of a block apart share a byte: all that is
        read and written is in one piece."""
        if self._bits == 8:
            return codes
        width = BLOCK * self._bits // 8
        packed = codes[:, :width]
        for place in range(1, 8 // self._bits):
            part = codes[:, place * width : (place + 1) * width]
            packed = torch.add(packed, part, alpha=1 << place * self._bits)
        return packed

    def _unpacked(self, codes: torch.Tensor) -> torch.Tensor:
        """Return multiples in float32. The lowest code is not used."""
        if self._bits == 8:
            signed = codes.view(torch.int8)
            self._require(int(signed.amin()) >= -self._levels)
            return signed.to(torch.float32)
        mask, width = (1 << self._bits) - 1, BLOCK * self._bits // 8
        values = torch.empty(len(codes), BLOCK, dtype=torch.float32)
        for place in range(8 // self._bits):
            part = (codes >> place * self._bits) & mask
            self._require(int(part.amin()) >= self._offset - self._levels)
            values[:, place * width : (place + 1) * width] = part
        return values.sub_(self._offset)

    def _require(self, is_known: bool) -> None:
        if not is_known:
            raise ProtocolError(f"codec {self.name}: a code that no sender uses")


def _without_non_finite(
    scales: torch.Tensor, blocks: torch.Tensor, *, asks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks with NaN or infinity have NaN for scale, and zeros for values."""
    finite = scales.isfinite()
    if asks and bool(finite.all()):
        return scales, blocks
    return scales.where(finite, torch.nan), blocks.where(finite, 0.0)


def _ternary(
    blocks: torch.Tensor, counts: torch.Tensor, *, asks: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and multiples -1, 0, 1. ``asks``: as in :meth:`Quantized._multiples`."""
    magnitudes = blocks.abs()
    means = sums_of(magnitudes) / counts
    times: torch.Tensor | None = None
    if not (asks and bool(means.isfinite().all())):  # blocks whose sum overflows are made smaller
        times = torch.ones_like(means).masked_fill_(~means.isfinite(), DOWN)
        magnitudes = magnitudes * times
        means = sums_of(magnitudes) / counts
    chosen = (magnitudes > _TERNARY * means).to(torch.float32)
    num_chosen = chosen.sum(dim=1, keepdim=True).clamp_(min=1)  # whole numbers: in any order
    scales = sums_of(magnitudes * chosen) / num_chosen
    if times is not None:
        scales = torch.minimum(scales, LARGEST * times) / times
        scales = scales.where(means.isfinite(), torch.nan)
    scales.masked_fill_(scales < _SMALLEST, 0)
    return scales, blocks.sign().mul_(chosen).nan_to_num_(0.0)
