"""RUN_DIR/decisions.jsonl: read, refused where it is damaged, and judged by `psdist check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.errors import HistoryError
from psdist.history.rules.decisions import DECISION_LINES, Changed, Observed, read_decision_lines

OBSERVED = (
    '{"observed": {"group": 0, "first_round": 1, "own_us": [5], "waits_us": [2], '
    '"is_judged": true}}'
)
CHANGED = '{"changed": {"rounds": [9], "mode": "ssp", "staleness": 3, "why": "a test"}}'


def write(folder: Path, text: str) -> Path:
    (folder / DECISION_LINES).write_text(text)
    return folder


def test_lines_are_read_in_order_and_one_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    first, second = read_decision_lines(write(tmp_path, f"{OBSERVED}\n{CHANGED}\n{OBSERVED[:20]}"))
    assert first.observed == Observed(
        group=0, first_round=1, own_us=[5], waits_us=[2], is_judged=True
    )
    assert second.changed == Changed(rounds=[9], mode="ssp", staleness=3, why="a test")


def test_a_run_in_which_nothing_was_observed_has_no_lines(tmp_path: Path) -> None:
    assert read_decision_lines(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "5", '{"other": 1}', OBSERVED[:-1], OBSERVED.replace("[5]", "[-5]")),
        *(
            CHANGED.replace("[9]", "[]"),
            CHANGED.replace("ssp", "async"),
            CHANGED.replace("3", "-3"),
        ),
    ],
)
def test_a_damaged_line_names_the_file(tmp_path: Path, line: str) -> None:
    with pytest.raises(HistoryError, match=r"decisions.jsonl is damaged: "):
        read_decision_lines(write(tmp_path, f"{OBSERVED}\n{line}\n"))
