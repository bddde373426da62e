"""Checkpoints where a spare has taken a worker's place: files and clocks are those of places, so
the next job continues with all of them, and with its spares."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psdist.config.modes import ModeFrom
from psdist.config.settings import RunConfig
from psdist.protocol.control import TakePlace
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.checkpointing.files import CheckpointFiles
from psdist.ranks.checkpointing.resuming import Restored, choose
from psdist.ranks.checkpointing.worker_files import WorkerCheckpoints
from psdist.servers.protocol.checkpoints import CompleteCheckpoint
from tests.support.ranks import make_rank
from tests.unit.ranks.checkpointing.test_resuming import begin, write_checkpoint

SUBSTITUTE = 2
ASYNC = ModeFrom(0, "async")
ROLES = Roles(
    places=tuple(Place(rank=rank, host="h", pid=rank, cores=(0,)) for rank in range(4)),
    server_ranks=(0,),
    worker_ranks=(1, 2, 3),
    groups=((0,), (1,), (2,)),
    num_substitutes=1,
)


@pytest.mark.parametrize(
    ("joined", "living", "clocks"),
    [
        ({}, (0, 1), (9, 4)),
        ({SUBSTITUTE: 1}, (0, SUBSTITUTE), (9, 7)),
        ({SUBSTITUTE: 0}, (1, SUBSTITUTE), (7, 4)),
        # The worker in that place when the checkpoint began failed after its file, and was
        # replaced.
        ({SUBSTITUTE: 1}, (0, 1), (9, 4)),
    ],
)
def test_a_place_has_the_file_and_the_clock_of_who_holds_it(
    joined: dict[int, int], living: tuple[int, ...], clocks: tuple[int, ...]
) -> None:
    context: Any = SimpleNamespace(
        config=RunConfig(mode="async"), roles=ROLES, joined=joined, attempt=1, folder=None
    )
    files = CheckpointFiles(context)
    partition = SimpleNamespace()
    made: list[Any] = []
    files._sets = [(partition, SimpleNamespace(optimizer="SGD", hyper=b"", tables=b""))]  # type: ignore[list-item]
    told = dict.fromkeys((server_id(0), *map(worker_id, living)), (10, 1))
    action = CompleteCheckpoint("step-00000004", [(9,), (4,), (7,)], told)

    def note(_partition: Any, *, clocks: tuple[int, ...], **_more: Any) -> None:
        made.append(clocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psdist.ranks.checkpointing.files.SetRecord", SimpleNamespace(of=note))
        patch.setattr("psdist.ranks.checkpointing.files.unpack_hyperparameters", lambda _: [{}])
        patch.setattr("psdist.ranks.checkpointing.files.Index", lambda **given: given)
        index: Any = files._index(action)
    assert made == [clocks]
    assert index["groups"] == ((0,), (1,))
    assert sorted(each.name for each in index["files"]) == [
        f"{name}.safetensors" for name in ("server-0", "worker-0", "worker-1")
    ]


def test_places_begin_where_they_were_and_spares_nowhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    checkpoint, _ = choose(tmp_path, lambda _line: None)
    assert checkpoint is not None
    for mode, clocks in (("ssp", (4, 6, 0)), ("sync", (4, 4, 0))):
        first = Restored.of(checkpoint, ROLES, mode=mode, modes=lambda _set: (ASYNC,)).first(0)
        assert first is not None
        assert first.clocks == clocks


@pytest.mark.parametrize(
    ("known", "num_dealt", "is_moved"),
    [([0, 1], 2, False), ([0], 2, True), ([0, 1, 2], 3, True), ([0, 1], 3, True)],
)
def test_nothing_is_moved_where_every_place_has_a_file(
    known: list[int], num_dealt: int, is_moved: bool
) -> None:
    index = SimpleNamespace(groups=[(worker,) for worker in range(num_dealt)])
    restored = SimpleNamespace(checkpoint=SimpleNamespace(workers=known, index=index))
    context: Any = SimpleNamespace(restored=restored, roles=ROLES)
    assert WorkerCheckpoints(context, collect=dict).is_moved == is_moved


def test_a_spare_that_takes_a_place_goes_on_from_no_checkpoint(tmp_path: Path) -> None:
    begin(tmp_path)
    write_checkpoint(tmp_path)
    checkpoint, attempt = choose(tmp_path, lambda _line: None)
    session = make_rank(
        ROLES,
        SimpleNamespace(me=worker_id(SUBSTITUTE)),
        tmp_path,
        bootstrap={"checkpoint": checkpoint, "attempt": attempt},
        mode="ssp",
    ).session
    assert session.restored is not None
    session.take_place(TakePlace(worker=1))
    assert session.restored is None
    assert session.first_clocks(0) is None
