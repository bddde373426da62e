"""How fast codecs are, in GB of float32 values per second of one core.

    python -m tests.benchmarks.schemes.codecs [--mib 4] [--repeat 20]

Encoding and decoding are timed apart, each the best of five times; `both` is encode, decode and
the remainder for feedback, the work of a worker in each push. Codecs with zstd have `pays
below`: on slower links the bytes that it saves would take longer than it takes on both ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from psdist.codecs import Matrix, MatrixCodec, Raw
from psdist.codecs.schemes import codec_of
from psdist.config.codec_specs import parse_codec

NAMES = (
    *(
        "fp16",
        "bf16",
        "int8",
        "int8:stochastic",
        "int4",
        "int4:stochastic",
        "int2",
        "int2:stochastic",
    ),
    *("sign", "topk:0.01", "topk:0.1", "randk:0.01", "lowrank:1", "lowrank:4"),
    *("fp16+zstd", "bf16+zstd", "int8+zstd", "int4+zstd", "int4:stochastic+zstd", "int2+zstd"),
    *("int2:stochastic+zstd", "topk:0.01+zstd", "topk:0.1+zstd"),
)
WIDTH = 1024
"""Width of the matrix into which lowrank forms the values."""


def gigabytes_per_s(num_bytes: int, repeat: int, call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(repeat):
            call()
        best = min(best, (time.thread_time() - begin) / repeat)
    return num_bytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of codecs on one core.")
    parser.add_argument("--mib", type=float, default=4.0, help="of float32, one chunk")
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(int(given.mib * 2**18), generator=torch.Generator().manual_seed(1))
    print(f"{given.mib:g} MiB of float32, one thread, GB/s of float32")
    print(f"{'codec':20} {'fewer':>6} {'encode':>8} {'decode':>8} {'both':>8}  pays below")
    plain: dict[str, tuple[int, float]] = {}
    for name in NAMES:
        codec = codec_of(parse_codec(name), has_feedback=True)
        assert not isinstance(codec, Raw)
        if isinstance(codec, MatrixCodec):
            codec = codec.of([Matrix(WIDTH, 0, len(values))])
        payload = codec.encode(values, seed=1)

        def encode(codec=codec) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return codec.encode(values, seed=1)

        def decode(codec=codec, payload=payload) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return codec.decode(payload, len(values))

        def both(codec=codec) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return values - codec.decode(codec.encode(values, seed=1), len(values))

        speeds = [gigabytes_per_s(values.nbytes, given.repeat, f) for f in (encode, decode, both)]
        ratio = values.nbytes / len(payload)
        line = f"{name:20} {ratio:6.2f} " + " ".join(f"{speed:8.2f}" for speed in speeds)
        seconds = values.nbytes / speeds[0] / 1e9 + values.nbytes / speeds[1] / 1e9
        plain[name] = len(payload), seconds
        without, packed, _ = name.partition("+zstd")
        if packed:
            num_bytes, before_s = plain[without]
            saved = 8 * (num_bytes - len(payload)) / (seconds - before_s) / 1e6
            line += f"  {saved:.0f} Mbit/s"
        print(line)


if __name__ == "__main__":
    main()
