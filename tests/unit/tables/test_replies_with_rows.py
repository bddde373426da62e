"""Replies with rows: a server sends the rows that it stores, and the reader makes the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.errors import ProtocolError
from psdist.tables.payloads import (
    decode_rows,
    encode_rows,
    pack_ids,
    pack_rows,
    read_ids,
    read_rows,
    reply_bytes,
    smallest,
)
from psdist.tables.specs import Ids, TableSpecs
from psdist.tables.store import RowStore, first_rows
from tests.support.tables import specs_of


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def trained(specs: TableSpecs, stored: list[Ids]) -> list[RowStore]:
    """Return the tables of a server where these ids were pushed."""
    stores = [RowStore(each) for each in specs.tables]
    for store, each in zip(stores, stored, strict=True):
        gradients = np.ones((len(each), store.spec.dim), np.float32)
        store.apply(each, gradients, lr=0.5, clock=0)
    return stores


def reply(specs: TableSpecs, stores: list[RowStore], wanted: list[Ids]) -> memoryview:
    rows = [store.gather_stored(each) for store, each in zip(stores, wanted, strict=True)]
    memory = memoryview(bytearray(reply_bytes(specs, list(map(len, wanted)))))
    return memory[: pack_rows(specs, rows, memory)]


@pytest.mark.parametrize("fields", [{}, {"num_rows": None}, {"admit": 2}], ids=str)
@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_the_reader_has_the_rows_of_the_server(codec: str, fields: dict[str, Any]) -> None:
    specs = specs_of(1, codec=codec, **fields)
    stores = trained(specs, [ids(3, 5, 9), ids()])
    wanted = [ids(2, 3, 4, 9), ids(1)]
    payload = reply(specs, stores, wanted)
    read = read_rows(specs, payload, wanted, first_rows(specs))
    for store, each, rows in zip(stores, wanted, read, strict=True):
        expected = store.gather(each)
        is_stored, found = store.gather_stored(each)
        dim = store.spec.dim
        expected[is_stored] = decode_rows(codec, encode_rows(codec, found)).reshape(-1, dim)
        assert rows.tobytes() == expected.tobytes()
        assert is_stored.tolist() == [False] * len(each) or "admit" not in fields


def test_rows_that_a_server_does_not_store_are_not_sent() -> None:
    specs = specs_of(1)
    stores = trained(specs, [ids(3, 5, 9), ids()])
    many = np.arange(400)
    assert len(reply(specs, stores, [many, many])) < smallest(specs) + 3 * 16 + 2 * 56 + 32
    assert len(reply(specs, trained(specs, [many, many]), [many, many])) > 400 * (8 + 12)


@pytest.mark.parametrize(("num_rows", "width"), [(500, 4), (2**32, 4), (2**32 + 1, 8), (None, 8)])
def test_ids_have_the_width_that_their_table_needs(num_rows: int | None, width: int) -> None:
    specs = specs_of(1, num_rows=num_rows)
    sent = [np.arange(100), ids((num_rows or 2**63) - 1)]
    payload = pack_ids(specs, sent)
    assert len(payload) == smallest(specs) + 100 * width + 8
    assert all(map(np.array_equal, read_ids(specs, payload, part=0), sent))


def test_replies_with_other_counts_and_marks_are_refused() -> None:
    specs = specs_of(1)
    stores, wanted = trained(specs, [ids(3, 5, 9), ids()]), [ids(2, 3, 4, 9), ids(1)]
    payload, first = reply(specs, stores, wanted), first_rows(specs)
    with pytest.raises(ProtocolError, match=r"a reply with \[4, 1\] rows of tables where \[3, 1\]"):
        read_rows(specs, payload, [ids(2, 3, 4), ids(1)], first)
    bits = smallest(specs) + 8
    for mark in (0b0101_0001, 0b1101_0000, 0b0001_0000):  # after the ids, one more, one less
        wrong = bytearray(payload)
        wrong[bits] = mark
        if mark == 0b0101_0001:  # bits of no id
            assert read_rows(specs, memoryview(wrong), wanted, first)
            continue
        with pytest.raises(ProtocolError, match=r"counts \[2, 0\] rows and marks others"):
            read_rows(specs, memoryview(wrong), wanted, first)
    with pytest.raises(ProtocolError, match="whose counts need"):
        read_rows(specs, payload[:-16], wanted, first)
