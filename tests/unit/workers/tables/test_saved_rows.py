"""Rows from servers to the file of ``job.save(tables=...)``, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from psdist.errors import ProtocolError
from psdist.protocol.control import StateHeld
from psdist.servers.tables.shard import TableShard
from psdist.tables import row_files
from psdist.tables.specs import TableSpecs
from psdist.workers.tables import saving
from psdist.workers.tables.saving import save_rows
from tests.support.faulty_disk import FaultyDisk
from tests.support.table_checkpoints import rounds_of, shards_of, train
from tests.support.tables import specs_of

NAMES = ("RowSGD", "LazyAdam")


class Loop:
    """A chief's loop, whose servers answer at once."""

    def __init__(self, specs: TableSpecs, shards: Sequence[TableShard]) -> None:
        self.specs = specs
        self._shards = shards
        self.num_asked = 0

    def answer(self, part: int, start: int) -> bytes:
        return self._shards[part].state(part, start)[1]

    def fetch_state(self, parts: Sequence[tuple[int, int]], sink: Any) -> None:
        for part, start in parts:
            self.num_asked += 1
            values = self.answer(part, start)
            held = StateHeld(number=1, chunk=part, start=start, described=b"", values=values)
            sink.keep(held, sender=f"server {part}")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(row_files, "PART_ELEMENTS", 32)
    specs = specs_of(3, *NAMES, num_rows=None)
    shards = shards_of(specs)
    train(shards, rounds_of(specs_of(1, *NAMES, num_rows=None), 3, seed=5))
    return Loop(specs, shards)


def test_a_file_has_the_rows_of_all_parts(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.safetensors"
    save_rows(path, loop)  # type: ignore[arg-type]
    found = load_file(path)
    for number, spec in enumerate(loop.specs.tables):
        stores = [shard.parts[part].stores[number] for part, shard in enumerate(loop._shards)]
        blocks = [store.stored(store.in_order()) for store in stores]
        ids = np.concatenate([each.ids for each in blocks])
        rows = np.concatenate([each.values for each in blocks])
        assert found[f"{spec.name}.ids"].tolist() == ids.tolist()
        assert found[f"{spec.name}.rows"].tobytes() == rows.tobytes()
    assert loop.num_asked > 30


def test_tables_without_rows_are_a_file_as_well(tmp_path: Path) -> None:
    specs = specs_of(2, *NAMES)
    save_rows(tmp_path / "a", Loop(specs, shards_of(specs)))  # type: ignore[arg-type]
    assert {key: each.shape for key, each in load_file(tmp_path / "a").items()} == {
        "table 0.ids": (0,),
        "table 0.rows": (0, 2),
        "table 1.ids": (0,),
        "table 1.rows": (0, 3),
    }


def test_a_full_disk_is_an_error_when_all_answers_are_here(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        saving, "row_file", lambda *given: row_files.row_file(*given, disk=FaultyDisk(fail_at=5))
    )
    with pytest.raises(OSError, match="No space left"):
        save_rows(tmp_path / "a", loop)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    num_asked, loop.num_asked = loop.num_asked, 0
    monkeypatch.undo()
    monkeypatch.setattr(row_files, "PART_ELEMENTS", 32)
    save_rows(tmp_path / "a", loop)  # type: ignore[arg-type]
    assert loop.num_asked == num_asked  # no answer was left behind


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values[:-4], "server 1 sent .* bytes of rows of part 1"),
        (lambda values: values + b"1234", "server 1 sent .* bytes of rows of part 1"),
        (lambda values: b"\1" + values[1:], "server 1 sent other numbers of rows of part 1"),
        (lambda _values: b"", "server 1 sent 0 bytes of rows of part 1"),
    ],
)
def test_other_answers_are_refused(
    change: Any, words: str, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = loop.answer
    is_changed = lambda part, start: (part, bool(start)) == (1, True)  # noqa: E731
    monkeypatch.setattr(
        loop,
        "answer",
        lambda part, start: (
            change(plain(part, start)) if is_changed(part, start) else plain(part, start)
        ),
    )
    with pytest.raises(ProtocolError, match=words):
        save_rows(tmp_path / "a", loop)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_negative_number_of_rows_is_refused(loop: Loop, tmp_path: Path) -> None:
    loop.answer = lambda _part, _start: np.array([-1, 2], np.int64).tobytes()  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="server 0 sent other numbers of rows"):
        save_rows(tmp_path / "a", loop)  # type: ignore[arg-type]
