"""Speed of encoding with error feedback, and of decoding, on one core: float32 per second.

    python -m tests.benchmarks.schemes.host_codecs [--mib 4] [--codec int8] [--json FILE]

Ways alternate, and each has the same bits:

torch      PushEncoder, with the codec in torch
kernels    PushEncoder, with psdist/codecs/host_kernels (C)
out        torch operators into memory that exists already, without a PushEncoder
numba      one loop, compiled by numba (if it is installed), without a PushEncoder
memcpy     a copy of the gradient, for comparison

decode_torch, decode_kernels: a server's read of such a payload, added to a sum.

Medians of seconds of the core, which other processes disturb less than those of the clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.coders import HostCoder
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.layout import CodecOf
from psdist.codecs.schemes import codec_of
from psdist.config.codec_specs import parse_codec
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import Turns

NAMES = ("int8", "int4", "int2", "sign", "fp16", "bf16")
LEVELS = {"int8": 127, "int4": 7}
TERMS = PushTerms(1.0, ())
TIMES = 1.0
BLOCK = 256


def chunk_of(codec: Any, num: int) -> tuple[ChunkCodings, Partition]:
    piece = Piece(
        name="w", shape=(num // 1024, 1024), stride=(1024, 1), dtype="float32", optimizer_group=0
    )
    partition = Partition.cut([piece], chunk_bytes=4 * num)
    codings = ChunkCodings.of([CodecOf(codec)], partition, Turns([(0, 0)]))
    assert codings is not None
    return codings, partition


def pushes(codings: ChunkCodings, coder: HostCoder, gradient: Tensor) -> Callable[[], None]:
    encoder = PushEncoder(
        codings, mine=[0], seed=0, group=0, has_feedback=True, compare_every=1 << 40, coder=coder
    )
    into, clock = memoryview(bytearray(codings.largest(0))), 0

    def push() -> None:
        nonlocal clock
        clock += 1
        encoder.encode(0, gradient, into, clock=clock, terms=TERMS)

    return push


class WithOut:
    """torch with ``out=``, each tensor made once."""

    def __init__(self, name: str, gradient: Tensor, kept: Tensor, payload: Tensor) -> None:
        self.name, self.gradient, self.kept = name, gradient, kept
        num_blocks = len(gradient) // BLOCK
        self.scales = payload[: 4 * num_blocks].view(torch.float32).view(-1, 1)
        self.codes = payload[4 * num_blocks :]
        self.left, self.asked, self.seen = (torch.empty_like(gradient) for _ in range(3))
        self.sums = [torch.empty(num_blocks, BLOCK >> halves) for halves in range(1, 9)]

    def __call__(self) -> None:
        torch.mul(self.kept, TIMES, out=self.asked)
        self.asked.add_(self.gradient)
        blocks, seen, scales = self.asked.view(-1, BLOCK), self.seen.view(-1, BLOCK), self.scales
        last = torch.abs(blocks, out=seen)
        if self.name == "sign":
            for sums in self.sums:
                width = sums.shape[1]
                last = torch.add(last[:, :width], last[:, width:], out=sums)
            torch.div(last, float(BLOCK), out=scales)
            self.codes.numpy()[:] = np.packbits(np.signbit(self.asked.numpy()))
            torch.copysign(scales, blocks, out=seen)
        else:
            torch.div(last.amax(dim=1, keepdim=True), LEVELS[self.name], out=scales)
            scales.masked_fill_(scales < 2.0**-126, 0)
            torch.div(blocks, scales.where(scales != 0, 1), out=seen)
            seen.round_()
            if self.name == "int8":
                self.codes.view(torch.int8).view(-1, BLOCK).copy_(seen)
            else:
                codes = (seen + 8).to(torch.uint8)
                to = self.codes.view(-1, BLOCK // 2)
                torch.add(codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :], alpha=16, out=to)
            seen.mul_(scales)
        torch.sub(self.asked, self.seen, out=self.left)
        torch.dot(self.left, self.left)
        torch.dot(self.asked, self.asked)


def numba_loops() -> tuple[Any, Any]:
    """Return the loops of int8 and int4, and of sign."""
    from numba import njit

    f4, magic, tiny = np.float32, np.float32(1.5 * 2.0**23), np.float32(2.0**-126)

    @njit(fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator] # numba's
    def quantize(  # type: ignore[no-untyped-def] # numba has types of its own
        gradient, kept, times, left, scales, codes, levels, is_int8
    ):
        asked, whole, wanted, missed = np.zeros(256, f4), np.zeros(256, f4), 0.0, 0.0
        for block in range(len(gradient) // 256):
            at, most = block * 256, f4(0)
            for i in range(256):
                residual = kept[at + i] * times
                asked[i] = gradient[at + i] + residual
                most = max(most, abs(asked[i]))
            scale = most / levels
            if scale < tiny:
                scale = f4(0)
            divisor = scale if scale != 0 else f4(1)
            scales[block] = scale
            for i in range(256):
                whole[i] = (asked[i] / divisor + magic) - magic
            if is_int8:
                for i in range(256):
                    codes[at + i] = np.uint8(np.int32(whole[i]) & 255)
            else:
                for i in range(128):
                    low, high = np.int32(whole[i]) + 8, np.int32(whole[i + 128]) + 8
                    codes[block * 128 + i] = np.uint8(low | high << 4)
            for i in range(256):
                rest = asked[i] - whole[i] * scale
                left[at + i] = rest
                missed += rest * rest
                wanted += asked[i] * asked[i]
        return missed, wanted

    @njit(fastmath=False, error_model="numpy")  # type: ignore[untyped-decorator] # numba's
    def signs(gradient, kept, times, left, scales, codes):  # type: ignore[no-untyped-def]
        asked, sums, wanted, missed = np.zeros(256, f4), np.zeros(128, f4), 0.0, 0.0
        bits = asked.view(np.uint32)
        for block in range(len(gradient) // 256):
            at = block * 256
            for i in range(256):
                residual = kept[at + i] * times
                asked[i] = gradient[at + i] + residual
            for i in range(128):
                sums[i] = abs(asked[i]) + abs(asked[i + 128])
            width = 64
            while width:
                for i in range(width):
                    sums[i] = sums[i] + sums[i + width]
                width //= 2
            scale = sums[0] / f4(256)
            scales[block] = scale
            for i in range(32):
                packed = np.uint32(0)
                for j in range(8):
                    packed |= (bits[8 * i + j] >> np.uint32(31)) << np.uint32(7 - j)
                codes[block * 32 + i] = np.uint8(packed)
            for i in range(256):
                rest = asked[i] - (-scale if bits[i] >> np.uint32(31) else scale)
                left[at + i] = rest
                missed += rest * rest
                wanted += asked[i] * asked[i]
        return missed, wanted

    return quantize, signs


def with_numba(
    name: str, gradient: Tensor, kept: Tensor, payload: Tensor, left: Tensor
) -> Callable[[], None]:
    quantize, signs = numba_loops()
    num_blocks = len(gradient) // BLOCK
    scales = payload[: 4 * num_blocks].view(torch.float32).numpy()
    given = (gradient.numpy(), kept.numpy(), np.float32(TIMES), left.numpy(), scales)
    codes = payload[4 * num_blocks :].numpy()
    if name == "sign":
        return lambda: signs(*given, codes)
    return lambda: quantize(*given, codes, np.float32(LEVELS[name]), name == "int8")


def decoders(
    codings: ChunkCodings, coder: HostCoder, gradient: Tensor
) -> dict[str, Callable[[], None]]:
    coding = codings[0]
    memory, total = memoryview(bytearray(codings.largest(0))), torch.zeros(len(gradient))
    payload = memory[: coding.encode(gradient, memory, whole=gradient, seed=0)]

    def by_torch() -> None:
        values = torch.empty(len(gradient)).zero_()
        coding.read(payload).set(values)
        total.add_(values)

    def by_kernels() -> None:
        assert coder.host_kernels is not None
        assert coder.host_kernels.add(coding, payload, total)

    found = {"decode_torch": by_torch}
    return found if coder.host_kernels is None else found | {"decode_kernels": by_kernels}


def copied(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def measure(name: str, num: int, repeat: int) -> dict[str, Any]:
    codec: Any = codec_of(parse_codec(name), has_feedback=True)
    generator = torch.Generator().manual_seed(1)
    gradient, kept = (torch.randn(num, generator=generator) * 1e-3 for _ in range(2))
    codings, _ = chunk_of(codec, num)
    ways = {"torch": pushes(codings, HostCoder(), gradient)}
    coder = HostCoder.compiled(codings)
    if coder.host_kernels is not None:
        ways["kernels"] = pushes(codings, coder, gradient)
    payload, left = torch.empty(codec.num_bytes(num), dtype=torch.uint8), torch.empty(num)
    if name in {*LEVELS, "sign"}:
        expected = codec.encode(gradient + kept * TIMES, seed=0)
        ways["out"] = WithOut(name, gradient, kept, payload)
        checked = ["out"]
        if importlib.util.find_spec("numba") is not None:
            ways["numba"] = with_numba(name, gradient, kept, payload, left)
            checked.append("numba")
        for way in checked:
            payload.zero_()
            ways[way]()
            if not torch.equal(payload, expected):
                raise RuntimeError(f"{name}: the payload of {way} differs")
    ways["memcpy"] = lambda: copied(left, gradient)
    ways |= decoders(codings, coder, gradient)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_number in range(repeat + 3):
        for way, call in ways.items():
            began_s = time.thread_time()
            call()
            if round_number >= 3:
                seconds[way].append(time.thread_time() - began_s)
    row: dict[str, Any] = {"codec": name, "mib": num / 2**18}
    for way, each in seconds.items():
        row[f"{way}_gb_s"] = round(4 * num / statistics.median(each) / 1e9, 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Encoding with feedback on one core.")
    parser.add_argument("--mib", type=float, default=4.0, help="of float32, a chunk")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--codec", action="append", choices=NAMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num = int(options.mib * 2**18) // 1024 * 1024
    rows = []
    for name in options.codec or NAMES:
        rows.append(measure(name, num, options.repeat))
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
