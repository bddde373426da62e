"""A chunk's values and its optimizer state as bytes, for a replica that is filled.

    packed = pack_regions(executor.snapshot(chunk, memory, set_index=0))
    packed.states, packed.wholes            # the description, for the record
    packed.carried                          # the bytes, in order
    executor.restore(chunk, unpack_regions(record, data, partition))

Each segment has its values in the server's dtype, then the elements of each key of its state. The
description has the rest (psdist.protocol.optimizer_state).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, TypeAlias

import msgpack
from pydantic import Field, TypeAdapter

from psdist.errors import ProtocolError
from psdist.protocol.optimizer_state import (
    STATE_ITEM_BYTES,
    PerElement,
    PieceState,
    Uncut,
    pack_states,
    unpack_states,
)
from psdist.protocol.partition import Partition, master_dtype
from psdist.servers.protocol.replication.records import ChunkRecord
from psdist.servers.shard.regions import Region, Shape, starts_of

if TYPE_CHECKING:
    import torch

_Size: TypeAlias = Annotated[int, Field(ge=0, lt=2**40, strict=True)]
_WHOLES: Final = TypeAdapter(
    list[tuple[int, str, str, Annotated[tuple[_Size, ...], Field(max_length=16)]]]
)


@dataclass(frozen=True, slots=True)
class PackedRegions:
    states: bytes
    wholes: bytes
    """Tensors with shapes of their own: [piece, key, dtype, shape] of each."""
    carried: Sequence[memoryview]


def pack_regions(regions: Sequence[Region]) -> PackedRegions:
    """Pack a whole chunk, one region for each segment; nothing from an executor of sizes."""
    from psdist.protocol.memory import as_bytes, dtype_name  # with torch: not in simulations

    wholes: list[list[object]] = []
    carried: list[memoryview] = []
    for each in regions:
        carried.append(as_bytes(each.values))
        for key in each.state:
            if key not in each.elements:
                continue
            values = each.elements[key]
            carried.append(as_bytes(values))
            if key in each.shapes:
                shape = list(each.shapes[key])
                wholes.append([each.piece, key, dtype_name(values.dtype), shape])
    states = pack_states({each.piece: each.state for each in regions if each.state})
    return PackedRegions(states, msgpack.packb(wholes), [each for each in carried if len(each)])


def unpack_regions(record: ChunkRecord, data: memoryview, partition: Partition) -> list[Region]:
    """Return the regions that :func:`pack_regions` packed, in memory of their own; nothing for no
    bytes. Raises :class:`ProtocolError` if the bytes do not fit the chunk."""
    if not len(data):
        return []
    chunk = partition.chunks[record.chunk]
    pieces = {segment.piece for segment in chunk.segments}
    states = unpack_states(record.states, pieces=pieces, is_of_server=True)
    wholes = _wholes(record.wholes)
    dtype = master_dtype(chunk.dtype)
    regions: list[Region] = []
    at = 0

    def take(dtype: str, num_elements: int) -> torch.Tensor:
        nonlocal at
        begin, at = at, at + num_elements * STATE_ITEM_BYTES[dtype]
        if at > len(data):
            _refuse(record, f"came with {len(data)} bytes, fewer than it describes")
        return _tensor(data[begin:at], dtype)

    for segment, start in zip(chunk.segments, starts_of(partition, chunk), strict=True):
        values = take(dtype, segment.length)
        state: PieceState = states.get(segment.piece, {})
        shapes: dict[str, Shape] = {}
        elements: dict[str, torch.Tensor] = {}
        for key, entry in state.items():
            if isinstance(entry, PerElement):
                elements[key] = take(entry.dtype, segment.length)
            elif isinstance(entry, Uncut):
                whole = wholes.get((segment.piece, key))
                if whole is None:
                    _refuse(record, f"does not describe the state {key!r}")
                shapes[key] = whole[1]
                elements[key] = take(whole[0], prod(whole[1]))
        regions.append(
            Region(
                piece=segment.piece,
                start=start,
                values=values,
                state=state,
                shapes=shapes,
                elements=elements,
            )
        )
    if at != len(data):
        _refuse(record, f"came with {len(data)} bytes, not {at}")
    return regions


def _tensor(data: memoryview, dtype: str) -> torch.Tensor:
    """Return a copy, because the bytes need not be aligned."""
    import torch

    from psdist.protocol.memory import state_dtype

    if not len(data):
        return torch.zeros(0, dtype=state_dtype(dtype))
    return torch.frombuffer(bytearray(data), dtype=state_dtype(dtype))


def _wholes(data: bytes) -> dict[tuple[int, str], tuple[str, Shape]]:
    """Return the dtype and the shape of each tensor with a shape of its own, by piece and key."""
    try:
        found = _WHOLES.validate_python(msgpack.unpackb(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a ChunkRecord that cannot be read: {error!r:.200}") from None
    for _, _, dtype, shape in found:
        if dtype not in STATE_ITEM_BYTES:
            raise ProtocolError(f"a ChunkRecord has {dtype!r:.40} of shape {shape!r:.80}")
    return {(piece, key): (dtype, shape) for piece, key, dtype, shape in found}


def _refuse(record: ChunkRecord, why: str) -> NoReturn:
    raise ProtocolError(f"a ChunkRecord of chunk {record.chunk} {why}")
