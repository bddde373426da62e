"""Forged histories, as in test_forged.py, where the files say it: cut, swapped, reopened, changed.

Each is judged by the command, whose exit status says what it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from psdist.commands.check import main
from psdist.history import DTYPES, HEADER, FileKind
from tests.support.history.toy_run import ToyRun

VIOLATED, UNREADABLE, INCOMPLETE = 1, 2, 3
COUNT = slice(16, 24)


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def cut(name: str, kind: FileKind, *, where: int) -> Callable[[Path], None]:
    """Take out a record, and close the file as if it had never been there."""

    def forge(path_dir: Path) -> None:
        path, size = path_dir / name, DTYPES[kind].itemsize
        data = path.read_bytes()
        num_records = (len(data) - HEADER.size) // size
        begin = HEADER.size + where % num_records * size
        left = bytearray(data[:begin] + data[begin + size :])
        left[COUNT] = number(num_records - 1)
        path.write_bytes(left)

    return forge


def write(name: str, offset: int, data: bytes) -> Callable[[Path], None]:
    def forge(path_dir: Path) -> None:
        content = bytearray((path_dir / name).read_bytes())
        assert content[offset : offset + len(data)] != data, "the change changes nothing"
        content[offset : offset + len(data)] = data
        (path_dir / name).write_bytes(content)

    return forge


def swap(one: str, other: str) -> Callable[[Path], None]:
    def forge(path_dir: Path) -> None:
        first, second = (path_dir / name for name in (one, other))
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    return forge


def promise(**changes: object) -> Callable[[Path], None]:
    def forge(path_dir: Path) -> None:
        path = path_dir / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return forge


def of_another_run(name: str) -> Callable[[Path], None]:
    def forge(path_dir: Path) -> None:
        other = path_dir.parent / "other" / "history"
        ToyRun(seed=2, path_dir=other).run()
        (path_dir / name).write_bytes((other / name).read_bytes())

    return forge


EVENTS, CHECKSUMS = FileKind.EVENTS, FileKind.CHECKSUMS
RECORD = HEADER.size + 5 * 32  # the sixth of a file of events, uses or pushes
FORGERIES = [
    ("the last event is cut off", cut("server-0.events", EVENTS, where=-1), VIOLATED),
    ("an event is cut out", cut("server-1.events", EVENTS, where=12), VIOLATED),
    ("the last checksum is cut off", cut("server-0.checksums", CHECKSUMS, where=-1), VIOLATED),
    ("a checksum is cut out", cut("server-0.checksums", CHECKSUMS, where=9), VIOLATED),
    ("the last use is cut off", cut("worker-2.uses", FileKind.USES, where=-1), VIOLATED),
    ("the last push is cut off", cut("worker-2.pushes", FileKind.PUSHES, where=-1), VIOLATED),
    ("a file says fewer records", write("worker-2.uses", 16, number(5)), UNREADABLE),
    ("a file says a negative number", write("worker-2.uses", 16, number(-2)), UNREADABLE),
    ("a file is open again", write("worker-2.uses", 16, number(-1)), INCOMPLETE),
    ("the log of a server is open again", write("server-0.events", 16, number(-1)), INCOMPLETE),
    ("two workers' uses change places", swap("worker-0.uses", "worker-1.uses"), UNREADABLE),
    ("two workers' pushes change places", swap("worker-0.pushes", "worker-1.pushes"), UNREADABLE),
    ("two servers' logs change places", swap("server-0.events", "server-1.events"), UNREADABLE),
    ("uses stand in the file of pushes", swap("worker-0.uses", "worker-0.pushes"), UNREADABLE),
    ("a log is of another run", of_another_run("server-0.events"), VIOLATED),
    ("the uses of a worker are of another run", of_another_run("worker-2.uses"), VIOLATED),
    ("the pushes of a worker are of another run", of_another_run("worker-2.pushes"), VIOLATED),
    ("run.json is of another run", promise(staleness=1), VIOLATED),
    ("run.json has a server more", promise(num_servers=3), UNREADABLE),
    ("run.json has a worker more", promise(groups=[[0, 1], [2], [3, 4]]), UNREADABLE),
    ("run.json has a field more", promise(forged=True), UNREADABLE),
    ("run.json is of the first format", promise(format=1), UNREADABLE),
    ("a file is of the first format", write("server-0.events", 4, b"\x01"), UNREADABLE),
    ("an event has a byte too many", write("server-0.events", RECORD + 31, b"\x01"), UNREADABLE),
    ("a use has a byte too many", write("worker-2.uses", RECORD + 29, b"\x01"), UNREADABLE),
    ("a push has a byte too many", write("worker-2.pushes", RECORD + 26, b"\x01"), UNREADABLE),
    ("a push is corrected", write("worker-2.pushes", RECORD + 25, b"\x02"), UNREADABLE),
    ("a header has a byte too many", write("worker-2.pushes", 12, b"\x01"), UNREADABLE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("forge", "status"), [each[1:] for each in FORGERIES], ids=[each[0] for each in FORGERIES]
)
def test_forged_files_are_refused(
    forge: Callable[[Path], None],
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ToyRun(seed=1, path_dir=tmp_path / "history").run()
    assert main(tmp_path) == 0, "the history before"
    capsys.readouterr()
    forge(tmp_path / "history")
    assert main(tmp_path) == status
    captured = capsys.readouterr()
    assert captured.err.count("\n") == (status == UNREADABLE)
    assert ("VIOLATED" in captured.out) == (status == VIOLATED)


def test_a_correction_of_psdist_0_1_0_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ToyRun(seed=1, path_dir=tmp_path / "history").run()
    write("worker-2.pushes", RECORD + 25, b"\x01")(tmp_path / "history")
    assert main(tmp_path) == UNREADABLE
    assert "worker-2.pushes is of another version of psdist: a later" in capsys.readouterr().err
