"""Workers are killed by SIGKILL, and the others train on: status 0, `psdist check` proves it, and
no process is left (tests/support/mpirun.py fails a run that leaves one)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, Completed, Mpi, run_mpi, run_program

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "dies.py"
TIMEOUT_S = 240
ULFM = ("--with-ft", "ulfm")


def run_dying(
    dies: str,
    path: Path,
    *,
    ranks: int = 4,
    mode: str = "sync",
    servers: int = 1,
    group: str = "rank",
    mpi: Mpi = "openmpi",
    launcher_args: tuple[str, ...] = ULFM,
    kills: str = "",
    is_parent: bool = False,
    **settings: object,
) -> Completed:
    """``is_parent``: started by `psdist run -n`, and not by mpirun itself."""
    words = ["-m", "psdist", "run", "--record", "--mode", mode, "--group", group]
    words += ["--servers", str(servers)]
    settings = {"max_deaths": 2, "chunk_bytes": 4096, "progress": "off", **settings}
    words += [f"--set={key}={value}" for key, value in settings.items()]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "ITERATIONS": "30"}
    env["KILLS"] = kills
    if is_parent:
        words += ["-n", str(ranks), str(PROGRAM)]
        return run_program([sys.executable, *words], timeout_s=TIMEOUT_S, env=env)
    return run_mpi(
        ranks, [*words, str(PROGRAM)], timeout_s=TIMEOUT_S, mpi=mpi, env=env,
        launcher_args=launcher_args,
    )  # fmt: skip


def summary_of(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((path / "run" / "summary.json").read_text())
    return summary


def prove(done: Completed, path: Path, dead: list[int], clocks: list[int]) -> dict[str, Any]:
    """``dead``: workers, in any order; ``clocks``: of the groups that live."""
    assert done.returncode == 0, done.text
    assert len(re.findall("^killed at", done.stdout, re.MULTILINE)) == len(dead), done.text
    summary = summary_of(path)
    assert summary["exit"] == "completed"
    assert sorted(each["worker"] for each in summary["deaths"]) == sorted(dead)
    assert all(0 <= each["settled_s"] < 30 for each in summary["deaths"])
    assert [clock for clock in summary["clocks"] if clock == 30] == clocks
    report = check_run(path / "run", read_histories(path / "run"))
    assert report.proved, (report.violations, report.notes)
    assert load_file(path / "run" / "model.safetensors")["0.weight"].isfinite().all()
    return summary


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "dies", "servers"),
    [
        pytest.param("sync", "0 pushing 12", 2, id="sync-chief-pushing", marks=SLOW),
        pytest.param("ssp", "1 collective 19", 1, id="ssp-worker-in-a-collective", marks=SLOW),
        pytest.param("sync", "1 pushing 12", 1, id="sync-worker-pushing", marks=SLOW),
        pytest.param("sync", "2 parked 7", 2, id="sync-worker-parked", marks=SLOW),
        pytest.param("ssp", "0 parked 7", 1, id="ssp-chief-parked", marks=SLOW),
        pytest.param("ssp", "2 pushing 3", 2, id="ssp-worker-pushing"),
        pytest.param("async", "0 pushing 12", 2, id="async-chief-pushing", marks=SLOW),
        pytest.param("sync", "0 collective 19", 1, id="sync-chief-in-a-collective", marks=SLOW),
        pytest.param("sync", "0 saving 0", 2, id="sync-chief-saving", marks=SLOW),
        pytest.param("sync", "0 setting 0", 1, id="sync-chief-setting-values", marks=SLOW),
        pytest.param("sync", "0 finishing 0", 1, id="sync-chief-finishing", marks=SLOW),
        pytest.param("ssp", "1 finishing 0", 2, id="ssp-worker-finishing", marks=SLOW),
        pytest.param("sync", "0 forward 4,2 pushing 9", 1, id="sync-two", marks=SLOW),
        pytest.param("async", "1 forward 4,2 forward 4", 2, id="async-two-at-once", marks=SLOW),
    ],
)
def test_the_others_train_on(mode: str, dies: str, servers: int, tmp_path: Path) -> None:
    plans = [each.split() for each in dies.split(",")]
    done = run_dying(dies, tmp_path, ranks=3 + servers, mode=mode, servers=servers)
    # A worker that had finished when it failed is not counted.
    dead = [int(worker) for worker, phase, _ in plans]
    is_done = plans[0][1] == "finishing"
    has_trained = plans[0][1] in ("finishing", "setting", "saving")
    num_left = 3 if has_trained else 3 - len(dead)
    if is_done:
        assert done.returncode == 0, done.text
        assert summary_of(tmp_path)["exit"] == "completed"
        return
    prove(done, tmp_path, dead, [30] * num_left)
    chief = min({0, 1, 2} - set(dead))
    assert f"worker {chief} chief True clock 30" in done.stdout, done.text
    for worker in dead:
        assert re.search(
            rf"psdist: WARNING: server 0 \(.*\): worker {worker} \(.*\) has failed; the job "
            r"continues with [12] workers?$",
            done.stderr,
            re.MULTILINE,
        ), done.text


TELLS_STATUS = "import subprocess, sys; print('ended with', subprocess.call(sys.argv[1:]))"
PLAIN = """
import os, signal, sys, torch, psdist

job = psdist.init()
worker = job.worker
model = torch.nn.Linear(2, 2)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for clock in range(5):
    if clock == 3 and worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
job.close()
if worker == 2:
    raise SystemExit(4)
sys.exit(3)
"""


def test_a_plain_script_ends_with_its_own_status_though_a_worker_has_died(tmp_path: Path) -> None:
    """A process around each rank reports its status: mpirun's own is of all together."""
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_MAX_DEATHS": "1"}
    env |= {"PSDIST_GROUP": "rank", "PSDIST_SERVERS": "1", "PYTHONPATH": str(REPOSITORY)}
    words = ["-c", TELLS_STATUS, sys.executable, str(script)]
    done = run_mpi(4, words, timeout_s=TIMEOUT_S, env=env, launcher_args=ULFM)
    told = re.findall(r"^ended with (-?\d+)$", done.stdout, re.MULTILINE)
    assert sorted(map(int, told)) == [-9, 0, 3, 4], done.text
    assert summary_of(tmp_path)["exit"] == "completed"


@pytest.mark.parametrize(
    "wish", ["PSDIST_MAX_DEATHS=1", pytest.param("PSDIST_REPLICATION=buddy", marks=SLOW)]
)
def test_a_plain_script_whose_status_mpi_would_hide_is_refused(wish: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from mpi4py import MPI\n{PLAIN}")
    name, value = wish.split("=")
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), name: value, "PSDIST_SERVERS": "2"}
    words = [str(script)]
    done = run_mpi(4, words, timeout_s=TIMEOUT_S, env=env, launcher_args=ULFM)
    assert done.returncode not in (0, None), done.text
    assert done.text.count("the script loads mpi4py's MPI before psdist.init()") == 1
    assert "Traceback" not in done.text


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["shared_memory", "torch"])
def test_the_rest_of_a_group_ends_well_and_the_others_train_on(tier: str, tmp_path: Path) -> None:
    """Two groups of two workers, which only a plan makes on one host of one socket."""
    plan = plan_of_groups(tmp_path / "plan.json", [2, 2])
    done = run_dying("0 forward 9", tmp_path, ranks=5, placement=plan, group_tier=tier)
    (death,) = prove(done, tmp_path, [0], [30])["deaths"]
    assert death["left"] == [1]
    (line,) = [line for line in done.stderr.splitlines() if "this worker ends" in line]
    assert re.search(
        r"psdist: worker 1 \(.*\): worker 0 \(.*\), of the same group, has failed", line
    )
    assert "worker 2 chief True clock 30" in done.stdout, done.text


@pytest.mark.slow
@pytest.mark.parametrize("is_parent", [False, True], ids=["mpirun", "psdist-run-n"])
def test_one_more_than_max_deaths_ends_the_job_with_one_line(
    is_parent: bool, tmp_path: Path
) -> None:
    """`psdist run -n` names the second failed worker as well, but not the first: it was
    survived."""
    dies = "1 forward 4,2 forward 9"
    done = run_dying(dies, tmp_path, max_deaths=1, is_parent=is_parent)
    assert done.returncode == 1, done.text
    line, *more = [each for each in done.stderr.splitlines() if re.match("psdist: .*error", each)]
    assert [re.findall("before that (worker [0-9])", each) for each in more] == (
        [["worker 2"]] if is_parent else []
    )
    assert re.search(
        r"psdist: server 0 \(.*\): error: worker 2 \(.*\) has failed; which is death 2, and "
        r"failures.max_deaths = 1: restart the job, or set failures.max_deaths higher$",
        line,
    ), done.text


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=SLOW)])
def test_a_launcher_that_ends_all_with_the_first_is_refused_at_the_start(
    mpi: Mpi, tmp_path: Path
) -> None:
    done = run_dying("1 forward 4", tmp_path, ranks=2, mpi=mpi, launcher_args=())
    assert done.returncode != 0, done.text
    lines = [line for line in done.stderr.splitlines() if line.startswith("psdist: error")]
    assert len(lines) == 1, done.text
    assert "failures.max_deaths is above 0, but this launcher ends all ranks" in lines[0]


@pytest.mark.parametrize(
    "before",
    [
        "exchange",
        *(pytest.param(each, marks=SLOW) for each in ("agree_on_plan", "broadcast", "join")),
    ],
)
def test_a_death_while_the_job_starts_ends_it_with_one_error(before: str, tmp_path: Path) -> None:
    done = run_mpi(
        4, ["-m", "tests.support.programs.deaths.dies_at_start"], timeout_s=TIMEOUT_S,
        env={"BEFORE": before, "PSDIST_MAX_DEATHS": "1", "PSDIST_RUN_DIR": str(tmp_path / "run")},
        launcher_args=ULFM,
    )  # fmt: skip
    assert done.returncode == 1, done.text
    assert "MPI_ABORT" not in done.text, "mpirun may never end after an Abort"
    assert "a rank failed while the job was starting, which no job survives" in done.text
    assert "Traceback" not in done.text
