"""A job whose coordinator has another standby: what that is sent and refuses, and how it goes
on."""

from __future__ import annotations

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import InstallSnapshot
from psdist.protocol.events import ControlArrived, Sent
from psdist.protocol.ids import COORDINATOR, server_id, spare_id
from psdist.servers.protocol.failover.coordinator_log import StandbyInstalled
from psdist.servers.replication import standby
from psdist.servers.replication.outbox import RecordFrame
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import prove_survival

SCHEDULE = Schedule(
    seed=5, servers=2, spares=2, iterations=(30, 30), num_chunks=6, mode="ssp", has_buddies=True
)


def entrusted_job() -> VirtualJob:
    """The coordinator has failed, server 1 has its place, and a spare is its standby."""
    job = VirtualJob(SCHEDULE, is_watched=False, max_deaths=9)
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.network.crash(COORDINATOR)
    job.network.run(until=lambda: any(isinstance(each, StandbyInstalled) for each in job.reported))
    assert (job.coordinator_at, job.num_successions) == (server_id(1), 1)
    return job


@pytest.mark.parametrize("part_bytes", [2**24, 1000])
def test_a_spare_goes_on_where_the_second_coordinator_dies(
    part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_PART_BYTES", part_bytes)
    job = entrusted_job()
    assert job.standby == spare_id(0)
    assert job.reported.count(StandbyInstalled(spare_id(0))) == 1
    assert job.spares[0].transport.coordinator_at == server_id(1)  # type: ignore[attr-defined]
    job.network.crash(server_id(1))
    job.run()
    assert (job.coordinator_at, job.num_successions) == (spare_id(0), 2)
    prove_survival(job)
    assert job.coordinator_log is not None
    assert job.coordinator_log.standby == spare_id(1), "which has a copy by then"


@pytest.mark.parametrize(
    ("spare", "peer", "part"),
    [
        pytest.param(0, COORDINATOR, 0, id="twice"),
        pytest.param(1, COORDINATOR, 1, id="not from its beginning"),
        pytest.param(1, server_id(1), 0, id="not of the coordinator"),
    ],
)
def test_what_is_not_asked_for_is_refused(spare: int, peer: int, part: int) -> None:
    job = entrusted_job()
    told = InstallSnapshot(number=1, part=part, num_parts=2, state=b"")
    with pytest.raises(ProtocolError, match=f"spare {spare}: server {peer} sent part {part} of"):
        job.spares[spare].decide(ControlArrived(peer, told))


def test_to_the_shard_of_a_coordinator_that_has_moved_nothing_is_sent_before_all_know() -> None:
    """It would come to a server which has no such copy."""
    job = VirtualJob(SCHEDULE, is_watched=False, max_deaths=9)
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.network.crash(COORDINATOR)
    job.network.run(until=lambda: job.num_successions > 0)
    line = job.servers[1].transport
    while not line._is_shard_elsewhere:  # type: ignore[attr-defined]
        job.network.step()
    frame = object.__new__(RecordFrame)
    line.send(COORDINATOR, frame)
    assert isinstance(found := line._ready.pop(), Sent)  # type: ignore[attr-defined]
    assert found.frame is frame
    job.run()
    assert not line._is_shard_elsewhere  # type: ignore[attr-defined]
    prove_survival(job)
