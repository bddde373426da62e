"""A file that takes a few bytes at a time gets all of them, in order."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import pytest

from psdist.whole_writes import append_whole, write_whole


class Sparing:
    def __init__(self, most: int, *, full_at: int = 1 << 20) -> None:
        self.most, self.full_at = most, full_at
        self.taken = bytearray()

    def write(self, data: memoryview) -> int:
        if len(self.taken) >= self.full_at:
            raise OSError("no space left")
        self.taken += data[: self.most]
        return min(len(data), self.most)


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_everything_is_written(most: int, kind: type[bytes | memoryview]) -> None:
    file = Sparing(most)
    write_whole(file, kind(bytes(range(50))))
    assert file.taken == bytes(range(50))


def test_nothing_is_no_write() -> None:
    write_whole(Sparing(1, full_at=0), b"")


def test_a_disk_that_fills_up_meanwhile_is_told() -> None:
    file = Sparing(3, full_at=6)
    with pytest.raises(OSError, match="no space left"):
        write_whole(file, bytes(50))
    assert len(file.taken) == 6


class SmallDisk(FileIO):
    """A file on a disk with room for ``room`` bytes."""

    room = 10

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        left = self.room - self.tell()
        if left <= 0:
            raise OSError("no space left")
        return super().write(bytes(data)[:left])


def test_what_does_not_fit_as_a_whole_leaves_no_part_and_what_fits_later_follows(
    tmp_path: Path,
) -> None:
    with SmallDisk(tmp_path / "lines", "ab") as file:
        append_whole(file, b"one\n")
        with pytest.raises(OSError, match="no space left"):
            append_whole(file, b"too long\n")
        append_whole(file, b"two\n")
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
