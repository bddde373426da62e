"""mode = auto on the virtual network: sync while all are alike, ssp while now this group is slow
and now that one; and staleness_to: a bound that moves. Each round is proved by its rule, and each
change by what was observed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from psdist.controller.observed import LevelsSized, ModeObserved
from psdist.history.rules.choices.decisions import DecisionLine, check_decisions
from psdist.history.rules.findings import Findings
from psdist.history.rules.log.modes import changes_of
from psdist.history.rules.log.replay import ServerReplay
from psdist.protocol.control import Progress
from psdist.protocol.ids import COORDINATOR
from psdist.servers.protocol.modes import ModeChanged
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.proof import prove
from tests.support.virtual.virtual_worker import VirtualWorker

ROUNDS, HALF = 240, 120
SCHEDULE = Schedule(
    seed=1,
    mode="sync",
    staleness=3,
    is_auto=True,
    group_sizes=(1, 1, 1, 1),
    iterations=(ROUNDS,) * 4,
    collectives=((),) * 4,
    compute_s=(1e-3,) * 4,
    num_chunks=2,
    servers=2,
)


def is_slow(schedule: Schedule, group: int, clock: int) -> bool:
    """Until half way now this group is slow and now that one, then none is."""
    pick = random.Random(f"{schedule.seed} slow {clock}")
    return (
        clock < schedule.iterations[0] // 2 and pick.randrange(len(schedule.group_sizes)) == group
    )


class Skewed(VirtualWorker):
    """Tells the coordinator what its rounds have taken, three at a time."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.own_us: list[int] = []
        self.waits_us: list[int] = []
        self.errors_ppm: list[int] = []

    def compute_s(self) -> float:
        return 1e-3 * (10.0 if is_slow(self.job.schedule, self.group, self.clock) else 1.0)

    def train_once(self) -> Iterator[float | None]:
        network, began_s = self.job.network, self.job.network.now_s
        self.record_use()
        yield self.compute_s()
        computed_s = network.now_s
        yield from self.iterate()
        self.clock += 1
        self.own_us.append(round(1e6 * (computed_s - began_s)))
        self.waits_us.append(round(1e6 * (network.now_s - computed_s)))
        if self.job.wire.is_ladder:
            self.errors_ppm.append(round(1e6 * self.trainer.coding_error))
        is_told = self.job.schedule.is_auto or self.job.wire.is_ladder
        if is_told and len(self.own_us) == 3 and not self.seat.place:
            self.tell()

    def tell(self) -> None:
        progress = Progress(
            worker=self.worker,
            clock=self.clock,
            samples=0,
            first_round=self.clock - len(self.own_us),
            own_us=self.own_us,
            waits_us=self.waits_us,
            errors_ppm=self.errors_ppm,
        )
        self.loop.transport.send_control(COORDINATOR, progress)
        self.own_us, self.waits_us, self.errors_ppm = [], [], []


def play(schedule: Schedule) -> VirtualJob:
    job = VirtualJob(schedule, make_worker=Skewed)
    job.run()
    return job


def lines_of(job: VirtualJob) -> list[DecisionLine]:
    """As the coordinator writes them."""
    lines: list[DecisionLine] = []
    for each in job.reported:
        if isinstance(each, LevelsSized):
            lines.append(DecisionLine(sized=each))
        elif isinstance(each, ModeObserved):
            lines.append(DecisionLine(observed=each))
        elif isinstance(each, ModeChanged):
            changed = asdict(each) | {"rounds": list(each.rounds)}
            lines.append(DecisionLine.model_validate({"changed": changed}))
    return lines


def violations(job: VirtualJob, lines: list[DecisionLine]) -> tuple[str, ...]:
    history, findings = job.history(), Findings(max_listed_per_rule=5)
    changes = changes_of(ServerReplay(history.run, history.servers[0]))
    check_decisions(history.run, lines, changes, findings, is_complete=True)
    return findings.lines()


@pytest.mark.parametrize("seed", range(3))
def test_staleness_comes_with_skew_and_goes_with_it(seed: int) -> None:
    job = play(replace(SCHEDULE, seed=seed, jitter_s=1e-5))
    prove(job)
    assert [each.mode for each in job.modes] == ["sync", "ssp", "sync"]
    _, to_ssp, to_sync = job.modes
    assert to_ssp.round <= 7, "psdist has chosen it within six rounds"
    assert HALF + 15 < to_sync.round < HALF + 60
    assert violations(job, lines_of(job)) == ()


@pytest.mark.slow
def test_it_takes_about_as_long_as_the_best_mode_of_each_half() -> None:
    longer = replace(SCHEDULE, iterations=(2 * ROUNDS,) * 4)
    took_s = {
        mode: play(replace(longer, mode=mode, is_auto=False)).network.now_s
        for mode in ("sync", "ssp")
    }
    auto_s = play(longer).network.now_s
    assert took_s["ssp"] < 0.75 * took_s["sync"]
    assert auto_s < 1.2 * took_s["ssp"]


def test_changes_that_do_not_follow_from_what_was_observed_are_found() -> None:
    job = play(SCHEDULE)
    lines = lines_of(job)
    (first, second) = [n for n, line in enumerate(lines) if line.changed is not None]
    changed, observed = lines[first].changed, lines[first - 1].observed
    assert changed is not None
    assert observed is not None

    def with_line(number: int, **update: Any) -> list[DecisionLine]:
        line = lines[number].model_copy(update=update)
        return [*lines[:number], line, *lines[number + 1 :]]

    forged = {
        "calls for ssp": with_line(first, changed=changed.model_copy(update={"why": "no reason"})),
        "changed to sync": [*lines[:first], *lines[first + 1 :]],
        "calls for no change": [*lines[:20], lines[first], *lines[20:]],
        "changes, the log of server 0 of 2": with_line(
            second, changed=changed.model_copy(update={"rounds": [ROUNDS]})
        ),
        "calls for": [
            each
            if each.observed is None
            else each.model_copy(update={"observed": replace(each.observed, own_us=[1000] * 3)})
            for each in lines
        ],
        "of no group": with_line(first - 1, observed=replace(observed, group=9)),
    }
    for words, wrong in forged.items():
        assert any(words in line for line in violations(job, wrong)), words


MOVING = replace(SCHEDULE, mode="ssp", staleness=1, highest=6)


@pytest.mark.parametrize("seed", range(2))
def test_a_bound_goes_up_with_skew_and_comes_back(seed: int) -> None:
    job = play(replace(MOVING, seed=seed, jitter_s=1e-5))
    prove(job)
    assert {each.mode for each in job.modes} == {"ssp"}
    first, *_, last = job.modes
    assert (first.staleness, last.staleness) == (1, 1)
    assert HALF < last.round < HALF + 60
    assert 3 <= max(each.staleness for each in job.modes) <= 6
    lines = lines_of(job)
    assert violations(job, lines) == ()
    (changed, *_) = [n for n, line in enumerate(lines) if line.changed is not None]
    without = [*lines[:changed], *lines[changed + 1 :]]
    assert any("calls for" in line or "never set" in line for line in violations(job, without))


@pytest.mark.slow
def test_a_bound_that_moves_is_faster_than_the_lowest() -> None:
    took_s = {
        bound: play(replace(MOVING, staleness=bound, highest=0, is_auto=False)).network.now_s
        for bound in (1, 6)
    }
    moving = play(MOVING)
    assert took_s[6] < 0.9 * took_s[1]
    assert moving.network.now_s < 0.93 * took_s[1]
