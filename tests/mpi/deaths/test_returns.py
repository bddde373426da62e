"""Workers are killed, and what they had not seen of the epoch is seen by those who live: every
sample once, but what the dead were at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, Completed, run_mpi
from tests.support.seen import Seen

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "returns.py"
TIMEOUT_S = 240
SLOW = pytest.mark.slow
SAMPLES = 120


def run_returning(
    dies: str,
    path: Path,
    *,
    workers: int = 3,
    mode: str = "sync",
    group: str = "rank",
    env: dict[str, str] | None = None,
    max_deaths: int = 3,
    settings: tuple[str, ...] = (),
) -> Completed:
    (path / "seen").mkdir(exist_ok=True)
    words = ["-m", "psdist", "run", "--record", "--mode", mode, "--servers", "1"]
    plan = "--placement={}".format(plan_of_groups(path / "plan.json", [2, 2]))
    words.append(f"--group={group}" if group != "plan" else plan)
    settings = (f"max_deaths={max_deaths}", "chunk_bytes=4096", "progress=off", *settings)
    words += [f"--set={each}" for each in settings]
    told = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "SEEN": str(path / "seen")}
    return run_mpi(
        workers + 1, [*words, str(PROGRAM)], timeout_s=TIMEOUT_S,
        env={**told, "PYTHONPATH": str(REPOSITORY), **(env or {})},
        launcher_args=("--with-ft", "ulfm"),
    )  # fmt: skip


def prove(done: Completed, path: Path, *, dead: set[int]) -> tuple[Seen, dict[int, list[int]]]:
    """The job has completed and is proved; what was seen, and by epoch what nobody has seen."""
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
    ("dies", "workers", "group", "env", "settings"),
    [
        pytest.param("1 12 step", 3, "rank", {}, (), id="a worker"),
        pytest.param("0 4 forward", 3, "rank", {}, (), id="the chief", marks=SLOW),
        pytest.param("2 9 step", 3, "rank", {}, (), id="in the last iteration", marks=SLOW),
        pytest.param("2 0 end", 3, "rank", {}, (), id="between epochs", marks=SLOW),
        pytest.param("1 12 step,0 14 forward", 4, "rank", {}, (), id="two", marks=SLOW),
        pytest.param("3 5 forward", 4, "plan", {}, (), id="a group of two", marks=SLOW),
        pytest.param(
            "1 12 step", 3, "rank", {"LOADER_PROCESSES": "2"}, (), id="loader processes", marks=SLOW
        ),
        pytest.param(
            "1 12 step", 3, "rank", {}, ("global_batch=12",), id="a global batch", marks=SLOW
        ),
    ],
)
def test_every_sample_is_seen_once_but_what_the_dead_were_at(
    dies: str,
    workers: int,
    group: str,
    env: dict[str, str],
    settings: tuple[str, ...],
    tmp_path: Path,
) -> None:
    done = run_returning(dies, tmp_path, workers=workers, group=group, env=env, settings=settings)
    dead = {int(each.split()[0]) for each in dies.split(",")}
    seen, missing = prove(done, tmp_path, dead=dead)
    in_flight = {sample for batch in seen.in_flight.values() for sample in batch}
    left = range(workers - len(dead) - (group == "plan"))
    for epoch, samples in missing.items():
        others = set(samples) - in_flight
        assert len(others) < len(left), f"epoch {epoch}: {samples}"
    living = [each for each in seen.saw if each not in dead and seen.batches(each, 2)]
    assert len(living) == len(left)
    for epoch in range(3):
        assert len({seen.batches(worker, epoch) for worker in living}) == 1, epoch
    (length,) = seen.lengths[2]
    assert length == seen.batches(living[0], 2)
    told = re.findall("goes back to it|from the next one on all is dealt", done.stderr)
    assert len(told) in range(1, len(dead) + 1), done.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_in_every_mode_nobody_sees_a_sample_twice(mode: str, tmp_path: Path) -> None:
    settings = ("staleness=2",) if mode == "ssp" else ()
    done = run_returning("1 8 step", tmp_path, mode=mode, settings=settings)
    seen, missing = prove(done, tmp_path, dead={1})
    assert not missing[2]
    assert len({len(seen.saw[worker]) for worker in (0, 2)}) == 1


@pytest.mark.slow
def test_where_samples_are_to_be_dropped_nothing_goes_back(tmp_path: Path) -> None:
    done = run_returning("1 12 step", tmp_path, settings=("samples_of_dead=drop",))
    seen, missing = prove(done, tmp_path, dead={1})
    assert {epoch: len(samples) for epoch, samples in missing.items()} == {0: 0, 1: 32, 2: 40}
    assert {length for lengths in seen.lengths.values() for length in lengths} == {10}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_checkpoint_in_such_an_epoch_has_what_is_left(workers: int, tmp_path: Path) -> None:
    """Worker 2 dies in the second epoch of three, and the job is started again behind a checkpoint
    in that epoch."""
    settings = ("checkpoint_every=16", "checkpoint_keep=1", "on_usr1=requeue")
    first = run_returning("2 12 step,0 18 forward,1 18 forward", tmp_path, settings=settings)
    assert "which leaves no group" in first.stderr, first.text
    before = Seen.read(tmp_path / "seen")
    names = sorted(each.name for each in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000016"], first.text
    (tmp_path / "seen").rename(tmp_path / "before")
    done = run_returning("", tmp_path, workers=workers, settings=(*settings, "resume=true"))
    assert done.returncode == 0, done.text
    after = Seen.read(tmp_path / "seen")
    # Of the epoch what was seen before the checkpoint, and what was seen behind it.
    counted = [
        sample
        for worker, mine in before.saw.items()
        for number, (epoch, batch) in enumerate(mine)
        if epoch == 1 and number < 16 and (worker != 2 or number < 12)
        for sample in batch
    ]
    counted += [
        sample for mine in after.saw.values() for epoch, batch in mine if epoch == 1
        for sample in batch
    ]  # fmt: skip
    assert len(counted) == len(set(counted))
    missing = set(range(SAMPLES)) - set(counted)
    assert missing <= set(before.in_flight[2]), sorted(missing)
