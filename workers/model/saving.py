"""Writing the whole model: pulled from the servers into memory of its own, then to safetensors.

    write_model(path, names, partition, pull=pull_into_frames)

The worker's own parameters are not touched: a save changes nothing that training sees.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.partition import ITEM_BYTES, Partition


def write_model(
    path: Path,
    names: Mapping[str, torch.Tensor | int],
    partition: Partition,
    *,
    pull: Callable[[Sequence[Frame]], None],
) -> None:
    """``names``: a piece's index where it is trained, else the tensor itself; ``pull`` fills one
    frame per chunk. The file is complete or absent. Raises OSError."""
    memories = [
        allocate(buffer.num_elements * ITEM_BYTES[buffer.dtype]) for buffer in partition.buffers
    ]
    frames: list[Frame] = []
    for chunk in partition.chunks:
        start = chunk.start * ITEM_BYTES[chunk.dtype]
        frames.append(Frame(memories[chunk.buffer][start : start + chunk.num_bytes]))
    pull(frames)
    pieces: dict[int, torch.Tensor] = {}
    for buffer in partition.buffers:
        flat = as_tensor(memories[buffer.index], buffer.dtype, buffer.num_elements)
        for piece, start in buffer.piece_starts:
            shape, stride = partition.pieces[piece].shape, partition.pieces[piece].stride
            pieces[piece] = torch.as_strided(flat, shape, stride, start)
    # safetensors wants every entry to own its memory, tied parameters included.
    tensors = {
        name: (pieces[value] if isinstance(value, int) else value.cpu()).contiguous().clone()
        for name, value in names.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:  # also a full disk is a SafetensorError
        if partial.is_file():
            partial.unlink()
        raise OSError(str(error)) from error
