"""Workers are killed by SIGKILL and spares take their places: status 0, `psdist check` proves it,
no sample is seen twice in an epoch, and unseen samples belonged to the failed worker."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.mpirun import REPOSITORY, Completed, run_mpi, run_program

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "joins.py"
TIMEOUT_S = 240
EPOCHS, BATCHES, BATCH_SIZE, WORKERS = 4, 15, 4, 3
LR, MOMENTUM = 1e-2, 0.5
SLOW = pytest.mark.slow


def run(
    dies: str,
    path: Path,
    *,
    mode: str = "sync",
    servers: int = 1,
    spares: int = 1,
    joins: int = 1,
    has_parent: bool = False,
    max_norm: float | None = None,
    **settings: Any,
) -> Completed:
    """``has_parent``: psdist starts the launcher, and ends it if that outlives a failed
    job; ``max_norm``: the script prepares its model with this norm to clip to."""
    words = ["-m", "psdist", "run", "--record", "--mode", mode, "--group", "rank"]
    words += ["--servers", str(servers), "--spares", str(spares)]
    settings = {"max_deaths": 4, "chunk_bytes": 4096, "progress": "off", **settings}
    words += [f"--set={key}={value}" for key, value in settings.items()]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "MAY_JOIN": str(joins)}
    env["PYTHONPATH"] = str(REPOSITORY)
    if max_norm is not None:
        env["MAX_NORM"] = str(max_norm)
    num_ranks = servers + WORKERS + spares
    if has_parent:
        argv = [sys.executable, *words, "-n", str(num_ranks), str(PROGRAM)]
        return run_program(argv, timeout_s=TIMEOUT_S, env=env)
    return run_mpi(
        num_ranks,
        [*words, str(PROGRAM)],
        timeout_s=TIMEOUT_S,
        env=env,
        launcher_args=("--with-ft", "ulfm"),
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = (path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def prove(done: Completed, path: Path, *, places: list[int]) -> list[dict[str, Any]]:
    """``places``: of failed workers, in the order in which spares take them. Return who has
    joined."""
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
    """Each place has the same samples in each iteration, for any worker there, and once."""
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
        pytest.param("sync", "1 loading 10", id="sync-loading", marks=SLOW),
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
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssp", "pipeline": 1},
        {"overlap": "full"},
        {"codec": "int8/sign"},
        {"mode": "async", "codec": "topk:0.1/fp16"},
    ],
    ids=str,
)
def test_a_spare_joins_with_what_scripts_and_codecs_keep(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    prove(run("1 loading 10", tmp_path, **settings), tmp_path, places=[1])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_spare_joins_where_gradients_are_clipped(mode: str, tmp_path: Path) -> None:
    """In sync two servers clip to the joint norm, in ssp each group clips its own gradient."""
    done = run("1 loading 10", tmp_path, mode=mode, servers=2, max_norm=1e-3)
    prove(done, tmp_path, places=[1])
    clipped = [float(each) for each in re.findall(r"change (\S+)", done.stdout)]
    assert len(clipped) == WORKERS
    assert 0 < max(clipped) <= LR * 1e-3 * EPOCHS * BATCHES / (1 - MOMENTUM) * 1.01


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
    assert names == [f"worker-{each}.safetensors" for each in range(WORKERS)]  # of its place


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_a_job_that_starts_again_goes_on_with_all_places_and_keeps_its_spares(
    mode: str, tmp_path: Path
) -> None:
    """A server fails when a spare has the place of worker 1, and worker 2 in the next attempt."""
    settings = {"servers": 2, "checkpoint_every": 5, "resume": "true", "has_parent": True}
    ended = run("1 loading 8,0 kills-1 33", tmp_path, mode=mode, **settings)
    assert ended.returncode == 1, ended.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["place"] for each in summary["joined"]] == [1]
    for mark in ("killed-0", "joined-3"):
        (tmp_path / "run" / mark).unlink()
    done = run("2 loading 45", tmp_path, mode=mode, **settings)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["attempts"]) == ("completed", 2)
    assert int(summary["resumed_from"].removeprefix("step-")) >= 25
    assert [each["place"] for each in summary["joined"]] == [2]
    assert "workers, the job of" not in done.text  # nothing is moved
    assert [(tmp_path / "run" / "joins").exists(), *(tmp_path / "run" / "joins").iterdir()] == [
        True
    ]
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)


@pytest.mark.slow
def test_places_are_taken_one_after_the_other_and_again(tmp_path: Path) -> None:
    """The second spare fails when it has just joined, the third has its place."""
    dies = "0 loading 5,1 loading 25,1 joining 0"
    prove(run(dies, tmp_path, spares=3, joins=3), tmp_path, places=[0, 1, 1])


@pytest.mark.slow
def test_a_spare_that_cannot_go_on_when_it_has_joined_dies_and_the_next_takes_the_place(
    tmp_path: Path,
) -> None:
    done = run("1 loading 5,1 torn 0", tmp_path, spares=2, joins=2)
    first, second = prove(done, tmp_path, places=[1, 1])
    assert (first["worker"], second["worker"]) == (3, 4)
    said = re.findall(
        r"^psdist: worker 3, a spare \(.*\): error.*joins/state-.*", done.stderr, re.M
    )
    assert len(said) == 1, done.text
    assert "this spare ends, and the job continues without it, as after the failure" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["worker"] for each in summary["deaths"]] == [1, 3]


@pytest.mark.slow
def test_without_a_spare_left_the_others_train_on(tmp_path: Path) -> None:
    done = run("0 loading 5,1 loading 30", tmp_path)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["place"] for each in summary["joined"]] == [0]
    assert summary["clocks"] == [5, 30, 60, 60]


@pytest.mark.parametrize(
    ("mode", "dies", "kept_by"),
    [
        pytest.param("sync", "1 loading 10,0 kills-1 25", "spare 1", id="sync-worker-first"),
        pytest.param(
            "sync", "0 kills-1 5,1 loading 30", "spare 0", id="sync-server-first", marks=SLOW
        ),
        pytest.param(
            "sync", "0 kills-0 5,1 loading 30", "spare 0", id="sync-registrar-first", marks=SLOW
        ),
        pytest.param("ssp", "0 loading 10,2 kills-0 30", "spare 1", id="ssp-chief", marks=SLOW),
        pytest.param("async", "2 kills-1 10,0 pushing 11", None, id="async-at-once", marks=SLOW),
    ],
)
def test_spares_take_the_places_of_workers_and_of_servers(
    mode: str, dies: str, kept_by: str | None, tmp_path: Path
) -> None:
    """One of two becomes a worker, the other has the replicas of the failed server's shards."""
    done = run(dies, tmp_path, mode=mode, servers=2, spares=2, replication="buddy")
    (place,) = [int(each.split()[0]) for each in dies.split(",") if "kills" not in each]
    (joined,) = prove(done, tmp_path, places=[place])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["spares"] == 2
    assert len(summary["deaths"]) == 2
    keepers = [each["kept_by"] for each in summary["alone"]]
    spare = joined["worker"] - WORKERS
    assert keepers == [f"spare {1 - spare}"] * 2
    assert kept_by in (None, keepers[0])
    assert f"worker {joined['worker']}, a spare (rank " in joined["who"]


@pytest.mark.slow
def test_a_spare_that_serves_and_one_that_works_die(tmp_path: Path) -> None:
    """The first of four spares becomes a worker and fails, the second a server's replica."""
    dies = "1 loading 8,1 joining 0,0 kills-1 30"
    done = run(dies, tmp_path, servers=3, spares=4, joins=2, replication="buddy")
    prove(done, tmp_path, places=[1, 1])


@pytest.mark.slow
def test_a_spare_that_is_not_needed_ends_with_the_others(tmp_path: Path) -> None:
    done = run("", tmp_path, joins=0)
    prove(done, tmp_path, places=[])
    assert done.stdout.count("begins") == WORKERS
