"""Aligned memory, and the same bytes seen as torch tensor or as memoryview; copies nothing.

memory = allocate(1 << 20)                        # page-aligned bytes
tensor = as_tensor(memory, "bfloat16", 512)       # shares them
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

PAGE_BYTES = 4096

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_STATE_DTYPES = {
    **_TORCH_DTYPES,
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""As psdist.protocol.optimizer_state.STATE_ITEM_BYTES."""


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32; torch's own name for dtypes that psdist does not train."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    return _TORCH_DTYPES[name]


def state_dtype(name: str) -> torch.dtype:
    """Dtype of an optimizer's state, which may differ from the dtypes of parameters."""
    return _STATE_DTYPES[name]


def allocate(num_bytes: int) -> memoryview:
    """Zeroed, page-aligned bytes (MPI transports and vector instructions like both)."""
    raw = np.zeros(num_bytes + PAGE_BYTES, dtype=np.uint8)
    offset = -raw.ctypes.data % PAGE_BYTES
    return raw[offset : offset + num_bytes].data


def as_tensor(memory: memoryview, dtype: str, num_elements: int) -> torch.Tensor:
    """The first ``num_elements`` of ``memory`` as a 1-D tensor that shares it."""
    if not num_elements:
        return torch.empty(0, dtype=_TORCH_DTYPES[dtype])
    return torch.frombuffer(memory, dtype=_TORCH_DTYPES[dtype], count=num_elements)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor."""
    memory: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return memory


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous CPU tensors of one size hold the same; in half of the time that
    torch.equal takes, which looks at one element after the other."""
    difference: int = _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return difference == 0
