"""job.close() and `with psdist.init() as job`: the processes continue, and begin another job.

tests/support/programs/jobs_script.py has the scripts. tests/support/mpirun.py fails a test whose
job hangs or leaves a process behind.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest

from psdist.commands import check
from tests.support.mpirun import (
    REPOSITORY,
    Completed,
    Mpi,
    environment_prefix,
    require,
    run_mpi,
    run_program,
)

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "jobs_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}
Start = Literal["python", "psdist run", "psdist run -n", "mpirun python"]


def run(
    start: Start,
    way: str,
    folder: Path,
    *,
    ranks: int = 4,
    mpi: Mpi = "openmpi",
    **variables: str,
) -> Completed:
    env = {**QUIET, "PSDIST_RUN_DIR": str(folder / "run"), "PSDIST_RECORD": "1", **variables}
    words = [SCRIPT, str(folder / "seen"), way]
    if start == "python":
        return run_program([sys.executable, *words], timeout_s=TIMEOUT_S, env=env, cwd=folder)
    if start == "mpirun python":
        return run_mpi(ranks, words, timeout_s=TIMEOUT_S, mpi=mpi, env=env, cwd=folder)
    words = ["-m", "psdist", "run", *words]
    if start == "psdist run":
        return run_mpi(ranks, words, timeout_s=TIMEOUT_S, mpi=mpi, env=env, cwd=folder)
    require(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    words[3:3] = ["-n", str(ranks)]
    return run_program([python, *words], timeout_s=TIMEOUT_S, env=env, cwd=folder)


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*"))]


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("run*"), key=lambda path: (len(path.name), path.name))


def summary(run_dir: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return told


def told(done: Completed) -> list[str]:
    """Our lines of standard error, those of warnings left out."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("psdist: ")]
    return [line for line in lines if "WARNING" not in line and " are ready after " not in line]


# -- several jobs ----------------------------------------------------------------------------------

ENDED = "was called after job.close(), which has ended this job; psdist.init() begins another one"
TOLD = {
    **{
        name: f"job.{name}() {ENDED}"
        for name in ("prepare", "save", "mean", "barrier", "pull", "log", "loader", "sampler")
    },
    "step": "optimizer.step() was called after job.close(), which has ended the job; psdist.init() "
    "begins another one, whose prepare gives an optimizer that trains",
}


def assert_three_jobs(done: Completed, folder: Path, *, workers: int, group: str) -> None:
    assert done.returncode == 0, done.text
    first, *others = seen(folder)
    assert len(others) == workers - 1
    assert [each["told"] for each in (first, *others)] == [TOLD] * workers
    assert [(job["mode"], job["clock"]) for job in first["jobs"]] == [
        ("ssp", 5),
        ("sync", 5),
        ("async", 5),
    ]
    # In sync all ranks have the same parameters, with or without a job before.
    parameters = [each["jobs"][1]["parameters"] for each in (first, *others)]
    assert parameters == [parameters[0]] * workers
    paths = runs(folder)
    assert [path.name for path in paths] == ["run", "run-2", "run-3"]
    for path, mode in zip(paths, ("ssp", "sync", "async"), strict=True):
        assert summary(path)["exit"] == "completed"
        assert (summary(path)["mode"], summary(path)["workers"]) == (mode, workers)
        config = tomllib.loads((path / "config.toml").read_text())
        assert (config["mode"], config["run_dir"]) == (mode, str(path))
        assert len((path / "metrics.jsonl").read_text().splitlines()) == workers
        ranks = json.loads((path / "ranks.json").read_text())
        assert ranks == json.loads((paths[0] / "ranks.json").read_text())
        assert (path / "plan.txt").read_text() == (paths[0] / "plan.txt").read_text()
        for rank in ranks:
            log = (path / "logs" / f"rank-{rank['rank']}.log").read_text()
            assert (path is paths[0]) or "begins" in log.splitlines()[0]
        assert check.main(path) == 0
    assert (
        len(
            {summary(path)["clocks"] == [5] * (workers if group == "rank" else 1) for path in paths}
        )
        == 1
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("psdist: completed")] != []
    assert done.stdout.count("psdist: completed in ") == 3
    assert told(done) == []


@pytest.mark.parametrize(
    ("start", "mpi", "group"),
    [
        pytest.param("python", "openmpi", "node", marks=pytest.mark.slow),
        pytest.param("psdist run", "openmpi", "rank", marks=pytest.mark.slow),
        pytest.param("psdist run -n", "mpich", "node", marks=pytest.mark.slow),
        ("mpirun python", "openmpi", "node"),
        pytest.param("mpirun python", "mpich", "rank", marks=pytest.mark.slow),
    ],
)
def test_three_jobs_of_one_process_are_three_proved_runs(
    start: Start, mpi: Mpi, group: str, tmp_path: Path
) -> None:
    done = run(start, "three_jobs", tmp_path, mpi=mpi, PSDIST_GROUP=group)
    if start == "psdist run -n":  # the parent shows the command that it starts
        assert told(done)[:1] == []
    assert_three_jobs(done, tmp_path, workers=1 if start == "python" else 3, group=group)


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_nothing_of_a_job_reaches_the_next_however_soon_that_begins(
    mpi: Mpi, tmp_path: Path
) -> None:
    done = run("psdist run", "many_jobs", tmp_path, mpi=mpi, PSDIST_GROUP="rank", ranks=5)
    assert done.returncode == 0, done.text
    paths = runs(tmp_path)
    assert len(paths) == 12
    for number, path in enumerate(paths):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [line["late"] for line in lines if "late" in line] == [number] * 50
        assert set(summary(path)["clocks"]) == {number % 4 + 1}
        assert tomllib.loads((path / "config.toml").read_text())["seed"] == number
        assert check.main(path) == 0


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_early_messages_wait_for_their_job_and_late_ones_are_dropped(
    mpi: Mpi, tmp_path: Path
) -> None:
    words = ["-m", "tests.support.programs.messages.generations"]
    env = {**QUIET, "PSDIST_RUN_DIR": str(tmp_path / "run")}
    done = run_mpi(2, words, timeout_s=60, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert [line for line in done.stdout.splitlines() if line.startswith("in ")] == [
        "in 0: [0]",
        "in 1: [1, None]",
        "in 2: [2, None]",
        "in 3: []",
    ], done.text


@pytest.mark.parametrize(
    "start",
    [pytest.param(each, marks=pytest.mark.slow) for each in ("psdist run -n", "mpirun python")],
)
def test_a_script_may_end_long_after_its_job(start: Start, tmp_path: Path) -> None:
    done = run(start, "ends_after_close", tmp_path, ranks=3)
    assert done.returncode == 0, done.text
    assert [len(each["jobs"]) for each in seen(tmp_path)] == [1, 1]
    assert [path.name for path in runs(tmp_path)] == ["run"]
    assert check.main(tmp_path / "run") == 0


@pytest.mark.parametrize("start", ["python", pytest.param("psdist run", marks=pytest.mark.slow)])
def test_a_good_exit_inside_closes_the_job(start: Start, tmp_path: Path) -> None:
    done = run(start, "exits_with_0_inside", tmp_path)
    assert done.returncode == 0, done.text
    assert summary(tmp_path / "run")["exit"] == "completed"
    assert check.main(tmp_path / "run") == 0


# -- what can go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "mpi"),
    [
        ("psdist run -n", "openmpi"),
        pytest.param("mpirun python", "mpich", marks=pytest.mark.slow),
    ],
)
def test_who_leaves_while_others_begin_again_is_named(
    start: Start, mpi: Mpi, tmp_path: Path
) -> None:
    done = run(start, "leaves_while_others_begin_again", tmp_path, mpi=mpi)
    # MPICH's mpiexec itself often says 9 (docs/dev/decisions.md).
    assert done.returncode == 2 or (mpi == "mpich" and done.returncode == 9), done.text
    (line,) = told(done)
    assert re.fullmatch(
        r"psdist: worker [01] \(rank \d on .*\): error at jobs_script.py line \d+: psdist.init was "
        r"called for job 2 by workers? [01](, 1)?; absent: worker 2, whose script has finished; "
        r"psdist.init must be called by every worker",
        line,
    ), done.text
    assert summary(tmp_path / "run")["exit"] == "completed"
    assert [path.name for path in runs(tmp_path)] == ["run"]


def test_a_job_that_cannot_begin_can_be_done_without(tmp_path: Path) -> None:
    done = run("psdist run", "catches_it_and_leaves", tmp_path)
    assert done.returncode == 0, done.text
    first, second, last = seen(tmp_path)
    assert last["told"] == ""
    for each in (first, second):
        assert "absent: worker 2, whose script has finished" in each["told"]


def test_the_next_job_wants_the_same_settings_everywhere(tmp_path: Path) -> None:
    done = run("psdist run", "begins_with_other_settings", tmp_path, ranks=3)
    assert done.returncode == 2, done.text
    (line,) = told(done)
    assert line.endswith(
        "psdist.init was given mode='async' by worker 0, mode='ssp' by worker 1; every worker must "
        "pass the same settings"
    )
    assert [path.name for path in runs(tmp_path)] == ["run"]


@pytest.mark.parametrize(
    ("start", "way"),
    [
        ("python", "fails_inside"),
        ("python", "fails_inside_and_goes_on"),
        ("psdist run -n", "fails_inside"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("mpirun python", "fails_inside_and_goes_on"),
                ("psdist run", "fails_inside"),
                ("psdist run", "fails_inside_and_goes_on"),
                ("psdist run -n", "fails_inside_and_goes_on"),
                ("mpirun python", "fails_inside"),
            )
        ),
    ],
)
def test_an_error_inside_ends_the_job_as_a_failed_script_does(
    start: Start, way: str, tmp_path: Path
) -> None:
    done = run(start, way, tmp_path, ranks=3)
    is_alone_again = start == "python" and way == "fails_inside_and_goes_on"
    assert done.returncode == (0 if is_alone_again else 1), done.text
    assert done.stderr.count("RuntimeError: lost its data") == (not is_alone_again), done.text
    assert summary(tmp_path / "run")["exit"] == "RuntimeError: lost its data"


def test_whoever_has_failed_begins_no_other_job(tmp_path: Path) -> None:
    done = run("psdist run", "fails_inside_and_begins_again", tmp_path, ranks=3)
    assert done.returncode == 2, done.text
    (line,) = told(done)
    assert line.endswith(
        "psdist.init() was called after a job had failed on this worker, for which others may wait:"
        " RuntimeError"
    )


def test_alone_a_job_may_follow_one_that_has_failed(tmp_path: Path) -> None:
    done = run("python", "fails_inside_and_begins_again", tmp_path)
    assert done.returncode == 0, done.text
    assert [summary(path)["exit"] for path in runs(tmp_path)] == [
        "RuntimeError: lost its data",
        "completed",
    ]


@pytest.mark.parametrize(
    "start",
    [
        "python",
        pytest.param("psdist run -n", marks=pytest.mark.slow),
        pytest.param("mpirun python", marks=pytest.mark.slow),
    ],
)
def test_an_error_between_jobs_ends_all_ranks(start: Start, tmp_path: Path) -> None:
    done = run(start, "fails_between", tmp_path)
    assert done.returncode == 1, done.text
    assert done.stderr.count("RuntimeError: lost its notes") == 1, done.text
    # The job before is what it was.
    assert summary(tmp_path / "run")["exit"] == "completed"
    assert check.main(tmp_path / "run") == 0


@pytest.mark.parametrize("start", ["python", pytest.param("psdist run", marks=pytest.mark.slow)])
def test_a_job_without_a_step_is_not_closed(start: Start, tmp_path: Path) -> None:
    done = run(start, "never_steps", tmp_path, ranks=3)
    assert done.returncode == 2, done.text
    (line,) = told(done)
    assert re.search(r"job.close: worker [01] computed gradients and never called", line), line


@pytest.mark.parametrize("start", ["python", pytest.param("psdist run", marks=pytest.mark.slow)])
def test_a_run_that_is_there_already_is_not_written_over(start: Start, tmp_path: Path) -> None:
    taken = tmp_path / "run-2"
    taken.mkdir()
    (taken / "ranks.json").write_text("[]")
    done = run(start, "second_directory_is_taken", tmp_path, ranks=3)
    assert done.returncode == 2, done.text
    (line,) = told(done)
    assert f"run_dir = {taken}: it holds a run already; choose another directory" in line
    assert [path.name for path in taken.iterdir()] == ["ranks.json"]


def test_two_tests_of_one_pytest_process_have_a_job_each(tmp_path: Path) -> None:
    tests = tmp_path / "test_training.py"
    tests.write_text(
        "import psdist, pytest, torch\n"
        "def train(job):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "def test_one():\n"
        "    with psdist.init(mode='ssp') as job:\n"
        "        train(job)\n"
        "def test_two():\n"
        "    with psdist.init() as job:\n"
        "        train(job)\n"
        "        assert job.clock == 2\n"
        "def test_three():\n"
        "    job = psdist.init()\n"
        "    train(job)\n"
        "    job.close()\n"
    )
    env = {**QUIET, "PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_RECORD": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = run_program(words, timeout_s=TIMEOUT_S, env=env, cwd=tmp_path)
    # Its own status, and its own words about the test that fails.
    assert done.returncode == 1, done.text
    assert "1 failed, 2 passed" in done.stdout, done.text
    assert done.stderr.count("Traceback") == 0, done.text
    exits = [summary(path)["exit"] for path in runs(tmp_path)]
    assert (exits[0], exits[2]) == ("completed", "completed")
    assert ".clock" in exits[1]  # the last line of what pytest says of the assert
    assert [check.main(path) for path in runs(tmp_path)] == [0, 3, 0]
