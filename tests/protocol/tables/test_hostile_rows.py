"""Messages of rows that are well-formed and wrong: refused by name, dropped, or taken because an
honest worker could have sent them; never another exception, and nothing that only grows."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.tables.payloads import pack_ids, pack_push
from psdist.tables.specs import TableSpecs
from tests.support.table_server import TableServer
from tests.support.tables import (
    drawn_ids,
    drawn_rows,
    ids_of_part,
    no_ids,
    of_part,
    slot_of,
    specs_of,
    step_of,
)

MIB = 1 << 20
NUMBERS = (-(2**63), -1, 0, 0, 1, 1, 2, 3, 2**31, 2**62, 2**63 - 1)
SMALL = (0, 0, 0, 1, 1, 2, 3, 65, 2**31, 2**32 - 1)
COUNTS = (0, 1, 2, 41, 500, 2**20, 2**31, 2**32 - 1)


class Hostile:
    """Workers of one server; half of their messages have something wrong."""

    def __init__(self, mode: str, codec: str, seed: int) -> None:
        self.specs = specs_of(2, num_rows=500, max_rows=100, codec=codec)
        self.server = TableServer(self.specs, mode=mode, num_servers=2)
        self.server.describe()
        self.server.register(0, 1)
        self.pick = random.Random(seed)
        self.draw = np.random.default_rng(seed)
        self.errors = self.taken = 0
        self.longest = ""
        """Texts of the errors."""

    def step(self) -> None:
        kind = self.pick.choice((Kind.PUSH, Kind.PUSH_ROWS, Kind.PULL_ROWS))
        payload = self.payload(kind)
        if self.pick.random() < 0.7:
            payload = self.spoilt(payload)
        try:
            if kind == Kind.PUSH:
                self.push(payload)
            else:
                self.server.deliver(self.header(kind, len(payload)), payload)
            self.taken += 1
        except ProtocolError as error:
            self.errors += 1
            self.longest = max(self.longest, str(error), key=len)
        self.server.taken()

    def push(self, payload: bytes) -> None:
        """Headers of pushes are the state machine's (tests/protocol/test_hostile.py)."""
        clock = self.pick.choice((0, 1, 2))
        step = step_of(0, clock, (0,), self.server.hyper, slot=slot_of(payload))
        self.server.shard.step(step)

    def payload(self, kind: Kind) -> bytes:
        specs, part = self.specs, self.pick.choice((0, 0, 0, 0, 1))
        wanted = ids_of_part(specs, [drawn_ids(each, self.draw) for each in specs.tables], part)
        if kind == Kind.PULL_ROWS:
            return bytes(pack_ids(specs, wanted))
        rows = of_part(specs, drawn_rows(specs, self.draw), part)
        for ids, values in rows:
            what = self.pick.choice(("", "", "", "", "NaN", "unsorted", "twice", "far"))
            if what == "NaN" and len(values):
                values[-1, 0] = self.pick.choice((np.nan, np.inf, -np.inf))
            elif what == "unsorted":
                ids[:] = ids[::-1].copy()
            elif len(ids) > 1 and what == "twice":
                ids[0] = ids[1]
            elif len(ids) and what == "far":
                ids[-1] = self.pick.choice(NUMBERS)
        num_before = self.pick.choice((0, 0, 0, 1, 2**32 - 1))
        wanted = wanted if kind == Kind.PUSH else no_ids(specs)
        with np.errstate(invalid="ignore"):  # by a codec that keeps no NaN
            return bytes(pack_push(specs, rows, wanted, num_before=num_before))

    def spoilt(self, payload: bytes) -> bytes:
        data, what = bytearray(payload), self.pick.randrange(5)
        if what == 0:
            return bytes(data[: self.pick.randrange(1, len(data) + 1)])
        if what == 1:
            return bytes(data) + bytes(self.pick.choice((1, 8, 64)))
        if what == 2:  # counts come after the head
            at = 8 + 4 * self.pick.randrange(2)
            struct.pack_into("<I", data, at, self.pick.choice(COUNTS))
        elif what == 3:
            data[self.pick.randrange(len(data))] ^= 1 << self.pick.randrange(8)
        else:
            return self.draw.bytes(self.pick.choice((1, 7, 64, 500)))
        return bytes(data)

    def header(self, kind: Kind, length: int) -> Header:
        worker = self.pick.choice((0, 0, 1))
        fields: dict[str, Any] = {
            "sender": worker_id(worker),
            "group": worker,
            "clock": self.pick.choice((0, 0, 1)),
            "map_version": self.pick.choice((1, 1, 2)) if kind == Kind.PUSH_ROWS else 0,
            "pull_number": 1,
            "flags": self.pick.choice((0, Flag.FRESH)),
            "dtype": int(Dtype.FLOAT32),
            "codec": int(CodecCode.ROWS),
        }
        if self.pick.random() < 0.3:
            field = self.pick.choice((*fields, "chunk", "set_index", "generation"))
            peers = (server_id(0), server_id(1), worker_id(5), worker_id(2**20))
            choices = {"sender": peers, "clock": NUMBERS, "flags": (0, 1, 4, 95)}
            fields[field] = self.pick.choice(choices.get(field, SMALL))
        return Header(kind=kind, length=length, **fields)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("count", [600, pytest.param(25_000, marks=pytest.mark.slow)])
def test_what_is_wrong_with_rows_is_refused_or_dropped_and_nothing_grows(
    mode: str, codec: str, count: int
) -> None:
    """By hand 100,000 messages, in the suite 2,400."""
    hostile = Hostile(mode, codec, count)
    tracemalloc.start()
    try:
        for number in range(count):
            hostile.step()
            if number == count // 5:
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert hostile.errors > count // 3, "the messages were meant to be wrong"
    assert hostile.taken > count // 50, "some are honest"
    assert len(hostile.longest) < 500
    assert growth < 2 * MIB
    rows = [store.gather(np.arange(500)) for store in hostile.server.shard.parts[0].stores]
    assert all(np.isfinite(each).all() for each in rows)


def test_a_push_of_the_largest_size_fits_its_slot_and_one_more_row_does_not() -> None:
    specs = TableSpecs(tables=specs_of(1).tables, num_parts=1, max_rows=100)
    server = TableServer(specs, mode="async")
    server.describe()
    server.register(0, 1)
    wide = np.arange(100, dtype=np.int64)
    empty = (wide[:0], np.empty((0, 2), np.float32))
    rows = [empty, (wide, np.ones((100, 3), np.float32))]
    server.push(0, pack_push(specs, rows, [wide[:0], wide]), clock=0)
    assert server.shard.statistics().rows == 100
    wide = np.arange(101, dtype=np.int64)
    rows = [empty, (wide, np.ones((101, 3), np.float32))]
    with pytest.raises(ProtocolError, match=r"group 0, iteration 1: .* 101 rows .*max_rows"):
        server.push(0, pack_push(specs, rows, no_ids(specs)), clock=1)
