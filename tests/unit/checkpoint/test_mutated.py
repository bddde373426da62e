"""Checkpoints that were damaged or forged, in every way that a seed draws: a clear line or the last
good state, and never another error. 100 of them; 1,000 with --all.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from psdist.checkpoint import index as indexes
from psdist.checkpoint import tree
from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.errors import CheckpointError
from tests.support.checkpoints import Made
from tests.support.faulty_disk import QuickDisk

Way = Callable[[random.Random, Path], None]
"""Changes something in the folder of a run's checkpoints."""
STEPS = (100, 200)


def a_file(draw: random.Random, folder: Path, *, pattern: str = "*") -> Path:
    return draw.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))


def a_place(draw: random.Random, data: bytes) -> int:
    """Half of them where the words are: in what the file begins with."""
    return draw.randrange(min(len(data), draw.choice([400, len(data)])))


def flip_bits(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 2, 8])):
        data[a_place(draw, data)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    os.truncate(path, draw.randrange(path.stat().st_size))


def grow(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 9)))


def blank(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    data = bytearray(path.read_bytes())
    at = a_place(draw, data)
    data[at : at + 64] = draw.choice([bytes(64), b"\xff" * 64, draw.randbytes(64)])
    path.write_bytes(data)


def take_out(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    data = path.read_bytes()
    at = a_place(draw, data)
    path.write_bytes(data[:at] + data[at + draw.randrange(1, 50) :])


def remove(draw: random.Random, folder: Path) -> None:
    a_file(draw, folder).unlink()


def swap(draw: random.Random, folder: Path) -> None:
    first, second = a_file(draw, folder), a_file(draw, folder)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def replace_by_no_file(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder)
    path.unlink()
    draw.choice([Path.mkdir, os.mkfifo, lambda each: each.symlink_to(each)])(path)


def rename_folder(draw: random.Random, folder: Path) -> None:
    path = folder / f"step-{draw.choice(STEPS):08d}"
    name = draw.choice([".partial", ".old", ".removed", "0", "x"])
    path.rename(path.with_name(path.name + name))


def name_another(draw: random.Random, folder: Path) -> None:
    words = ["step-00000100", "step-00000300", "", "..", "/etc", "x" * 1000, "step-00000100\0"]
    (folder / "latest").write_text(draw.choice(words))


def make_header_huge(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder, pattern="*.safetensors")
    length = draw.choice([2**63, 2**64 - 1, 10**8, 10**8 - 1, 10**9, path.stat().st_size])
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


DAMAGES: list[Way] = [
    *(flip_bits, cut, grow, blank, take_out, remove, swap),
    *(replace_by_no_file, rename_folder, name_another, make_header_huge),
]


def another(draw: random.Random, value: Any) -> Any:
    """Something else, of the kinds that a reader may stumble over."""
    kinds: list[Any] = [None, True, -1, 0, 2**31, 2**70, 1.5, "", "x", "0", [], {}, [[]], {"a": 1}]
    if isinstance(value, list) and value:
        kinds += [value[:-1], value + value, value[::-1]]
    if isinstance(value, int):
        kinds += [value + 1, value - 1, value * 2]
    return draw.choice(kinds)


def change_somewhere(draw: random.Random, content: Any) -> Any:
    """A member of a member of ... becomes something else, or is gone, or is there once more."""
    if isinstance(content, dict | list) and content and draw.random() < 0.9:
        at = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if draw.random() < 0.1:
            del content[at]
        else:
            content[at] = change_somewhere(draw, content[at])
        return content
    return another(draw, content)


def forge_index(draw: random.Random, folder: Path) -> None:
    path = a_file(draw, folder, pattern="index.json")
    content = json.loads(path.read_text())
    del content["crc32"]
    for _ in range(draw.choice([1, 1, 3])):
        content = change_somewhere(draw, content)
    if isinstance(content, dict):
        content["crc32"] = indexes._checksum(content)
    path.write_text(json.dumps(content))


def forge_header(draw: random.Random, folder: Path) -> None:
    """In a file whose checksum and size in the index are made to fit."""
    path = a_file(draw, folder, pattern="*.safetensors")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if draw.random() < 0.5:
        text = change_somewhere(draw, json.loads(header["__metadata__"]["psdist"]))
        header["__metadata__"]["psdist"] = json.dumps(text)
    else:
        header = change_somewhere(draw, header)
    words = json.dumps(header).encode()
    data = len(words).to_bytes(8, "little") + words + data[8 + length :]
    path.write_bytes(data)
    index = path.with_name("index.json")
    content = json.loads(index.read_text())
    del content["crc32"]
    for file in content["files"]:
        if file["name"] == path.name:
            file |= {"num_bytes": len(data), "crc32": indexes.zlib.crc32(data)}
    content["crc32"] = indexes._checksum(content)
    index.write_text(json.dumps(content))


FORGERIES: list[Way] = [forge_index, forge_header]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Made]]:
    path = tmp_path_factory.mktemp("honest")
    made = [Made(step=step, seed=step, chunk_bytes=2048) for step in STEPS]
    for each in made:
        each.write(Folder(path, disk=QuickDisk()), disk=QuickDisk())
    return path / "checkpoints", made


def read_all(checkpoint: Checkpoint) -> None:
    for set_index, each in enumerate(checkpoint.index.sets):
        for piece, record in enumerate(each.pieces):
            checkpoint.read_stretch(set_index, piece, 0, record.num_elements)
            checkpoint.state_of(set_index, piece)
    for worker in checkpoint.workers:
        tree.unpack(*checkpoint.worker(worker))


def play(seed: int, honest: tuple[Path, list[Made]], run_dir: Path) -> str:
    """What follows from the changes that ``seed`` draws."""
    draw = random.Random(seed)
    folder = run_dir / "checkpoints"
    shutil.copytree(honest[0], folder)
    ways = FORGERIES if draw.random() < 0.3 else DAMAGES
    chosen = [draw.choice(ways) for _ in range(draw.choice([1, 1, 2]))]
    for way in chosen:
        # Two may not go together.
        with suppress(IndexError, OSError, ValueError, KeyError, TypeError):
            way(draw, folder)
    lines: list[str] = []
    found = Folder(run_dir).newest_good(lines.append)
    assert all("\n" not in line and line.isprintable() for line in lines), lines
    if found is not None and ways is FORGERIES:
        with suppress(CheckpointError):
            read_all(found)
    elif found is not None:
        assert any(not each.differences(found) for each in honest[1]), (seed, chosen)
    shutil.rmtree(folder)
    if found is None:
        return "none"
    return "the newest" if found.name == "step-00000200" else "another"


def test_a_hundred_mutated_checkpoints_are_refused_or_whole(
    tmp_path: Path, honest: tuple[Path, list[Made]]
) -> None:
    outcomes = {play(seed, honest, tmp_path) for seed in range(100)}
    assert outcomes == {"none", "the newest", "another"}


@pytest.mark.slow
def test_a_thousand_more_are(tmp_path: Path, honest: tuple[Path, list[Made]]) -> None:
    for seed in range(100, 1100):
        play(seed, honest, tmp_path)
