"""``psdist export --table``, and what ``psdist checkpoint`` says of tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from psdist.checkpoint.folder import Folder
from psdist.commands import cli
from psdist.errors import InvariantError
from psdist.servers.tables import checkpoints
from psdist.servers.tables.shard import TableShard
from psdist.tables.row_files import row_file
from psdist.tables.specs import TableSpecs
from tests.support.faulty_disk import FaultyDisk
from tests.support.table_checkpoints import rounds_of, shards_of, train, written
from tests.support.tables import specs_of

NAMES = ("RowWiseAdagrad", "LazyAdam")


def trained(specs: TableSpecs) -> list[TableShard]:
    shards = shards_of(specs)
    train(shards, rounds_of(specs_of(1, *NAMES, num_rows=None), 5, seed=1))
    return shards


def run(*words: object) -> object:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main([f"{each}" for each in words])
    return caught.value.code


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    written(Folder(tmp_path / "run"), trained(specs_of(2, *NAMES, num_rows=None)), step=5)
    return tmp_path / "run"


@pytest.mark.usefixtures("run_dir")
def test_all_rows_are_exported_and_any_number_of_servers_gives_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards = trained(specs_of(3, *NAMES, num_rows=None))
    written(Folder(tmp_path / "three"), shards, step=5)
    monkeypatch.setattr(checkpoints, "_BLOCK_VALUES", 25)
    for name in ("run", "three"):
        assert run("export", tmp_path / name, tmp_path / f"{name}.safetensors", "--table", "*") == 0
    one, three = (tmp_path / f"{name}.safetensors" for name in ("run", "three"))
    assert one.read_bytes() == three.read_bytes()
    found = load_file(tmp_path / "run.safetensors")
    assert sorted(found) == ["table 0.ids", "table 0.rows", "table 1.ids", "table 1.rows"]
    for number, dim in enumerate((2, 3)):
        ids, rows = found[f"table {number}.ids"], found[f"table {number}.rows"]
        assert (ids.dtype, rows.dtype, rows.shape) == (np.int64, np.float32, (len(ids), dim))
        stores = [shard.parts[part].stores[number] for part, shard in enumerate(shards)]
        assert len(np.unique(ids)) == len(ids) == sum(map(len, stores))
        parts = shards[0].specs.parts_of(number, ids)
        for part, store in enumerate(stores):
            own = parts == part
            assert store.gather(ids[own]).tobytes() == rows[own].tobytes()
    assert f"table 0 {len(found['table 0.ids']):,}, table 1 " in capsys.readouterr().out


def test_a_table_is_exported_by_its_name(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "one.safetensors"
    assert run("export", f"{run_dir}", f"{out}", "--table", "table 1") == 0
    assert sorted(load_file(out)) == ["table 1.ids", "table 1.rows"]
    assert [each.name for each in out.parent.iterdir()] == [out.name]


def test_lists_and_proofs_know_tables(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("checkpoint", "list", f"{run_dir}") == 0
    assert "  2 tables  latest" in capsys.readouterr().out
    assert run("checkpoint", "verify", f"{run_dir}") == 0
    assert run("checkpoint", "diff", f"{run_dir}", f"{run_dir}") == 0
    assert "0 parameters, 2 tables and what 0 workers kept: the same" in capsys.readouterr().out


def test_what_cannot_be_exported_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["x.safetensors", "--table", "items"], "has the tables table 0, table 1"),
        (["x.pt", "--table", "*"], "must end in .safetensors"),
        (["x.safetensors", "--table", "*", "--model", "0"], "--model"),
        (["/proc/x.safetensors", "--table", "*"], "/proc/x.safetensors cannot be written"),
    ):
        assert run("export", f"{run_dir}", *arguments) != 0
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors*"))


def test_a_file_of_rows_is_complete_or_absent(tmp_path: Path) -> None:
    def write(path: Path, disk: FaultyDisk, num: int = 3) -> None:
        with row_file(path, {"a": 2}, {"a": 3}, disk=disk) as file:
            file.write("a", 1, np.arange(1, num), np.ones((num - 1, 2), np.float32))
            file.write("a", 0, np.arange(1), np.zeros((1, 2), np.float32))

    path, num_calls = tmp_path / "rows.safetensors", FaultyDisk()
    write(path, num_calls)
    assert load_file(path)["a.rows"].tolist() == [[0, 0], [1, 1], [1, 1]]
    path.unlink()
    for fail_at in range(num_calls.num_calls):
        with pytest.raises(OSError, match="No space left"):
            write(path, FaultyDisk(fail_at=fail_at))
        assert not list(tmp_path.iterdir())
    with pytest.raises(InvariantError, match="1 rows were not written"):
        write(path, FaultyDisk(), num=2)
    assert not list(tmp_path.iterdir())
