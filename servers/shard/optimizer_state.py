"""Optimizer state as torch has it, from its description and back to one.

    state = begin({"step": OneValue("float32", 0, 3.0), "exp_avg": PerElement("float32")}, (1024,),
                  torch.float32, is_fused=True)
    describe(state, (1024,))                          # the same again

It does not decide which optimizers resume with state: the chief has described the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from psdist.protocol.memory import as_bytes, dtype_name, state_dtype
from psdist.protocol.optimizer_state import (
    MOST_CHARACTERS,
    MOST_KEYS,
    STATE_ITEM_BYTES,
    Entry,
    OneValue,
    PerElement,
    PieceState,
    Plain,
    Uncut,
    is_key,
)


def begin(
    described: PieceState,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    is_fused: bool,
    device: torch.device,
) -> dict[str, Any]:
    """State of a tensor of this shape, dtype and device, zero where it has elements. As torch does
    where it loads state: what is a float per element gets the tensor's dtype, ``step`` is float32
    where the step is fused, and on the CPU where it is not, and all else lies on the device."""
    state: dict[str, Any] = {}
    for key, entry in described.items():
        if isinstance(entry, PerElement):
            own = state_dtype(entry.dtype)
            own = dtype if own.is_floating_point else own
            state[key] = torch.zeros(shape, dtype=own, device=device)
        elif isinstance(entry, OneValue):
            own = torch.float32 if key == "step" and is_fused else state_dtype(entry.dtype)
            where = torch.device("cpu") if key == "step" and not is_fused else device
            state[key] = torch.full((1,) * entry.dims, entry.value, dtype=own, device=where)
        elif isinstance(entry, Plain):
            state[key] = entry.value
    return state


def is_begun(state: Mapping[str, Any] | None) -> bool:
    """Whether there is any: torch keeps None for what it has not made yet (SGD's momentum)."""
    return state is not None and any(value is not None for value in state.values())


def describe(state: Mapping[str, Any], shape: tuple[int, ...]) -> PieceState:
    """Describe the state of a tensor of this shape."""
    if len(state) > MOST_KEYS or not all(map(is_key, state)):
        return {"state": Uncut(f"a map of {len(state)} keys")}
    return {key: _entry(value, shape) for key, value in state.items()}


def _entry(value: Any, shape: tuple[int, ...]) -> Entry:
    if isinstance(value, Tensor):
        dtype = dtype_name(value.dtype)
        if dtype in STATE_ITEM_BYTES:
            if shape and value.shape == shape:
                return PerElement(dtype)
            if value.numel() == 1:
                return OneValue(dtype, value.dim(), value.item())
        return Uncut(f"a {dtype} tensor of the shape {tuple(value.shape)}"[:MOST_CHARACTERS])
    if value is None or isinstance(value, bool | int | float):
        return Plain(value)
    return Uncut(f"a {type(value).__name__}"[:MOST_CHARACTERS])


def fill(target: Tensor, values: bytes, dtype: str) -> None:
    """``target`` becomes what these bytes are in ``dtype``."""
    target.copy_(torch.frombuffer(bytearray(values), dtype=state_dtype(dtype)))


def bytes_of(values: Tensor) -> bytes:
    return bytes(as_bytes(values))
