"""What people hear of a shard that is alone, and whole again."""

from __future__ import annotations

import logging

import pytest

from psdist.protocol.ids import spare_id
from psdist.ranks.telling.copies import CopyReports
from psdist.servers.protocol.takeovers import ShardAlone, ShardWhole


def test_a_shard_is_told_alone_once_and_whole_again(caplog: pytest.LogCaptureFixture) -> None:
    now = iter([12.0, 13.5, 15.0])
    reports = CopyReports(started_s=10.0, clock=lambda: next(now))
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.alone(ShardAlone(1, 1))
        reports.whole(ShardWhole(1, 3))
        reports.alone(ShardAlone(1, 3))
    whole = {"server": 1, "host": 1, "from_s": 2.0, "until_s": 3.5, "kept_by": 3}
    alone = {"server": 1, "host": 3, "from_s": 5.0, "until_s": None, "kept_by": None}
    assert reports.told() == [whole, alone]
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 3
    assert "the shard of server 1 has one copy, in server 1" in lines[0]
    assert "has a second copy again, in server 3, after 1.5 s" in lines[1]


def test_a_spare_is_named(caplog: pytest.LogCaptureFixture) -> None:
    reports = CopyReports(started_s=10.0, clock=lambda: 12.0)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        reports.alone(ShardAlone(1, 1))
        reports.whole(ShardWhole(1, spare_id(2)))
        reports.alone(ShardAlone(1, spare_id(2)))
    assert [each["kept_by"] for each in reports.told()] == ["spare 2", None]
    assert [each["host"] for each in reports.told()] == [1, "spare 2"]
    lines = [each.getMessage() for each in caplog.records]
    assert "has a second copy again, in spare 2, after" in lines[1]
    assert "has one copy, in spare 2: the job" in lines[2]


def test_a_next_standby_tells_what_the_coordinator_knew() -> None:
    now = iter([12.0, 13.5, 15.0])
    reports = CopyReports(started_s=10.0, clock=lambda: next(now))
    reports.alone(ShardAlone(1, 1))
    reports.whole(ShardWhole(1, 3))
    reports.alone(ShardAlone(2, 3))
    other = CopyReports(started_s=110.0, clock=lambda: 116.0)
    other.go_on(reports.standing())
    assert other.told() == reports.told()
    other.whole(ShardWhole(2, spare_id(0)))
    assert [each["until_s"] for each in other.told()] == [3.5, 6.0]
