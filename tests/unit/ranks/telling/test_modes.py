"""What people hear of a schedule's parts."""

from __future__ import annotations

import logging

import pytest

from psdist.config.settings import RunConfig
from psdist.protocol.control import Progress
from psdist.ranks.telling.modes import ModeReports
from psdist.ranks.telling.standing import Standing


def test_each_part_is_told_once_when_the_slowest_group_has_come_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = "0: ssp:8 topk:0.01; 20: ssp:8 int8; 30: sync none; 40: sync int4"
    modes = ModeReports(RunConfig(schedule=schedule))
    standing = Standing(mode=modes.now, group_of_worker=(0, 0, 1))
    assert modes.now == "ssp:8 topk:0.01"
    told = []
    with caplog.at_level(logging.INFO, logger="psdist"):
        for clock in (0, 19, 20, 21, 35):
            clocks = {0: clock, 1: clock, 2: clock + 6}
            progress = {w: Progress(worker=w, clock=n, samples=0) for w, n in clocks.items()}
            modes.reached(standing.behind(progress, ()))
            told.append(modes.now)
    assert told == [
        *("ssp:8 topk:0.01", "ssp:8 topk:0.01", "ssp:8 int8", "ssp:8 int8", "sync none"),
    ]
    assert caplog.messages == [
        "ssp:8 int8 from iteration 20 on (schedule)",
        "sync none from iteration 30 on (schedule)",
    ]
    assert standing.behind({2: Progress(worker=2, clock=9, samples=0)}, ()) == 0
    assert standing.behind({2: Progress(worker=2, clock=9, samples=0)}, (0, 1)) == 9
