"""Messages between ranks at the start, without MPI."""

from __future__ import annotations

from psdist.config.settings import RunConfig, encode
from psdist.ranks.agreement import _differs, _runs_of
from psdist.version import VERSION


def test_cores_travel_as_runs() -> None:
    assert _runs_of({5, 1, 2, 3, 9, 8}) == [(1, 3), (5, 1), (8, 2)]
    assert _runs_of(range(384)) == [(0, 384)]
    assert _runs_of(()) == []


def test_a_rank_says_how_it_differs_from_rank_0() -> None:
    mine, first = RunConfig(), RunConfig(credits=3)
    assert _differs(version=VERSION, host="n0", config=encode(mine), mine=mine) == ""
    told = _differs(version=VERSION, host="n0", config=encode(first), mine=mine)
    assert f"credits = {mine.credits!r} here, 3 on rank 0" in told
    told = _differs(version="0.0.1", host="n0", config=b"another format", mine=mine)
    assert told.startswith(f"psdist {VERSION} on ")
    assert "0.0.1 on n0 (rank 0); install the same version on all hosts" in told
