"""Writing the whole model: pulled from the servers into memory of its own, then to safetensors.

    pieces = copy_of_pieces(partition, copy=copy_into_frames)
    write_tensors(path, {"weight": pieces[0]})

The worker's own parameters are not touched: a save changes nothing that training sees.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from psdist.errors import UsageError
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition

SUFFIX: Final = ".safetensors"


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Raises :class:`UsageError` for the name of a file that others would take for another kind."""
    name = Path(path)
    if name.suffix == SUFFIX:
        return
    better = f": {str(name.with_suffix(SUFFIX))!r}" if name.name else ""
    raise UsageError(
        f"job.save({os.fspath(path)!r}): it writes a safetensors file, whose name must end in "
        f"{SUFFIX}{better} (safetensors.torch.load_file reads it)"
    )


def copy_of_pieces(
    partition: Partition, *, copy: Callable[[Sequence[Frame]], None]
) -> list[torch.Tensor]:
    """The pieces, in memory of their own, which ``copy`` fills: one frame per chunk."""
    memories = allocate_buffers(partition)
    copy([Frame(part_of(memories, chunk)) for chunk in partition.chunks])
    pieces: dict[int, torch.Tensor] = {}
    for buffer in partition.buffers:
        flat = as_tensor(memories[buffer.index], buffer.dtype, buffer.num_elements)
        for piece, start in buffer.piece_starts:
            shape, stride = partition.pieces[piece].shape, partition.pieces[piece].stride
            pieces[piece] = torch.as_strided(flat, shape, stride, start)
    return [pieces[piece] for piece in range(len(partition.pieces))]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The file is complete or absent. Raises OSError."""
    # safetensors wants every entry to own its memory, tied parameters included.
    tensors = {name: value.cpu().contiguous().clone() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        mode = _mode_of_new_file(partial)
        save_file(tensors, partial)  # by a temporary file that only its owner may read
        partial.chmod(mode)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:  # also a full disk is a SafetensorError
        if partial.is_file():
            partial.unlink()
        raise OSError(str(error)) from error


def _mode_of_new_file(path: Path) -> int:
    """The permissions that a file made here gets: the umask's, or the folder's default ACL."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


class PlainMemory:
    """Flat memory of a worker without a model, for benchmarks and tests of the protocol."""

    def __init__(
        self, partition: Partition, *, gradients: Sequence[memoryview] | None = None
    ) -> None:
        """``gradients``: by buffer, memory that other workers push, too; else it is this worker's
        own."""
        self._parameters = allocate_buffers(partition)
        self._gradients = allocate_buffers(partition) if gradients is None else gradients

    def parameter_bytes(self, chunk: Chunk) -> memoryview:
        return part_of(self._parameters, chunk)

    def gradient_bytes(self, chunk: Chunk) -> memoryview:
        return part_of(self._gradients, chunk)

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`parameter_bytes`."""
        return Frame(self.parameter_bytes(chunk))

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`gradient_bytes`."""
        return Frame(self.gradient_bytes(chunk))


def allocate_buffers(partition: Partition) -> list[memoryview]:
    """Zeroed memory for each buffer of ``partition``."""
    return [
        allocate(buffer.num_elements * ITEM_BYTES[buffer.dtype]) for buffer in partition.buffers
    ]


def part_of(buffers: Sequence[memoryview], chunk: Chunk) -> memoryview:
    """The bytes of ``chunk`` in the memory of the partition's buffers."""
    start = chunk.start * ITEM_BYTES[chunk.dtype]
    return buffers[chunk.buffer][start : start + chunk.num_bytes]
