"""What people hear of second copies of shards: when a shard was alone, and when it was whole again.

reports = CopyReports(started_s=context.started_s)
reports.alone(ShardAlone(server=1, host=2))
reports.whole(ShardWhole(server=1, keeper=0))
reports.told()          # [{"server": 1, "host": 2, "from_s": 3.1, "until_s": 3.4, "kept_by": 0}]
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from psdist.protocol.ids import describe_peer
from psdist.ranks.telling.deaths import told_holder
from psdist.servers.protocol.takeovers import ShardAlone, ShardWhole

logger = logging.getLogger("psdist")


class CopyReports:
    def __init__(self, *, started_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock()``: seconds, as ``started_s``."""
        self._started_s = started_s
        self._clock = clock
        self._told: list[dict[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}
        """By server: what is not over."""

    def alone(self, event: ShardAlone, *, is_news: bool = True) -> None:
        """One copy is left; ``host`` is whose process serves the shard. ``is_news``: people hear it
        now."""
        told = {
            "server": event.server,
            "host": told_holder(event.host),
            "from_s": self._now(),
            "until_s": None,
            "kept_by": None,
        }
        self._told.append(told)
        self._open[event.server] = told
        if not is_news:
            return
        logger.warning(
            "the shard of server %d has one copy, in %s: the job ends with that one's "
            "death, until another copy is whole",
            event.server,
            describe_peer(event.host),
        )

    def whole(self, event: ShardWhole, *, is_news: bool = True) -> None:
        """There is another copy; ``is_news`` as in :meth:`alone`."""
        told = self._open.pop(event.server)
        told["until_s"], told["kept_by"] = self._now(), told_holder(event.keeper)
        if not is_news:
            return
        logger.warning(
            "the shard of server %d has a second copy again, in %s, after %.1f s",
            event.server,
            describe_peer(event.keeper),
            told["until_s"] - told["from_s"],
        )

    def standing(self) -> list[dict[str, Any]]:
        """All that this knows, for the coordinator's next standby."""
        return self._told

    def go_on(self, standing: list[dict[str, Any]]) -> None:
        """With what the coordinator knew of it (:meth:`standing`)."""
        self._told = standing
        self._open = {each["server"]: each for each in standing if each["until_s"] is None}

    def told(self) -> list[dict[str, Any]]:
        """For summary.json, in the order in which shards were left alone: seconds of the run;
        ``until_s`` and ``kept_by`` are null for a shard that is alone still."""
        return [dict(each) for each in self._told]

    def _now(self) -> float:
        return round(self._clock() - self._started_s, 3)
