"""The outside of a safetensors file: its header, written and read with limits; torch-free.

8 bytes with the header's length, the header (JSON: of each tensor dtype, shape and where its bytes
are; and a text), the bytes of the tensors, one after the other without a hole.

    data = header([Shaped("a", "F32", (3,))], text="{}")
    contents = read_header(file, where="server-0.safetensors")
    contents.tensors["a"].begin             # in the file

Read by hand and not by the library: it must not take a file at its word, parts of a tensor are
wanted, and a list of checkpoints needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from typing import Final, NamedTuple

from psdist.checkpoint.strict import decode, parse_json
from psdist.errors import CheckpointError

ITEM_BYTES: Final = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library has it."""
MAX_NAME: Final = 500
_MOST_DIMS: Final = 64
_LENGTH_BYTES: Final = 8
_TEXT_KEY: Final = "psdist"


class Shaped(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Stored(NamedTuple):
    """A tensor in a file: its bytes are those from ``begin`` of the file on."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    tensors: dict[str, Stored]
    text: str
    """psdist's own entry of the metadata; empty where there is none."""


def header(tensors: Sequence[Shaped], *, text: str) -> bytes:
    """Return the start of the file; the tensors' bytes follow in this order. Raises
    :class:`CheckpointError` if no reader would accept it."""
    found: dict[str, object] = {"__metadata__": {_TEXT_KEY: text}}
    at = 0
    for tensor in tensors:
        offsets = [at, at := at + tensor.num_bytes]
        if tensor.name in found or len(tensor.name) > MAX_NAME:
            raise CheckpointError(f"tensor {tensor.name!r:.80} is there twice, or named too long")
        found[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    data = json.dumps(found, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    if len(data) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(data):,} bytes of plain values and names in one file of a checkpoint; at most "
            f"{MAX_HEADER_BYTES:,} are kept: keep large data as tensors"
        )
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def read_header(file: FileIO, *, where: str) -> Contents:
    """Raises :class:`CheckpointError` in one line for anything but a file without holes."""
    num_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES or length + _LENGTH_BYTES > num_bytes:
        raise CheckpointError(
            f"{where}: damaged: a header of {length:,} bytes in a file of {num_bytes:,}"
        )
    text = decode(file.read(length), where=where, max_bytes=MAX_HEADER_BYTES)
    content = parse_json(text, where=where)
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: damaged: the header is no object")
    metadata = content.pop("__metadata__", {})
    kept = metadata.get(_TEXT_KEY, "") if isinstance(metadata, dict) else None
    if not isinstance(kept, str):
        raise CheckpointError(f"{where}: damaged: the header's metadata is no text")
    first = _LENGTH_BYTES + length
    try:
        tensors = {name: _stored(name, each, first) for name, each in content.items()}
    except ValueError as error:
        raise CheckpointError(f"{where}: damaged: {error}") from None
    at = first
    for stored in sorted(tensors.values(), key=lambda each: (each.begin, each.num_bytes)):
        if stored.begin != at:
            raise CheckpointError(f"{where}: damaged: tensors overlap, or leave a hole")
        at += stored.num_bytes
    if at != num_bytes:
        raise CheckpointError(f"{where}: damaged: {num_bytes:,} bytes, its header describes {at:,}")
    return Contents(tensors, kept)


def _stored(name: str, content: object, first: int) -> Stored:
    if not isinstance(content, dict) or content.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r:.80} is not described")
    dtype, shape, offsets = content["dtype"], content["shape"], content["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES or len(name) > MAX_NAME:
        raise ValueError(f"tensor {name!r:.80} has dtype {dtype!r:.80}")
    if not _are_counts(shape) or len(shape) > _MOST_DIMS:
        raise ValueError(f"tensor {name!r:.80} has no shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r:.80} has no place")
    begin, end = offsets
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r:.80} has {end - begin} bytes for shape {shape!r:.80}")
    return Stored(dtype, tuple(shape), first + begin, end - begin)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 60 for value in values
    )
