"""The totals of summary.json over all parameter sets are the sums over the sets."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.summaries import check_sets
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary

RUN = RunRecord(
    psdist="0", mode="sync", groups=((0,),), slices=((0,),), num_servers=1, num_chunks=1,
    owners=(0,),
)  # fmt: skip
COUNTS = (
    *("num_chunks", "updates", "pushes", "steps", "replies", "copies_on_write", "position"),
    "checksums",
)


def server(first: int) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(COUNTS)}


def of_set(*, clock: int, chunks: int | None, servers: tuple[int, int]) -> dict[str, Any]:
    return {
        "empty_servers": (), "chunks": chunks, "clocks": (clock, clock), "updates_applied": clock,
        "max_staleness_seen": 1, "staleness_seen": {"0": clock, "1": 2}, "recorded": None,
        "per_server": tuple(server(each) for each in servers),
    }  # fmt: skip


def summary(**changes: Any) -> Summary:
    """Return a summary of a run of two sets on two servers, with the counts of each server."""
    told = {
        "mode": "sync", "staleness": None, "servers": 2, "workers": 2, "groups": 2,
        "exit": "completed", "empty_servers": (), "chunks": 7, "clocks": (5, 5),
        "updates_applied": 8, "max_staleness_seen": 1, "staleness_seen": {"0": 8, "1": 4},
        "recorded": None,
        "per_server": tuple(
            {name: base + 2 * place for place, name in enumerate(COUNTS)} for base in (110, 1100)
        ),
        "sets": (of_set(clock=5, chunks=3, servers=(10, 100)),
                 of_set(clock=3, chunks=4, servers=(100, 1000))),
        **changes,
    }  # fmt: skip
    return Summary.model_validate(told)


def found(said: Summary, *, histories: int = 2) -> list[str]:
    findings = Findings(max_listed_per_rule=20)
    check_sets(said, [RUN] * histories, findings)
    assert findings.counts[Rule.SUMMARY] == findings.total
    return list(findings.lines())


def test_counts_of_two_sets_add_up_server_by_server_and_the_clocks_are_the_first_sets() -> None:
    assert found(summary()) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"clocks": (3, 3)}, "clocks (3, 3), of its sets together (5, 5)"),
        ({"chunks": 4}, "chunks 4, of its sets together 7"),
        ({"chunks": None}, "chunks None, of its sets together 7"),
        ({"updates_applied": 5}, "updates_applied 5, of its sets together 8"),
        (
            {"staleness_seen": {"0": 8, "1": 3}},
            "staleness_seen Counter({'0': 8, '1': 3}), of its sets together "
            "Counter({'0': 8, '1': 4})",
        ),
    ],
)
def test_a_count_that_its_sets_do_not_add_up_to_is_told(changes: dict[str, Any], line: str) -> None:
    assert found(summary(**changes)) == [f"summary.json says {line}"]


@pytest.mark.parametrize("place", range(len(COUNTS)))
def test_every_count_of_every_server_is_held_against_the_sets(place: int) -> None:
    name = COUNTS[place]
    told = [dict(each) for each in summary().model_dump()["per_server"]]
    told[1][name] += 1
    first, second = 110 + 2 * place, 1100 + 2 * place
    assert found(summary(per_server=tuple(told))) == [
        f"summary.json says {name} of servers [{first}, {second + 1}], of its sets together "
        f"[{first}, {second}]"
    ]


def test_a_staleness_that_nobody_saw_may_be_left_out() -> None:
    assert found(summary(staleness_seen={"0": 8, "1": 4, "2": 0})) == []


def test_what_one_set_does_not_know_the_run_does_not_know() -> None:
    sets = (of_set(clock=5, chunks=None, servers=(10, 100)), summary().model_dump()["sets"][1])
    assert found(summary(sets=sets, chunks=None)) == []
    assert found(summary(sets=sets)) == ["summary.json says chunks 7, of its sets together None"]


def test_every_set_has_a_history_and_every_history_a_set() -> None:
    line = "summary.json says {} parameter sets, there are histories of {}"
    assert found(summary(), histories=1) == [line.format(2, 1)]
    assert found(summary(), histories=3) == [line.format(2, 3)]
    assert found(summary(sets=()), histories=1) == []
    assert found(summary(sets=()), histories=2) == [line.format(1, 2)]
