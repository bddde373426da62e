"""Who reports on a rank: the coordinator, its standby, who becomes that later, and nobody else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from psdist.protocol.control import Progress
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.ranks import coordinating
from psdist.ranks.context import RankContext
from psdist.ranks.coordinating import Duty, coordinator_of
from psdist.servers.protocol.coordinator import WriteMetrics
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog, Entrusted
from psdist.servers.protocol.takeovers import ServerDeath, ShardAlone
from psdist.transport.lines import LineTransport
from tests.unit.ranks.test_shared_spares import SPARE, context_of


def coordinator_log_of(context: RankContext, *, is_active: bool) -> CoordinatorLog:
    return coordinating.coordinator_log_of(context, coordinator_of(context), is_active=is_active)


def test_a_rank_without_a_duty_reports_nothing(tmp_path: Path) -> None:
    duty = Duty(context_of(tmp_path))
    duty.on_idle()
    assert list(tmp_path.iterdir()) == []


def test_the_next_standby_tells_what_the_coordinator_has_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Duty(context_of(tmp_path, COORDINATOR))
    active = coordinator_log_of(first._context, is_active=True)
    reports = first.report_on(active.coordinator, active)
    first._context.joined[2] = 0
    for told in (ServerDeath(1, "server 1", host=COORDINATOR), ShardAlone(0, COORDINATOR)):
        reports.on_action(told)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.on_action(Entrusted(SPARE))
    assert caplog.messages == ["the coordinator, in server 0, has a standby again: spare 1"]

    active.standby = SPARE
    active.coordinator.progress[0] = Progress(worker=0, clock=3, samples=1)
    second = Duty(context_of(tmp_path, SPARE))
    standby = second.make_standby(active.to_snapshot(), reports.to_snapshot())
    assert standby.reports.to_snapshot() == reports.to_snapshot()
    assert second._context.joined == {2: 0}
    standby.reports.succeed([WriteMetrics({"worker": 0, "clock": 3})])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"worker": 0, "clock": 3}
    assert second._context.on_abort is not None
    second._context.on_abort("ended", 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each["server"] for each in summary["deaths"]] == [1]
    assert [each["server"] for each in summary["alone"]] == [0]
    assert (summary["registrar"], summary["deputy"]) == (0, "spare 1")


def test_status_says_where_the_coordinator_is_when_it_has_moved(tmp_path: Path) -> None:
    context = context_of(tmp_path, COORDINATOR)
    coordinator_log = coordinator_log_of(context, is_active=True)
    reporter = Duty(context).report_on(
        coordinator_log.coordinator, coordinator_log, is_active=False
    )
    assert reporter.coordinator_line == "", "as at the start"
    coordinator_log.standby = None
    assert reporter.coordinator_line == "in server 0, without a standby"
    coordinator_log.standby, coordinator_log.coordinator_at = SPARE, server_id(1)
    assert reporter.coordinator_line == "in server 1, its standby is spare 1"


def line_of(context: RankContext) -> LineTransport:
    context.begin_job(1, context.config)
    assert context._line is not None
    return context._line


def test_the_coordinator_is_where_the_line_has_followed_it(tmp_path: Path) -> None:
    context = context_of(tmp_path, SPARE)
    line = line_of(context)
    assert (line.coordinator_at, line.standby, context.is_coordinator) == (
        COORDINATOR,
        server_id(1),
        False,
    )
    line.host(COORDINATOR)
    assert (line.coordinator_at, context.is_coordinator) == (SPARE, True)
    at_home = line_of(context_of(tmp_path, COORDINATOR))
    assert (at_home.coordinator_at, at_home.standby) == (COORDINATOR, None)


def test_who_speaks_where_the_job_ends_is_the_coordinator_or_its_standby(tmp_path: Path) -> None:
    context = context_of(tmp_path, SPARE)
    line_of(context)
    endpoint = context._endpoint
    assert context._speaker() == COORDINATOR
    endpoint.lost[COORDINATOR] = "server 0"  # type: ignore[index]
    assert context._speaker() == server_id(1)
    endpoint.lost[server_id(1)] = "server 1"  # type: ignore[index]
    assert context._speaker() == worker_id(0), "the first that lives"
