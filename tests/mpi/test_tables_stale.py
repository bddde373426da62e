"""Tables in modes that let rows be stale: psdist check proves how stale the rows of a run were.

tests/support/programs/tables/stale.py is the script.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psdist.commands.check import Report, check_run
from psdist.history import History, Records
from psdist.history.files import read_histories
from psdist.history.rules.findings import Rule
from tests.support.mpirun import environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
PROGRAM = "tests.support.programs.tables.stale"
HYBRID = ("--set", "tables.mode=async")
SSP = ("--mode", "ssp", "--staleness", "3")


def ran(run_dir: Path, *options: str) -> list[History]:
    """Run two workers and two servers; return the history of each parameter set."""
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    done = run_program(
        [
            *(python, "-m", "psdist", "run", "--group", "rank", "--run-dir", str(run_dir)),
            *("--record", "--workers", "2", "--servers", "2", *options),
            *("-m", PROGRAM, str(run_dir.with_suffix(".pt"))),
        ],
        timeout_s=TIMEOUT_S,
        env={"PSDIST_REPORT_PROGRESS": "off"},
    )
    assert done.returncode == 0, done.text
    return list(read_histories(run_dir))


def forged(run_dir: Path, histories: list[History], *, age: int) -> Report:
    """Judge the run if a worker had used rows in iteration 20 that are ``age`` iterations old."""
    dense, rows = histories
    uses = rows.workers[1].uses.copy()

    def of(iteration: int) -> Records:
        return uses[(uses["iteration"] == iteration) & (uses["chunk"] == 0)]

    use = (uses["iteration"] == 20) & (uses["chunk"] == 0)
    for field in ("position", "reply"):
        uses[field][use] = of(20 - age)[field]
    worker = replace(rows.workers[1], uses=uses)
    return check_run(run_dir, [dense, replace(rows, workers=(rows.workers[0], worker))])


@pytest.mark.parametrize(
    ("options", "age"),
    [
        pytest.param(SSP, 4, id="ssp"),
        pytest.param(HYBRID, 4, id="tables in async next to parameters in sync"),
        pytest.param((*HYBRID, "--set", "tables.cache=300"), 20, id="and kept rows"),
    ],
)
def test_rows_are_as_stale_as_their_mode_allows(
    options: tuple[str, ...], age: int, tmp_path: Path
) -> None:
    histories = ran(tmp_path / "run", *options)
    report = check_run(tmp_path / "run", histories)
    assert report.proved, report.violations
    dense, rows = histories
    assert (dense.run.mode, rows.run.mode) == (
        ("ssp",) * 2 if options == SSP else ("sync", "async")
    )
    assert report.max_staleness <= 3 or rows.run.mode == "async"
    assert sum(int(log.uses["crc"].sum()) for log in rows.workers) > 3_000  # rows used
    told = forged(tmp_path / "run", histories, age=age)
    assert Rule.OWN.value in told.violations_by_rule


def test_kept_rows_in_sync_are_refused() -> None:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    options = ["--workers", "1", "--set", "tables.cache=300", "-m", PROGRAM, "x"]
    done = run_program([python, "-m", "psdist", "run", *options], timeout_s=TIMEOUT_S)
    assert done.returncode == 2, done.text
    assert "tables.cache = 300 with tables.mode = same: in sync a kept row would lack" in done.text


@pytest.mark.parametrize(
    ("settings", "most_pulled"),
    [
        pytest.param({}, 1.25e6, id="sync"),
        pytest.param(
            {"PSDIST_TABLES_MODE": "async", "PSDIST_TABLES_CACHE": "20000"},
            0.45e6,
            id="rows kept for 16 iterations",
        ),
    ],
)
def test_bytes_of_an_iteration_with_cardinalities_of_criteo(
    settings: dict[str, str], most_pulled: float
) -> None:
    """26 tables, batch 2,048, dim 16, Zipf 1.05: 16,100 distinct rows an iteration."""
    python = str(environment_prefix("openmpi") / "bin" / "python")
    done = run_program(
        [python, "-m", "tests.support.programs.tables.criteo", "30"],
        timeout_s=TIMEOUT_S,
        env={"PSDIST_REPORT_PROGRESS": "off", **settings},
    )
    assert done.returncode == 0, done.text
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("bytes ")]
    assert len(told) == 30
    pushed, pulled = (np.diff([int(each[at]) for each in told])[17:] for at in (0, 1))
    assert 0.9e6 < pushed.mean() <= 1.25e6
    assert 0.05e6 < pulled.mean() <= most_pulled
