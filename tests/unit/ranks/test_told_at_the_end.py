"""The failed ranks that a rank reports to its parent when the job is complete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.report import RankSurvived
from tests.support.ranks import make_rank

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(4)),
    server_ranks=(0, 1),
    worker_ranks=(2, 3),
    groups=((0,), (1,)),
)


@pytest.mark.parametrize("survives", [False, True])
def test_who_has_died_is_not_missed_on_a_host_without_the_coordinator(
    survives: bool, tmp_path: Path
) -> None:
    told: list[Any] = []
    transport = SimpleNamespace(
        me=server_id(1),
        lost={worker_id(1): ""},
        moved={COORDINATOR: ""},
        drain=lambda _timeout_s: None,
    )
    parent = SimpleNamespace(tell=told.append, finished=lambda: None)
    bootstrap = {"buddies": (1, 0)} if survives else {}
    make_rank(ROLES, transport, tmp_path, parent=parent, bootstrap=bootstrap).exit.close()
    ranks = {each.rank for each in told if isinstance(each, RankSurvived)}
    assert ranks == ({0, 3} if survives else set())
