"""Histories of sets of tables: what honest workers use is proved, and rows that are too old are
not, under each mode, with prefetch and with kept rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from psdist.commands.check import Report, check_sets_of
from psdist.errors import HistoryError
from psdist.history import EventKind
from psdist.history.rules.findings import Rule
from psdist.history.run_record import CodecsSince
from tests.support.history.forging import Forgery

ROWS = 13
"""Number of the codec by which messages carry rows."""


class Rows(Forgery):
    """A run of rows: as one of chunks; workers use seven rows of each."""

    def __init__(self, *, kept: int = 0, **settings: Any) -> None:
        super().__init__(checksum_every=0, **settings)
        self.run["row_staleness"] = kept
        self.run["codecs"] = (CodecsSince(round=0, push="rows", pull="rows", push_code=ROWS),)
        for uses in self.uses:
            uses["crc"] = 7
        for events in self.events:
            events["codec"][events["kind"] == EventKind.APPLY] = ROWS

    def use_rows_of(self, worker: int, iteration: int, *, age: int, chunk: int = 0) -> None:
        """The oldest rows that the worker uses in this iteration are of ``age`` iterations ago."""
        old = self.use(worker, iteration=iteration - age, chunk=chunk)
        use = self.use(worker, iteration=iteration, chunk=chunk)
        use["position"], use["reply"] = old["position"], old["reply"]


MODES: Sequence[dict[str, Any]] = (
    {"mode": "sync"},
    {"mode": "ssp", "staleness": 3},
    {"mode": "async"},
    {"mode": "async", "pipeline": 1},
)


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_an_honest_run_is_proved(settings: dict[str, Any], seed: int) -> None:
    report = Rows(seed=seed, **settings).judge()
    assert report.proved
    assert not any("no bytes" in note for note in report.notes)


def broken_by(forged: Rows) -> dict[str, int]:
    return forged.judge().violations_by_rule


def test_rows_of_the_iteration_before_break_sync() -> None:
    forged = Rows(mode="sync", collectives=())
    forged.use_rows_of(3, 5, age=1)
    assert Rule.BOUND.value in broken_by(forged)


def test_a_row_that_is_4_old_breaks_a_bound_of_3() -> None:
    """Groups in step: a use that is n iterations old lacks n updates."""
    for age in range(1, 6):
        forged = Rows(mode="sync", collectives=())
        forged.run |= {"mode": "ssp", "staleness": 3}
        for events in forged.events:  # each update is a step of ssp
            is_apply = events["kind"] == EventKind.APPLY
            events["flags"][is_apply] |= 1
            events["lr_scale"][is_apply] = events["weight"][is_apply] / 4
        forged.use_rows_of(3, 5, age=age)
        # Its own updates, and the reply that brought the rows, are older than they may be as well.
        assert (Rule.BOUND.value in broken_by(forged)) == (age > 3)
        assert Rule.OWN.value in broken_by(forged)


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("pipeline", [0, 1])
def test_async_rows_are_as_old_as_prefetch_and_kept_rows_make_them(
    kept: int, pipeline: int
) -> None:
    for age in range(1, 6):
        forged = Rows(
            kept=kept, mode="async", pipeline=pipeline, groups=((0,),), iterations=(8,),
            collectives=(),
        )  # fmt: skip
        applied = forged.find_event(0, EventKind.APPLY, group=0, chunk=0, clock=5 - age)
        use = forged.use(0, iteration=6, chunk=0)
        use["position"], use["reply"] = applied + 1, 5 - age
        report = forged.judge()
        assert report.proved == (age <= kept + pipeline), report.violations


@pytest.mark.parametrize("age", [2, 3])
def test_the_reply_that_brought_rows_is_as_old_as_the_rows_may_be(age: int) -> None:
    forged = Rows(kept=2, mode="ssp", staleness=3)
    forged.use(3, iteration=5, chunk=0)["reply"] = 5 - 1 - age
    assert broken_by(forged) == ({Rule.SAMPLING.value: 1} if age > 2 else {})


def test_versions_may_go_back_and_differ_in_a_group_because_rows_do() -> None:
    forged = Rows(kept=2, mode="ssp", staleness=3)
    forged.use_rows_of(0, 7, age=1)
    forged.use_rows_of(0, 6, age=2)
    report = forged.judge()
    assert report.proved, report.violations
    forged.run["row_staleness"] = None
    with pytest.raises(HistoryError, match="is damaged: record 0 has crc 7"):
        forged.judge()


def test_a_part_of_which_no_rows_were_used_may_name_any_version() -> None:
    forged = Rows(mode="sync")
    use = forged.use(3, iteration=5, chunk=1)
    use["position"], use["reply"] = 0, 0
    assert not forged.judge().proved
    use["crc"] = 0
    assert forged.judge().proved


def test_an_iteration_without_a_record_is_found() -> None:
    forged = Rows(mode="ssp")
    forged.uses[3] = forged.uses[3][forged.uses[3]["iteration"] != 4]
    assert Rule.COVERAGE.value in broken_by(forged)


def test_rows_by_another_codec_are_found() -> None:
    forged = Rows(mode="ssp")
    forged.apply(0, group=1, clock=3)["codec"] = 0
    assert broken_by(forged) == {Rule.CODECS.value: 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "sync", "row_staleness": 2}, "allows no pipeline and no row_staleness"),
        ({"mode": "async", "row_staleness": 0, "checksum_every": 4}, "rows have no checksums"),
    ],
)
def test_run_json_promises_nothing_that_rows_cannot_keep(
    fields: dict[str, Any], message: str
) -> None:
    forged = Rows(mode="async")
    forged.run |= fields
    with pytest.raises(ValidationError, match=message):
        forged.history()


def _of_two_sets(**changes: Any) -> Report:
    """Judge parameters in sync next to tables in async."""
    dense, rows = Forgery(mode="sync"), Rows(kept=2, mode="async", pipeline=1)
    rows.run |= {"set_index": 1, **changes}
    return check_sets_of([dense.history(), rows.history()], None)


def test_tables_may_have_a_mode_and_codecs_of_their_own() -> None:
    report = _of_two_sets()
    assert report.proved, report.violations


def test_tables_of_another_job_are_found() -> None:
    report = _of_two_sets(attempt=2)
    assert report.violations == ("run.json of set 1 is of another job than that of set 0",)
