"""What people hear of ranks that have died: a line at once, and ``deaths`` in summary.json.

reports = DeathReports(coordinator.progress, started_s=context.started_s, roles=roles)
reports.declared(Death(...))
reports.survived(Survived(1))
reports.told()          # [{"worker": 2, "clock": 41, ...}]
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psdist.protocol.control import Progress
from psdist.protocol.ids import describe_peer, describe_workers, is_spare, worker_id
from psdist.protocol.roles import Roles
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.takeovers import ServerDeath, SpareDeath
from psdist.servers.protocol.views import Death, Survived

logger = logging.getLogger("psdist")


def told_holder(peer: int) -> int | str:
    """Who has a shard, for summary.json: the number of a server, or ``spare 1``."""
    return describe_peer(peer) if is_spare(peer) else peer


@dataclass(slots=True)
class _Reported:
    death: Death
    noticed_s: float
    clock: int | None
    survived_s: float | None = None


class DeathReports:
    def __init__(self, progress: Mapping[int, Progress], *, started_s: float, roles: Roles) -> None:
        """``progress``: what each worker has told last of where it stands."""
        self._progress = progress
        self._started_s = started_s
        self._roles = roles
        self._reported: list[_Reported] = []
        self._taken_over: list[dict[str, Any]] = []
        self._joined: list[dict[str, Any]] = []

    def declared(self, death: Death, *, is_news: bool = True) -> None:
        """The coordinator knows of it; servers are being told. ``is_news``: people hear it now."""
        last = self._progress.get(death.worker)
        clock = None if last is None else last.clock
        self._reported.append(_Reported(death, time.monotonic(), clock))
        if not is_news:
            return
        out = {each for one in self._reported for each in (one.death.worker, *one.death.left)}
        num_left = self._roles.num_beginning + len(self._joined) - len(out)
        with_whom = f", and with it {describe_workers(death.left)} of its group" * bool(death.left)
        if death.stay:
            with_whom = f"; group {death.group} goes on with {describe_workers(death.stay)}"
        logger.warning(
            "%s has died%s; the job goes on with %d worker%s",
            death.who,
            with_whom,
            num_left,
            "s" * (num_left != 1),
        )

    def taken_over(self, death: ServerDeath, *, is_news: bool = True) -> None:
        """A server has died, and its buddy goes on in its place."""
        clock = max((each.clock for each in self._progress.values()), default=0)
        self._taken_over.append(
            {
                "server": death.server,
                "who": death.who,
                "taken_over_by": told_holder(death.host),
                "clock": clock,
                "at_s": round(time.monotonic() - self._started_s, 3),
            }
        )
        if not is_news:
            return
        logger.warning(
            "%s has died; %s has taken its place: no update that was acknowledged is lost",
            death.who,
            describe_peer(death.host),
        )

    def spare_lost(self, death: SpareDeath, *, is_news: bool = True) -> None:
        """A spare has died; what it served or kept, if anything, is told by others."""
        clock = max((each.clock for each in self._progress.values()), default=0)
        at_s = round(time.monotonic() - self._started_s, 3)
        told = {"spare": death.spare, "who": death.who, "clock": clock, "at_s": at_s}
        self._taken_over.append(told)
        if is_news:
            logger.warning("%s has died; the job goes on", death.who)

    def substitute_lost(self, death: SubstituteDeath, *, is_news: bool = True) -> None:
        """A spare for workers' places has died before it had taken one."""
        spare = death.worker - self._roles.num_beginning
        self.spare_lost(SpareDeath(spare, death.who), is_news=is_news)

    def joined(self, joined: Joined, *, is_news: bool = True) -> None:
        """A spare trains in a dead worker's place from now on."""
        told = {
            "worker": joined.worker,
            "who": self._roles.describe(worker_id(joined.worker)),
            "place": joined.place,
            "clock": joined.clocks[0],
            "at_s": round(time.monotonic() - self._started_s, 3),
        }
        self._joined.append(told)
        if is_news:
            logger.warning("%s", _line_of(told))

    def joined_lines(self) -> list[str]:
        """For people, in the order in which they came."""
        return [_line_of(each) for each in self._joined]

    def told_of_joined(self) -> list[dict[str, Any]]:
        """For summary.json, in the order in which they came: ``place`` is the worker whose part of
        the data it has, ``clock`` where its clock began."""
        return [dict(each) for each in self._joined]

    def standing(self) -> list[Any]:
        """All that this knows, as plain values, for the coordinator's next standby."""
        reported = [
            [
                *(each.death.worker, each.death.who, each.death.generation),
                *(list(each.death.left), each.death.chief),
                *(each.clock, each.noticed_s - self._started_s),
                None if each.survived_s is None else each.survived_s - self._started_s,
            ]
            for each in self._reported
        ]
        return [reported, self._taken_over, self._joined]

    def go_on(self, standing: list[Any]) -> None:
        """With what the coordinator knew (:meth:`standing`)."""
        reported, self._taken_over, self._joined = standing
        began_s = self._started_s
        self._reported = [
            _Reported(
                Death(worker, who, generation, tuple(left), chief),
                began_s + noticed_s,
                clock,
                None if survived_s is None else began_s + survived_s,
            )
            for worker, who, generation, left, chief, clock, noticed_s, survived_s in reported
        ]

    def survived(self, survived: Survived) -> None:
        """All servers have taken in what was declared up to a generation."""
        for each in self._reported:
            if each.survived_s is None and each.death.generation <= survived.generation:
                each.survived_s = time.monotonic()

    def told(self) -> list[dict[str, Any]]:
        """For summary.json, in the order in which they were declared: ``clock`` is the last that
        the worker has told (null: none), for a server the furthest that any has; ``settled_s`` how
        long all servers took to go on."""
        workers = [
            {
                "worker": each.death.worker,
                "who": each.death.who,
                "group": self._roles.group_of_worker[each.death.worker],
                "left": list(each.death.left),
                "clock": each.clock,
                "at_s": round(each.noticed_s - self._started_s, 3),
                "settled_s": (
                    None if each.survived_s is None else round(each.survived_s - each.noticed_s, 4)
                ),
                "generation": each.death.generation,
            }
            for each in self._reported
        ]
        return sorted([*workers, *self._taken_over], key=lambda each: float(each["at_s"]))


def _line_of(joined: Mapping[str, Any]) -> str:
    return (
        f"{joined['who']} has taken the place of worker {joined['place']}, from iteration "
        f"{joined['clock']} on"
    )
