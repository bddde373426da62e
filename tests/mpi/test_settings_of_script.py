"""psdist.init(mode=..., ...): servers, workers, the run's files and the check go by it.

tests/support/programs/settings_script.py is the script; every worker writes down what it saw.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from psdist.commands import check
from psdist.config.sources import resolve
from tests.support.mpirun import REPOSITORY, Completed, Mpi, run_mpi, run_program

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "settings_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}
SSP = '{"mode": "ssp", "staleness": 2, "seed": 5, "on_nonfinite": "skip", "checksum_every": 1}'


def run_script(
    ranks: int, folder: Path, *passed: str, options: tuple[str, ...] = (), mpi: Mpi = "openmpi"
) -> Completed:
    """Under `psdist run`; on 1 rank without a launcher."""
    words = ["-m", "psdist", "run", "--record", "--group", "rank", *options]
    words += ["--run-dir", str(folder / "run"), SCRIPT, str(folder / "seen"), *passed]
    if ranks == 1:
        return run_program([sys.executable, *words], timeout_s=TIMEOUT_S, env=QUIET)
    return run_mpi(ranks, words, timeout_s=TIMEOUT_S, mpi=mpi, env=QUIET)


def run_plain(ranks: int, folder: Path, *passed: str, **variables: str) -> Completed:
    """As `python settings_script.py`, under mpirun or alone."""
    env = {**QUIET, "PSDIST_RUN_DIR": str(folder / "run"), "PSDIST_RECORD": "1"}
    env |= {"PSDIST_GROUP": "rank", **variables}
    words = [SCRIPT, str(folder / "seen"), *passed]
    if ranks == 1:
        return run_program([sys.executable, *words], timeout_s=TIMEOUT_S, env=env)
    return run_mpi(ranks, words, timeout_s=TIMEOUT_S, env=env)


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*"))]


def files(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """config.toml, summary.json, history/run.json."""
    run = folder / "run"
    return (
        resolve(command_line={}, environment={}, file=run / "config.toml").config.model_dump(),
        json.loads((run / "summary.json").read_text()),
        json.loads((run / "history" / "run.json").read_text()),
    )


def prove(folder: Path) -> None:
    assert check.main(folder / "run") == 0


def assert_ssp(done: Completed, folder: Path, *, workers: int) -> None:
    """The settings of SSP have reached all ranks."""
    assert done.returncode == 0, done.text
    first, *others = seen(folder)
    assert (first["mode"], first["staleness"], first["again"]) == ("ssp", 2, True)
    assert others == [first] * (workers - 1)
    config, summary, run = files(folder)
    assert {key: config[key] for key in json.loads(SSP)} == json.loads(SSP)
    assert (summary["mode"], summary["staleness"], summary["workers"]) == ("ssp", 2, workers)
    assert (run["mode"], run["staleness"], run["checksum_every"]) == ("ssp", 2, 1)
    assert [line for line in done.stdout.splitlines() if line.endswith("(psdist.init)")] == [
        "psdist: mode = ssp  (psdist.init)",
        "psdist: staleness = 2  (psdist.init)",
        "psdist: seed = 5  (psdist.init)",
        "psdist: training.on_nonfinite = skip  (psdist.init)",
        "psdist: transfer.checksum_every = 1  (psdist.init)",
    ]
    prove(folder)


@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [(1, "openmpi"), (4, "openmpi"), pytest.param(5, "mpich", marks=pytest.mark.slow)],
)
def test_what_the_script_passes_reaches_every_rank_and_file(
    ranks: int, mpi: Mpi, tmp_path: Path
) -> None:
    servers = ("--servers", "2") if ranks == 5 else ()
    done = run_script(ranks, tmp_path, SSP, options=servers, mpi=mpi)
    assert_ssp(done, tmp_path, workers={1: 1, 4: 3, 5: 3}[ranks])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_script_that_python_runs_passes_settings_as_well(ranks: int, tmp_path: Path) -> None:
    assert_ssp(run_plain(ranks, tmp_path, SSP), tmp_path, workers=max(1, ranks - 1))


def test_every_other_source_is_stronger(tmp_path: Path) -> None:
    options = ("--mode", "sync", "--set", "on_nonfinite=skip", "--seed", "0")
    done = run_script(3, tmp_path, SSP, options=options)
    assert done.returncode == 0, done.text
    (told,) = [line for line in done.text.splitlines() if "flat names of settings" in line]
    assert "PSDIST_REPORT_PROGRESS for PSDIST_PROGRESS" in told
    assert "training.on_nonfinite for on_nonfinite" in told
    config, summary, run = files(tmp_path)
    assert (config["mode"], config["seed"], config["staleness"]) == ("sync", 0, 2)
    assert (summary["mode"], summary["staleness"]) == ("sync", None)
    assert (run["mode"], run["checksum_every"]) == ("sync", 1)
    assert {each["mode"] for each in seen(tmp_path)} == {"sync"}
    prove(tmp_path)


@pytest.mark.slow  # most other tests start such scripts
def test_a_script_that_passes_nothing_runs_as_ever(tmp_path: Path) -> None:
    done = run_script(3, tmp_path, "{}", options=("--set", "on_nonfinite=skip"))
    assert done.returncode == 0, done.text
    assert "(psdist.init)" not in done.stdout
    config, summary, _ = files(tmp_path)
    assert (config["mode"], summary["mode"]) == ("sync", "sync")
    prove(tmp_path)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_that_pass_other_settings_are_one_line_with_both(
    is_plain: bool, tmp_path: Path
) -> None:
    passed = ('{"mode": "ssp"}', '{"mode": "ssp"}', '{"mode": "async"}')
    run = run_plain if is_plain else run_script
    done = run(4, tmp_path, *(passed if not is_plain else (passed[0], *passed)))
    assert done.returncode == 2, done.text
    assert done.stderr.count("psdist.init was given mode='ssp' by worker") == 1, done.text
    assert "mode='async' by worker 2; every worker must pass the same settings" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "every worker must pass the same settings" in summary["exit"]
    # Nothing was decided by either.
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["mode"] == "sync"


@pytest.mark.slow
def test_settings_that_only_one_worker_passes_are_a_difference(tmp_path: Path) -> None:
    done = run_script(3, tmp_path, "{}", '{"staleness": 4}')
    assert done.returncode == 2, done.text
    assert "no staleness by worker 0, staleness=4 by worker 1" in done.stderr, done.text


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        pytest.param(
            '{"servers": 2}',
            "psdist.init(servers=2): servers is decided before scripts run, so it is set on the "
            "command line (--set servers=2), by PSDIST_SERVERS=2 or in the TOML file; psdist.init "
            "takes mode, staleness, consistency.pipeline, training.on_nonfinite, seed, "
            "transfer.checksum_every",
            marks=pytest.mark.slow,  # tests/unit/config has all the words
        ),
        pytest.param(
            '{"mode": "ssp", "staleness": -1}',
            "staleness = -1 (psdist.init): must be a whole number from 0 to 2147483647",
            marks=pytest.mark.slow,
        ),
        ('{"stalenes": 1}', "stalenes = 1 (psdist.init) is no setting; did you mean staleness?"),
    ],
)
@pytest.mark.parametrize(
    "start", ["psdist run", pytest.param("mpirun python", marks=pytest.mark.slow), "python"]
)
def test_a_setting_that_is_not_taken_is_one_line(
    start: str, passed: str, told: str, tmp_path: Path
) -> None:
    if start == "psdist run":
        done = run_script(3, tmp_path, passed)
        where = "error at settings_script.py line "
    else:
        done = run_plain(1 if start == "python" else 3, tmp_path, passed)
        where = "psdist: error: "
    assert done.returncode == 2, done.text
    lines = [line for line in done.stderr.splitlines() if line.endswith(told)]
    assert len(lines) == 1, done.text
    assert where in lines[0], done.text
    assert "Traceback" not in done.stderr, done.text


def test_a_second_call_gives_the_same_job_or_says_what_differs(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    script.write_text(
        "import psdist\n"
        "job = psdist.init(mode='ssp')\n"
        "assert psdist.init() is psdist.init(mode='ssp') is job\n"
        "psdist.init(mode='ssp', staleness=4)\n"
    )
    env = {**QUIET, "PSDIST_RUN_DIR": str(tmp_path / "run")}
    done = run_program([sys.executable, str(script)], timeout_s=TIMEOUT_S, env=env)
    assert done.returncode == 2, done.text
    assert (
        "error at twice.py line 4: psdist.init(staleness=4) was called during a job that was "
        "begun without staleness; pass settings in the first call"
    ) in done.stderr, done.text
