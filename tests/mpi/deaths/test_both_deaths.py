"""A worker and a server are killed by SIGKILL in one job, and the others train on: status 0,
`psdist check` proves it, and no process is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.mpi.deaths.test_deaths import TIMEOUT_S, ULFM, run_dying, summary_of
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, run_mpi

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


@pytest.mark.slow
def test_who_hears_late_that_it_is_out_ends_well(tmp_path: Path) -> None:
    """The coordinator and one worker of a group are killed at once, and the other worker of it
    looks up when the rest of the job has ended."""
    plan = plan_of_groups(tmp_path / "plan.json", [2, 2], servers=2)
    settings = {"replication": "buddy", "max_deaths": 2, "placement": plan, "chunk_bytes": 8192}
    words = ["-m", "psdist", "run", "--record", "--mode", "async", "--servers", "2"]
    words += [f"--set={key}={value}" for key, value in settings.items()]
    program = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "late_to_hear.py"
    done = run_mpi(
        6, [*words, str(program)], timeout_s=TIMEOUT_S, launcher_args=ULFM,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run")},
    )  # fmt: skip
    assert done.returncode == 0, done.text
    assert "error" not in done.text, done.text
    assert done.stdout.index("worker 0 clock 12") < done.stdout.index("worker 2 looks up"), (
        done.text
    )
    (line,) = [each for each in done.stderr.splitlines() if "this worker ends" in each]
    assert re.search(
        r"psdist: worker 2 \(.*\): worker 3 \(.*\), of the same group, has failed", line
    )
    assert summary_of(tmp_path)["exit"] == "completed"
