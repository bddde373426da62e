"""Workers are killed. Nobody uses the rest of their samples; summary.json has the number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, Completed, run_mpi
from tests.support.seen import Seen

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "writes_samples.py"
TIMEOUT_S = 240
SLOW = pytest.mark.slow
SAMPLES, BATCH = 120, 4


def run_writing_samples(
    dies: str,
    path: Path,
    *,
    workers: int = 3,
    group: str = "rank",
    max_deaths: int = 3,
    settings: tuple[str, ...] = (),
) -> Completed:
    (path / "seen").mkdir(exist_ok=True)
    words = ["-m", "psdist", "run", "--record", "--servers", "1"]
    plan = "--placement={}".format(plan_of_groups(path / "plan.json", [2, 2]))
    words.append(f"--group={group}" if group != "plan" else plan)
    settings = (f"max_deaths={max_deaths}", "chunk_bytes=4096", "progress=off", *settings)
    words += [f"--set={each}" for each in settings]
    told = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "SEEN": str(path / "seen")}
    return run_mpi(
        workers + 1, [*words, str(PROGRAM)], timeout_s=TIMEOUT_S,
        env={**told, "PYTHONPATH": str(REPOSITORY)},
        launcher_args=("--with-ft", "ulfm"),
    )  # fmt: skip


def prove(done: Completed, path: Path, *, dead: set[int]) -> tuple[Seen, dict[int, list[int]]]:
    """Prove that the job completed. Return the samples that were used, and by epoch the others."""
    assert done.returncode == 0, done.text
    summary = json.loads((path / "run" / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert {each["worker"] for each in summary["deaths"]} == dead
    report = check_run(path / "run", read_histories(path / "run"))
    assert report.proved, (report.violations, report.notes)
    seen = Seen.read(path / "seen")
    out = dead.union(*(each["left"] for each in summary["deaths"]))
    return seen, seen.prove(samples=SAMPLES, dead=out)


@pytest.mark.parametrize(
    ("dies", "workers", "group", "dropped", "used_by_nobody"),
    [
        pytest.param("1 12 step", 3, "rank", [1], [0, 32, 40], id="a worker"),
        pytest.param("0 4 forward", 3, "rank", [0], [24, 40, 40], id="the chief", marks=SLOW),
        pytest.param("3 5 forward", 4, "plan", [2, 3], [], id="a group of two", marks=SLOW),
    ],
)
def test_samples_of_a_failed_worker_are_dropped_and_counted(
    dies: str,
    workers: int,
    group: str,
    dropped: list[int],
    used_by_nobody: list[int],
    tmp_path: Path,
) -> None:
    done = run_writing_samples(dies, tmp_path, workers=workers, group=group)
    seen, missing = prove(done, tmp_path, dead={int(dies.split()[0])})
    if used_by_nobody:
        assert [len(missing[epoch]) for epoch in range(3)] == used_by_nobody
    assert len({length for lengths in seen.lengths.values() for length in lengths}) == 1
    # The others may use a batch, or two, before they learn of the failure.
    lost = sum(map(len, missing.values())) - sum(map(len, seen.in_flight.values()))
    counted = json.loads((tmp_path / "run" / "summary.json").read_text())["dropped_samples"]
    assert lost - 2 * BATCH * len(dropped) <= counted <= lost
