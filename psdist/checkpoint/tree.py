"""Trees of plain values, tensors, numpy arrays and bytes: as JSON and named tensors, and back.

    plain, tensors = pack({"rng": torch.get_rng_state(), "epoch": 3})
    unpack(plain, tensors)              # the same types and bits; tensors on the CPU

The tensors are copies: later changes by the tree's owner do not reach them. A worker's state is a
dict; its member "models" has, for each prepared model, the names of its ``state_dict()``: (set,
piece) for a trained one, else the tensor. An export needs no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from psdist.checkpoint import plain as plain_values
from psdist.checkpoint.tensors import CODES
from psdist.errors import CheckpointError, UsageError

_ARRAY_KINDS: Final = "biuf"
"""Kinds of numpy's dtypes: booleans, whole numbers, floats."""


def pack(value: Any, *, path: str = "the value") -> tuple[object, dict[str, torch.Tensor]]:
    """(JSON, tensors by name). Raises :class:`UsageError` that names the place in the tree of what
    cannot be kept; ``path`` is the tree's own name."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor
        return name

    def other(value: Any, path: str) -> object:
        if isinstance(value, torch.Tensor):
            return {"tensor": keep(_copied(value, path))}
        if type(value) is bytes:
            return {"bytes": keep(_of_bytes(value))}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {kind: keep(_of_array(np.asarray(value), path))}
        return plain_values.refuse(value, path)

    return plain_values.pack(value, path=path, other=other), tensors


def unpack(plain: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree that :func:`pack` was given. Raises :class:`CheckpointError` for anything
    else."""

    def other(kind: str, content: object) -> Any:
        if kind not in ("tensor", "bytes", "array", "scalar"):
            raise CheckpointError(f"{kind!r:.80} is no kind of value")
        tensor = tensors.get(content) if isinstance(content, str) else None
        if tensor is None:
            raise CheckpointError(f"no tensor {content!r:.80}, which the values name")
        if kind == "tensor":
            return tensor
        if kind == "bytes":
            if tensor.dtype != torch.uint8 or tensor.dim() != 1:
                raise CheckpointError(f"tensor {content} is not bytes")
            return tensor.numpy().tobytes()
        try:
            array = tensor.numpy()
        except (TypeError, RuntimeError):  # bfloat16
            raise CheckpointError(f"tensor {content} is no numpy array") from None
        if kind == "scalar" and array.ndim:
            raise CheckpointError(f"tensor {content} is not one number")
        return array if kind == "array" else array[()]

    return plain_values.unpack(plain, other=other)


def _copied(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout != torch.strided or value.is_quantized or value.dtype not in CODES:
        raise UsageError(
            f"{path} is a {value.layout} tensor of {value.dtype}, which safetensors does not keep; "
            "convert it, or leave it out"
        )
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()


def _of_bytes(value: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(value, np.uint8).copy())


def _of_array(array: Any, path: str) -> torch.Tensor:
    if array.dtype.kind in _ARRAY_KINDS and array.dtype.itemsize <= 8:
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
        try:
            return torch.from_numpy(native)
        except TypeError:
            pass
    raise UsageError(f"{path} is a numpy array of {array.dtype}; convert it, or leave it out")
