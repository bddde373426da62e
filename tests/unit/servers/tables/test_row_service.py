"""Pulls of rows, pushes in several messages, and the description of a set of tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.codecs.wire import RAW_WIRE
from psdist.errors import ProtocolError
from psdist.protocol.control import Evict, Leave, Register
from psdist.protocol.events import ControlArrived, Sent
from psdist.protocol.header import Flag, Kind
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.protocol.actions import ChangeCodecs
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.set_store import ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.tables.contents import contents_of
from psdist.tables.payloads import pack_ids, pack_push, read_rows
from psdist.tables.store import first_rows
from tests.support.table_server import TableServer
from tests.support.tables import no_ids, specs_of

SPECS = specs_of(1)
IDS = [np.array([2, 5]), np.array([7])]
ONES = [
    (ids, np.ones((len(ids), each.dim), np.float32))
    for ids, each in zip(IDS, SPECS.tables, strict=True)
]
PUSH = pack_push(SPECS, ONES, no_ids(SPECS))
PULL = pack_ids(SPECS, IDS)


def server(**more: Any) -> TableServer:
    found = TableServer(SPECS, **more)
    found.describe()
    found.register(0, 1)
    found.taken()
    return found


def test_a_pull_is_answered_with_the_rows_of_its_ids() -> None:
    it = server()
    it.send(1, Kind.PULL_ROWS, PULL, pull_number=4)
    ((peer, header, payload),) = it.taken()
    assert (peer, header.kind, header.flags) == (worker_id(1), Kind.REPLY, Flag.FOR_PULL)
    assert (header.pull_number, header.clock, header.chunk_version) == (4, 0, 1)
    rows = read_rows(SPECS, memoryview(payload), IDS, first_rows(SPECS))
    for store, ids, each in zip(it.shard.parts[0].stores, IDS, rows, strict=True):
        assert each.tobytes() == store.gather(ids).tobytes()
    assert it.shard.statistics().rows == 0  # a pulled row stores nothing


@pytest.mark.parametrize(
    ("own", "waits_after"),
    [(None, 0), (rule_for("async"), 3), (rule_for("ssp", staleness=2), 2)],
    ids=["the mode of parameters", "async", "ssp:2"],
)
def test_tables_may_have_a_mode_of_their_own(own: MakeRule | None, waits_after: int) -> None:
    """Group 1 never pushes; parameters are in sync."""
    it = server(mode="sync", of_tables=own)
    answered = 0
    for clock in range(3):
        it.push(0, PUSH, clock=clock)
        if not [each for each in it.taken() if each[1].kind == Kind.REPLY]:
            break
        answered += 1
    assert answered == waits_after


def test_a_change_of_codecs_holds_the_rounds_of_tables_with_a_mode_of_their_own() -> None:
    it = server(mode="sync", of_tables=rule_for("async"))
    (each,) = it.loop.sets
    it.push(0, PUSH, clock=0)
    assert len(it.taken()) == 1
    for action in each.hold_rounds():
        each.execute(action)
    it.push(0, PUSH, clock=1)
    assert not it.taken()
    for action in each.core.handle(ChangeCodecs(1, 2, 0)):
        if not isinstance(action, ChangeCodecs):  # this wire has no levels
            each.execute(action)
    it.loop.turn()
    assert [header.clock for _, header, _ in it.taken()] == [1]


def test_a_pull_waits_until_the_mode_allows_it_and_a_fresh_one_does_not() -> None:
    it = server(mode="ssp", staleness=0)
    it.push(0, PUSH, clock=0)
    assert not it.taken()  # its reply waits for group 1
    it.send(0, Kind.PULL_ROWS, PULL, clock=1, pull_number=1)
    assert not it.taken()
    it.push(1, PUSH, clock=0)
    kinds = [(peer, each.pull_number) for peer, each, _ in it.taken()]
    assert kinds == [(worker_id(1), 0), (worker_id(0), 0), (worker_id(0), 1)]
    it.push(0, PUSH, clock=1)
    it.send(0, Kind.PULL_ROWS, PULL, clock=2, pull_number=2, flags=Flag.FRESH)
    ((_, header, _),) = it.taken()
    assert (header.pull_number, header.flags) == (2, Flag.FOR_PULL | Flag.FRESH)


def test_a_pull_before_the_description_waits_for_it() -> None:
    it = TableServer(SPECS)
    it.control(1, Register(group=1, workers=[1], clock=0))
    it.send(1, Kind.PULL_ROWS, PULL, pull_number=1)
    it.describe()
    assert [header.pull_number for _, header, _ in it.taken() if header.kind == Kind.REPLY] == [1]


def refuse(match: str, worker: int = 1, kind: Kind = Kind.PULL_ROWS, **fields: Any) -> None:
    it = server()
    payload = fields.pop("payload", PULL)
    with pytest.raises(ProtocolError, match=match):
        it.send(worker, kind, payload, **{"pull_number": 1, **fields})
    assert it.shard.statistics().rows == 0


def test_what_is_wrong_with_a_pull_is_told() -> None:
    refuse("^server 0: worker 7 sent rows of tables of set 0, which it does not train", worker=7)
    refuse("worker 1 sent rows of tables of set 3", set_index=3)
    refuse("worker 1 sent rows of part 9 of set 0, which this server does not hold", chunk=9)
    refuse(r"worker 1 sent rows of part 0 at iteration 2, .* iteration 1 and view 0 are", clock=2)
    refuse("worker 1 sent rows of part 0 at iteration -1", clock=-1)
    refuse("view 4; iteration 1 and view 0 are most", generation=4)
    refuse("sent rows by codec 0, dtype 1", codec=0)
    refuse("sent rows by codec 13, dtype 0", dtype=0)
    refuse("sent a message of rows with 8 bytes, whose counts need", payload=bytes(PULL[:8]))
    refuse("sent a message of rows that begins with", payload=b"y" * 32)
    refuse("offers 1000000 bytes of rows", payload=bytes(1_000_000))
    refuse("worker 1 sent a message of kind 10 without rows", payload=b"")
    refuse("pushed rows for group 0, which is not its own", kind=Kind.PUSH_ROWS, payload=PUSH,
           group=0, map_version=1)  # fmt: skip
    refuse("pushed rows of part 0: message 2 of iteration 0 after 0", kind=Kind.PUSH_ROWS,
           payload=PUSH, map_version=2)  # fmt: skip


def test_a_worker_has_one_pull_of_a_part_open() -> None:
    it = server()
    it.push(0, PUSH, clock=0)
    it.send(0, Kind.PULL_ROWS, PULL, clock=1, pull_number=1)
    with pytest.raises(ProtocolError, match="worker 0 sent rows of part 0 before its last were"):
        it.send(0, Kind.PULL_ROWS, PULL, clock=1, pull_number=2)


def test_a_push_in_several_messages_is_acknowledged_and_applied_as_one() -> None:
    it, whole = server(), server()
    halves = [[ONES[0], (IDS[1][:0], ONES[1][1][:0])], [(IDS[0][:0], ONES[0][1][:0]), ONES[1]]]
    first, last = (
        pack_push(SPECS, half, no_ids(SPECS), num_before=number)
        for number, half in enumerate(halves)
    )
    it.send(0, Kind.PUSH_ROWS, first, clock=0, map_version=1)
    ((peer, header, _),) = it.taken()
    assert (peer, header.kind, header.map_version) == (worker_id(0), Kind.RECEIPT, 1)
    it.push(0, last, clock=0)
    whole.push(0, PUSH, clock=0)
    for each in (it, whole):
        assert each.shard.statistics().rows == 0
        each.push(1, PUSH, clock=0)
        assert each.shard.statistics().rows == 3
    one, other = (each.shard.parts[0].stores for each in (it, whole))
    for mine, its, ids in zip(one, other, IDS, strict=True):
        assert mine.gather(ids).tobytes() == its.gather(ids).tobytes()
    it.send(0, Kind.PUSH_ROWS, first, clock=0, map_version=1)  # sent again: applied before
    assert not it.shard.parts[0].early[0]


def test_messages_of_a_failed_worker_without_their_push_are_dropped() -> None:
    it = server(mode="sync", survives_workers=True)
    it.send(0, Kind.PUSH_ROWS, PUSH, clock=0, map_version=1)
    whole = pack_push(SPECS, ONES, no_ids(SPECS), num_before=1)
    it.send(1, Kind.PUSH_ROWS, PUSH, clock=0, map_version=1)
    it.push(1, whole, clock=0)
    assert it.shard.parts[0].early[0]
    it.lose(0)
    assert not it.shard.parts[0].early[0]
    it.lose(1)
    assert it.shard.parts[0].early[1]  # its push is here whole: the round may contain it
    it.handle(ControlArrived(COORDINATOR, Evict(generation=1, dead=[0, 1])))
    assert it.shard.statistics().rows == 3
    assert not it.shard.parts[0].early[1]


def test_a_pull_of_a_failed_worker_is_forgotten() -> None:
    it = server(mode="sync", survives_workers=True)
    it.push(0, PUSH, clock=0)
    it.send(0, Kind.PULL_ROWS, PULL, clock=1, pull_number=1)
    it.lose(0)
    it.handle(ControlArrived(COORDINATOR, Evict(generation=1, dead=[0])))
    it.push(1, PUSH, clock=0)
    assert [peer for peer, _, _ in it.taken()] == [worker_id(1)]
    it.send(0, Kind.PULL_ROWS, PULL, clock=0, pull_number=2)  # sent before it failed
    assert not it.taken()


def test_a_server_ends_when_its_answers_have_left() -> None:
    it = server()
    it.network.keeps_frames = True
    it.send(1, Kind.PULL_ROWS, PULL, pull_number=1)
    for worker in (0, 1):
        it.control(worker, Leave(group=worker, clock=0))
    assert not it.service.is_over
    it.handle(Sent(it.network.frames[-1]))
    assert it.service.is_over


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"partition": b"\x90"}, "another partition"),
        ({"hyper": pack_hyperparameters([{"lr": 0.1}])}, "hyperparameters of other groups"),
        ({"state": b"\x90"}, "optimizer state"),
        ({"max_norm": 1.0}, "a norm to clip rows to"),
        ({"tables": b"x"}, "description of tables that is damaged"),
    ],
)
def test_a_description_that_no_chief_sends_is_refused(fields: Any, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        TableServer(SPECS).control(0, TableServer(SPECS).setup(**fields))


def test_tables_are_refused_where_servers_keep_no_rows() -> None:
    store = ShardStore(TensorShard).of_set(0)
    with pytest.raises(ProtocolError, match="this server keeps no rows of tables"):
        store.choose(TableServer(SPECS).setup(), store.wire, store.make_executor)


def test_parts_go_by_the_weights_of_servers_whatever_else_they_hold() -> None:
    specs = specs_of(16)
    setup = TableServer(specs).setup()
    contents = contents_of(setup, RAW_WIRE, TensorShard)
    held = [10**9, 0]
    owners = contents.describe(1, setup, (3.0, 1.0), held).owners
    assert [owners.count(server) for server in (0, 1)] == [12, 4]
    assert held == [10**9, 0]
