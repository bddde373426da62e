"""Which parameters an update was computed on, where the lr is divided by how stale it is."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np

from psdist.commands.check import check
from psdist.history import EventKind, History
from psdist.history.rules.findings import Rule
from tests.support.history.summaries import summary_of
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.virtual_worker import VirtualWorker

SCHEDULE = Schedule(
    seed=1,
    mode="async",
    stale_lr="inverse",
    group_sizes=(1, 1, 1),
    iterations=(24, 24, 6),
    collectives=((), (), ()),
    compute_s=(1e-3, 1e-3, 4e-3),
    num_chunks=2,
    servers=1,
    jitter_s=1e-6,
)


@cache
def history() -> History:
    job = VirtualJob(SCHEDULE, make_worker=VirtualWorker)
    job.run()
    report = check(job.history(), summary=summary_of(job))
    assert report.proved, report.violations[:5]
    return job.history()


def broken(changed: History) -> set[str]:
    return set(check(changed).violations_by_rule)


def test_of_several_forward_passes_the_last_one_counts() -> None:
    """As if the worker had begun each iteration with what it had used in the one before."""
    logs = [*history().workers]
    uses = logs[2].uses
    before = uses[uses["iteration"] < uses["iteration"].max()].copy()
    before["iteration"] += 1
    together = np.concatenate([before, uses])
    kind = np.repeat([0, 1], [len(before), len(uses)])
    together = together[np.lexsort((np.arange(len(together)), kind, together["iteration"]))]
    logs[2] = dataclasses.replace(logs[2], uses=together)
    found = broken(dataclasses.replace(history(), workers=tuple(logs)))
    assert Rule.SCALES.value not in found
    assert Rule.OWN.value in found, "those first passes lack its own updates"


def test_a_worker_that_used_older_parameters_than_the_server_took_them_for_is_found() -> None:
    logs = [*history().workers]
    uses = logs[2].uses.copy()
    uses["position"][uses["iteration"] == 3] = uses["position"][uses["iteration"] == 2]
    logs[2] = dataclasses.replace(logs[2], uses=uses)
    assert Rule.SCALES.value in broken(dataclasses.replace(history(), workers=tuple(logs)))


def test_a_factor_that_is_another_one_is_found() -> None:
    (log,) = history().servers
    events = log.events.copy()
    applied = np.flatnonzero((events["kind"] == EventKind.APPLY) & (events["group"] == 2))
    events["lr_scale"][applied[-1]] *= 1.25
    changed = dataclasses.replace(log, events=events)
    assert broken(dataclasses.replace(history(), servers=(changed,))) == {Rule.SCALES.value}
