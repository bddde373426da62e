"""The same bytes as memory, as tensor and on the wire: shared, aligned, never copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psdist.protocol.memory import (
    PAGE_BYTES,
    allocate,
    as_bytes,
    as_tensor,
    dtype_name,
    torch_dtype,
)

DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 12_345])
def test_memory_is_zero_writable_and_starts_at_a_page(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert (memory.nbytes, memory.format, memory.readonly) == (num_bytes, "B", False)
    assert bytes(memory) == bytes(num_bytes)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data if num_bytes else 0
    assert address % PAGE_BYTES == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_shares_the_memory_that_it_was_made_from(dtype: str) -> None:
    memory = allocate(64)
    tensor = as_tensor(memory, dtype, 4)
    assert (tensor.dtype, tensor.shape) == (torch_dtype(dtype), (4,))
    tensor.fill_(1.0)
    assert bytes(memory) == bytes(as_bytes(tensor)) + bytes(64 - tensor.nbytes)
    memory[:] = bytes(64)
    assert not tensor.any()


def test_a_tensor_of_no_elements_needs_no_memory() -> None:
    assert as_tensor(allocate(0), "float32", 0).shape == (0,)


def test_the_memory_outlives_the_names_that_made_it() -> None:
    tensor = as_tensor(allocate(4 * 1024), "float32", 1024)
    tensor.copy_(torch.arange(1024))
    memory = as_bytes(as_tensor(allocate(4), "float32", 1).fill_(1.0))
    assert torch.equal(tensor, torch.arange(1024, dtype=torch.float32))
    assert bytes(memory) == np.float32(1.0).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_a_tensor_are_its_own_memory_also_where_it_wants_a_gradient(dtype: str) -> None:
    tensor = torch.zeros(8, dtype=torch_dtype(dtype), requires_grad=True)
    memory = as_bytes(tensor[2:4])
    assert memory.nbytes == 2 * tensor.element_size()
    memory[:] = bytes(as_bytes(torch.ones(2, dtype=tensor.dtype)))
    assert tensor.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_names_of_dtypes_go_both_ways(dtype: str) -> None:
    assert dtype_name(torch_dtype(dtype)) == dtype


def test_dtypes_that_are_not_trained_keep_torchs_name() -> None:
    assert dtype_name(torch.int64) == "int64"
