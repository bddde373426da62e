"""Cost of a server's checkpoint file, next to a copy in memory and a plain file of its size.

    python -m tests.benchmarks.checkpoints.files --mib 512 --dir /scratch

A shard of chunks with Adam's state, written as psdist does (checksum, fsync), proved and read back.
Training pauses for the copy only; the rest happens in the background. In turns, the fastest of
several rounds, and the ratios of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import torch

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import FileRecord, Index, SetRecord
from psdist.checkpoint.states import to_json
from psdist.checkpoint.tensors import Entry, write_file
from psdist.protocol.memory import as_bytes
from psdist.protocol.optimizer_state import OneValue, PerElement
from psdist.protocol.partition import Partition, Piece

KEYS = ("value", "state.exp_avg", "state.exp_avg_sq")
STATE = {
    "step": OneValue("float32", 0, 1.0),
    "exp_avg": PerElement("float32"),
    "exp_avg_sq": PerElement("float32"),
}
NAME = "step-00000001"


class Shard:
    """One piece of so many bytes with its state, in chunks of 4 MiB."""

    def __init__(self, num_bytes: int) -> None:
        count = num_bytes // 4 // len(KEYS)
        piece = Piece(name="p", shape=(count,), stride=(1,), dtype="float32", optimizer_group=0)
        self.partition = Partition.cut([piece], chunk_bytes=4 << 20)
        self.memory = {key: torch.randn(count) for key in KEYS}
        self.copies = {key: torch.empty(count) for key in KEYS}
        self.num_bytes = count * 4 * len(KEYS)

    def copy(self) -> None:
        for key, values in self.memory.items():
            self.copies[key].copy_(values)

    def entries(self) -> list[Entry]:
        return [
            Entry(0, 0, chunk.start, key, values[chunk.start : chunk.start + segment.length])
            for chunk in self.partition.chunks
            for segment in chunk.segments
            for key, values in self.copies.items()
        ]

    def index(self, file: FileRecord) -> Index:
        sets = SetRecord.of(self.partition, optimizer="torch.optim.Adam", clocks=(1,), hyper=[])
        return Index(
            psdist="0",
            time="",
            attempt=1,
            mode="sync",
            seed=0,
            world=2,
            servers=1,
            groups=((0,),),
            sets=(sets,),
            files=(file,),
        )


def write_plain(path: Path, shard: Shard) -> None:
    with path.open("wb", buffering=0) as file:
        for values in shard.copies.values():
            memory = as_bytes(values)
            for at in range(0, len(memory), 4 << 20):
                file.write(memory[at : at + (4 << 20)])
        os.fsync(file.fileno())


def measure(shard: Shard, folder: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """By what was done: the least seconds, and seconds of the processor then."""
    run = Folder(folder)
    partial = run.begin(NAME)
    file = partial / "server-0.safetensors"
    written: list[FileRecord] = []

    def write() -> None:
        written[:] = [write_file(file, shard.entries(), to_json({(0, 0): STATE}))]

    def prove() -> None:
        if run.newest_good(print) is None:
            raise SystemExit("the checkpoint that was just written is not whole")

    def read() -> None:
        checkpoint = run.open(NAME)
        for key in KEYS:
            for chunk in shard.partition.chunks:
                length = sum(segment.length for segment in chunk.segments)
                checkpoint.read_stretch(0, 0, chunk.start, length, key)

    steps: dict[str, Callable[[], object]] = {
        "copy in memory": shard.copy,
        "checksum": lambda: [zlib.crc32(as_bytes(each)) for each in shard.copies.values()],
        "plain file, fsync": lambda: write_plain(folder / "plain", shard),
        "psdist's file, fsync": write,
    }
    after: dict[str, Callable[[], object]] = {"proof of all bytes": prove, "read in chunks": read}
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            timed(best, name, step)
    run.commit(NAME, shard.index(written[0]), 1)
    for _ in range(rounds):
        for name, step in after.items():
            timed(best, name, step)
    return best


def timed(best: dict[str, tuple[float, float]], name: str, step: Callable[[], object]) -> None:
    start, own = perf_counter(), process_time()
    step()
    took = perf_counter() - start, process_time() - own
    best[name] = min(best.get(name, took), took)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256, help="of the shard, with its state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where it writes; else the system's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shard = Shard(options.mib << 20)
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        best = measure(shard, folder, options.rounds)
    finally:
        shutil.rmtree(folder)
    copy_s, _ = best["copy in memory"]
    print(f"{shard.num_bytes / 2**20:.0f} MiB in {len(shard.entries())} tensors")
    for name, (took_s, own_s) in best.items():
        speed = shard.num_bytes / took_s / 1e9
        print(f"{name:22} {took_s:8.3f} s  {speed:6.2f} GB/s  {took_s / copy_s:6.1f} copies"
              f"  {own_s:6.2f} s of a core")  # fmt: skip
    if options.json is not None:
        found = {name: {"s": took, "processor_s": own} for name, (took, own) in best.items()}
        content = {"bytes": shard.num_bytes, "machine": platform.platform(), "best": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
