"""Workers are killed by SIGKILL and spares take their places: status 0, `psdist check` proves it,
no sample is seen twice in an epoch, and what nobody has seen the dead one would have."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "joins.py"
TIMEOUT_S = 240
EPOCHS, BATCHES, BATCH_SIZE, WORKERS = 4, 15, 4, 3
SLOW = pytest.mark.slow


def run(
    dies: str, path: Path, *, mode: str = "sync", spares: int = 1, joins: int = 1, **settings: Any
) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--mode", mode, "--group", "rank"]
    words += ["--servers", "1", "--spares", str(spares)]
    settings = {"max_deaths": 4, "chunk_bytes": 4096, "progress": "off", **settings}
    words += [f"--set={key}={value}" for key, value in settings.items()]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "MAY_JOIN": str(joins)}
    return run_mpi(
        1 + WORKERS + spares,
        [*words, str(PROGRAM)],
        timeout_s=TIMEOUT_S,
        env={**env, "PYTHONPATH": str(REPOSITORY)},
        launcher_args=("--with-ft", "ulfm"),
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = (path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def prove(done: Completed, path: Path, *, places: list[int]) -> list[dict[str, Any]]:
    """``places``: of the dead, in the order in which spares take them. Who has joined."""
    assert done.returncode == 0, done.text
    summary = json.loads((path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["workers"], summary["groups"]) == ("completed", 3, 3)
    joined: list[dict[str, Any]] = summary["joined"]
    assert [each["place"] for each in joined] == places, done.text
    report = check_run(path / "run", read_histories(path / "run"))
    assert report.proved, (report.violations, report.notes)
    for each in joined:
        line = f"{each['who']} has taken the place of worker {each['place']}, from iteration "
        assert f"{line}{each['clock']} on" in done.stderr
    ends = re.findall(r"^worker (\d) number (\d) clock (\d+)$", done.stdout, re.MULTILINE)
    assert sorted(int(place) for place, _, _ in ends) == [0, 1, 2], done.text
    assert {int(clock) for _, _, clock in ends} == {EPOCHS * BATCHES}, done.text
    prove_data(path, joined)
    return joined


def prove_data(path: Path, joined: list[dict[str, Any]]) -> None:
    """Of every place each iteration's samples are the same whoever makes it, and once."""
    place_of = {each["worker"]: each["place"] for each in joined}
    seen: defaultdict[int, Counter[str]] = defaultdict(Counter)
    made: defaultdict[int, list[int]] = defaultdict(list)
    for line in lines_of(path):
        iteration = line["clock"] - 1
        made[place_of.get(line["worker"], line["worker"])].append(iteration)
        seen[iteration // BATCHES].update(line["samples"].split())
    for epoch, samples in seen.items():
        assert max(samples.values()) == 1, (epoch, samples.most_common(3))
    for place, iterations in made.items():
        assert len(set(iterations)) == len(iterations), (place, iterations)
        if place not in place_of.values():
            assert iterations == list(range(EPOCHS * BATCHES))
    num_samples = sum(map(len, made.values())) * BATCH_SIZE
    assert sum(map(len, seen.values())) == num_samples


@pytest.mark.parametrize(
    ("mode", "dies"),
    [
        pytest.param("sync", "1 loading 10", id="sync-loading"),
        pytest.param("sync", "0 pushing 12", id="sync-chief-pushing", marks=SLOW),
        pytest.param("sync", "1 parked 8", id="sync-parked", marks=SLOW),
        pytest.param(
            "sync", "0 parked 14", id="sync-chief-parked-in-the-last-of-an-epoch", marks=SLOW
        ),
        pytest.param("sync", "2 collective 0", id="sync-in-a-collective", marks=SLOW),
        pytest.param("ssp", "0 loading 10", id="ssp-chief-loading", marks=SLOW),
        pytest.param("ssp", "2 pushing 9", id="ssp-pushing", marks=SLOW),
        pytest.param("async", "1 parked 8", id="async-parked", marks=SLOW),
        pytest.param("async", "0 pushing 16", id="async-chief-pushing", marks=SLOW),
    ],
)
def test_a_spare_takes_the_place_of_a_dead_worker(mode: str, dies: str, tmp_path: Path) -> None:
    done = run(dies, tmp_path, mode=mode)
    place = int(dies.split()[0])
    (joined,) = prove(done, tmp_path, places=[place])
    assert joined["worker"] == WORKERS


@pytest.mark.slow
def test_psdist_decides_by_a_spare_that_has_joined_too(tmp_path: Path) -> None:
    (joined,) = prove(run("1 loading 10", tmp_path, mode="auto"), tmp_path, places=[1])
    lines = map(json.loads, (tmp_path / "run" / "decisions.jsonl").read_text().splitlines())
    members = [each for each in lines if not {"gone", "came"}.isdisjoint(each)]
    came = {"group": WORKERS, "first_round": joined["clock"]}
    assert members == [{"gone": {"group": 1}}, {"came": came}]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2])
def test_who_dies_during_a_checkpoint_is_followed_and_the_next_one_has_the_spare(
    place: int, tmp_path: Path
) -> None:
    done = run(f"{place} checkpoint 19", tmp_path, checkpoint_every=10)
    prove(done, tmp_path, places=[place])
    newest = tmp_path / "run" / "checkpoints" / "step-00000060"
    names = sorted(each.name for each in newest.glob("worker-*"))
    living = sorted({0, 1, 2, 3} - {place})
    assert names == [f"worker-{worker}.safetensors" for worker in living]


@pytest.mark.slow
def test_places_are_taken_one_after_the_other_and_again(tmp_path: Path) -> None:
    """The second spare dies when it has just joined, the third has its place."""
    dies = "0 loading 5,1 loading 25,1 joining 0"
    prove(run(dies, tmp_path, spares=3, joins=3), tmp_path, places=[0, 1, 1])


@pytest.mark.slow
def test_without_a_spare_left_the_others_train_on(tmp_path: Path) -> None:
    done = run("0 loading 5,1 loading 30", tmp_path)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["place"] for each in summary["joined"]] == [0]
    assert summary["clocks"] == [5, 30, 60, 60]


def test_a_spare_that_is_not_needed_ends_with_the_others(tmp_path: Path) -> None:
    done = run("", tmp_path, joins=0)
    prove(done, tmp_path, places=[])
    assert done.stdout.count("begins") == WORKERS
