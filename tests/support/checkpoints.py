"""Checkpoints made by hand, as a job's ranks write them: servers their chunks, workers a tree.

    made = Made(step=100, seed=1)
    checkpoint = made.write(Folder(run_dir), servers=2)
    made.elements[0, 1, "value"]            # what piece 1 of set 0 holds, in the order of memory

A model of two sets: an embedding and a matrix that lies transposed in memory, under two names, in
Adam; a float16 vector in SGD with momentum; an untrained buffer of each worker's own.
"""

from __future__ import annotations

from typing import Any

import torch

from psdist.checkpoint import states, tree
from psdist.checkpoint.disk import DISK, Disk
from psdist.checkpoint.folder import Folder, name_of
from psdist.checkpoint.index import FileRecord, Index, SetRecord
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.tensors import Entry, write_file, write_tensors
from psdist.protocol.memory import torch_dtype
from psdist.protocol.optimizer_state import OneValue, PerElement, PieceState, Plain
from psdist.protocol.partition import Partition, Piece, master_dtype

ADAM, SGD = "torch.optim.Adam", "torch.optim.SGD"
HYPER = {
    ADAM: [{"betas": (0.9, 0.999), "lr": 0.1, "weight_decay": 0}],
    SGD: [{"lr": 1.0, "momentum": 0.5}],
}
PIECES = {
    optimizer: [
        Piece(name=name, shape=shape, stride=stride, dtype=dtype, optimizer_group=0)
        for name, shape, stride, dtype in pieces
    ]
    for optimizer, pieces in {
        ADAM: [
            ("embedding", (40, 10), (10, 1), "float32"),
            ("first.weight", (30, 7), (1, 30), "float32"),
        ],
        SGD: [("half", (2000,), (1,), "float16")],
    }.items()
}


class Made:
    def __init__(
        self, *, step: int = 100, seed: int = 1, workers: int = 2, chunk_bytes: int = 512
    ) -> None:
        self.step = step
        self.chunk_bytes = chunk_bytes
        self.seed = seed
        self.workers = workers
        generator = torch.Generator().manual_seed(seed)
        self.elements: dict[tuple[int, int, str], torch.Tensor] = {}
        self.states: dict[tuple[int, int], PieceState] = {}
        for set_index, optimizer in enumerate(PIECES):
            for at, piece in enumerate(PIECES[optimizer]):
                keys = ["exp_avg", "exp_avg_sq"] if optimizer == ADAM else ["momentum_buffer"]
                count, dtype = piece.num_elements, master_dtype(piece.dtype)
                state: PieceState = {key: PerElement(dtype) for key in keys}
                if optimizer == ADAM:
                    state = {"step": OneValue("float32", 0, float(step)), **state}
                else:
                    state["counted"] = Plain(step)
                self.states[set_index, at] = state
                for key in ("value", *(f"state.{key}" for key in keys)):
                    values = torch.randn(count, generator=generator, dtype=torch_dtype(dtype))
                    self.elements[set_index, at, key] = values
        self.trees = [self._tree(worker, generator) for worker in range(workers)]

    def _tree(self, worker: int, generator: torch.Generator) -> dict[str, Any]:
        return {
            "models": [
                {
                    "embedding": (0, 0),
                    "first.weight": (0, 1),
                    "tied": (0, 1),
                    "half": (1, 0),
                    "norm.mean": torch.randn(5, generator=generator),
                }
            ],
            "rng": {"torch": generator.get_state()},
            "state": {"epoch": self.step // 10, "best": float("inf"), 3: [worker, (1, "a")]},
        }

    def partitions(self) -> list[Partition]:
        return [Partition.cut(pieces, chunk_bytes=self.chunk_bytes) for pieces in PIECES.values()]

    def entries(self, server: int, servers: int) -> list[Entry]:
        """Those of one server: stretches of chunks that it owns."""
        found = []
        for set_index, partition in enumerate(self.partitions()):
            starts = dict(pair for buffer in partition.buffers for pair in buffer.piece_starts)
            owners = partition.shard([1.0] * servers)
            for chunk in partition.chunks:
                if owners[chunk.index] != server:
                    continue
                for each in chunk.segments:
                    start = chunk.start + each.offset - starts[each.piece]
                    for (of_set, piece, key), values in self.elements.items():
                        if (of_set, piece) == (set_index, each.piece):
                            part = values[start : start + each.length]
                            found.append(Entry(set_index, piece, start, key, part))
        return found

    def index(self, files: list[FileRecord], *, servers: int, attempt: int = 1) -> Index:
        return Index(
            psdist="0.1.0",
            time="2026-01-31T12:00:00Z",
            attempt=attempt,
            mode="sync",
            seed=7,
            world=servers + self.workers,
            servers=servers,
            groups=tuple((worker,) for worker in range(self.workers)),
            sets=tuple(
                SetRecord.of(
                    partition,
                    optimizer=optimizer,
                    clocks=(self.step,) * self.workers,
                    hyper=HYPER[optimizer],
                )
                for partition, optimizer in zip(self.partitions(), PIECES, strict=True)
            ),
            files=tuple(files),
        )

    def write(
        self,
        folder: Folder,
        *,
        servers: int = 2,
        keep: int = 3,
        attempt: int = 1,
        disk: Disk = DISK,
        good: int | None = None,
    ) -> Checkpoint:
        name = name_of(self.step)
        path = folder.begin(name)
        files = []
        for server in range(servers):
            entries = self.entries(server, servers)
            held = {(entry.set_index, entry.piece) for entry in entries}
            plain = states.to_json({at: self.states[at] for at in sorted(held)})
            target = path / f"server-{server}.safetensors"
            files.append(write_file(target, entries, plain, disk=disk))
        for worker, its in enumerate(self.trees):
            plain_tree, tensors = tree.pack(its)
            target = path / f"worker-{worker}.safetensors"
            files.append(write_tensors(target, tensors, plain_tree, disk=disk))
        folder.commit(name, self.index(files, servers=servers, attempt=attempt), keep, good=good)
        return folder.open(name)

    def differences(self, checkpoint: Checkpoint) -> list[str]:
        """In what ``checkpoint`` is not this one, bit by bit."""
        found = []
        for (set_index, piece, key), values in self.elements.items():
            read = checkpoint.read_stretch(set_index, piece, 0, len(values), key)
            if not torch.equal(read, values):  # there is no NaN
                found.append(f"{key} of piece {piece} of set {set_index}")
        for at, state in self.states.items():
            if checkpoint.state_of(*at) != state:
                found.append(f"state of {at}")
        for worker, its in enumerate(self.trees):
            if repr(tree.unpack(*checkpoint.worker(worker))) != repr(its):
                found.append(f"worker {worker}")
        return found
