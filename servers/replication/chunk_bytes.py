"""A chunk's values and its optimizer state as bytes, for a replica that is filled.

    states, carried = pack_regions(executor.snapshot(chunk, memory, set_index=0))
    executor.restore(chunk, unpack_regions(record, data, partition))

Each segment has its values in the server's dtype, then the elements of each key of its state. The
description has the rest (psdist.protocol.optimizer_state).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.optimizer_state import (
    STATE_ITEM_BYTES,
    PerElement,
    PieceState,
    Whole,
    pack_states,
    unpack_states,
)
from psdist.protocol.partition import Partition, master_dtype
from psdist.servers.protocol.replication.records import ChunkRecord
from psdist.servers.shard.regions import Region, starts_of

if TYPE_CHECKING:
    import torch


def pack_regions(regions: Sequence[Region]) -> tuple[bytes, list[memoryview]]:
    """Return the description of a whole chunk, one region for each segment, and its bytes. Nothing
    from an executor of sizes."""
    from psdist.protocol.memory import as_bytes  # with torch: not in simulations

    carried: list[memoryview] = []
    for each in regions:
        ordered = (each.elements[key] for key in each.state if key in each.elements)
        carried += map(as_bytes, (each.values, *ordered))
    states = pack_states({each.piece: each.state for each in regions if each.state})
    return states, [each for each in carried if len(each)]


def unpack_regions(record: ChunkRecord, data: memoryview, partition: Partition) -> list[Region]:
    """Return the regions that :func:`pack_regions` packed, in memory of their own; nothing for no
    bytes. Raises :class:`ProtocolError` if the bytes do not fit the chunk."""
    if not len(data):
        return []
    chunk = partition.chunks[record.chunk]
    pieces = {segment.piece for segment in chunk.segments}
    states = unpack_states(record.states, pieces=pieces, is_of_server=True)
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
        elements: dict[str, torch.Tensor] = {}
        for key, entry in state.items():
            if isinstance(entry, PerElement):
                elements[key] = take(entry.dtype, segment.length)
            elif isinstance(entry, Whole):
                elements[key] = take(entry.dtype, prod(entry.shape))
        regions.append(
            Region(
                piece=segment.piece,
                start=start,
                values=values,
                state=state,
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


def _refuse(record: ChunkRecord, why: str) -> NoReturn:
    raise ProtocolError(f"a ChunkRecord of chunk {record.chunk} {why}")
