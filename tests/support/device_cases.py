"""On what codecs with a form for devices are compared: here on the CPU, in tests/gpu on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from psdist.codecs import Codec, OnDevice
from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.coders import DeviceCoder, HostCoder
from psdist.codecs.device_kernels import DeviceKernels
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.host_kernels import HostKernels
from psdist.codecs.layout import CodecOf
from psdist.codecs.schemes.plain import Cast, Exact
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import TopK
from psdist.protocol.memory import torch_dtype
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import Burst, Turns
from psdist.transfers import Transfers

FORMS: Final[dict[str, OnDevice]] = {
    "fp16": Cast("fp16"),
    "bf16": Cast("bf16"),
    "int8": Quantized("int8"),
    "int4": Quantized("int4"),
    "int2": Quantized("int2"),
    "sign": Sign(),
    "topk:0.01": TopK(0.01),
    "topk:0.5": TopK(0.5),
}
LENGTHS: Final = (1, 2, 63, 255, 256, 257, 511, 1000, 4096)
LARGEST: Final = torch.finfo(torch.float32).max
HARD: Final = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 65504.0, 65519.996, 65520.0, 1e38, LARGEST, -LARGEST),
    *(1e-45, -1e-45, 1e-39, 2.0**-126, 2.0**-126 * 127, 2.0**-126 * 7 * 0.999, 6e-8, 1.00048828125),
    *(float("inf"), float("-inf"), float("nan")),
)
"""Zeros, halves between two roundings, what overflows in 16 bits, denormals, what is not finite."""


def hard_vector(
    length: int,
    *,
    seed: int,
    scale: float = 1.0,
    placed: Iterable[tuple[int, float]] = (),
    zeros_from: int | None = None,
    ties: bool = False,
) -> Tensor:
    """``placed``: (where, what); ``ties``: magnitudes, many of them equal."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale
    if ties:
        values = (values / scale * 2).round() * scale / 2
    if zeros_from is not None:
        values[zeros_from:] = 0
    for place, value in placed:
        values[place] = value
    return values


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if both have the same bits; float32, on any device."""
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


class Pair:
    """One push after another, encoded by the host and by a device from the same gradients."""

    def __init__(
        self,
        parts: Sequence[tuple[int, Codec]],
        copies: Transfers,
        *,
        dtype: str = "float32",
        exact: Sequence[str] = (),
        burst: int = 0,
        shape: tuple[int, ...] = (20, 16),
        coder: HostCoder | None = None,
        **options: Any,
    ) -> None:
        """``parts``: codecs, each from its round on; ``exact``: of the pieces a, b and c those that
        codecs leave alone; ``burst``: every so many rounds of the first codec go in full;
        ``coder``: of the second encoder, by default the device's without kernels."""
        pieces = [
            Piece(name=name, shape=shape, stride=(shape[1], 1), dtype=dtype, optimizer_group=0)
            for name in "abc"
        ]
        partition = Partition.cut(pieces, chunk_bytes=1 << 24)
        self.partition = partition
        (self.chunk,) = partition.chunks
        kinds = [CodecOf(codec, tuple(exact)) for _, codec in parts]
        bursts = {0: Burst(burst, len(parts))} if burst else {}
        turns = Turns([(start, n) for n, (start, _) in enumerate(parts)], bursts=bursts)
        codings = []
        for _ in range(2):
            parts = [*kinds, *(CodecOf(Exact()) for _ in bursts)]
            made = ChunkCodings.of(parts, partition, turns)
            assert made is not None
            codings.append(made)
        given: dict[str, Any] = {"mine": [0], "seed": 5, "group": 1, "has_feedback": True} | options
        self.copies = copies
        self.host = PushEncoder(codings[0], **given)
        self.device = PushEncoder(codings[1], coder=coder or DeviceCoder(copies), **given)
        self.memories = (
            memoryview(bytearray(codings[0].largest(0))),
            copies.allocate(codings[0].largest(0)),
        )
        self.there = torch.zeros(self.chunk.length, dtype=torch_dtype(dtype), device=copies.device)
        self.clock = 0

    def begin(self, gradient: Tensor, terms: PushTerms) -> Any:
        self.there.copy_(gradient)
        return self.device.begin(
            0, self.there, self.memories[1], clock=self.clock, terms=terms,
            after=[self.copies.mark()],
        )  # fmt: skip

    def push(self, gradient: Tensor, terms: PushTerms) -> tuple[bytes, bytes]:
        """The payloads of both."""
        sizes = []
        for encoder, values, into in (
            (self.host, gradient, self.memories[0]),
            (self.device, self.there, self.memories[1]),
        ):
            sizes.append(encoder.encode(0, values, into, clock=self.clock, terms=terms))
        self.clock += 1
        one, other = (bytes(into[:n]) for into, n in zip(self.memories, sizes, strict=True))
        return one, other

    def require_same_residuals(self) -> None:
        one, other = self.host.residuals(), self.device.residuals()
        assert one.keys() == other.keys()
        for chunk, ours in one.items():
            theirs = other[chunk]
            assert same_bits(ours.values, theirs.values)
            assert (ours.rate, ours.codec) == (theirs.rate, theirs.codec)
            assert (ours.due is None) == (theirs.due is None)
            if ours.due is not None and theirs.due is not None:
                assert same_bits(ours.due, theirs.due)


def require_same_steps(
    codec: Any,
    coder: HostCoder,
    kernels: DeviceKernels | HostKernels,
    *,
    dtype: str = "float32",
    shape: tuple[int, ...] = (20, 16),
    exact: Sequence[str] = (),
    steps: int = 6,
    scale: float = 1e-3,
    ties: bool = False,
) -> int:
    """Push by a coder with these kernels and by torch on the host: the same bytes, residuals and
    reported numbers. Return the number of pushes that the kernels have encoded."""
    pair = Pair(
        [(0, codec)], coder.transfers, dtype=dtype, exact=exact, shape=shape, coder=coder,
        compare_every=5,
    )  # fmt: skip
    before = kernels.num_pushes
    for step in range(steps):
        gradient = hard_vector(pair.chunk.length, seed=step, scale=scale, ties=ties)
        gradient[:: 1 + pair.chunk.length // 7] = -0.0
        gradient = gradient.to(pair.there.dtype).nan_to_num_()  # float16 has made some infinite
        terms = PushTerms((1.0, 0.3, 0.3)[step % 3], ())
        pair.begin(gradient, terms)
        one, other = pair.push(gradient, terms)
        assert one == other
        pair.require_same_residuals()
    for ours, theirs in (
        (pair.host.errors.missed, pair.device.errors.missed),
        (pair.host.errors.wanted, pair.device.errors.wanted),
    ):
        assert all(math.isclose(*each, rel_tol=1e-4) for each in zip(ours, theirs, strict=True))
    return kernels.num_pushes - before
