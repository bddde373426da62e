"""The status of a run: the model that all reports are made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptMode, KeptModes, TuningState
from psdist.controller.observed import LossHeard
from psdist.controller.steps import Term
from psdist.protocol.control import Progress
from psdist.protocol.ids import spare_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.reporting.progress import GroupPaces
from psdist.ranks.reporting.run_status import RunStatus
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.steps import StepsChosen
from psdist.servers.protocol.takeovers import ServerDeath, ShardAlone, ShardWhole, SpareDeath
from psdist.servers.protocol.views import Death, Survived

ROLES = Roles(
    places=tuple(Place(rank=rank, host="n1", pid=rank, cores=(0,)) for rank in range(5)),
    server_ranks=(0,),
    worker_ranks=(1, 2, 3, 4),
    groups=((0,), (1, 2), (3,)),
)


PROGRESS = {2: Progress(worker=2, clock=41, samples=9)}
TO_INT4 = ModeChanged((28,), "sync", 0, "slow", 3)
TO_INT8 = ModeChanged((60,), "sync", 0, "fast", 2)
HEARD = LossHeard(2, 5, 3, 1.5)


def status_of(
    config: RunConfig | None = None,
    progress: Mapping[int, Progress] | None = None,
    *,
    roles: Roles = ROLES,
) -> RunStatus:
    return RunStatus(config or RunConfig(), roles, progress or {})


def lines(status: RunStatus, *facts: object, at_s: float = 5.0) -> list[str]:
    """Update the model; the lines for the log."""
    notices = [status.update(each, at_s + second) for second, each in enumerate(facts)]
    return [each.text for each in notices if each is not None]


def chosen(block: int, *steps: int, why: str = "") -> StepsChosen:
    return StepsChosen(Term(0, 0, block), steps, why)


# -- failures and spares ---------------------------------------------------------------------------


def test_a_death_is_told_at_once_and_with_what_it_has_cost_at_the_end() -> None:
    status = status_of(progress=PROGRESS)
    first_death = Death(2, "worker 2 (rank 3 on n1)", generation=1, left=(1,), chief=0)
    second_death = Death(3, "worker 3 (rank 4 on n1)", generation=2, left=(), chief=0)
    assert lines(status, first_death, second_death) == [
        "worker 2 (rank 3 on n1) has failed, and with it worker 1 of its group; the job continues "
        "with 2 workers",
        "worker 3 (rank 4 on n1) has failed; the job continues with 1 worker",
    ]
    assert lines(status, Survived(1), at_s=5.25) == []
    first, second = status.deaths
    assert first == {
        "worker": 2,
        "who": "worker 2 (rank 3 on n1)",
        "group": 1,
        "left": (1,),
        "clock": 41,
        "at_s": 5.0,
        "settled_s": 0.25,
        "generation": 1,
    }
    assert (second["clock"], second["settled_s"], second["generation"]) == (None, None, 2)
    status.update(Survived(2), 7.5)
    assert [each["settled_s"] for each in status.deaths] == [0.25, 1.5]


def test_spares_are_named_where_they_die_and_where_they_go_on() -> None:
    status = status_of(progress=PROGRESS)
    assert lines(
        status,
        SpareDeath(1, "spare 1 (rank 6 on n1)"),
        ServerDeath(1, "server 1 (rank 1 on n1)", spare_id(0)),
        ServerDeath(2, "server 2 (rank 2 on n1)", 0),
    ) == [
        "spare 1 (rank 6 on n1) has failed; the job continues",
        "server 1 (rank 1 on n1) has failed; spare 0 has taken its place: no update that was "
        "acknowledged is lost",
        "server 2 (rank 2 on n1) has failed; server 0 has taken its place: no update that was "
        "acknowledged is lost",
    ]
    first, second, third = status.deaths
    assert first == {"spare": 1, "who": "spare 1 (rank 6 on n1)", "clock": 41, "at_s": 5.0}
    assert (second["taken_over_by"], third["taken_over_by"]) == ("spare 0", 0)


def test_a_spare_that_takes_a_workers_place_is_told_and_counts_among_those_left() -> None:
    roles = replace(ROLES, groups=((0,), (1,), (2,), (3,)), num_substitutes=1)
    status = status_of(roles=roles)
    line = "worker 3, a spare (rank 4 on n1) has taken the place of worker 1, from iteration 14 on"
    assert lines(
        status,
        Death(1, "worker 1 (rank 2 on n1)", generation=1, left=(), chief=0),
        Joined(3, 1, (14, 2), "state-14-0-1"),
        Death(0, "worker 0 (rank 1 on n1)", generation=2, left=(), chief=2),
        SubstituteDeath(3, "worker 3, a spare (rank 4 on n1)"),
    ) == [
        "worker 1 (rank 2 on n1) has failed; the job continues with 2 workers",
        line,
        "worker 0 (rank 1 on n1) has failed; the job continues with 2 workers",
        "worker 3, a spare (rank 4 on n1) has failed; the job continues",
    ]
    assert status.joined_lines == [line]
    who = "worker 3, a spare (rank 4 on n1)"
    assert status.joined == [{"worker": 3, "who": who, "place": 1, "clock": 14, "at_s": 6.0}]
    assert [each.get("spare") for each in status.deaths] == [None, None, 0]


def test_a_group_that_goes_on_is_told_with_who_is_left() -> None:
    death = Death(2, "worker 2", generation=1, left=(), chief=0, group=1, stay=(1,))
    assert lines(status_of(), death) == [
        "worker 2 has failed; group 1 continues with worker 1; the job continues with 3 workers"
    ]


def test_a_shard_is_told_alone_once_and_whole_again() -> None:
    status = status_of()
    told = lines(status, ShardAlone(1, 1), ShardWhole(1, 3), ShardAlone(1, spare_id(2)), at_s=2.0)
    assert status.alone == [
        {"server": 1, "host": 1, "from_s": 2.0, "until_s": 3.0, "kept_by": 3},
        {"server": 1, "host": "spare 2", "from_s": 4.0, "until_s": None, "kept_by": None},
    ]
    assert status.alone_now == [1]
    assert told == [
        "the shard of server 1 is in server 1 only, without a replica: the job ends if that "
        "process fails before the next replica is complete",
        "the shard of server 1 has a replica again, in server 3, after 1.0 s",
        "the shard of server 1 is in spare 2 only, without a replica: the job ends if that "
        "process fails before the next replica is complete",
    ]


def test_the_next_standby_has_the_same_model() -> None:
    config = RunConfig(codec="auto")
    status = status_of(config, PROGRESS)
    for second, fact in enumerate(
        (
            Death(2, "worker 2 (rank 3 on n1)", generation=1, left=(1,), chief=0),
            Survived(1),
            Death(3, "worker 3 (rank 4 on n1)", generation=2, left=(), chief=0),
            ServerDeath(0, "server 0 (rank 0 on n1)", host=spare_id(1)),
            Joined(3, place=2, clocks=(7,), state=""),
            ShardAlone(2, 3),
            TO_INT4,
        )
    ):
        status.update(fact, float(second))
    other = status_of(config)
    other.from_snapshot(status.to_snapshot())
    assert other.to_snapshot() == status.to_snapshot()
    for each in (other, status):
        each.update(Survived(2), 9.0)
        each.update(ShardWhole(2, spare_id(0)), 10.0)
    assert (other.deaths, other.joined, other.alone) == (status.deaths, status.joined, status.alone)
    assert other.deaths[1]["settled_s"] == 7.0
    assert (other.words, other.codecs) == (status.words, status.codecs)


# -- modes, codecs and local steps -----------------------------------------------------------------


def test_codecs_are_told_with_their_reasons() -> None:
    status = status_of(RunConfig(codec="auto"))
    assert status.mode == "sync none"
    assert lines(status, TO_INT4, TO_INT8) == [
        "codec int4/int4 from iteration 28 on (slow)",
        "codec int8/int8 from iteration 60 on (fast)",
    ]
    assert status.mode == "sync int8/int8"
    assert status.words == "sync; codec auto, none, int4/int4 from 28, int8/int8 from 60"
    assert status.codecs == [
        {"round": 0, "push": "none", "pull": "none", "why": "auto"},
        {"round": 28, "push": "int4", "pull": "int4", "why": "slow"},
        {"round": 60, "push": "int8", "pull": "int8", "why": "fast"},
    ]


def test_modes_are_told_as_modes() -> None:
    status = status_of(RunConfig(mode="auto"))
    changed = ModeChanged((28, 30), "ssp", 2, "skewed")
    assert lines(status, changed) == ["mode ssp:2 from iteration 28, 30 on (skewed)"]
    assert status.mode == "ssp (staleness 2)"
    assert status.words == "auto (sync, ssp:3), ssp:2 from 28"
    assert status.codecs == []
    assert status.modes_of_set(1) == [
        {"round": 0, "mode": "sync", "staleness": None, "why": "settings"},
        {"round": 30, "mode": "ssp", "staleness": 2, "why": "skewed"},
    ]


def test_the_modes_of_a_checkpoint_are_told_once_and_on_a_later_standby_too() -> None:
    config, start = RunConfig(mode="auto"), KeptMode(rounds=(0,), mode="sync", staleness=0)
    kept = KeptModes(by="auto", starts=(start,)).then((28,), "ssp", 2)

    def resumed() -> RunStatus:
        tuning_state = TuningState(modes=kept)
        return RunStatus(
            config, ROLES, {}, tuning_state=tuning_state, why="checkpoint step-00000030"
        )

    status, standby = resumed(), resumed()
    standby.from_snapshot(status.to_snapshot())
    assert standby.modes_of_set(0) == status.modes_of_set(0)
    assert [(each["round"], each["why"]) for each in status.modes_of_set(0)] == [
        (0, "checkpoint step-00000030"),
        (28, "checkpoint step-00000030"),
    ]
    assert standby.words == "auto (sync, ssp:3), ssp:2 from 28"


def test_codecs_of_settings_and_schedules_say_so() -> None:
    fixed = status_of(RunConfig(codec="int8"))
    assert (fixed.mode, fixed.words) == ("sync", "sync")
    assert [each["why"] for each in fixed.codecs] == ["settings"]
    scheduled = status_of(RunConfig(schedule="0: sync none; 9: sync int8"))
    assert [each["why"] for each in scheduled.codecs] == ["schedule", "schedule"]


def test_each_part_is_told_once_when_the_slowest_group_has_come_to_it() -> None:
    schedule = "0: ssp:8 topk:0.01; 20: ssp:8 int8; 30: sync none; 40: sync int4"
    status, paces = status_of(RunConfig(schedule=schedule)), GroupPaces((0, 0, 1))
    modes, told = [status.mode], []
    for clock in (0, 19, 20, 21, 35):
        clocks = {0: clock, 1: clock, 2: clock + 6}
        progress = {w: Progress(worker=w, clock=n, samples=0) for w, n in clocks.items()}
        told += status.reach(paces.behind(progress, ()))
        modes.append(status.mode)
    first = "ssp:8 topk:0.01"
    assert modes == [first, first, first, "ssp:8 int8", "ssp:8 int8", "sync none"]
    assert [(each.text, each.level) for each in told] == [
        ("ssp:8 int8 from iteration 20 on (schedule)", logging.INFO),
        ("sync none from iteration 30 on (schedule)", logging.INFO),
    ]
    assert paces.behind({2: Progress(worker=2, clock=9, samples=0)}, ()) == 0
    assert paces.behind({2: Progress(worker=2, clock=9, samples=0)}, (0, 1)) == 9


BY_LOSS: dict[str, Any] = {"local_steps": 8, "steps_by": "loss"}
BY_SPEED: dict[str, Any] = {"local_steps": 8, "steps_by": "speed"}


def test_changes_of_local_steps_are_told() -> None:
    by_loss = status_of(RunConfig(**BY_LOSS))
    assert lines(by_loss, HEARD, chosen(2, 8, 8), chosen(3, 4, 4, why="low")) == [
        "local steps: 4 (low)"
    ]
    by_speed = status_of(RunConfig(**BY_SPEED))
    many = chosen(5, *range(1, 18), why="fast")
    assert lines(by_speed, chosen(3, 8, 8), chosen(4, 4, 12, why="fast"), many) == [
        "local steps by group: 4, 12 (fast)",
        f"local steps by group: {', '.join(map(str, range(1, 17)))}, ... (fast)",
    ]


def test_a_missing_loss_is_told_once() -> None:
    blocks = [chosen(block, 8, 8) for block in range(6)]
    assert lines(status_of(RunConfig(**BY_LOSS)), *blocks) == [
        "local.steps_by = loss: no loss was reported in the first 9 rounds; rounds stay at 8 local "
        "steps until the script calls job.report(loss)"
    ]
    assert lines(status_of(RunConfig(**BY_LOSS)), HEARD, *blocks) == []
    assert lines(status_of(RunConfig(**BY_SPEED)), *blocks) == []


@pytest.mark.parametrize("rule", [BY_LOSS, BY_SPEED])
def test_the_end_of_a_run_tells_all_changes_by_the_loss(rule: dict[str, Any]) -> None:
    changes = chosen(0, 8, 8), chosen(2, 5, 5, why="low"), chosen(3, 5, 5), chosen(4, 2, 2, why="0")
    status = status_of(RunConfig(**rule))
    lines(status, *changes)
    is_by_loss = rule is BY_LOSS
    assert status.words == "sync" + "; local steps 8, 5 from 5, 2 from 13" * is_by_loss
    assert status.steps_by_loss == is_by_loss * [
        {"round": 0, "steps": 8, "why": "settings"},
        {"round": 5, "steps": 5, "why": "low"},
        {"round": 13, "steps": 2, "why": "0"},
    ]
