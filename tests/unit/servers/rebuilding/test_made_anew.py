"""A shard as it is made of what workers send: its memory, its log, and what its machine knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.history.records import EventKind
from psdist.history.writers import EventCount, ServerHistory
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import HeldValues, HeldVersions, HeldWanted, Rebuild, Setup
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.loop import ServerLoop
from psdist.servers.protocol.membership import Standing
from psdist.servers.protocol.rebuilding.rebuilds import ServerRebuilt
from psdist.servers.rebuilding import (
    FoundState,
    Rebuilding,
    RebuildingOptions,
    RebuiltShard,
    WantedChunks,
)
from psdist.servers.set_loop import ServerOptions
from psdist.servers.shard.executor import ShardSpec
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.worker_machine import BYTES, OWNERS, PARTITION

GROUPS = ((0,), (1,))
MINE = [1, 3, 5]
SETUP = Setup(
    partition=PARTITION.encode(),
    optimizer="torch.optim.SGD",
    hyper=pack_hyperparameters([{"lr": 0.1}]),
    state=b"what the chief had sent",
)
REBUILD = Rebuild(server=1, number=2, resumed_up_to=3, positions=[])


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send_control(self, peer: int, message: Any, _set_index: int = 0) -> None:
        self.sent.append((peer, message))


class Memory:
    """Keeps what an executor is told, in order."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.told: list[Any] = []

    def restore(self, chunk: int, regions: Sequence[Any]) -> None:
        self.told.append((chunk, *regions))

    def load(self, action: Any) -> None:
        self.told.append((action.chunk, bytes(action.slot.payload)))


def make(**changed: Any) -> tuple[Rebuilding, Wire]:
    wire = Wire()
    options = RebuildingOptions(
        groups=GROUPS,
        make_core=lambda *_: None,  # type: ignore[arg-type, return-value]
        make_history=lambda server, _index, number, position: ServerHistory(
            None, server, rebuilt=number, position=position
        ),
        make_keeper=lambda _server: None,
    )
    server_options = ServerOptions(
        server=0, shard_weights=(1.0, 1.0), modes=("sync",), receive_buffers=None
    )
    rebuilding = Rebuilding(wire, replace(options, **changed), server_options, Memory)  # type: ignore[arg-type]
    rebuilding.on_built(0, PARTITION, OWNERS, SETUP)
    return rebuilding, wire


def held(worker: int, **changed: Any) -> HeldVersions:
    message = HeldVersions(
        server=1,
        worker=worker,
        set_index=0,
        chunks=MINE,
        positions=[10 + worker] * 3,
        min_dones=[4] * 3,
        versions=[5 + worker] * 3,
        rounds=[4, 4, 5],
        sent=[1 - worker] * 3,
        paused=[False] * 3,
        left=-1,
        is_setting=False,
    )
    return replace(message, **changed)


def values_of(chunk: int) -> bytes:
    return bytes([chunk]) * BYTES


def tell(rebuilding: Rebuilding, **changed: Any) -> None:
    """Worker 1 has the newest of all."""
    rebuilding.on_told(worker_id(0), held(0))
    rebuilding.on_told(worker_id(1), held(1, **changed))
    for chunk in MINE:
        for start in (0, BYTES // 2):
            part = values_of(chunk)[start : start + BYTES // 2]
            values = HeldValues(server=1, set_index=0, chunk=chunk, start=start, values=part)
            rebuilding.on_told(worker_id(1), values)


def made_by(rebuilding: Rebuilding, message: Rebuild = REBUILD, **changed: Any) -> RebuiltShard:
    tell(rebuilding, **changed)
    assert rebuilding.take_made() is None, "before the registrar wants it"
    rebuilding.begin(message)
    made = rebuilding.take_made()
    assert made is not None
    assert rebuilding.take_made() is None
    return made


def test_it_has_the_values_that_came_and_a_fresh_optimizer() -> None:
    rebuilding, wire = make()
    made = made_by(rebuilding)
    assert wire.sent == [(worker_id(1), HeldWanted(server=1, set_index=0, chunks=MINE))]
    (each,) = made.sets
    memory: Any = each.executor
    assert memory.told == [(chunk, values_of(chunk)) for chunk in MINE]
    assert memory.spec.chunks == tuple(MINE)
    assert not memory.spec.states
    assert each.setup == replace(SETUP, state=b"")
    assert (made.server, made.num_lost, made.checkpoint) == (1, 3, "")


def test_its_machine_knows_what_the_chunks_contain_and_who_is_there() -> None:
    (each,) = made_by(make()[0], left=5).sets
    picture = each.picture
    assert picture.clocks == {1: [5, 4], 3: [5, 4], 5: [6, 5]}
    assert picture.versions == dict.fromkeys(MINE, 6)
    assert picture.loaded == set(MINE)
    assert picture.standings == [Standing.ACTIVE, Standing.LEFT]
    assert picture.stops == [0, 5]
    assert picture.resumed_up_to == 3


def test_its_log_begins_with_who_is_there_what_it_has_and_what_may_be_lost() -> None:
    (each,) = made_by(make()[0], left=5).sets
    assert isinstance(each.log, ServerHistory)
    events = each.log.log().events
    kinds = [EventKind(kind).name for kind in events["kind"]]
    assert kinds == ["REBUILT", "JOIN", "JOIN", "LEAVE", *["HELD"] * 3, *["LOST"] * 3]
    rows = [tuple(row) for row in events[["clock", "weight", "chunk", "group"]].tolist()]
    assert rows[0][:2] == (0, 11.0)
    assert [row[:2] for row in rows[1:4]] == [(0, 1.0), (0, 1.0), (5, 1.0)]
    assert rows[4:7] == [(6, 11.0, chunk, 1) for chunk in MINE]
    assert rows[7:] == [(4, 0.0, 1, 0), (4, 0.0, 3, 0), (5, 0.0, 5, 0)]


def test_it_begins_no_earlier_than_the_dead_one_had_told() -> None:
    later = replace(REBUILD, positions=[17])
    (each,) = made_by(make()[0], later).sets
    assert isinstance(each.log, ServerHistory)
    assert each.log.log().events["weight"][0] == 17.0
    assert each.log.position == 17 + 9


def test_without_a_history_its_events_are_counted() -> None:
    (each,) = made_by(make(make_history=lambda *_: None)[0]).sets
    assert isinstance(each.log, EventCount)
    assert each.log.position == 11 + 9


def test_groups_join_where_a_checkpoint_has_them() -> None:
    first = FirstClocks(checkpoint="step-00000002", clocks=(2, 3))
    (each,) = made_by(make(first_clocks=lambda _set: first)[0]).sets
    assert isinstance(each.log, ServerHistory)
    events = each.log.log().events
    assert events["clock"][events["kind"] == EventKind.JOIN].tolist() == [2, 3]
    assert each.picture.stops == [2, 3]


def test_the_optimizers_state_is_a_checkpoints_where_that_has_the_set() -> None:
    search = Search()
    made = made_by(make(find_state=search.begin)[0])
    assert search.wanted == {0: (PARTITION, MINE)}
    memory: Any = made.sets[0].executor
    assert made.checkpoint == "step-00000004"
    assert memory.told[:2] == [(1, "state of 1"), (1, values_of(1))]
    search.found = FoundState("step-00000004", {})
    memory = made_by(make(find_state=search.begin)[0]).sets[0].executor
    assert len(memory.told) == 3


def test_it_waits_for_that_state() -> None:
    search = Search()
    search.is_over = False
    rebuilding, _ = make(find_state=search.begin)
    tell(rebuilding)
    rebuilding.begin(REBUILD)
    assert rebuilding.take_made() is None
    search.is_over = True
    assert rebuilding.take_made() is not None


class Search:
    """A checkpoint has state of all chunks."""

    def __init__(self) -> None:
        regions: Any = {(0, chunk): (f"state of {chunk}",) for chunk in MINE}
        self.found = FoundState("step-00000004", regions)
        self.is_over = True
        self.wanted: WantedChunks = {}

    def begin(self, wanted: WantedChunks) -> Search:
        self.wanted = wanted
        return self


def test_what_cannot_be_is_refused() -> None:
    rebuilding, _ = make()
    with pytest.raises(ProtocolError, match="worker 0 sent HeldVersions of server 2"):
        rebuilding.on_told(worker_id(0), held(0, server=2))
    with pytest.raises(InvariantError, match="set 2 was described after 1"):
        rebuilding.on_built(2, PARTITION, OWNERS, SETUP)
    rebuilding.begin(REBUILD)
    with pytest.raises(InvariantError, match="told twice to make the shard of server 1 anew"):
        rebuilding.begin(REBUILD)


# -- in a loop -------------------------------------------------------------------------------------


def small_job(*, is_rebuilt: bool = True, iterations: int = 2) -> VirtualJob:
    schedule = Schedule(
        seed=3,
        servers=2,
        iterations=(iterations,) * 2,
        collectives=((1,), (1,)),
        is_rebuilt=is_rebuilt,
    )
    return VirtualJob(schedule, is_watched=False)


def test_servers_tell_how_long_their_logs_are_when_a_collective_is_over() -> None:
    job = small_job()
    job.run()
    rebuilds = job.registrar._rebuilds
    assert rebuilds is not None
    logs = [each.log() for each in job.server_histories]
    assert rebuilds._positions.keys() == {0, 1}
    for server, (position,) in rebuilds._positions.items():
        kinds = logs[server].events["kind"][:position]
        assert kinds[-1] == EventKind.RESUME, "all that the collective has led to"


def test_what_a_reply_tells_of_is_in_the_file_before_it_leaves() -> None:
    job = small_job()
    num_flushed = num_behind = 0
    for loop in job.servers:
        (each,) = loop.sets
        each._options = replace(each._options, flushes_replies=True)
        assert each._history is not None
        flush, send, history = each._history.flush, each._transport.send, each._history
        flushed_up_to: list[int] = [0]

        def flush_and_note(flush: Any = flush, history: Any = history, to: Any = flushed_up_to):  # type: ignore[no-untyped-def]
            flush()
            to.append(history.position)

        def look_and_send(  # type: ignore[no-untyped-def]
            peer: int, frame: Any, send: Any = send, history: Any = history, to: Any = flushed_up_to
        ):
            nonlocal num_flushed, num_behind
            num_flushed += to[-1] == history.position
            num_behind += to[-1] != history.position
            send(peer, frame)

        each._history.flush = flush_and_note  # type: ignore[method-assign]
        each._transport.send = look_and_send  # type: ignore[method-assign]
    job.run()
    assert num_flushed > 10
    assert not num_behind


def turning(loop: ServerLoop, **_more: Any) -> Iterator[None]:
    """As :meth:`ServerLoop.run`, an actor."""
    while not loop.is_finished:
        if not loop.turn():
            yield None


@pytest.mark.parametrize("turns", [False, True], ids=["actor", "run"])
def test_a_server_goes_on_with_the_shard_when_all_is_here(
    turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if turns:
        monkeypatch.setattr(ServerLoop, "actor", turning)
    job = small_job(iterations=8)
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 1)
    job.network.crash(server_id(1))
    job.network.run()
    assert not job.network.unfinished
    assert [loop.transport.me for loop in job.servers[0].hosted] == [server_id(1)]
    assert [worker.clock for worker in job.workers] == [8, 8]
    assert any(isinstance(each, ServerRebuilt) for each in job.reported)


@pytest.mark.parametrize(
    ("peer", "message", "words"),
    [
        (server_id(1), REBUILD, "server 1 sent Rebuild; server 0 declares deaths"),
        (worker_id(0), held(9), "told what worker 9 holds"),
    ],
)
def test_others_than_the_registrar_want_no_shard(peer: int, message: Any, words: str) -> None:
    loop: ServerLoop = small_job().servers[0]
    with pytest.raises(ProtocolError, match=words):
        loop._handle_outside_sets(peer, message)


@pytest.mark.parametrize("message", [REBUILD, held(0)])
def test_elsewhere_no_shard_is_made(message: Any) -> None:
    loop = small_job(is_rebuilt=False).servers[0]
    with pytest.raises(ProtocolError, match=r"shards? (are|is) made anew"):
        loop._handle_outside_sets(0 if message is REBUILD else worker_id(0), message)
