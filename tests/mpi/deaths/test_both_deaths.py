"""A worker and a server are killed by SIGKILL in one job, and the others train on: status 0,
`psdist check` proves it, and no process is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.mpi.deaths.test_deaths import run_dying, summary_of

pytestmark = pytest.mark.mpi

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "dies", "kills"),
    [
        pytest.param("sync", "0 pushing 12", "1 13", id="sync-chief-then-server"),
        pytest.param("ssp", "1 parked 12", "1 7", id="ssp-server-then-worker", marks=SLOW),
        pytest.param("async", "0 forward 12", "1 12", id="async-at-once", marks=SLOW),
        pytest.param("sync", "1 collective 19", "1 19", id="sync-in-a-collective", marks=SLOW),
    ],
)
def test_the_others_train_on(mode: str, dies: str, kills: str, tmp_path: Path) -> None:
    done = run_dying(
        dies, tmp_path, ranks=5, servers=2, mode=mode, kills=kills, replication="buddy"
    )
    assert done.returncode == 0, done.text
    summary = summary_of(tmp_path)
    assert summary["exit"] == "completed"
    dead = int(dies.split()[0])
    deaths = {each.get("worker", -1): each for each in summary["deaths"]}
    assert sorted(deaths) == [-1, dead], summary["deaths"]
    assert (deaths[-1]["server"], deaths[-1]["taken_over_by"]) == (1, 0)
    assert [clock for clock in summary["clocks"] if clock == 30] == [30, 30]
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
    chief = min({0, 1, 2} - {dead})
    assert f"worker {chief} chief True clock 30" in done.stdout, done.text
