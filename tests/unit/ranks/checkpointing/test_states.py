"""The state of a shard that is made anew, as it is looked for in checkpoints that may be torn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.errors import CheckpointError
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.states import StateSearch
from psdist.servers.rebuilding import FoundState
from tests.support.checkpoints import Made


def chunks_of(server: int, made: Made) -> dict[int, tuple[Partition, Sequence[int]]]:
    """Of two servers."""
    found = {}
    for set_index, partition in enumerate(made.partitions()):
        owners = partition.shard([1.0, 1.0])
        mine = [chunk for chunk, owner in enumerate(owners) if owner == server]
        found[set_index] = (partition, mine)
    return found


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def search(folder: Folder, server: int, made: Made) -> FoundState | None:
    looking = StateSearch(folder, chunks_of(server, made))
    found = looking.found
    assert looking.is_over
    return found


def test_it_finds_the_state_of_the_chunks_that_are_wanted(tmp_path: Path) -> None:
    made = Made()
    made.write(Folder(tmp_path))
    found = search(Folder(tmp_path), 1, made)
    assert found is not None
    assert found.checkpoint == "step-00000100"
    wanted = chunks_of(1, made)
    assert found.regions.keys() == {
        (index, chunk) for index, (_, chunks) in wanted.items() for chunk in chunks
    }
    for (set_index, _), regions in found.regions.items():
        for each in regions:
            for key, values in each.elements.items():
                whole = made.elements[set_index, each.piece, f"state.{key}"]
                assert torch.equal(values, whole[each.start : each.start + len(values)])
            assert each.state == made.states[set_index, each.piece]


def test_of_a_set_that_the_checkpoint_does_not_have_it_finds_nothing(tmp_path: Path) -> None:
    made = Made()
    made.write(Folder(tmp_path))
    wanted = chunks_of(0, made)
    found = StateSearch(Folder(tmp_path), {**wanted, 2: wanted[0]}).found
    assert found is not None
    assert {index for index, _ in found.regions} == {0, 1}


def test_files_of_others_may_be_torn_and_its_own_may_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = Made(step=100), Made(step=200, seed=2)
    older.write(Folder(tmp_path))
    newest = newer.write(Folder(tmp_path))
    damage(newest.path / "server-0.safetensors")
    damage(newest.path / "worker-1.safetensors")
    found = [search(Folder(tmp_path), server, newer) for server in (1, 0)]
    assert [each.checkpoint for each in found if each] == ["step-00000200", "step-00000100"]
    (line,) = caplog.messages
    assert "checkpoint step-00000200 is not used" in line
    assert "server-0.safetensors" in line


def test_without_a_checkpoint_it_finds_nothing(tmp_path: Path) -> None:
    assert search(Folder(tmp_path), 0, Made()) is None


def test_it_looks_again_where_that_was_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was being written when the server died is complete, and old ones go."""
    made, folder = Made(step=100), Folder(tmp_path)
    made.write(folder)
    later = Made(step=200, seed=2)
    read, num_read = Checkpoint.read_stretch, 0

    def late(*arguments: object) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            later.write(folder, keep=1)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "read_stretch", late)
    found = search(folder, 0, made)
    assert found is not None
    assert found.checkpoint == "step-00000200"


def test_it_looks_again_where_the_only_one_was_removed_before_it_was_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = Made(step=100), Folder(tmp_path)
    made.write(folder)
    later = Made(step=200, seed=2)
    verify = Checkpoint.verify

    def late(self: Checkpoint, *arguments: Any) -> None:
        if self.name == "step-00000100":
            later.write(folder, keep=1)
        verify(self, *arguments)

    monkeypatch.setattr(Checkpoint, "verify", late)
    found = search(folder, 0, made)
    assert found is not None
    assert found.checkpoint == "step-00000200"


def test_what_cannot_be_read_twice_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made()
    made.write(Folder(tmp_path))

    def unread(*_arguments: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(Checkpoint, "read_stretch", unread)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        search(Folder(tmp_path), 0, made)
