"""The clock by which a rank judges what computation may hide."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from psdist.protocol.ids import worker_id
from psdist.protocol.roles import Place, Roles
from tests.support.ranks import make_rank

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(2)),
    server_ranks=(0,),
    worker_ranks=(1,),
    groups=((0,),),
)


@pytest.mark.parametrize(("share", "free_s"), [(2.0, 10.0), (1.0, 10.0), (0.5, 4.0), (0.4, 2.5)])
def test_time_in_which_a_rank_uses_cores_that_are_short_is_not_free(
    share: float, free_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make_rank(ROLES, SimpleNamespace(me=worker_id(0)), tmp_path)
    rank.core_share, rank.now_s = share, lambda: 10.0
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    assert rank.free_s() == free_s
