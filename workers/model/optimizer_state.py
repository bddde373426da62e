"""A torch optimizer's state on the chief: what goes to the servers, and what comes back of it.

    states = describe_state(optimizer, model)                  # or OptimizerRefusedError
    source = OwnState(partition, parameters, optimizer, states)
    source.part(chunk, start)                                  # bytes for a server
    sink = ServersState(partition)                             # filled part by part
    sink.by_piece(name)

State with elements lies in memory in the order of its parameter's, as in flat memory; a part is
copied when it is sent, so the chief never stores two copies of the whole state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from psdist.errors import OptimizerRefusedError, ProtocolError
from psdist.protocol.control import StateHeld
from psdist.protocol.memory import as_bytes, dtype_name, state_dtype
from psdist.protocol.optimizer_state import (
    MOST_KEYS,
    ONE_VALUE_KEYS,
    STATE_ITEM_BYTES,
    Entry,
    OneValue,
    PerElement,
    PieceState,
    Plain,
    Uncut,
    Whole,
    fits_torch,
    is_key,
    part_starts,
    stretches,
    unpack_states,
)
from psdist.protocol.partition import Partition
from psdist.workers.model.description import ModelDescription


def describe_state(
    optimizer: torch.optim.Optimizer, model: ModelDescription
) -> dict[int, PieceState]:
    """Describe the state of each piece that has some; an empty dict for a new optimizer.

    Raises :class:`OptimizerRefusedError` for state that cannot be cut by element.
    """
    if _is_fresh(optimizer):
        return {}
    for key, value in optimizer.state.items():
        if value and not isinstance(key, Tensor):
            raise OptimizerRefusedError(
                f"{model.optimizer} has state under {key!r:.80}, which is no parameter; servers "
                "take state of parameters only: pass job.prepare an optimizer without state"
            )
    held = [optimizer.state.get(parameter) or {} for parameter in model.parameters]
    one_value = ONE_VALUE_KEYS | {
        key
        for state, parameter in zip(held, model.parameters, strict=True)
        for key, value in state.items()
        if isinstance(value, Tensor) and parameter.numel() > 1 and value.shape != parameter.shape
    }
    states: dict[int, PieceState] = {}
    for piece, (state, parameter) in enumerate(zip(held, model.parameters, strict=True)):
        name = model.pieces[piece].name
        if len(state) > MOST_KEYS:
            raise OptimizerRefusedError(
                f"{model.optimizer} has {len(state)} entries of state for parameter {name}; "
                f"servers take {MOST_KEYS} at most: pass job.prepare an optimizer without state"
            )
        for key, value in state.items():
            entry = _entry(value, parameter, may_be_cut=key not in one_value)
            what = "a key that is no text of 1 to 128 characters" if not is_key(key) else ""
            if not what and not fits_torch(model.optimizer, key, entry):
                entry = _described(value)
            if isinstance(entry, Uncut):
                what = f"{entry.what} for a parameter of the shape {tuple(parameter.shape)}"
            if what:
                raise _refusal(model.optimizer, name, key, what)
            states.setdefault(piece, {})[key] = entry
    return states


def _refusal(optimizer: str, parameter: str, key: object, what: str) -> OptimizerRefusedError:
    return OptimizerRefusedError(
        f"{optimizer} has state that cannot be cut into shards: state {key!r:.80} of parameter "
        f"{parameter} is {what}; between scripts and servers goes state with a value for each "
        "element of the parameter, a number, or a tensor of one value"
    )


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """True if it has no state, or the state of Adagrad before its first step."""
    if type(optimizer) is not torch.optim.Adagrad:
        return not any(optimizer.state.values())
    return all(
        not optimizer.state.get(parameter)
        or (
            not float(optimizer.state[parameter]["step"])
            and bool(
                (optimizer.state[parameter]["sum"] == group["initial_accumulator_value"]).all()
            )
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _entry(value: Any, parameter: Tensor, *, may_be_cut: bool) -> Entry:
    if isinstance(value, Tensor):
        dtype = dtype_name(value.dtype)
        if dtype in STATE_ITEM_BYTES and value.layout == torch.strided:
            if value.shape == parameter.shape and (may_be_cut or value.numel() > 1):
                return PerElement(dtype)
            if value.numel() == 1:
                return OneValue(dtype, value.dim(), value.item())
        return _described(value)
    if value is None or isinstance(value, bool | float):
        return Plain(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return Plain(value)
    return _described(value)


def _described(value: Any) -> Uncut:
    if isinstance(value, Tensor):
        return Uncut(f"a {dtype_name(value.dtype)} tensor of the shape {tuple(value.shape)}")
    return Uncut(f"a {type(value).__name__}")


def _piece_starts(partition: Partition) -> dict[int, int]:
    """Where each piece begins in its buffer."""
    return {piece: start for buffer in partition.buffers for piece, start in buffer.piece_starts}


class OwnState:
    """The chief's state, for servers."""

    def __init__(
        self,
        partition: Partition,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        states: Mapping[int, PieceState],
    ) -> None:
        self._partition = partition
        self._parameters = parameters
        self._optimizer = optimizer
        self._states = states
        self._starts = _piece_starts(partition)
        self._flat: tuple[int, dict[str, Tensor]] = (-1, {})
        """The last piece, and its state in the order of its memory."""

    def part(self, chunk: int, start: int) -> bytes:
        cut = self._partition.chunks[chunk]
        values = []
        for each in stretches(cut, self._states, start):
            first = cut.start + each.start - self._starts[each.piece]
            elements = self._flat_state(each.piece, each.key)[first : first + each.length]
            values.append(as_bytes(elements.cpu().contiguous()))
        return b"".join(values)

    def _flat_state(self, piece: int, key: str) -> Tensor:
        if self._flat[0] != piece:
            self._flat = (piece, {})
        found = self._flat[1]
        if key not in found:
            value: Tensor = self._optimizer.state[self._parameters[piece]][key].detach()
            found[key] = _in_memory_order(value, self._partition.pieces[piece].stride)
        return found[key]


def _in_memory_order(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the elements in the order of memory with this (dense) stride: a view if it is the
    value's own stride."""
    if value.stride() == stride:
        return torch.as_strided(value, (value.numel(),), (1,), value.storage_offset())
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    torch.as_strided(flat, value.shape, stride).copy_(value)
    return flat


class StateSink(Protocol):
    """Takes what servers answer to the chief."""

    def keep(self, message: StateHeld, *, sender: str) -> None: ...


class ServersState:
    """The servers' state, put together on the chief."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._starts = _piece_starts(partition)
        self._described: dict[int, tuple[int, PieceState]] = {}
        """Piece -> (its lowest chunk so far, state of that chunk)."""
        self._flat: dict[tuple[int, str], Tensor] = {}

    def keep(self, message: StateHeld, *, sender: str) -> None:
        chunk = self._partition.chunks[message.chunk]
        pieces = {segment.piece for segment in chunk.segments}
        try:
            states = unpack_states(message.described, pieces=pieces, is_of_server=True)
        except ProtocolError as error:
            raise ProtocolError(f"{sender} sent {error}") from None
        layout = stretches(chunk, states, message.start)
        expected = sum(each.num_bytes for each in layout)
        if expected != len(message.values):
            raise ProtocolError(
                f"{sender} sent {len(message.values)} bytes of optimizer state of chunk "
                f"{message.chunk}, and describes {expected}"
            )
        for piece, state in states.items():
            # All chunks of a piece have the same entries.
            number, known = self._described.setdefault(piece, (message.chunk, state))
            if message.chunk < number:
                self._described[piece] = (message.chunk, state)
            if _with_elements(known) != _with_elements(state):
                raise ProtocolError(
                    f"{sender} sent other optimizer state of parameter "
                    f"{self._partition.pieces[piece].name} in chunk {message.chunk} than was sent "
                    "of another part of it"
                )
        at = 0
        for each in layout:
            values = bytearray(message.values[at : at + each.num_bytes])
            at += each.num_bytes
            begin = chunk.start + each.start - self._starts[each.piece]
            target = self._elements(each.piece, each.key, each.dtype)
            target[begin : begin + each.length] = torch.frombuffer(
                values, dtype=state_dtype(each.dtype)
            )

    def _elements(self, piece: int, key: str, dtype: str) -> Tensor:
        flat = self._flat.get((piece, key))
        if flat is None:
            num_elements = self._partition.pieces[piece].num_elements
            flat = self._flat[piece, key] = torch.zeros(num_elements, dtype=state_dtype(dtype))
        return flat

    def by_piece(self, optimizer: str) -> dict[int, dict[str, Any]]:
        """Return the state as torch has it, on the CPU. Raises :class:`OptimizerRefusedError` if
        ``optimizer``, as run by the servers, has state that cannot be put together."""
        found: dict[int, dict[str, Any]] = {}
        for piece, (_, state) in sorted(self._described.items()):
            its = self._partition.pieces[piece]
            for key, entry in state.items():
                if isinstance(entry, Uncut | Whole):
                    what = f"{entry.what} for a parameter of the shape {its.shape}"
                    raise _refusal(optimizer, its.name, key, what)
                found.setdefault(piece, {})[key] = self._value(piece, key, entry)
        return found

    def _value(self, piece: int, key: str, entry: PerElement | OneValue | Plain) -> Any:
        if isinstance(entry, Plain):
            return entry.value
        if isinstance(entry, OneValue):
            return torch.full((1,) * entry.dims, entry.value, dtype=state_dtype(entry.dtype))
        its = self._partition.pieces[piece]
        return torch.as_strided(self._elements(piece, key, entry.dtype), its.shape, its.stride)


def _with_elements(state: PieceState) -> dict[str, str]:
    """Return the dtype of each entry with elements."""
    return {key: its.dtype for key, its in state.items() if isinstance(its, PerElement)}


def all_parts(partition: Partition) -> list[tuple[int, int]]:
    """Return (chunk, start) of every part of every chunk."""
    return [
        (chunk.index, start) for chunk in partition.chunks for start in part_starts(chunk.length)
    ]
