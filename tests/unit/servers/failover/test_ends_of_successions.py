"""A standby that succeeds a coordinator, of a job that cannot go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from psdist.errors import ServersLostError
from psdist.servers.loop import ServerLoop


def test_what_is_known_of_the_end_is_written_by_who_has_the_place() -> None:
    told: list[Any] = []

    def fails(who: str, *, lost: dict[int, str]) -> Any:
        raise ServersLostError(who, str(lost))

    coordinator_log = SimpleNamespace(
        coordinator_at=0, moves=[], is_complete=True, announcements=list, succeed=fails
    )
    loop: Any = SimpleNamespace(
        _standby=SimpleNamespace(coordinator_log=coordinator_log, on_succeed=told.append),
        _replication=object(),
        transport=SimpleNamespace(lost={}),
    )
    with pytest.raises(ServersLostError):
        ServerLoop._succeed(loop, "server 0")
    assert told == [[]], "it is the coordinator before the job ends"
