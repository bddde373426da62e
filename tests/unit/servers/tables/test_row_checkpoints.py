"""Rows in files: written by each server's keeper, proved whole, read back by another division."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from psdist.checkpoint.folder import Folder, name_of
from psdist.checkpoint.index import FileRecord, Index, SetRecord
from psdist.checkpoint.reading import Checkpoint
from psdist.errors import CheckpointError
from psdist.protocol.control import Written
from psdist.protocol.optimizers import pack_hyperparameters, unpack_hyperparameters
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.servers.protocol.actions import StartSum
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.tables.checkpoints import rows_in
from psdist.servers.tables.contents import contents_of
from psdist.servers.tables.shard import TableShard
from psdist.tables.payloads import largest_push
from psdist.tables.specs import TableSpecs
from tests.support.table_server import TableServer
from tests.support.tables import drawn_rows, push_of, specs_of, step_of

HYPER = pack_hyperparameters([{"lr": 0.1}, {"lr": 0.05}])
TABLES = ("RowWiseAdagrad", "LazyAdam")


def trained(specs: TableSpecs) -> list[TableShard]:
    shards = [
        TableShard(specs, chunks=(part,), largest_push=largest_push(specs))
        for part in range(specs.num_parts)
    ]
    random = np.random.default_rng(1)
    for clock in range(4):
        rows = drawn_rows(specs, random, most=300)
        for part, shard in enumerate(shards):
            shard.start_sum(StartSum(part, push_of(specs, rows, part), 1.0, clock))
            shard.step(step_of(part, clock, (0,), HYPER))
    return shards


def written(run_dir: Path, specs: TableSpecs, shards: list[TableShard]) -> Checkpoint:
    folder, name, files = Folder(run_dir), name_of(4), list[FileRecord]()
    folder.begin(name)
    for part, shard in enumerate(shards):
        keeper = FileKeeper(folder, part, restored=None, is_behind=False)
        keeper.keep(0, shard.snapshot(part, keeper.memory, set_index=0))
        keeper.write(name)
        assert keeper.go_on()
        told = keeper.outcome()
        assert isinstance(told, Written)
        file = f"server-{part}.safetensors"
        files.append(FileRecord(name=file, num_bytes=told.num_bytes, crc32=told.crc32))
    record = SetRecord.of(
        specs.partition(),
        optimizer="torch.optim.SGD",
        clocks=(4,),
        hyper=unpack_hyperparameters(HYPER),
    )
    index = Index(
        psdist="0.1.0",
        time="2026-01-31T12:00:00Z",
        attempt=1,
        mode="sync",
        seed=7,
        world=1 + len(shards),
        servers=len(shards),
        groups=((0,),),
        sets=(record,),
        files=tuple(files),
    )
    folder.commit(name, index, 3)
    return folder.open(name)


def test_files_of_two_servers_are_whole_and_restored_on_three(tmp_path: Path) -> None:
    shards = trained(specs_of(2, *TABLES, admit=2))
    checkpoint = written(tmp_path, shards[0].specs, shards)
    checkpoint.verify()
    specs = specs_of(3, *TABLES, admit=2)
    store = ShardStore(
        TensorShard,
        choose=contents_of,
        keeper=FileKeeper(Folder(tmp_path), 0, restored=checkpoint, is_behind=False),
    ).of_set(0)
    setup = TableServer(specs).setup()
    contents = store.choose(setup, store.wire, store.make_executor)
    built = contents.describe(0, setup, (1.0,) * 3, [0] * 3)
    num = 0
    for server in range(3):
        options = ServerOptions(
            server=server, shard_weights=(1.0,) * 3, modes=("sync",), receive_buffers=None
        )
        executor = contents.make_executor(contents.spec(options, built))
        assert isinstance(executor, TableShard)
        (part,) = executor.parts
        contents.restore(executor, store.keeper, built, part)
        for table, spec in enumerate(specs.tables):
            ids = np.arange(500)[specs.parts_of(table, np.arange(500)) == part]
            before = shards[0].specs.parts_of(table, ids)
            expected = np.empty((len(ids), spec.dim), np.float32)
            for each, shard in enumerate(shards):
                old = shard.parts[each].stores[table]
                expected[before == each] = old.gather(ids[before == each])
            found = executor.parts[part].stores[table]
            assert found.gather(ids).tobytes() == expected.tobytes()
            num += len(found)
    assert num == sum(shard.statistics().rows for shard in shards)


def test_other_tables_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    shards = trained(specs_of(2, *TABLES))
    checkpoint = written(tmp_path, shards[0].specs, shards)
    kept = FileKeeper(Folder(tmp_path), 0, restored=checkpoint, is_behind=False).kept(0)
    tables = shards[0].specs.tables
    wider = dataclasses.replace(tables[1], dim=9)
    for others, match in (
        ((tables[0], wider), "^table table 1: dim 3 there, 9 here; resume with"),
        (tables[:1], "^2 tables there, 1 here"),
    ):
        specs = TableSpecs(tables=others, num_parts=1)
        with pytest.raises(CheckpointError, match=match):
            list(rows_in(kept, specs, 0))


def test_a_checkpoint_whose_rows_are_damaged_is_refused(tmp_path: Path) -> None:
    shards = trained(specs_of(1, *TABLES))
    written(tmp_path, shards[0].specs, shards)
    (path,) = tmp_path.rglob("server-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged: its checksum"):
        Folder(tmp_path).open(name_of(4)).verify()
