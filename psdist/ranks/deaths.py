"""What people hear of workers that have died: a line at once, and ``deaths`` in summary.json.

reports = DeathReports(registrar.progress, started_s=context.started_s, roles=roles)
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
from psdist.protocol.ids import describe_workers
from psdist.protocol.roles import Roles
from psdist.servers.protocol.deaths import Death, Survived

logger = logging.getLogger("psdist")


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

    def declared(self, death: Death) -> None:
        """The registrar knows of it; servers are being told."""
        last = self._progress.get(death.worker)
        clock = None if last is None else last.clock
        self._reported.append(_Reported(death, time.monotonic(), clock))
        out = {each for one in self._reported for each in (one.death.worker, *one.death.left)}
        num_left = self._roles.num_workers - len(out)
        with_whom = f", and with it {describe_workers(death.left)} of its group" * bool(death.left)
        logger.warning(
            "%s has died%s; the job goes on with %d worker%s",
            death.who,
            with_whom,
            num_left,
            "s" * (num_left != 1),
        )

    def survived(self, survived: Survived) -> None:
        """All servers have taken in what was declared up to a generation."""
        for each in self._reported:
            if each.survived_s is None and each.death.generation <= survived.generation:
                each.survived_s = time.monotonic()

    def told(self) -> list[dict[str, Any]]:
        """For summary.json, in the order in which they were declared: ``clock`` is the last that
        the worker has told (null: none); ``settled_s`` how long all servers took to go on."""
        return [
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
