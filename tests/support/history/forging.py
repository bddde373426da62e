"""Histories as faulty servers and workers would write them: honest ones of toy runs, changed.

A :class:`Forgery` holds the records of a run for changing in place. Where an event is put in or
taken out, the server's later positions follow, as they would in a server with that fault: what is
refused is the fault and not its traces.

    forged = Forgery(mode="sync")
    forged.event(0, EventKind.JOIN, group=1)["weight"] = 3
    forged.judge()                  # a Report; HistoryError where it cannot be read
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from psdist.commands.check import Report, Verdict, check
from psdist.errors import HistoryError
from psdist.history import (
    NO_CHUNK,
    EventFlag,
    EventKind,
    History,
    Records,
    ServerLog,
    WorkerLog,
)
from psdist.history.rules.findings import Rule
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_run import ToyRun


class Forgery:
    def __init__(self, **settings: Any) -> None:
        toy = ToyRun(**({"seed": 1, "empty_rate": 0.0} | settings))
        history = toy.run()
        assert history is not None
        self.run: dict[str, Any] = history.run.model_dump()
        self.summary: dict[str, Any] = summary_of_toy(toy).model_dump()
        self.is_summary_asked = False
        """A server that counts as wrongly as it serves says nothing against itself."""
        self.events = [log.events.copy() for log in history.servers]
        self.sums = [log.checksums.copy() for log in history.servers]
        self.uses = [log.uses.copy() for log in history.workers]
        self.pushes = [log.pushes.copy() for log in history.workers]

    def history(self) -> History:
        return History(
            run=RunRecord.model_validate(self.run),
            servers=tuple(
                ServerLog(server=server, events=events, checksums=sums, is_complete=True)
                for server, (events, sums) in enumerate(zip(self.events, self.sums, strict=True))
            ),
            workers=tuple(
                WorkerLog(worker=worker, uses=uses, pushes=pushes, is_complete=True)
                for worker, (uses, pushes) in enumerate(zip(self.uses, self.pushes, strict=True))
            ),
        )

    def judge(self) -> Report:
        summary = Summary.model_validate(self.summary) if self.is_summary_asked else None
        return check(self.history(), summary=summary, max_listed_per_rule=1)

    # -- finding records -----------------------------------------------------------------------

    def find_event(self, server: int, kind: EventKind, *, last: bool = False, **fields: int) -> int:
        """The position of the first (or last) event that is so."""
        return _find(self.events[server], last=last, kind=kind, **fields)

    def event(self, server: int, kind: EventKind, **fields: Any) -> np.void:
        return self.events[server][self.find_event(server, kind, **fields)]

    def apply(self, server: int, **fields: Any) -> np.void:
        return self.event(server, EventKind.APPLY, **fields)

    def use(self, worker: int, **fields: int) -> np.void:
        return self.uses[worker][_find(self.uses[worker], last=False, **fields)]

    def push(self, worker: int, iteration: int, chunk: int = NO_CHUNK) -> np.void:
        return self.pushes[worker][
            _find(self.pushes[worker], last=False, iteration=iteration, chunk=chunk)
        ]

    def checksum(self, server: int, **fields: int) -> np.void:
        return self.sums[server][_find(self.sums[server], last=False, **fields)]

    # -- what a fault does to a server's log ---------------------------------------------------

    def insert(self, server: int, position: int, event: np.void, **changes: Any) -> None:
        """One event more, a copy of ``event`` with ``changes``."""
        new = np.array([event], dtype=self.events[server].dtype)
        for name, value in changes.items():
            new[name] = value
        self._shift(server, position, 1)
        self.events[server] = np.insert(self.events[server], position, new)

    def delete(self, server: int, position: int) -> np.void:
        event = self.events[server][position].copy()
        self._shift(server, position + 1, -1)
        self.events[server] = np.delete(self.events[server], position)
        return event

    def move(self, server: int, position: int, to: int) -> None:
        """The event at ``position`` comes at position ``to`` instead."""
        self.insert(server, to, self.delete(server, position))

    def swap(self, server: int, one: int, other: int) -> None:
        events = self.events[server]
        events[[one, other]] = events[[other, one]]

    def _shift(self, server: int, begin: int, by: int) -> None:
        """Positions beyond ``begin`` count ``by`` events more."""
        for records in (self.sums[server], *self.uses):
            is_mine = records["position"] > begin if by > 0 else records["position"] >= begin
            if "server" in (records.dtype.names or ()):
                is_mine &= records["server"] == server
            records["position"][is_mine] += np.array(by).astype(np.uint64)

    def rescale(self, server: int, num_active: float) -> None:
        """The server divides weights by this, throughout."""
        events = self.events[server]
        is_scaled = (events["kind"] == EventKind.APPLY) & (events["flags"] & EventFlag.EMPTY == 0)
        events["lr_scale"][is_scaled] = events["weight"][is_scaled] / num_active

    # -- steps of sync -------------------------------------------------------------------------

    def step(self, server: int, number: int) -> list[int]:
        """The positions of a step's contributions."""
        events = self.events[server]
        ends = np.flatnonzero(events["flags"] & EventFlag.LAST)
        begin = end = int(ends[number])
        while events["kind"][begin - 1] == EventKind.APPLY and not (
            events["flags"][begin - 1] & EventFlag.LAST
        ):
            begin -= 1
        return list(range(begin, end + 1))


def _find(records: Records, *, last: bool, **fields: Any) -> int:
    is_it = np.ones(len(records), np.bool_)
    for name, value in fields.items():
        is_it &= records[name] == value
    found = np.flatnonzero(is_it)
    assert len(found), f"the honest history has no record with {fields}"
    return int(found[-1 if last else 0])


Forge = Callable[[Forgery], None]


@dataclass(frozen=True)
class Fault:
    what: str
    rule: Rule | None
    """Which must refuse it; None: the record cannot be read."""
    forge: Forge
    settings: dict[str, Any] = field(default_factory=dict)
    """The honest run's own."""

    def refused(self) -> list[str]:
        """The check's findings: each broken rule with a count and its first violation. Fails the
        test where that is not about ``rule``, or the history before the fault is not proved."""
        forged = Forgery(**self.settings)
        assert forged.judge().proved, "the history before the fault"
        self.forge(forged)
        if self.rule is None:
            with pytest.raises(HistoryError, match="is damaged: record") as caught:
                forged.judge()
            return [str(caught.value)]
        report = forged.judge()
        assert report.verdict == Verdict.VIOLATED
        assert self.rule.value in report.violations_by_rule, report.violations
        assert report.num_violations == sum(report.violations_by_rule.values())
        told = zip(report.violations_by_rule.items(), report.violations, strict=True)
        return [line for (rule, count), first in told for line in (f"{count} x {rule}", first)]


class FaultList(list[Fault]):
    def fault(self, what: str, rule: Rule | None, **settings: Any) -> Callable[[Forge], Forge]:
        """The function below is what the fault does."""

        def add(forge: Forge) -> Forge:
            self.append(Fault(what, rule, forge, settings))
            return forge

        return add

    def change(
        self, what: str, rule: Rule | None, find: Callable[[Forgery], Any], **values: Any
    ) -> None:
        """The fault changes these fields of one record."""

        def forge(forged: Forgery) -> None:
            record = find(forged)
            for name, value in values.items():
                assert record[name] != value, "the change changes nothing"
                record[name] = value

        self.append(Fault(what, rule, forge))
