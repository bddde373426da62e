"""An attempt's files when the next one begins, and the checkpoint that the next one resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import Index, SetRecord, TableRecord
from psdist.checkpoint.reading import Checkpoint
from psdist.config.modes import ModeFrom
from psdist.errors import ConfigError, InvariantError
from psdist.protocol.control import WriteFailed, Written
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizer_state import OneValue, PerElement
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.roles import Place, Roles
from psdist.ranks.checkpointing.files import FileKeeper, file_name
from psdist.ranks.checkpointing.resuming import Restored, choose, mark_of, opened, set_aside
from psdist.servers.shard.regions import Region, starts_of
from tests.support.tables import specs_of

GROUPS = ((0,), (1,))
PIECES = [
    Piece(name=name, shape=(size,), stride=(1,), dtype="float32", optimizer_group=0)
    for name, size in (("a", 3000), ("b", 5))
]
PARTITION = Partition.cut(PIECES, chunk_bytes=4096)


def regions(chunk: int) -> list[Region]:
    each = PARTITION.chunks[chunk]
    found = []
    for segment, start in zip(each.segments, starts_of(PARTITION, each), strict=True):
        values = torch.arange(start, start + segment.length, dtype=torch.float32)
        state = {"step": OneValue("float32", 0, 3.0), "exp_avg": PerElement("float32")}
        found.append(
            Region(
                piece=segment.piece,
                start=start,
                values=values,
                state=state,
                elements={"exp_avg": -values},
            )
        )
    return found


def finished(keeper: FileKeeper) -> Written | WriteFailed:
    """Return the outcome of the file, when nothing is owed to it any more."""
    while keeper.go_on():
        pass
    assert keeper._writing is not None
    keeper._writing.outcome(waits=True)
    told = keeper.outcome()
    assert told is not None
    return told


def write_checkpoint(run_dir: Path, clocks: tuple[int, ...] = (4, 6)) -> None:
    folder = Folder(run_dir)
    folder.begin("step-00000004")
    records = []
    for server in (0, 1):
        keeper = FileKeeper(folder, server, restored=None, is_behind=server == 1)
        for chunk in range(server, len(PARTITION.chunks), 2):
            keeper.keep(0, regions(chunk))
        keeper.write("step-00000004")
        told = finished(keeper)
        records.append((server_id(server), told.num_bytes, told.crc32))  # type: ignore[union-attr]
    from psdist.checkpoint.index import FileRecord

    index = Index(
        psdist="0",
        time="2026-01-31T12:00:00Z",
        attempt=1,
        mode="ssp",
        seed=0,
        world=4,
        servers=2,
        groups=GROUPS,
        sets=(SetRecord.of(PARTITION, optimizer="torch.optim.Adam", clocks=clocks, hyper=[{}]),),
        files=tuple(
            FileRecord(name=file_name(peer, {}), num_bytes=size, crc32=crc)
            for peer, size, crc in records
        ),
    )
    folder.commit("step-00000004", index, keep=2)


def roles(groups: tuple[tuple[int, ...], ...]) -> Roles:
    num = sum(map(len, groups))
    places = tuple(Place(rank=rank, host="h", pid=rank, cores=(0,)) for rank in range(num + 1))
    return Roles(
        places=places, server_ranks=(0,), worker_ranks=tuple(range(1, num + 1)), groups=groups
    )


def begin(run_dir: Path, *names: str) -> None:
    run_dir.mkdir(exist_ok=True)
    for name in ("ranks.json", "summary.json", *names):
        (run_dir / name).write_text(name)
    (run_dir / "logs").mkdir()


def test_a_new_run_is_the_first_attempt(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "none") == 1
    assert set_aside(tmp_path) == 1
    assert not list(tmp_path.iterdir())


def test_each_attempt_keeps_what_it_has_written(tmp_path: Path) -> None:
    decided = ["decisions.jsonl", "steps.jsonl"]  # judged together with the history
    begin(tmp_path, "metrics.jsonl", *decided)
    assert set_aside(tmp_path) == 2
    begin(tmp_path)
    assert set_aside(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "attempt-1",
        "attempt-2",
        "metrics.jsonl",
    ]
    for attempt, more in (("attempt-1", decided), ("attempt-2", [])):
        names = sorted(path.name for path in (tmp_path / attempt).iterdir())
        assert names == sorted(["logs", "ranks.json", "summary.json", *more])


def test_a_death_in_the_middle_is_completed_by_the_next_attempt(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "attempt-1.partial").mkdir()
    (tmp_path / "summary.json").rename(tmp_path / "attempt-1.partial" / "summary.json")
    assert set_aside(tmp_path) == 2
    (tmp_path / "attempt-2.partial").mkdir()  # and one that had moved all of it
    assert set_aside(tmp_path) == 3
    assert (tmp_path / "attempt-1" / "ranks.json").exists()


def test_the_newest_checkpoint_is_chosen_and_said(tmp_path: Path) -> None:
    begin(tmp_path)
    write_checkpoint(tmp_path)
    lines: list[str] = []
    checkpoint, attempt = choose(tmp_path, lines.append)
    assert checkpoint is not None
    assert (checkpoint.name, attempt) == ("step-00000004", 2)
    assert lines == [
        "resume: attempt 2 resumes from checkpoint step-00000004 of 2026-01-31T12:00:00Z, attempt 1"
    ]
    again = opened(tmp_path, checkpoint.name, mark_of(checkpoint))
    assert again is not None
    with pytest.raises(ConfigError, match="is another checkpoint here than on rank 0"):
        opened(tmp_path, checkpoint.name, "other")
    assert opened(tmp_path, "", "") is None


def test_groups_go_on_where_they_were_or_all_at_the_lowest_clock(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    checkpoint, _ = choose(tmp_path, lambda _line: None)
    assert checkpoint is not None

    def modes(_set_index: int) -> tuple[ModeFrom, ...]:
        return (ModeFrom(0, "ssp", 2), ModeFrom(sync_from, "sync"))

    def clocks(groups: tuple[tuple[int, ...], ...], mode: str) -> tuple[int, ...]:
        first = Restored.of(checkpoint, roles(groups), mode=mode, modes=modes).first(0)
        assert first is not None
        assert first.checkpoint == "step-00000004"
        return first.clocks

    sync_from = 6
    assert clocks(GROUPS, "ssp") == (4, 6)
    sync_from = 5
    assert clocks(GROUPS, "ssp") == (4, 4)
    sync_from = 6
    assert clocks(GROUPS, "sync") == (4, 4)
    assert clocks(((0, 1),), "ssp") == (4,)
    assert clocks(((0,), (1,), (2,)), "ssp") == (4, 4, 4)
    assert Restored.of(checkpoint, roles(GROUPS), mode="ssp", modes=modes).first(1) is None
    table = TableRecord.of(specs_of(1).tables[0])
    record = replace(checkpoint.index.sets[0], tables=(table,))
    checkpoint = Checkpoint(checkpoint.path, replace(checkpoint.index, sets=(record,)))
    for mode, expected in (("async", (4, 6)), ("sync", (4, 4)), (None, (4, 6))):
        own = None if mode is None else ModeFrom(0, mode)  # type: ignore[arg-type]
        found = Restored.of(checkpoint, roles(GROUPS), mode="ssp", modes=modes, of_tables=own)
        assert found.first(0).clocks == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("chunk_bytes", [4096, 8192, None])
def test_a_shard_of_another_cut_reads_what_was_kept(
    chunk_bytes: int | None, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    checkpoint, _ = choose(tmp_path, lambda _line: None)
    partition = Partition.cut(PIECES, chunk_bytes=chunk_bytes)
    keeper = FileKeeper(Folder(tmp_path), 0, restored=checkpoint, is_behind=False)
    num_elements = 0
    for chunk in range(len(partition.chunks)):
        for region in keeper.regions(0, partition, chunk):
            length = len(region.values)
            wanted = torch.arange(region.start, region.start + length, dtype=torch.float32)
            assert torch.equal(region.values, wanted)
            assert torch.equal(region.elements["exp_avg"], -wanted)
            assert region.state["step"] == OneValue("float32", 0, 3.0)
            num_elements += length
    assert num_elements == 3005


def test_a_file_that_cannot_be_written_is_told_and_the_next_one_may_be(tmp_path: Path) -> None:
    keeper = FileKeeper(Folder(tmp_path), 0, restored=None, is_behind=False)
    keeper.keep(0, regions(0))
    keeper.write("step-00000004")  # its folder does not exist
    told = finished(keeper)
    assert "No such file or directory" in told.problem  # type: ignore[union-attr]
    assert not keeper.is_busy
    assert keeper.outcome() is None
    assert file_name(worker_id(3), {}) == "worker-3.safetensors"
    assert file_name(worker_id(3), {2: 0, 3: 1}) == "worker-1.safetensors"


def test_memory_of_copies_is_not_written_to_while_a_file_is_made_of_it(tmp_path: Path) -> None:
    keeper = FileKeeper(Folder(tmp_path), 0, restored=None, is_behind=True, is_expecting=True)
    assert keeper.is_reserving
    keeper.memory.room((0, 0, 0, ""), torch.ones(4))
    assert [keeper.statistics(index) for index in (0, 1)] == [
        {"snapshot_bytes": 16},
        {"snapshot_bytes": 0},
    ]
    keeper.write("step-00000004")
    assert not keeper.is_reserving
    with pytest.raises(InvariantError, match="before the last one was written"):
        _ = keeper.memory
    finished(keeper)
    assert keeper.is_reserving
    assert keeper.statistics(0) == {"snapshot_bytes": 16}
