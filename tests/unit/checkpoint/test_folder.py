"""The folder of a run's checkpoints: what is the newest, what is kept, and what a death leaves."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from psdist.checkpoint.folder import Folder, name_of
from psdist.errors import CheckpointError
from tests.support.checkpoints import Made
from tests.support.faulty_disk import Death, FaultyDisk, QuickDisk

FIRST, SECOND, THIRD = "step-00000100", "step-00000200", "step-00000300"


def made_at(step: int, *, seed: int = 1) -> Made:
    return Made(step=step, seed=seed, workers=1, chunk_bytes=1 << 20)


def with_two(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    for step in (100, 200):
        made_at(step).write(folder)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def newest(folder: Folder) -> tuple[str, list[str]]:
    """Its name, and what was said of the others."""
    lines: list[str] = []
    found = folder.newest_good(lines.append)
    return "" if found is None else found.name, lines


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest(Folder(tmp_path)) == ("", [])
    (tmp_path / "checkpoints").mkdir()
    assert newest(Folder(tmp_path)) == ("", [])
    assert Folder(tmp_path / "none").names() == []


def test_names_have_eight_digits_or_more() -> None:
    assert [name_of(7), name_of(10**9)] == ["step-00000007", "step-1000000000"]


@pytest.mark.parametrize("name", ["", "step-1", "../step-00000100", "step-00000100\n", "latest"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    for call in (Folder(tmp_path).begin, Folder(tmp_path).open):
        with pytest.raises(CheckpointError, match="is no name of a checkpoint"):
            call(name)


def test_the_newest_is_what_latest_names(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    assert (folder.path / "latest").read_text() == f"{SECOND}\n"
    assert newest(folder) == (SECOND, [])
    (folder.path / "latest").write_text(FIRST)  # by somebody who wants to go back
    assert newest(folder) == (FIRST, [])


def test_what_lies_beside_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    (folder.path / f"{THIRD}.partial").mkdir()
    (folder.path / "step-4").mkdir()
    (folder.path / THIRD).write_text("a file")
    assert folder.names() == [FIRST, SECOND]
    assert newest(folder) == (SECOND, [])


@pytest.mark.parametrize("name", ["server-0.safetensors", "worker-0.safetensors"])
def test_a_flipped_bit_makes_the_one_before_the_newest_with_a_line(
    tmp_path: Path, name: str
) -> None:
    folder = with_two(tmp_path)
    path = folder.path / SECOND / name
    flip(path)
    found, (line,) = newest(folder)
    assert found == FIRST
    assert line.startswith(f"checkpoint {SECOND} is not used: {path}: damaged: its checksum is ")


def test_an_index_that_was_changed_makes_the_one_before_the_newest(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    path = folder.path / SECOND / "index.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 3'))
    line = f"checkpoint {SECOND} is not used: {path}: damaged: its checksum is of other contents"
    assert newest(folder) == (FIRST, [line])


def test_a_missing_and_a_shorter_file_are_said(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    (folder.path / SECOND / "server-1.safetensors").unlink()
    os.truncate(folder.path / FIRST / "server-0.safetensors", 5)
    found, lines = newest(folder)
    assert found == ""
    assert lines[0].endswith("server-1.safetensors cannot be read: No such file or directory")
    assert "server-0.safetensors: damaged: 5 bytes, " in lines[1]


def test_files_of_another_checkpoint_are_noticed(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    name = "server-0.safetensors"
    (folder.path / FIRST / name).replace(folder.path / SECOND / name)
    assert newest(folder)[0] == ""


def test_a_latest_that_names_nothing_is_said_and_the_newest_is_found(tmp_path: Path) -> None:
    folder = with_two(tmp_path)
    latest = folder.path / "latest"
    latest.write_text(THIRD)
    assert newest(folder) == (
        SECOND,
        [f"{folder.path / THIRD}, the latest checkpoint, is gone"],
    )
    line = f"{latest} names no checkpoint: looking for the newest"
    for content in (b"", b"step-1", b"\xff", b"../" * 40):
        latest.write_bytes(content)
        assert newest(folder) == (SECOND, [line])
    latest.unlink()
    assert newest(folder) == (SECOND, [line])


def test_a_later_attempt_is_newer_than_more_steps(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    made_at(300).write(folder, attempt=1)
    made_at(100).write(folder, attempt=2)
    made_at(200).write(folder, attempt=2)
    flip(folder.path / SECOND / "server-0.safetensors")
    assert newest(folder)[0] == FIRST


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in range(100, 600, 100):
        made_at(step).write(folder, keep=2)
    assert folder.names() == ["step-00000400", "step-00000500"]
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "latest",
        "step-00000400",
        "step-00000500",
    ]


def test_what_is_damaged_does_not_count_among_the_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (100, 200):
        made_at(step).write(folder, keep=2)
    os.truncate(folder.path / SECOND / "server-0.safetensors", 5)
    made_at(300).write(folder, keep=2)
    assert folder.names() == [FIRST, SECOND, THIRD]
    made_at(400).write(folder, keep=2)
    assert folder.names() == [THIRD, "step-00000400"]


def test_going_back_keeps_what_latest_names(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for step in (100, 200, 300):
        made_at(step).write(folder, attempt=1)
    made_at(150).write(folder, attempt=2, keep=1)
    assert folder.names() == ["step-00000150"]
    assert newest(folder) == ("step-00000150", [])


def test_a_second_one_at_the_same_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    made_at(100).write(folder)
    again = made_at(100, seed=5)
    again.write(folder)
    assert folder.names() == [FIRST]
    assert again.differences(folder.open(FIRST)) == []


def test_a_file_that_is_not_there_as_written_makes_no_checkpoint(tmp_path: Path) -> None:
    made, folder = made_at(200), with_two(tmp_path)
    index = folder.open(SECOND).index
    folder.begin(THIRD)
    with pytest.raises(CheckpointError, match="file system that all hosts of the job share"):
        folder.commit(THIRD, index, 3)
    folder.abandon(THIRD)
    assert not folder.partial(THIRD).exists()
    assert newest(folder) == (SECOND, [])
    assert made.differences(folder.open(SECOND)) == []


def calls_of_the_second(tmp_path: Path, *, step: int) -> int:
    """How many a checkpoint at ``step`` makes, after one at 100, which it removes."""
    made_at(100).write(Folder(tmp_path))
    disk = FaultyDisk()
    made_at(step).write(Folder(tmp_path, disk=disk), servers=1, keep=1, disk=disk)
    return disk.num_calls


def is_either(folder: Folder, first: Made, second: Made) -> bool:
    """Whether the newest one is one of the two, bit by bit."""
    found = folder.newest_good(str)
    return found is not None and [] in (first.differences(found), second.differences(found))


def is_usable(folder: Folder) -> bool:
    """Whether the next one is made, and nothing left of those before."""
    made_at(300).write(folder, servers=1, keep=2, disk=QuickDisk())
    has_left = any(path.suffix for path in folder.path.iterdir())
    return newest(folder) == (THIRD, []) and not has_left


@pytest.mark.parametrize(("step", "removals"), [(100, 1), (200, 2)])
def test_a_full_disk_at_any_call_leaves_the_last_one(
    tmp_path: Path, step: int, removals: int
) -> None:
    num_calls = calls_of_the_second(tmp_path / "none", step=step)
    first, second = made_at(100), made_at(step, seed=9)
    failed = []
    for at in range(num_calls):
        folder = Folder(tmp_path / str(at), disk=QuickDisk())
        first.write(folder, servers=1, disk=QuickDisk())
        disk = FaultyDisk(fail_at=at)
        faulty = Folder(tmp_path / str(at), disk=disk)
        try:
            second.write(faulty, servers=1, keep=1, disk=disk)
        except OSError:
            failed.append(at)
            faulty.abandon(name_of(step))
        assert is_either(folder, first, second), at
        assert is_usable(folder), at
    # Where nothing but the removal of the one before has failed, the new one stands.
    assert failed == list(range(num_calls - removals))


@pytest.mark.parametrize("step", [100, 200])
def test_a_death_at_any_call_leaves_the_last_one(tmp_path: Path, step: int) -> None:
    num_calls = calls_of_the_second(tmp_path / "none", step=step)
    first, second = made_at(100), made_at(step, seed=9)
    for at in range(num_calls + 1):  # or after the last one
        folder = Folder(tmp_path / str(at), disk=QuickDisk())
        first.write(folder, servers=1, disk=QuickDisk())
        disk = FaultyDisk(fail_at=at, is_death=True)
        with pytest.raises(Death) if at < num_calls else contextlib.nullcontext():
            second.write(Folder(tmp_path / str(at), disk=disk), servers=1, keep=1, disk=disk)
        assert is_either(folder, first, second), at
        disk.lose_what_was_not_synced()
        assert is_either(folder, first, second), f"without power, {at}"
        assert is_usable(folder), at
