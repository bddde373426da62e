"""The tensors of a checkpoint's file: a server's stretches of pieces, a worker's tensors by name.

    record = write_file(folder / "server-0.safetensors", entries, plain)
    record = write_tensors(folder / "worker-0.safetensors", {"0": tensor}, plain)
    read_into(target, path, stored, first)

The file is on the disk when a function returns, and its checksum is of what was handed to the disk.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Final

import torch

from psdist.checkpoint.container import ITEM_BYTES, Shaped, Stored, header
from psdist.checkpoint.disk import DISK, Disk
from psdist.checkpoint.index import FileRecord
from psdist.checkpoint.strict import open_regular, quoted
from psdist.errors import CheckpointError

CODES: Final = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names."""
DTYPES: Final = {code: dtype for dtype, code in CODES.items()}
_SLICE_BYTES: Final = 4 << 20
"""Checksummed and written while it is in the cache."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Elements of a piece from element ``start`` of its memory on, 1-D on the CPU: ``key`` "value"
    for what the optimizer steps, "state.KEY" for its state. State that is not per element is
    the whole tensor, of any shape, with start 0."""

    set_index: int
    piece: int
    start: int
    key: str
    values: torch.Tensor

    @property
    def name(self) -> str:
        return f"{self.set_index}/{self.piece}/{self.start}/{self.key}"


def write_file(
    path: Path, entries: Iterable[Entry], plain: Mapping[str, object], *, disk: Disk = DISK
) -> FileRecord:
    """``plain``: JSON, such as psdist.checkpoint.states.to_json gives. Raises OSError, and
    :class:`CheckpointError` where no reader would take it."""
    named = [(entry.name, entry.values) for entry in entries]
    return _write(path, named, json.dumps(plain, allow_nan=False), disk)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], plain: object, *, disk: Disk = DISK
) -> FileRecord:
    """``plain, tensors``: as psdist.checkpoint.tree.pack gives them."""
    return _write(path, list(tensors.items()), json.dumps(plain, allow_nan=False), disk)


def _write(path: Path, named: list[tuple[str, torch.Tensor]], text: str, disk: Disk) -> FileRecord:
    # Large items first: each tensor then begins at a multiple of its item's size.
    named.sort(key=lambda each: -ITEM_BYTES[CODES[each[1].dtype]])
    shaped = [Shaped(name, CODES[each.dtype], tuple(each.shape)) for name, each in named]
    crc = num_bytes = 0
    with disk.create(path) as file:
        for data in (
            memoryview(header(shaped, text=text)),
            *(_bytes_of(each) for _, each in named),
        ):
            for at in range(0, len(data), _SLICE_BYTES):
                part = data[at : at + _SLICE_BYTES]
                crc = zlib.crc32(part, crc)
                disk.write(file, part)
            num_bytes += len(data)
        disk.sync(file)
    return FileRecord(name=path.name, num_bytes=num_bytes, crc32=crc)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():  # an empty one of numpy's has stride 0, and no view as bytes
        return memoryview(b"")
    memory: memoryview = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return memory


# -- reading -------------------------------------------------------------------------------------


def allocate(code: str, num_elements: int) -> torch.Tensor:
    return torch.empty(num_elements, dtype=DTYPES[code])


def read_into(target: torch.Tensor, path: Path, stored: Stored, first: int) -> None:
    """``target``, 1-D and contiguous, becomes elements of ``stored`` from ``first`` on."""
    memory: memoryview = target.view(torch.uint8).numpy().data
    with open_regular(path) as file:
        _read(file, stored.begin + first * ITEM_BYTES[stored.dtype], memory, path)


def read_tensor(path: Path, stored: Stored) -> torch.Tensor:
    found = allocate(stored.dtype, prod(stored.shape))
    read_into(found, path, stored, 0)
    return found.view(stored.shape)


def _read(file: FileIO, begin: int, memory: memoryview, path: Path) -> None:
    try:
        file.seek(begin)
        while len(memory):
            count = file.readinto(memory)
            if not count:
                raise CheckpointError(f"{quoted(path)}: damaged: it ends early")
            memory = memory[count:]
    except OSError as error:
        raise CheckpointError(f"{quoted(path)}: cannot be read: {error.strerror}") from None
