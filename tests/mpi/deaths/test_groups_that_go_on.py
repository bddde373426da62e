"""Workers are killed by SIGKILL, and their groups continue without them (``on_group_death =
reform``): status 0, `psdist check` proves it, every surviving worker has made every iteration, and
no process is left."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.mpi.deaths.test_dropped_samples import prove, run_writing_samples
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "goes_on.py"
ULFM = ("--with-ft", "ulfm")
ITERATIONS = 20
SLOW = pytest.mark.slow


def run_dying(
    dies: str, path: Path, *, sizes: Sequence[int], servers: int = 1, **settings: object
) -> Completed:
    """``sizes``: workers of each group."""
    given = {
        "placement": plan_of_groups(path / "plan.json", sizes, servers=servers),
        "on_group_death": "reform",
        "max_deaths": 4,
        "chunk_bytes": 4096,
        "progress": "off",
        **settings,
    }
    words = ["-m", "psdist", "run", "--record", "--servers", str(servers)]
    words += [f"--set={key}={value}" for key, value in given.items()]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "DIES": dies, "ITERATIONS": str(ITERATIONS)}
    words.append(str(PROGRAM))
    num_ranks = servers + sum(sizes)
    return run_mpi(num_ranks, words, timeout_s=240, mpi="openmpi", env=env, launcher_args=ULFM)


def summary_of(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((path / "run" / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    ("mode", "dies", "sizes", "tier"),
    [
        ("sync", "1 pushing 8, 0 reducing 13", [3, 1], "auto"),
        ("sync", "0 gathering 6", [2], "torch"),
        *(
            pytest.param(*each, tier, marks=SLOW)
            for tier in ("auto", "torch")
            for each in (
                ("sync", "0 gathering 6, 2 agreeing 6", [3, 3]),
                ("sync", "5 forward 3, 3 parked 12", [3, 3]),
                ("sync", "0 collective 9, 1 pushing 10, 4 reducing 10", [3, 3]),
                ("ssp", "0 parked 7, 1 pushing 14", [3, 3]),
                ("async", "2 reducing 5, 4 gathering 5, 3 collective 14", [3, 3]),
                ("sync", "1 pushing 6, 2 gathering 12", [3]),  # the only group
            )
        ),
    ],
)
def test_a_group_goes_on_without_its_dead(
    mode: str, dies: str, sizes: Sequence[int], tier: str, tmp_path: Path
) -> None:
    done = run_dying(dies, tmp_path, sizes=sizes, mode=mode, group_tier=tier)
    assert done.returncode == 0, done.text
    dead = sorted(int(each.split()[0]) for each in dies.split(","))
    assert len(re.findall("^killed at", done.stdout, re.MULTILINE)) == len(dead), done.text
    living = [worker for worker in range(sum(sizes)) if worker not in dead]
    found = re.findall(r"^worker (\d+) clock (\d+) has (\w+)$", done.stdout, re.MULTILINE)
    assert sorted(int(worker) for worker, _, _ in found) == living, done.text
    assert {int(clock) for _, clock, _ in found} == {ITERATIONS}
    checksums = {each for _, _, each in found}
    assert mode != "sync" or len(checksums) == 1, "in sync all end with the same parameters"
    groups = [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
    left = [[worker for worker in group if worker not in dead] for group in groups]
    met = re.findall(r"^worker (\d+) is (\d+) of (\d+)$", done.stdout, re.MULTILINE)
    assert sorted(tuple(map(int, each)) for each in met) == [
        (worker, place, len(group)) for group in left for place, worker in enumerate(group)
    ]
    for worker in dead:
        assert re.search(rf"worker {worker} \(.*\) has failed; group \d+ continues with", done.text)
    summary = summary_of(tmp_path)
    assert summary["exit"] == "completed"
    assert sorted(each["worker"] for each in summary["deaths"]) == dead
    assert summary["clocks"] == [ITERATIONS] * len(summary["clocks"])
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)


@SLOW
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "0: sync; 5: ssp:1; 12: sync"},
        {"mode": "auto"},
        {"mode": "ssp", "staleness": 1, "staleness_to": 4},
        {"push_codec": "int8"},
    ],
    ids=str,
)
def test_a_group_goes_on_with_modes_that_change_and_coded_pushes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    dies = "0 gathering 6, 1 pushing 10, 4 reducing 12"
    done = run_dying(dies, tmp_path, sizes=[3, 3], **settings)
    assert done.returncode == 0, done.text
    ended = re.findall(r"^worker (\d+) clock (\d+) has (\w+)$", done.stdout, re.MULTILINE)
    assert sorted(int(worker) for worker, _, _ in ended) == [2, 3, 5]
    assert {clock for _, clock, _ in ended} == {str(ITERATIONS)}
    if "schedule" in settings:
        assert [each["round"] for each in summary_of(tmp_path)["modes"]] == [0, 5, 12]
    elif "mode" in settings:
        lines = (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
        led_anew = [json.loads(line)["came"] for line in lines if "came" in json.loads(line)]
        assert [each["group"] for each in led_anew] == [0, 0]
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)


@SLOW
@pytest.mark.parametrize(
    ("dies", "dead_workers"),
    [
        ("1 pushing 6, 2 kills-1 6", [1]),
        ("0 parked 4, 2 kills-0 9, 3 gathering 14", [0, 3]),  # the coordinator
    ],
)
def test_servers_with_buddies_die_too(dies: str, dead_workers: list[int], tmp_path: Path) -> None:
    done = run_dying(dies, tmp_path, sizes=[3, 2], servers=2, replication="buddy")
    assert done.returncode == 0, done.text
    ended = re.findall(r"^worker (\d+) clock (\d+) has (\w+)$", done.stdout, re.MULTILINE)
    living = [each for each in range(5) if each not in dead_workers]
    assert sorted(int(worker) for worker, _, _ in ended) == living
    assert {clock for _, clock, _ in ended} == {str(ITERATIONS)}
    assert len({checksum for _, _, checksum in ended}) == 1
    deaths = summary_of(tmp_path)["deaths"]
    assert sorted(each["worker"] for each in deaths if "worker" in each) == dead_workers
    assert sum("server" in each for each in deaths) == 1
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)


REFORMS = ("on_group_death=reform",)


@SLOW
@pytest.mark.parametrize("dies", ["3 5 forward", "0 12 forward", "1 12 step,0 16 forward"])
def test_the_samples_of_failed_workers_alone_are_dropped(dies: str, tmp_path: Path) -> None:
    """There are two groups of two workers. The other workers of a group continue."""
    dead = {int(each.split()[0]) for each in dies.split(",")}
    done = run_writing_samples(dies, tmp_path, workers=4, group="plan", settings=REFORMS)
    seen, missing = prove(done, tmp_path, dead=dead)
    used = [sum(seen.batches(worker, epoch) for epoch in range(3)) for worker in seen.saw]
    assert sorted(used)[len(dead) :] == [max(used)] * (4 - len(dead))
    lost = sum(map(len, missing.values())) - sum(map(len, seen.in_flight.values()))
    counted = json.loads((tmp_path / "run" / "summary.json").read_text())["dropped_samples"]
    assert lost - 3 * 4 * len(dead) <= counted <= lost


@SLOW
def test_a_job_goes_on_from_a_checkpoint_that_was_made_behind_it(tmp_path: Path) -> None:
    """Behind the first of three deaths, and then with all of its workers again."""
    settings = ("checkpoint_every=16", "checkpoint_keep=1", *REFORMS)
    dies = "1 12 forward,2 18 forward,3 18 forward"
    first = run_writing_samples(
        dies, tmp_path, workers=4, group="plan", max_deaths=2, settings=settings
    )
    assert "which is death 3, and failures.max_deaths = 2" in first.stderr, first.text
    names = sorted(each.name for each in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000016"], first.text
    settings = (*settings, "resume=true")
    done = run_writing_samples("", tmp_path, workers=4, group="plan", settings=settings)
    assert done.returncode == 0, done.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "completed"
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)


@SLOW
def test_groups_that_reduce_elsewhere_are_refused(tmp_path: Path) -> None:
    done = run_dying("", tmp_path, sizes=[2], group_tier="mpi")
    assert done.returncode != 0
    assert (
        "failures.on_group_death = reform with hosts.group_tier = mpi: a call with a failed member"
    ) in done.text
