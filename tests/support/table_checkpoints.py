"""Checkpoints of tables: trained shards, written by the servers' keepers and restored from files.

trained = shards_of(specs); train(trained, specs, rounds)
checkpoint = written(Folder(tmp_path), trained, step=6)
again = restored(checkpoint, specs_of(3))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psdist.checkpoint.folder import Folder, name_of
from psdist.checkpoint.index import FileRecord, Index, SetRecord
from psdist.checkpoint.reading import Checkpoint, KeptSet
from psdist.protocol.control import Written
from psdist.protocol.ids import server_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.ranks.checkpointing.files import FileKeeper, file_name
from psdist.servers.protocol.actions import StartSum
from psdist.servers.tables.checkpoints import rows_in
from psdist.servers.tables.shard import TableShard
from psdist.tables.payloads import largest_push
from psdist.tables.specs import Ids, Rows, TableSpecs
from tests.support.tables import drawn_rows, push_of, step_of

Round = Sequence[tuple[Ids, Rows]]


def rounds_of(specs: TableSpecs, num_rounds: int, *, seed: int, most: int = 200) -> list[Round]:
    random = np.random.default_rng(seed)
    return [drawn_rows(specs, random, most=most) for _ in range(num_rounds)]


def shards_of(specs: TableSpecs) -> list[TableShard]:
    """A server for each part."""
    return [
        TableShard(specs, chunks=(part,), largest_push=largest_push(specs))
        for part in range(specs.num_parts)
    ]


def train(shards: Sequence[TableShard], rounds: Sequence[Round], *, first: int = 0) -> None:
    hyper = pack_hyperparameters([{"lr": 0.1} for _ in shards[0].specs.tables])
    for clock, rows in enumerate(rounds, start=first):
        for shard in shards:
            for part in shard.parts:
                slot = push_of(shard.specs, rows, part)
                shard.start_sum(StartSum(part, slot, 1.0, clock))
                shard.step(step_of(part, clock, (0,), hyper))


def written(
    folder: Folder, shards: Sequence[TableShard], *, step: int, keep: int = 9
) -> Checkpoint:
    specs, name, records = shards[0].specs, name_of(step), []
    folder.begin(name)
    for server, shard in enumerate(shards):
        keeper = FileKeeper(folder, server, restored=None, is_behind=False)
        for part in shard.parts:
            keeper.keep(0, shard.snapshot(part, keeper.memory, set_index=0))
        keeper.write(name)
        while keeper.go_on():
            pass
        told = keeper.outcome()
        assert isinstance(told, Written), told
        name_of_file = file_name(server_id(server), {})
        records.append(FileRecord(name=name_of_file, num_bytes=told.num_bytes, crc32=told.crc32))
    hyper = [{"lr": 0.1} for _ in specs.tables]
    record = SetRecord.of(
        specs.partition(), optimizer="rows", clocks=(step,), hyper=hyper, tables=specs.tables
    )
    index = Index(
        psdist="0",
        time="2026-01-31T12:00:00Z",
        attempt=1,
        mode="sync",
        seed=3,
        world=len(shards) + 1,
        servers=len(shards),
        groups=((0,),),
        sets=(record,),
        files=tuple(records),
    )
    folder.commit(name, index, keep)
    checkpoint = folder.open(name)
    checkpoint.verify()
    return checkpoint


def restored(checkpoint: Checkpoint, specs: TableSpecs) -> list[TableShard]:
    shards = shards_of(specs)
    for shard in shards:
        for part, its in shard.parts.items():
            for table, bucket, rows in rows_in(KeptSet(checkpoint, 0), specs, part):
                its.stores[table].restore(rows, first_bucket=bucket)
    return shards
