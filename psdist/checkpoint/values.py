"""Bytes of a checkpoint's file as tensors: all that reading needs torch for."""

from __future__ import annotations

from io import FileIO
from math import prod
from pathlib import Path

import torch

from psdist.checkpoint.container import ITEM_BYTES, Stored
from psdist.checkpoint.strict import open_regular, quoted
from psdist.checkpoint.tensors import DTYPES
from psdist.errors import CheckpointError


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
