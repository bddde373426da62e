"""What people hear of a shard that is alone, and whole again."""

from __future__ import annotations

import logging

import pytest

from psdist.ranks.telling.copies import CopyReports
from psdist.servers.protocol.replication.takeovers import ShardAlone, ShardWhole


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
