"""Rows in checkpoints: files of one number of servers, restored with another, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import difference_of_tables
from psdist.checkpoint.reading import KeptSet
from psdist.commands.checkpoints.comparing import differences
from psdist.errors import CheckpointError, UserError
from psdist.protocol.optimizer_state import PART_ELEMENTS, Whole
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.servers.tables import checkpoints
from psdist.servers.tables.checkpoints import num_rows_in, rows_in, tables_in
from psdist.tables import row_files
from tests.support.table_checkpoints import restored, rounds_of, shards_of, train, written
from tests.support.tables import specs_of

NAMES = ("RowWiseAdagrad", "LazyAdam", "RowSGD")
KINDS: list[dict[str, object]] = [
    {},
    {"num_rows": None, "admit": 2},
    {"evict": "age:3"},
    {"num_rows": None, "admit": 2, "evict": "age:2"},
]


@pytest.mark.parametrize("fields", KINDS)
def test_a_resumed_run_on_other_numbers_of_servers_equals_one_that_went_on(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_BLOCK_VALUES", 20)  # several blocks
    specs = specs_of(2, *NAMES, **fields)  # type: ignore[arg-type]
    rounds = rounds_of(replace(specs, num_parts=1), 12, seed=1)
    shards = shards_of(specs)
    train(shards, rounds[:6])
    kept = written(Folder(tmp_path / "kept"), shards, step=6)
    assert tables_in(KeptSet(kept, 0)) == specs
    stores = [part.stores for shard in shards for part in shard.parts.values()]
    assert num_rows_in(KeptSet(kept, 0)) == [
        sum(map(len, its)) for its in zip(*stores, strict=True)
    ]
    train(shards, rounds[6:], first=6)
    whole = written(Folder(tmp_path / "whole"), shards, step=12)
    assert list(differences(kept, whole))
    for num_parts in (3, 1, 2):
        folder = Folder(tmp_path / str(num_parts))
        again = restored(kept, replace(specs, num_parts=num_parts))
        kept = written(folder, again, step=6)
        train(again, rounds[6:], first=6)
        assert not list(differences(written(folder, again, step=12), whole))


def test_each_difference_of_rows_is_seen(tmp_path: Path) -> None:
    specs = specs_of(2, *NAMES, admit=2)
    rounds = rounds_of(specs, 8, seed=2)
    shards = shards_of(specs)
    train(shards, rounds)
    one = written(Folder(tmp_path / "one"), shards, step=8)
    store = shards[0].parts[0].stores[1]
    ids = store.stored(store.in_order()).ids[:2]
    store.apply(ids, np.ones((2, 3), np.float32), lr=0.1, clock=9)
    shards[1].parts[1].stores[2].counts[5, 1, 7] += 1
    other = written(Folder(tmp_path / "other"), shards, step=8)
    assert list(differences(one, other)) == [
        "table table 1: 2 rows differ, in values or state",
        "table table 2: 1 blocks of counts differ",
    ]
    train(restored(one, specs_of(2, *NAMES, admit=2)), rounds)
    third = shards_of(specs_of(1, "RowSGD"))
    found = list(differences(one, written(Folder(tmp_path / "third"), third, step=8)))
    assert "table table 0: optimizer RowWiseAdagrad there, RowSGD here" in found


def test_the_index_says_in_what_tables_differ(tmp_path: Path) -> None:
    specs = specs_of(2, *NAMES)
    there = written(Folder(tmp_path), shards_of(specs), step=1).index.sets[0].tables
    here = specs.tables
    assert not difference_of_tables(there, here)
    for own, words in (
        (
            [here[0], replace(here[1], num_rows=7), here[2]],
            "table table 1: num_rows 500 there, 7 here",
        ),
        (here[:2], "3 tables there, 2 here"),
        ([], "3 tables there, 0 here"),
        ([replace(here[0], name="x")], "table table 0 there, x here"),
    ):
        assert difference_of_tables(there, own) == words


class Damaged(KeptSet):
    """A set of a checkpoint whose numbers of rows are others."""

    numbers: list[int]

    def read(self, piece, key, start, length):  # type: ignore[no-untyped-def]
        found = super().read(piece, key, start, length)
        if key == "num_rows":
            found[: len(self.numbers)] += torch.tensor(self.numbers)
        return found


@pytest.mark.parametrize("numbers", [[-500], [3], [0, 100_000], [1 << 62, 1 << 62]])
def test_numbers_of_rows_that_do_not_fit_are_damage(numbers: list[int], tmp_path: Path) -> None:
    specs = specs_of(1, *NAMES)
    shards = shards_of(specs)
    train(shards, rounds_of(specs, 3, seed=3))
    kept = Damaged(written(Folder(tmp_path), shards, step=3), 0)
    object.__setattr__(kept, "numbers", numbers)
    with pytest.raises(CheckpointError, match=r"damaged: .* of part 0 of the tables"):
        list(rows_in(kept, specs, 0))


def test_state_that_is_not_of_tables_and_other_tables_are_refused(tmp_path: Path) -> None:
    specs = specs_of(2, *NAMES)
    checkpoint = written(Folder(tmp_path), shards_of(specs), step=1)
    with pytest.raises(
        CheckpointError, match=r"^table table 0: admit 0 there, 3 here; resume with"
    ):
        list(rows_in(KeptSet(checkpoint, 0), specs_of(2, *NAMES, admit=3), 0))

    class Other(KeptSet):
        def state(self, piece: int) -> dict[str, Whole]:  # type: ignore[override]
            del piece
            return {"ids": Whole("float32", (3,)), "tables": Whole("uint8", (2, 2))}

    with pytest.raises(CheckpointError, match="damaged: tables of part 0 of the tables"):
        list(rows_in(Other(checkpoint, 0), specs, 0))


def test_a_server_sends_its_rows_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "PART_ELEMENTS", 40)
    specs = specs_of(2, *NAMES)
    shard = shards_of(specs)[1]
    train([shard], rounds_of(specs, 4, seed=4))
    stores, dims = shard.parts[1].stores, [each.dim for each in specs.tables]
    state, head = shard.state(1, 0)
    num_rows = np.frombuffer(head, np.int64).tolist()
    assert (state, num_rows) == ({}, list(map(len, stores)))
    blocks = row_files.blocks_of(num_rows, dims)
    assert max(each.num * dims[each.table] for each in blocks) == 40
    found: list[list[int]] = [[] for _ in stores]
    for number, (table, first, num) in enumerate(blocks, start=1):
        _, values = shard.state(1, number * PART_ELEMENTS)
        assert values[: len(head)] == head
        ids = np.frombuffer(values[len(head) : len(head) + 8 * num], np.int64)
        assert first == len(found[table])
        found[table] += ids.tolist()
        assert values[len(head) + 8 * num :] == stores[table].gather(ids).tobytes()
    assert found == [each.stored(each.in_order()).ids.tolist() for each in stores]
    for start in (1, PART_ELEMENTS * (len(blocks) + 1), 1 << 59):
        assert shard.state(1, start) == ({}, head)
    train([shard], rounds_of(specs, 2, seed=6), first=4)
    _, values = shard.state(1, PART_ELEMENTS)
    ids = stores[0].stored(stores[0].in_order()[:20]).ids
    assert values == shard.state(1, 0)[1] + ids.tobytes() + stores[0].gather(ids).tobytes()


def test_a_server_without_memory_for_a_checkpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (shard,) = shards_of(specs_of(1, *NAMES))
    monkeypatch.setattr(np, "empty", lambda *_given: bytearray(1 << 62))
    with pytest.raises(UserError, match=r"^no memory for the copies of a checkpoint of tables on"):
        shard.snapshot(0, SnapshotMemory(), set_index=1)
