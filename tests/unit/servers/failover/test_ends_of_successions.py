"""A standby that succeeds a coordinator, of a job that cannot continue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from psdist.codecs.wire import RAW_WIRE
from psdist.errors import ServersLostError
from psdist.protocol.events import PeerLost
from psdist.servers.replication.standby import Standby, StandbySeat
from tests.support.virtual.job import Schedule, VirtualJob, replication_of


def test_what_is_known_of_the_end_is_written_by_who_has_the_place() -> None:
    told: list[Any] = []

    def fails(who: str, *, lost: dict[int, str]) -> Any:
        raise ServersLostError(who, str(lost))

    coordinator_log: Any = SimpleNamespace(
        coordinator_at=0, moves=[], is_complete=True, announcements=list, succeed=fails
    )
    reports: Any = SimpleNamespace(succeed=told.append)
    loop = VirtualJob(Schedule(seed=1, servers=2, has_buddies=True), is_watched=False).servers[1]
    standby = Standby(coordinator_log, reports)
    seat = StandbySeat(lambda _state, _told: standby, replication_of(loop), RAW_WIRE, standby)
    seat.begin(loop)
    with pytest.raises(ServersLostError):
        seat.on_lost(PeerLost(0, "server 0"))
    assert told == [[]], "it is the coordinator before the job ends"
