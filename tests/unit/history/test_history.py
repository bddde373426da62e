"""The recorded history: what is written is what is read, and damage is one clear line.

Longer than other modules: writers and reader share the damaged records.
"""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from psdist.errors import HistoryError, InvariantError
from psdist.history import (
    CHECKSUM,
    CHECKSUM_DTYPE,
    EVENT,
    EVENT_DTYPE,
    HEADER,
    NO_CHUNK,
    OF_MEMBERSHIP,
    PUSH,
    PUSH_DTYPE,
    RETIRED_KINDS,
    USE_DTYPE,
    EventFlag,
)
from psdist.history.writers import (
    EventCount,
    EventKind,
    History,
    RunRecord,
    read_history,
    slice_places,
    write_run,
)
from tests.support.history.memory import ServerHistory, WorkerHistory, collect

RUN = RunRecord(
    psdist="0.1.0",
    mode="ssp",
    staleness=3,
    groups=((0,), (1,)),
    slices=((0,) * 8,),
    num_servers=1,
    num_chunks=8,
    owners=(0,) * 8,
    checksum_every=4,
)

clocks = st.integers(0, 2**31 - 2)
events = st.lists(
    st.one_of(
        st.tuples(
            st.just("apply"),
            st.integers(0, 7),
            st.integers(0, 1),
            clocks,
            st.floats(allow_nan=False),
            st.floats(allow_nan=False, width=32),
            st.booleans(),
            st.booleans(),
        ),
        st.tuples(
            st.just("member"),
            st.sampled_from(sorted(OF_MEMBERSHIP)),
            st.integers(0, 1),
            clocks,
            st.floats(allow_nan=False),
        ),
        st.tuples(
            st.just("load"),
            st.integers(0, 7),
            st.integers(0, 1),
            clocks,
            st.none() | st.integers(0, 2**32 - 1),
        ),
        st.tuples(
            st.just("checksum"),
            st.integers(0, 7),
            st.integers(0, 2**32 - 1),
            st.integers(0, 1),
            clocks,
        ),
    ),
    max_size=40,
)
uses = st.lists(
    st.tuples(
        clocks,
        st.lists(
            st.tuples(
                st.integers(0, 7),
                st.integers(0, 2**48 - 1),
                clocks,
                st.integers(0, 2**32 - 1),
            ),
            max_size=9,
        ),
    ),
    max_size=10,
)
pushes = st.lists(
    st.tuples(
        clocks,
        st.floats(allow_nan=False),
        st.floats(allow_nan=False),
        st.sets(st.integers(0, 7)),
    ),
    max_size=10,
)


def write(
    path_dir: Path | None, drawn_events: list, drawn_uses: list, drawn_pushes: list
) -> History | None:
    server = ServerHistory(path_dir, 0)
    workers = [WorkerHistory(path_dir, 0), WorkerHistory(path_dir, 1)]
    for kind, *rest in drawn_events:
        if kind == "apply":
            *numbers, is_last, is_empty = rest
            server.apply(*numbers, is_last=is_last, is_empty=is_empty)
        elif kind == "member":
            server.member(*rest)
        elif kind == "load":
            server.load(*rest)
        else:
            chunk, crc, worker, clock = rest
            server.checksum(chunk, crc, worker=worker, clock=clock)
    for iteration, rows in drawn_uses:
        chunks, positions, replies, crcs = np.array(rows, dtype=np.uint64).reshape(-1, 4).T
        workers[1].uses(iteration, chunks, 0, positions, replies, crcs > 0, crcs)
    for iteration, own, weight, empty in drawn_pushes:
        workers[0].push(iteration, own, weight, empty, 8)
    for writer in (server, *workers):
        writer.close()
    if path_dir is None:
        return collect(RUN, [server], workers)
    write_run(path_dir, RUN)
    return None


def recorded(run_dir: Path, *, num_events: int = 6, is_closed: bool = True) -> Path:
    """A small run on disk; returns its history directory."""
    path_dir = run_dir / "history"
    server = ServerHistory(path_dir, 0)
    workers = [WorkerHistory(path_dir, 0), WorkerHistory(path_dir, 1)]
    server.member(EventKind.JOIN, 0, 0, 1.0)
    for clock in range(num_events - 1):
        server.apply(3, 0, clock)
        workers[0].uses(clock, [0, 3], 0, server.position, clock)
        workers[0].push(clock, 1.0, 1.0, {2}, 8)
    server.checksum(3, 17, worker=0, clock=1)
    for writer in (server, *workers):
        writer.close(is_complete=is_closed)
    write_run(path_dir, RUN)
    return path_dir


# ---------------------------------------------------------------------------------------------
# Records are read as they were written


def test_the_structs_that_write_and_the_dtypes_that_read_have_one_layout() -> None:
    event = np.frombuffer(EVENT.pack(11, 1.5, 0.25, 7, 3, 5, 2, 9), EVENT_DTYPE)
    assert EVENT.size == EVENT_DTYPE.itemsize == 32
    assert event.tolist() == [(11, 1.5, 0.25, 7, 3, 5, 2, 9)]
    checksum = np.frombuffer(CHECKSUM.pack(9, 6, 2, 4, 0xDEADBEEF), CHECKSUM_DTYPE)
    assert CHECKSUM.size == CHECKSUM_DTYPE.itemsize == 24
    assert checksum.tolist() == [(9, 6, 2, 4, 0xDEADBEEF)]
    push = np.frombuffer(PUSH.pack(3, NO_CHUNK, 0.5, 1.5, 1, 1), PUSH_DTYPE)
    assert PUSH.size == PUSH_DTYPE.itemsize == 32
    assert push.tolist() == [(3, NO_CHUNK, 0.5, 1.5, 1, 1)]
    assert USE_DTYPE.itemsize == 32
    assert HEADER.size == 24


@given(events, uses, pushes)
def test_files_and_memory_give_the_same_history(
    tmp_path_factory: pytest.TempPathFactory,
    drawn_events: list,
    drawn_uses: list,
    drawn_pushes: list,
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir / "history", drawn_events, drawn_uses, drawn_pushes)
    from_files = read_history(run_dir)
    in_memory = write(None, drawn_events, drawn_uses, drawn_pushes)
    assert in_memory is not None
    assert from_files.run == in_memory.run == RUN
    for ours, theirs in zip(from_files.servers, in_memory.servers, strict=True):
        assert ours.events.dtype == theirs.events.dtype == EVENT_DTYPE
        assert ours.events.tolist() == theirs.events.tolist()
        assert ours.checksums.tolist() == theirs.checksums.tolist()
        assert ours.is_complete
        assert theirs.is_complete
    for mine, other in zip(from_files.workers, in_memory.workers, strict=True):
        assert mine.uses.dtype == other.uses.dtype == USE_DTYPE
        assert mine.uses.tolist() == other.uses.tolist()
        assert mine.pushes.dtype == other.pushes.dtype == PUSH_DTYPE
        assert mine.pushes.tolist() == other.pushes.tolist()
    num_events = sum(kind != "checksum" for kind, *_ in drawn_events)
    assert len(from_files.servers[0].events) == num_events


def test_an_event_keeps_every_field() -> None:
    history = ServerHistory(None, 0)
    history.apply(5, 1, 7, 2.0, 0.5, is_last=False, is_empty=True)
    history.apply(5, 1, 8)
    history.member(EventKind.LEAVE, 1, 9, 2.0)
    history.close()
    first, second, third = history.log().events
    assert [first[name] for name in ("chunk", "group", "clock", "weight", "lr_scale")] == [
        5, 1, 7, 2.0, 0.5,
    ]  # fmt: skip
    assert (first["kind"], first["flags"]) == (EventKind.APPLY, EventFlag.EMPTY)
    assert second["flags"] == EventFlag.LAST
    assert (third["kind"], third["chunk"], third["clock"]) == (EventKind.LEAVE, NO_CHUNK, 9)


def test_a_position_is_the_number_of_events_before() -> None:
    history = ServerHistory(None, 0)
    assert history.position == 0
    history.member(EventKind.JOIN, 0, 0)
    history.apply(0, 0, 0)
    assert history.position == 2
    history.checksum(0, 99, worker=3, clock=5)
    assert history.position == 2
    assert history.num_checksums == 1
    assert history.log().checksums.tolist() == [(2, 5, 3, 0, 99)]


def test_a_push_is_one_record_and_one_more_for_each_chunk_that_alone_was_empty() -> None:
    worker = WorkerHistory(None, 0)
    worker.push(0, 0.5, 2.5, (), 3)
    worker.push(1, 0.5, 2.5, {7, 5}, 3)
    worker.push(2, 0.5, 0.0, {5, 6, 7}, 3)
    assert worker.log().pushes.tolist() == [
        (0, NO_CHUNK, 0.5, 2.5, 0, 0),
        (1, NO_CHUNK, 0.5, 2.5, 0, 0),
        (1, 5, 0.5, 2.5, 1, 0),
        (1, 7, 0.5, 2.5, 1, 0),
        (2, NO_CHUNK, 0.5, 0.0, 1, 0),
    ]


def test_the_places_of_chunks_are_those_in_a_group_of_that_size() -> None:
    cuts = {1: [range(5)], 3: [[1, 4], [], [0, 2, 3]]}
    slices = ((0, 0, 0, 0, 0), (), (2, 0, 2, 2, 0))
    assert slice_places(cuts.__getitem__, [(0, 2, 3), (1,), (4,)]) == slices


def test_a_slice_belongs_to_whoever_has_the_chunk_also_beside_empty_slices() -> None:
    of_four = (1, 1, 1, 3, 3, 3, 3, 3)
    run = RUN.model_copy(
        update={"groups": ((4,), (0, 1, 3, 2)), "slices": ((0,) * 8, (), (), of_four)}
    )
    owners = run.slice_owner(np.array([0, 1, 1, 1, 1]), np.array([7, 0, 2, 3, 7]))
    assert owners.tolist() == [4, 1, 1, 2, 2]


def test_a_step_is_one_event_for_each_contribution_and_the_last_one_ends_it() -> None:
    history, count = ServerHistory(None, 0), EventCount()
    for log in (history, count):
        log.member(EventKind.JOIN, 0, 0, 1.0)
        log.step(3, [(0, 7, 1.0, False, 5), (1, 7, 2.0, True, 0)], 0.5)
        log.step(4, [(0, 7, 1.0, False, 0)])
        assert log.position == 4
    steps = history.log().events[1:]
    assert steps["chunk"].tolist() == [3, 3, 4]
    assert steps["group"].tolist() == [0, 1, 0]
    assert steps["weight"].tolist() == [1.0, 2.0, 1.0]
    assert steps["lr_scale"].tolist() == [0.5, 0.5, 1.0]
    assert steps["flags"].tolist() == [0, EventFlag.EMPTY | EventFlag.LAST, EventFlag.LAST]


def test_records_beyond_one_buffer_are_kept_in_order(tmp_path: Path) -> None:
    for path_dir in (None, tmp_path / "history"):
        server, worker = ServerHistory(path_dir, 0), WorkerHistory(path_dir, 0)
        other = WorkerHistory(path_dir, 1)
        for clock in range(10_000):
            server.apply(0, 0, clock)
            server.checksum(0, clock, worker=0, clock=clock)
            worker.push(clock, 1.0, 1.0, (), 8)
        worker.uses(0, np.arange(10_000) % 8, 0, np.arange(10_000), 0, True, 5)
        worker.uses(1, np.arange(4_000) % 8, 0, np.arange(4_000), 1, False, 0)
        for writer in (server, worker, other):
            writer.close()
        if path_dir is None:
            history = collect(RUN, [server], [worker, other])
        else:
            write_run(path_dir, RUN)
            history = read_history(tmp_path)
        assert history.servers[0].events["clock"].tolist() == list(range(10_000))
        assert history.servers[0].checksums["crc"].tolist() == list(range(10_000))
        assert history.workers[0].pushes["iteration"].tolist() == list(range(10_000))
        recorded_uses = history.workers[0].uses
        assert recorded_uses["position"].tolist() == [*range(10_000), *range(4_000)]
        assert set(recorded_uses["crc"][:10_000].tolist()) == {5}
        assert set(recorded_uses["has_crc"][10_000:].tolist()) == {0}


def test_a_membership_event_is_not_an_apply() -> None:
    with pytest.raises(InvariantError, match="not a membership event"):
        ServerHistory(None, 0).member(EventKind.APPLY, 0, 0)


def test_nothing_can_be_recorded_after_close(tmp_path: Path) -> None:
    history = ServerHistory(tmp_path, 0)
    history.close()
    history.close()
    with pytest.raises(InvariantError, match="after close"):
        history.apply(0, 0, 0)


def test_a_history_is_never_overwritten(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(HistoryError, match="is there already, from another run"):
        ServerHistory(tmp_path / "history", 0)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file in the way")
    with pytest.raises(HistoryError, match="cannot write"):
        WorkerHistory(tmp_path / "history", 0)
    with pytest.raises(HistoryError, match="cannot write"):
        write_run(tmp_path / "history", RUN)


# ---------------------------------------------------------------------------------------------
# Crashes and damage


def test_what_was_flushed_before_a_crash_is_read_as_incomplete(tmp_path: Path) -> None:
    path_dir = recorded(tmp_path, is_closed=False)
    history = read_history(tmp_path)
    assert len(history.servers[0].events) == 6
    assert not history.servers[0].is_complete
    assert not history.workers[0].is_complete
    assert history.notes == ()
    data = (path_dir / "server-0.events").read_bytes()
    (path_dir / "server-0.events").write_bytes(data[:-5])
    history = read_history(tmp_path)
    assert len(history.servers[0].events) == 5
    assert history.notes == ("server-0.events ends in the middle of record 5",)


def test_flush_leaves_whole_records_for_a_reader_of_a_running_job(tmp_path: Path) -> None:
    path_dir = tmp_path / "history"
    server = ServerHistory(path_dir, 0)
    workers = [WorkerHistory(path_dir, 0), WorkerHistory(path_dir, 1)]
    write_run(path_dir, RUN)
    for clock in range(9):
        server.apply(0, 0, clock)
        workers[0].uses(clock, [0], 0, server.position, clock)
        workers[0].push(clock, 1.0, 1.0, (), 8)
    server.flush()
    workers[0].flush()
    history = read_history(tmp_path)
    assert len(history.servers[0].events) == len(history.workers[0].uses) == 9
    assert len(history.workers[0].pushes) == 9
    assert not history.servers[0].is_complete
    for writer in (server, *workers):
        writer.close()
    assert read_history(tmp_path).servers[0].is_complete


class _FullDisk:
    """A file on a disk that has room for half of the next write."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self._file.close()


def test_nothing_is_written_behind_a_record_that_a_full_disk_has_cut(tmp_path: Path) -> None:
    write_run(tmp_path / "history", RUN)
    WorkerHistory(tmp_path / "history", 0).close()
    WorkerHistory(tmp_path / "history", 1).close()
    server = ServerHistory(tmp_path / "history", 0)
    for clock in range(4):
        server.apply(0, 0, clock)
    recorder = server._events
    recorder._file = _FullDisk(recorder._file)
    with pytest.raises(HistoryError, match="No space left"):
        server.flush()
    with pytest.raises(InvariantError):  # as a failing rank does before it ends
        server.flush()
    server.close(is_complete=False)
    assert [int(each) for each in read_history(tmp_path).servers[0].events["clock"]] == [0, 1]


def test_a_killed_process_leaves_what_was_recorded_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr("psdist.history.writers.monotonic", lambda: float(next(seconds)))
    server = ServerHistory(tmp_path / "history", 0)
    worker, other = (WorkerHistory(tmp_path / "history", index) for index in (0, 1))
    write_run(tmp_path / "history", RUN)
    server.apply(0, 0, 0)
    server.checksum(0, 1, worker=0, clock=0)
    worker.uses(0, [0], 0, server.position, 0)
    worker.push(0, 1.0, 1.0, (), 8)
    history = read_history(tmp_path)  # nothing was flushed by hand, nothing closed
    assert len(history.servers[0].events) == 1
    assert len(history.servers[0].checksums) == 1
    assert len(history.workers[0].uses) == 1
    assert len(history.workers[0].pushes) == 1
    for writer in (server, worker, other):
        writer.close(is_complete=False)


@pytest.mark.parametrize(
    "name", ["server-0.events", "server-0.checksums", "worker-0.uses", "worker-0.pushes"]
)
@pytest.mark.parametrize("num_bytes", [1, 16, 33])
def test_a_closed_file_that_lost_bytes_is_damaged(
    tmp_path: Path, name: str, num_bytes: int
) -> None:
    path = recorded(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises(HistoryError, match="is damaged") as caught:
        read_history(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_closed_file_that_grew_is_damaged(tmp_path: Path) -> None:
    path = recorded(tmp_path) / "worker-0.uses"
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(HistoryError, match="closed with 10 records and now holds 11"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, 0, "its header is not that of such a file"),
        (4, 9, "format version 9"),
        (4, 2, "format version 2, this psdist reads 4"),
        (6, 3, "its header is not that of such a file"),
        (8, 1, "was written by number 1"),
        (12, 1, "its header is not that of such a file"),
        (16, 200, "closed with 200 records"),
        (24 + 28, 77, "record 0 has kind 77"),
        (24 + 27, 1, "record 0 has group"),
        (24 + 20, 0, "record 0 has chunk"),
        (24 + 29, 1, "record 0 has flags 1"),
        (24 + 32 + 29, 5, "record 1 has flags 5"),
        (24 + 32 + 23, 1, "record 1 has chunk"),
        (24 + 7, 200, "record 0 has clock -"),
        (24 + 32 + 31, 1, "record 1 has bytes other than zero"),
    ],
)
def test_a_changed_byte_that_cannot_be_is_named(
    tmp_path: Path, offset: int, value: int, words: str
) -> None:
    path = recorded(tmp_path) / "server-0.events"
    data = bytearray(path.read_bytes())
    data[offset] = value
    path.write_bytes(data)
    with pytest.raises(HistoryError) as caught:
        read_history(tmp_path)
    assert words in str(caught.value)
    assert "server-0.events" in str(caught.value)


@given(st.data())
def test_any_damage_is_either_read_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    path_dir = recorded(run_dir)
    path = data.draw(st.sampled_from(sorted(path_dir.iterdir())))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read_history(run_dir)
    except HistoryError as error:
        assert "\n" not in str(error)  # noqa: PT017 - reading it without an error is fine too


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "version of psdist: format: Input should be 4"),
        ({"slices": []}, "slices are of groups of up to 0 workers, groups have 1"),
        ({"slices": [[0] * 8, [0] * 8]}, "slices are of groups of up to 2 workers, groups have 1"),
        ({"slices": [[0] * 7]}, "slices of groups of 1 must give each of 8 chunks a place below"),
        ({"slices": [[0] * 7 + [1]]}, "slices of groups of 1 must give each of 8 chunks a place"),
        ({"slices": [[]]}, "slices of groups of 1 must give each of 8 chunks a place"),
        ({"mode": "async"}, "no other mode has one, seen 3"),
        ({"mode": "bsp"}, "mode"),
        ({"staleness": None}, "mode ssp needs a staleness"),
        ({"staleness": -1}, "staleness"),
        ({"staleness": "3"}, "staleness"),
        ({"mode": "sync", "staleness": None, "pipeline": 1}, "sync allows no pipeline"),
        ({"groups": [[0], [2]]}, "every worker 0, 1, 2 ... once"),
        ({"groups": [[0, 1], []]}, "none be empty"),
        ({"groups": []}, "groups"),
        ({"num_chunks": 9}, "owners names 8 chunks of 9"),
        ({"owners": [0, 0, 0, 0, 0, 0, 0, 1]}, "owners names server 1 of 1"),
        ({"num_servers": 0}, "num_servers"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_run_record_that_contradicts_itself_is_one_line(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = recorded(tmp_path) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HistoryError) as caught:
        read_history(tmp_path)
    assert words in str(caught.value)
    assert "run.json is damaged or of another version" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = recorded(tmp_path) / "run.json"
    now = read_history(tmp_path).run
    earlier = json.loads(path.read_text()) | {"round_weights": "equal", "usual_steps": 0}
    path.write_text(json.dumps(earlier))
    assert read_history(tmp_path).run == now


def test_what_an_earlier_version_promised_and_this_one_has_not_is_one_line(tmp_path: Path) -> None:
    path = recorded(tmp_path) / "run.json"
    earlier = json.loads(path.read_text()) | {"round_weights": "steps", "usual_steps": 4}
    path.write_text(json.dumps(earlier))
    with pytest.raises(HistoryError) as caught:
        read_history(tmp_path)
    assert str(caught.value) == (
        f"{path} is of another version of psdist, {earlier['psdist']}: this version has no "
        "round_weights; check the run with the version that wrote it"
    )


def test_a_history_of_a_rebuilt_shard_is_one_line(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    (folder / "rebuilt-0.events").touch()
    with pytest.raises(HistoryError) as caught:
        read_history(tmp_path)
    told = str(caught.value)
    assert told.startswith(
        f"{folder / 'rebuilt-0.events'} is of another version of psdist: a shard"
    )
    assert told.endswith("check the run with the version that wrote it")


@pytest.mark.parametrize("kind", RETIRED_KINDS)
def test_an_event_that_only_earlier_versions_wrote_is_one_line(kind: int) -> None:
    events = np.zeros(1, EVENT_DTYPE)
    events["kind"] = kind
    now = collect(RUN, [ServerHistory(None, 0)], [WorkerHistory(None, 0), WorkerHistory(None, 1)])
    with pytest.raises(HistoryError, match=r"server-0.events is of another version of psdist"):
        replace(now, servers=(replace(now.servers[0], events=events),))


def test_a_run_record_is_refused_where_it_is_made_too() -> None:
    with pytest.raises(ValidationError, match="mode ssp needs a staleness"):
        RunRecord.model_validate(RUN.model_dump() | {"staleness": None})


@pytest.mark.parametrize(
    "name", ["run.json", "server-0.checksums", "worker-1.uses", "worker-0.pushes"]
)
def test_a_missing_file_is_one_line(tmp_path: Path, name: str) -> None:
    (recorded(tmp_path) / name).unlink()
    with pytest.raises(HistoryError, match="cannot read") as caught:
        read_history(tmp_path)
    assert name in str(caught.value)


def test_a_run_without_history_is_told_to_record(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="without --record"):
        read_history(tmp_path)


def test_a_history_needs_one_log_of_each_server_and_worker() -> None:
    server, worker = ServerHistory(None, 0), WorkerHistory(None, 0)
    with pytest.raises(HistoryError, match="history of 2 workers"):
        collect(RUN, [server], [worker])
    with pytest.raises(HistoryError, match="history of 1 servers"):
        collect(RUN, [], [worker, WorkerHistory(None, 1)])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("chunk", (0, [8], 0, 0, 0)),
        ("server", (0, [0], 1, 0, 0)),
        ("position", (0, [0], 0, 2**60, 0)),
        ("iteration", (-1, [0], 0, 0, 0)),
        ("reply", (0, [0], 0, 0, -1)),
        ("has_crc", (0, [0], 0, 0, 0, 2)),
        ("crc", (0, [0], 0, 0, 0, 0, 7)),
    ],
)
def test_a_use_that_the_run_does_not_have_is_named(field: str, arguments: tuple) -> None:
    worker = WorkerHistory(None, 1)
    worker.uses(*arguments)
    with pytest.raises(HistoryError, match=f"worker-1.uses is damaged: record 0 has {field}"):
        collect(RUN, [ServerHistory(None, 0)], [WorkerHistory(None, 0), worker])


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("iteration", (-1, 1.0, 1.0, (), 8)),
        ("chunk", (0, 1.0, 1.0, {8}, 8)),
    ],
)
def test_a_push_that_the_run_does_not_have_is_named(field: str, record: tuple) -> None:
    worker = WorkerHistory(None, 1)
    worker.push(*record)
    with pytest.raises(HistoryError, match=f"worker-1.pushes is damaged: record . has {field}"):
        collect(RUN, [ServerHistory(None, 0)], [WorkerHistory(None, 0), worker])


@pytest.mark.parametrize(
    ("field", "chunk", "worker", "clock"),
    [("chunk", 8, 0, 0), ("worker", 0, 2, 0), ("clock", 0, 0, -1)],
)
def test_a_checksum_that_the_run_does_not_have_is_named(
    field: str, chunk: int, worker: int, clock: int
) -> None:
    server = ServerHistory(None, 0)
    server.checksum(chunk, 1, worker=worker, clock=clock)
    with pytest.raises(HistoryError, match=f"server-0.checksums is damaged: record 0 has {field}"):
        collect(RUN, [server], [WorkerHistory(None, 0), WorkerHistory(None, 1)])
