"""The time of a push that is encoded on a GPU, and of one that its host encodes.

    python -m tests.benchmarks.schemes.device_codecs [--mib 64] [--chunk-mib 4] [--json FILE]

As a worker does it (psdist.codecs.feedback), with feedback: from gradients on the GPU to encoded
chunks in pinned memory, all begun before the first is waited for. Ways alternate; medians of all:

copy       the gradients' copy to pinned memory alone, the least time of the host's way
host       the host encodes
device     the GPU encodes by the codec in torch
kernels    the GPU encodes in one pass (psdist.codecs.device_kernels)

``core``: seconds of the worker's core; ``begin``: until all chunks are begun. Every few rounds the
payloads of ``device`` and ``kernels`` are compared. It needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from psdist.codecs import Codec, Raw
from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.coders import DeviceCoder
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.layout import CodecOf
from psdist.codecs.schemes import codec_of
from psdist.config.codec_specs import parse_codec
from psdist.protocol.memory import as_tensor
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import Turns
from psdist.transfers import ToGpu

NAMES = ("fp16", "bf16", "int8", "int4", "int2", "sign", "topk:0.01")
TERMS = PushTerms(1.0, ())


class Ways:
    """Pushes of one model with one codec; each way has residuals of its own."""

    def __init__(self, codec: Codec, options: argparse.Namespace, transfers: ToGpu) -> None:
        width = 1024
        rows = int(options.mib * 2**18) // width
        piece = Piece(
            name="w", shape=(rows, width), stride=(width, 1), dtype="float32", optimizer_group=0
        )
        partition = Partition.cut([piece], chunk_bytes=int(options.chunk_mib * 2**20))
        self.chunks = partition.chunks
        made = ChunkCodings.of([CodecOf(codec)], partition, Turns([(0, 0)]))
        given: dict[str, Any] = {"mine": list(range(len(self.chunks))), "seed": 0, "group": 0}
        given["has_feedback"] = True
        assert made is not None
        self.transfers = transfers
        self.host = PushEncoder(made, **given)
        self.device = PushEncoder(made, coder=DeviceCoder(transfers), **given)
        coder = DeviceCoder.of(transfers, made, partition)
        self.kernels = None if coder.kernels is None else PushEncoder(made, coder=coder, **given)
        sizes = [made.largest(index) for index in given["mine"]]
        self.frames = [transfers.allocate(size) for size in sizes]
        self.pinned = [
            as_tensor(transfers.allocate(4 * chunk.length), "float32", chunk.length)
            for chunk in self.chunks
        ]
        generator = torch.Generator(transfers.device).manual_seed(1)
        self.gradients = [
            torch.randn(chunk.length, device=transfers.device, generator=generator)
            for chunk in self.chunks
        ]
        self.clock = 0
        self.num_bytes = 0
        self.begin_s = 0.0

    def copy(self) -> None:
        mark = self.transfers.mark()
        copies = [
            self.transfers.begin([pair], after=[mark])
            for pair in zip(self.gradients, self.pinned, strict=True)
        ]
        copies[-1].wait()

    def on_host(self) -> None:
        mark = self.transfers.mark()
        copies = [
            self.transfers.begin([pair], after=[mark])
            for pair in zip(self.gradients, self.pinned, strict=True)
        ]
        for index, copy in enumerate(copies):
            copy.wait()
            self.host.encode(
                index, self.pinned[index], self.frames[index], clock=self.clock, terms=TERMS
            )

    def on_device(self, encoder: PushEncoder) -> None:
        began_s, mark = time.perf_counter(), self.transfers.mark()
        for index, (gradient, frame) in enumerate(zip(self.gradients, self.frames, strict=True)):
            encoder.begin(index, gradient, frame, clock=self.clock, terms=TERMS, after=[mark])
        self.begin_s = time.perf_counter() - began_s
        self.num_bytes = sum(
            encoder.encode(index, gradient, frame, clock=self.clock, terms=TERMS)
            for index, (gradient, frame) in enumerate(zip(self.gradients, self.frames, strict=True))
        )


def measure(codec: Codec, options: argparse.Namespace, transfers: ToGpu) -> dict[str, Any]:
    ways = Ways(codec, options, transfers)
    calls: dict[str, Callable[[], None]] = {"copy": ways.copy}
    if not options.without_host:
        calls["host"] = ways.on_host
    calls["device"] = partial(ways.on_device, ways.device)
    if ways.kernels is not None:
        calls["kernels"] = partial(ways.on_device, ways.kernels)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    of_core: dict[str, list[float]] = {name: [] for name in calls}
    begin: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(options.repeat + 2):
        payloads: set[bytes] = set()
        for name, call in calls.items():
            torch.cuda.synchronize()
            began_s, core_s = time.perf_counter(), time.thread_time()
            call()
            core_s, took_s = time.thread_time() - core_s, time.perf_counter() - began_s
            if name in {"device", "kernels"} and repeat % 4 == 1:
                payloads.add(b"".join(bytes(frame) for frame in ways.frames))
            if repeat >= 2:
                seconds[name].append(took_s)
                of_core[name].append(core_s)
                begin[name].append(ways.begin_s)
        if len(payloads) > 1:
            raise RuntimeError(f"{codec.name}: the kernels' payloads differ in round {repeat}")
        ways.clock += 1
    num_bytes = sum(4 * chunk.length for chunk in ways.chunks)
    row: dict[str, Any] = {"codec": codec.name, "fewer": round(num_bytes / ways.num_bytes, 1)}
    for name in calls:
        row[f"{name}_ms"] = round(1e3 * statistics.median(seconds[name]), 2)
        row[f"{name}_core_ms"] = round(1e3 * statistics.median(of_core[name]), 2)
        if name in {"device", "kernels"}:
            row[f"{name}_begin_ms"] = round(1e3 * statistics.median(begin[name]), 2)
        row[f"{name}_gb_s"] = round(num_bytes / statistics.median(seconds[name]) / 1e9, 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Encoding on a GPU, and on its host.")
    parser.add_argument("--mib", type=float, default=64.0, help="of float32")
    parser.add_argument("--chunk-mib", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--codec", action="append", choices=NAMES)
    parser.add_argument("--without-host", action="store_true", help="skip the host's way")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    transfers = ToGpu(torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}, {options.mib:g} MiB in {options.chunk_mib:g}, torch "
          f"{torch.__version__}")  # fmt: skip
    rows = []
    for name in options.codec or NAMES:
        codec = codec_of(parse_codec(name), has_feedback=True)
        assert not isinstance(codec, Raw)
        rows.append(measure(codec, options, transfers))
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
