"""The messages that carry rows of tables: pushes, pulls and replies, as bytes.

    payload = pack_push(specs, [(ids, gradients), ...], wanted=[ids, ...])
    push = read_push(specs, payload, part=0)          # raises ProtocolError
    num_bytes = pack_rows(specs, [(is_stored, rows), ...], into=memory)
    read_rows(specs, payload, [ids, ...], first_rows(specs))       # by table: float32 [n, dim]

A payload is a head with counts by table, then ids (strictly ascending: uint32 if the table has at
most 2^32 rows, else int64), then rows, all of them table by table and little-endian, each block
from a multiple of 8 bytes on. ``wanted`` ids come last. A reply has a bit for each id before its
rows, 0 where the server stores no row: the reader makes the first values. Rows are encoded one by
one, by the codec of the specs:

    none   float32
    fp16   float16
    int8   a float32 scale, then int8: value = scale * number, scale = max |value| / 127
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence, Sized
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from psdist.errors import ProtocolError
from psdist.tables.specs import Ids, Rows, TableSpec, TableSpecs
from psdist.tables.store import RowStore

CODECS: Final = ("none", "fp16", "int8")

_HEAD: Final = struct.Struct("<4sI")
"""Magic; in a push the number of messages before it that have more of its rows."""
_MAGIC: Final = b"ROWS"
_ALIGN: Final = 8


class RowPush(NamedTuple):
    """A group's push of one part. Arrays may be views of the payload."""

    ids: list[Ids]
    """By table, strictly ascending."""
    rows: list[Rows]
    """By table: the gradient of each id."""
    wanted: list[Ids]
    """By table, strictly ascending: the rows that the reply is to carry."""
    num_before: int
    """Messages before it that have more of its rows."""


def row_bytes(codec: str, dim: int) -> int:
    """Return the bytes of one encoded row."""
    return {"none": 4 * dim, "fp16": 2 * dim, "int8": 4 + dim}[codec]


def largest_push(specs: TableSpecs) -> int:
    """Return the most bytes that a push may have: ``max_rows`` gradients and as many wanted ids."""
    return largest_rows(specs) + _aligned(8 * len(specs.tables)) + 16 * specs.max_rows


def largest_rows(specs: TableSpecs) -> int:
    """Return the most bytes that a reply may have: ``max_rows`` rows."""
    widest = max(row_bytes(specs.codec, each.dim) for each in specs.tables)
    gaps = 2 * _ALIGN * len(specs.tables)
    return reply_bytes(specs, ()) + specs.max_rows // 8 + specs.max_rows * widest + gaps


def reply_bytes(specs: TableSpecs, counts: Sequence[int]) -> int:
    """Return the most bytes of a reply with this many rows, by table."""
    blocks = (
        _aligned(-(-num // 8)) + _aligned(num * row_bytes(specs.codec, table.dim))
        for num, table in zip(counts, specs.tables, strict=False)
    )
    return smallest(specs) + _aligned(4 * len(specs.tables)) + sum(blocks)


def smallest(specs: TableSpecs) -> int:
    """Return the fewest bytes of any payload."""
    return _HEAD.size + _aligned(4 * len(specs.tables))


def pack_push(
    specs: TableSpecs,
    rows: Sequence[tuple[Ids, Rows]],
    wanted: Sequence[Ids],
    *,
    num_before: int = 0,
) -> memoryview:
    """Return the payload of a push; ``rows`` and ``wanted`` by table."""
    blocks: list[npt.NDArray[Any]] = [_counts(ids for ids, _ in rows), _counts(wanted)]
    blocks += _narrowed(specs, (ids for ids, _ in rows))
    blocks += [encode_rows(specs.codec, each) for _, each in rows]
    return _joined([*blocks, *_narrowed(specs, wanted)], num_before)


def read_push(specs: TableSpecs, payload: memoryview, *, part: int) -> RowPush:
    """Return what :func:`pack_push` has packed for ``part``. Raises :class:`ProtocolError` for
    anything else: other counts, ids that are not ascending or not of this part."""
    source = _Source(specs, payload)
    counts, num_wanted = source.counts(), source.counts()
    ids, rows = source.ids(counts, part), source.rows(counts)
    wanted = source.ids(num_wanted, part)
    source.require_end()
    return RowPush(ids, rows, wanted, source.num_before)


def pack_ids(specs: TableSpecs, ids: Sequence[Ids]) -> memoryview:
    """Return the payload of a pull; ``ids`` by table."""
    return _joined([_counts(ids), *_narrowed(specs, ids)], 0)


def read_ids(specs: TableSpecs, payload: memoryview, *, part: int) -> list[Ids]:
    """Return what :func:`pack_ids` has packed for ``part``; raises as :func:`read_push`."""
    source = _Source(specs, payload)
    ids = source.ids(source.counts(), part)
    source.require_end()
    return ids


def pack_rows(
    specs: TableSpecs, rows: Sequence[tuple[npt.NDArray[np.bool_], Rows]], into: memoryview
) -> int:
    """Write the payload of a reply; return its bytes. ``rows``, by table: True for each id that has
    a row, and these rows."""
    blocks: list[npt.NDArray[Any]] = [
        *(_counts(is_stored for is_stored, _ in rows), _counts(each for _, each in rows)),
        *(np.packbits(is_stored) for is_stored, _ in rows),
        *(encode_rows(specs.codec, each) for _, each in rows),
    ]
    payload = _joined(blocks, 0)
    into[: len(payload)] = payload
    return len(payload)


def read_rows(
    specs: TableSpecs, payload: memoryview, ids: Sequence[Ids], first: Sequence[RowStore]
) -> list[Rows]:
    """Return the rows of ``ids``, by table, that a reply has brought, and first values where it has
    no row; ``first``: :func:`psdist.tables.store.first_rows`. Raises :class:`ProtocolError` for a
    reply to others."""
    source, expected = _Source(specs, payload), list(map(len, ids))
    counts, num_stored = source.counts(), source.counts()
    if counts != expected:
        raise ProtocolError(f"a reply with {counts} rows of tables where {expected} belong")
    stored = [source.bits(num) for num in counts]
    if num_stored != [np.count_nonzero(each) for each in stored]:
        raise ProtocolError(f"a reply that counts {num_stored} rows and marks others")
    found = source.rows(num_stored)
    for table, (each, is_stored, rows) in enumerate(zip(ids, stored, found, strict=True)):
        if len(rows) < len(each):
            whole = np.empty((len(each), rows.shape[1]), np.float32)
            whole[is_stored], whole[~is_stored] = rows, first[table].gather(each[~is_stored])
            found[table] = whole
    source.require_end()
    return found


def encode_rows(codec: str, rows: Rows) -> npt.NDArray[np.uint8]:
    """Return the rows (float32 [n, dim]) as bytes [n, row_bytes]. A row of zeros has scale 0."""
    if codec == "none":
        return np.ascontiguousarray(rows).view(np.uint8)
    if codec == "fp16":
        return rows.astype(np.float16).view(np.uint8)
    scales = (np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))
    numbers = np.rint(rows / divisors[:, None]).astype(np.int8)
    return np.concatenate([scales[:, None].view(np.uint8), numbers.view(np.uint8)], axis=1)


def decode_rows(codec: str, data: npt.NDArray[np.uint8]) -> Rows:
    """Return rows as float32 [n, dim]. ``data``: [n, row_bytes]."""
    if codec == "none":
        return data.view(np.float32)
    if codec == "fp16":
        return data.view(np.float16).astype(np.float32)
    scales = np.ascontiguousarray(data[:, :4]).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale that no sender makes
        return scales * data[:, 4:].view(np.int8).astype(np.float32)


class _Source:
    """Reads a payload block by block."""

    def __init__(self, specs: TableSpecs, payload: memoryview) -> None:
        self._specs = specs
        self._data = np.frombuffer(payload, np.uint8)
        if len(self._data) < _HEAD.size:
            raise ProtocolError(f"a message of rows with {len(self._data)} bytes")
        magic, self.num_before = _HEAD.unpack_from(payload)
        if magic != _MAGIC:
            raise ProtocolError(f"a message of rows that begins with {magic!r}")
        self._at = _HEAD.size

    def _take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        end = self._at + num_bytes
        if end > len(self._data):
            raise ProtocolError(
                f"a message of rows with {len(self._data)} bytes, whose counts need {end} or more"
            )
        taken = self._data[self._at : end]
        self._at += _aligned(num_bytes)
        return taken

    def counts(self) -> list[int]:
        counts: list[int] = self._take(4 * len(self._specs.tables)).view(np.uint32).tolist()
        if sum(counts) > self._specs.max_rows:
            raise ProtocolError(
                f"a message with {sum(counts)} rows of tables; at most {self._specs.max_rows} are "
                "allowed (tables.max_rows)"
            )
        return counts

    def ids(self, counts: Sequence[int], part: int) -> list[Ids]:
        found = list[Ids]()
        for index, (table, count) in enumerate(zip(self._specs.tables, counts, strict=True)):
            dtype = _id_dtype(table)
            data = self._take(dtype.itemsize * count).view(dtype)
            found.append(data.astype(np.int64, copy=False))
            if count:
                _require_ids(self._specs, index, found[-1], part)
        return found

    def bits(self, num: int) -> npt.NDArray[np.bool_]:
        return np.unpackbits(self._take(-(-num // 8)), count=num).view(np.bool_)

    def rows(self, counts: Sequence[int]) -> list[Rows]:
        found, codec = list[Rows](), self._specs.codec
        for table, count in zip(self._specs.tables, counts, strict=True):
            width = row_bytes(codec, table.dim)
            found.append(decode_rows(codec, self._take(width * count).reshape(count, width)))
        return found

    def require_end(self) -> None:
        if self._at != _aligned(len(self._data)):
            raise ProtocolError(
                f"a message of rows with {len(self._data)} bytes, of which {self._at} are counted"
            )


def _require_ids(specs: TableSpecs, index: int, ids: Ids, part: int) -> None:
    table = specs.tables[index]
    if len(ids) > 1 and not (ids[1:] > ids[:-1]).all():
        raise ProtocolError(f"ids of table {table.name} that are not ascending, or there twice")
    if table.num_rows is not None and not (ids[0] >= 0 and ids[-1] < table.num_rows):
        raise ProtocolError(
            f"ids of table {table.name} from {ids[0]} to {ids[-1]}; it has {table.num_rows} rows"
        )
    if specs.num_parts > 1 and (specs.parts_of(index, ids) != part).any():
        raise ProtocolError(f"ids of table {table.name} that are not of part {part}")


def _id_dtype(table: TableSpec) -> np.dtype[Any]:
    is_narrow = table.num_rows is not None and table.num_rows <= 2**32
    return np.dtype(np.uint32 if is_narrow else np.int64)


def _narrowed(specs: TableSpecs, ids: Iterable[Ids]) -> list[npt.NDArray[Any]]:
    """Return ids, by table, as messages have them."""
    pairs = zip(ids, specs.tables, strict=True)
    return [each.astype(_id_dtype(table), copy=False) for each, table in pairs]


def _counts(blocks: Iterable[Sized]) -> npt.NDArray[np.uint32]:
    return np.array([len(each) for each in blocks], np.uint32)


def _joined(blocks: Sequence[npt.NDArray[Any]], num_before: int) -> memoryview:
    """Return the head and the blocks, each from a multiple of 8 bytes on."""
    sizes = [_aligned(each.nbytes) for each in blocks]
    memory = memoryview(bytearray(_HEAD.size + sum(sizes)))
    data = np.frombuffer(memory, np.uint8)
    _HEAD.pack_into(memory, 0, _MAGIC, num_before)
    at = _HEAD.size
    for block, size in zip(blocks, sizes, strict=True):
        data[at : at + block.nbytes] = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        at += size
    return memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
