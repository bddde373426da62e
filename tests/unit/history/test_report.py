"""The report of `psdist check`, whole: every number, every note, in order."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from psdist.commands.check import Report, check, main
from psdist.history import EventKind, History, Records, ServerLog
from psdist.history.rules.findings import Rule
from tests.support.history.forging import Forgery
from tests.support.history.summaries import summary_of_toy
from tests.support.history.toy_run import ToyRun


def died(log: ServerLog, group: int) -> Records:
    """The server's events, had the group failed where it left."""
    events = log.events.copy()
    is_it = (events["kind"] == EventKind.LEAVE) & (events["group"] == group)
    events["kind"][is_it] = EventKind.DEATH
    return events


def crashed(toy: ToyRun) -> History:
    """Group 2 (worker 3) failed; then all but worker 0 were killed, one after the other."""
    history = toy.run()
    assert history is not None
    servers = []
    for log, num_events, num_sums in zip(history.servers, (48, 24), (40, 25), strict=True):
        records = {"events": died(log, 2)[:num_events], "checksums": log.checksums[:num_sums]}
        servers.append(dataclasses.replace(log, is_complete=False, **records))
    workers = []
    for log, num_uses, num_pushes in zip(
        history.workers, (24, 23, 24, 18), (8, 8, 5, 6), strict=True
    ):
        records = {"uses": log.uses[:num_uses], "pushes": log.pushes[:num_pushes]}
        workers.append(dataclasses.replace(log, is_complete=log.worker == 0, **records))
    notes = ("server-0.events ends in the middle of record 48",)
    return dataclasses.replace(history, servers=servers, workers=workers, notes=notes)


def test_after_a_crash_every_part_that_is_not_proved_is_told_in_order() -> None:
    toy = ToyRun(seed=1, collectives=(), empty_rate=0.0)
    history = crashed(toy)
    summary = summary_of_toy(toy).model_copy(update={"max_staleness_seen": 7})
    report = check(history, summary=summary)
    assert report == Report(
        is_complete=False,
        violations=(),
        num_violations=0,
        violations_by_rule={},
        num_uses=24 + 23 + 24 + 18,
        num_applies=(48 - 5) + (24 - 4),
        num_checksums=89 - 2 - 9,
        staleness={0: 51, 1: 9, 2: 27},
        max_staleness=2,
        notes=(
            "server-0.events ends in the middle of record 48",
            "server 0 evicted these groups: [2]",
            "of 10 updates on server 0 it is not proved what they weighed: the records of who "
            "pushed them end before",
            "the log of server 0 ends early, after 48 events; 9 sampled uses have no checksum to "
            "compare",
            "on server 0 these groups never left: [0]",
            "server 1 evicted these groups: [2]",
            "of 5 updates on server 1 it is not proved what they weighed: the records of who "
            "pushed them end before",
            "the log of server 1 ends early, after 24 events; 2 uses of later versions are not "
            "proved",
            "on server 1 these groups never left: [0, 1]",
            "the records of worker 1 end early, after 23 uses",
            "the records of worker 2 end early, after 24 uses",
            "the records of worker 3 end early, after 18 uses: its group failed",
            "summary.json says max_staleness_seen 7, what was recorded shows 2",
        ),
    )
    assert list(report.staleness) == [0, 1, 2]


def test_what_a_crashed_run_does_not_say_of_itself_or_says_rightly_is_no_note() -> None:
    toy = ToyRun(seed=1, collectives=(), empty_rate=0.0)
    history = crashed(toy)
    for claim in (None, 2):
        summary = summary_of_toy(toy).model_copy(update={"max_staleness_seen": claim})
        assert check(history, summary=summary).notes == check(history).notes


def test_a_run_without_iterations_is_reported_whole() -> None:
    toy = ToyRun(seed=1, iterations=(0, 0, 0), collectives=())
    history = toy.run()
    assert history is not None
    assert check(history, summary=summary_of_toy(toy)) == Report(
        is_complete=True,
        violations=(),
        num_violations=0,
        violations_by_rule={},
        num_uses=0,
        num_applies=0,
        num_checksums=0,
        staleness={},
        max_staleness=0,
        notes=("no use was recorded: there is nothing to prove",),
    )


def test_staleness_is_reported_in_ascending_order_whichever_was_met_first() -> None:
    forged = Forgery(mode="async", collectives=())
    for chunk, iteration in ((0, 7), (1, 6)):  # of server 0, which is checked first, and 1
        used = forged.use(2, iteration=iteration, chunk=chunk)
        used["position"] = forged.use(2, iteration=0, chunk=chunk)["position"]
    staleness = forged.judge().staleness
    assert list(staleness) == sorted(staleness)
    assert (staleness[6], staleness[7]) == (1, 1)


def test_the_report_as_json_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = ToyRun(seed=1, empty_rate=0.0, path_dir=tmp_path / "history")
    toy.run()
    events = tmp_path / "history" / "server-0.events"
    data = bytearray(events.read_bytes())
    data[24] = 1  # the clock of the first JOIN
    events.write_bytes(data)
    assert main(tmp_path, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)

    assert sum(told.pop("staleness").values()) == told["num_uses"]
    assert told.pop("share_stale") > 0
    assert told == {
        "format": "psdist check",
        "version": 1,
        "verdict": "violated",
        "proved": False,
        "is_complete": True,
        "violations": ["server 0, position 0: JOIN of group 0: at clock 1; a group begins with 0"],
        "num_violations": 1,
        "violations_by_rule": {Rule.MEMBERSHIP.value: 1},
        "num_uses": (8 * 2 + 8 + 6) * 3,
        "num_applies": (8 + 8 + 6) * 3,
        "num_checksums": (8 * 2 + 8 + 6) * 3,
        "max_staleness": 2,
        "notes": [],
        "changes": [],
    }


def test_a_crash_before_the_first_use_is_reported_whole() -> None:
    history = ToyRun(seed=1, groups=((0,),), iterations=(1,), num_servers=1, collectives=()).run()
    assert history is not None
    log, worker = history.servers[0], history.workers[0]
    log = dataclasses.replace(
        log, events=log.events[:1], checksums=log.checksums[:0], is_complete=False
    )
    worker = dataclasses.replace(
        worker, uses=worker.uses[:0], pushes=worker.pushes[:0], is_complete=False
    )
    report = check(dataclasses.replace(history, servers=(log,), workers=(worker,)))
    assert (report.num_applies, report.staleness, report.max_staleness) == (0, {}, 0)
    assert report.notes == (
        "the log of server 0 ends early, after 1 events",
        "on server 0 these groups never left: [0]",
        "the records of worker 0 end early, after 0 uses",
        "no use was recorded: there is nothing to prove",
    )


def test_notes_come_in_order_also_where_there_is_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ToyRun(seed=1, checksum_every=0, path_dir=tmp_path / "history").run()
    (tmp_path / "summary.json").unlink()
    uses = tmp_path / "history" / "worker-1.uses"
    data = bytearray(uses.read_bytes())
    data[16:24] = (-1).to_bytes(8, "little", signed=True)
    uses.write_bytes(data)
    assert main(tmp_path) == 3
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line.startswith("note")] == [
        *(
            f"note: of 1 updates on server {server} it is not proved what they weighed: the "
            "records of who pushed them end before"
            for server in (0, 1)
        ),
        "note: the records of worker 1 end early, after 24 uses",
        "note: no bytes were compared: no reply had a checksum",
        "note: there is no summary.json: the claims of the run were not compared",
    ]


def test_what_cannot_be_read_is_said_in_red_and_in_no_other_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    run_dir = tmp_path / ("long" * 30) / "17"
    assert main(run_dir) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"\x1b[31mpsdist check: {run_dir}/history does not exist: {run_dir} is not a run "
        "directory, or the run was made without --record\x1b[0m\n"
    )
