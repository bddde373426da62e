"""Kills at named moments: who is killed, once, and what is told of the cells that were played."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.deaths.kill_matrix import (
    MODES,
    Cell,
    Played,
    cells,
    job_script,
    load,
    store,
    table,
    went_on_s,
)
from tests.support.strikes import PHASES, VICTIMS, Strike, mark_of

GOOD = Played(
    phase="pushing",
    victim="chief",
    mode="sync",
    hosts=1,
    statuses=(0,),
    was_killed=True,
    is_complete=True,
    is_proved=True,
    went_on_s=0.24,
    seconds=5.0,
    said="",
)
AGAIN = replace(GOOD, phase="registering", statuses=(1, 0), went_on_s=None)


def test_a_strike_kills_who_it_names_and_nobody_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as named,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other,
    ):
        roles = [(other, "server"), (other, "worker"), (named, "server")]
        ranks = [{"role": role, "pid": process.pid} for process, role in roles]
        (run_dir / "ranks.json").write_text(json.dumps(ranks))
        monkeypatch.setenv("PSDIST_RUN_DIR", str(run_dir))
        monkeypatch.setenv("STRIKE", "shutting down standby")
        strike = Strike.of_environment()
        assert strike == Strike("shutting down", "standby", run_dir)
        assert not strike.has_fallen
        strike.fall()
        assert named.wait(timeout=30) == -signal.SIGKILL
        told = json.loads(mark_of(run_dir).read_text())
        assert (told["phase"], told["victim"]) == ("shutting down", "standby")
        Strike("shutting down", "worker", run_dir).fall()  # would be `other`, if it fell
        assert strike.has_fallen
        assert Strike.of_environment() is None
        assert other.poll() is None
        other.kill()


def test_workers_come_to_a_moment_as_the_victim_and_servers_as_the_victim_or_a_witness() -> None:
    of_worker, of_server = (Strike("folding", each, Path()) for each in ("worker", "server"))
    assert of_worker.is_on("worker", 2)
    assert not of_worker.is_on("worker", 0)
    assert [of_worker.is_seen_by(server) for server in range(3)] == [True] * 3
    assert [of_server.is_seen_by(server) for server in range(3)] == [False, False, True]
    assert (of_worker.leading_worker, of_server.leading_worker) == (2, 2)
    assert Strike("parked", "chief", Path()).leading_worker == 0


def test_a_mode_is_not_asked_for_a_moment_that_it_does_not_have() -> None:
    every = cells(PHASES, VICTIMS, MODES)
    assert len(every) == len(set(every)) == (9 * 3 - 3) * 5
    assert {each.mode for each in every if each.phase == "folding"} == {"sync"}
    assert {each.mode for each in every if each.phase == "parked"} == {"sync", "ssp"}


@pytest.mark.parametrize(
    "change",
    [
        {"statuses": (1, 0)},
        {"statuses": (1,)},
        {"statuses": ()},
        {"was_killed": False},
        {"is_complete": False},
        {"is_proved": False},
        {"is_clean": False},
    ],
)
def test_a_cell_is_good_where_the_job_went_on_and_is_proved(change: dict[str, object]) -> None:
    assert GOOD.is_good
    assert not replace(GOOD, **change).is_good  # type: ignore[arg-type]


def test_a_job_whose_rank_dies_while_it_registers_may_be_started_again() -> None:
    assert AGAIN.is_good
    assert not replace(AGAIN, statuses=(1, 1)).is_good


def test_what_was_played_is_added_to_the_file_in_the_order_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "plays.json"
    store(path, [GOOD, replace(GOOD, hosts=4)])
    store(path, [AGAIN, replace(GOOD, seconds=7.0)])
    assert load(path) == [AGAIN, replace(GOOD, seconds=7.0), replace(GOOD, hosts=4)]


def test_the_table_says_what_became_of_the_job_by_mode() -> None:
    parked = [
        replace(GOOD, phase="parked", victim="worker", mode=mode, went_on_s=after_s)
        for mode, after_s in (("sync", 0.24), ("ssp", 0.31))
    ]
    bad = replace(GOOD, mode="ssp", is_proved=False)
    rows = table([GOOD, bad, AGAIN, *parked]).splitlines()
    assert rows[0] == "| | worker | chief | server | standby | coordinator |"
    cells_of = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in rows[2:]}
    assert list(cells_of) == list(PHASES)
    assert cells_of["registering"][1] == "again / – / –"
    assert cells_of["pushing"][1] == "0.2 s / **not as it should** / –"
    assert cells_of["parked"][0] == "0.2 s / 0.3 s"
    assert cells_of["folding"][0] == "–"


def test_all_have_gone_on_when_the_last_of_the_living_has_made_an_iteration(tmp_path: Path) -> None:
    lines = [(0, 1.0), (1, 1.1), (2, 1.2), (0, 2.5), (1, 2.25), (0, 2.75), (1, 9.0)]
    text = "\n".join(json.dumps({"worker": worker, "at": at}) for worker, at in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert went_on_s(tmp_path, 2.0) == 0.5
    assert went_on_s(tmp_path, 9.0) is None


def test_on_four_hosts_a_job_that_fails_is_started_once_again_with_the_same_words(
    tmp_path: Path,
) -> None:
    plays = [Cell(phase="registering", victim="chief", mode="ssp")] * 2
    for name, first in (("mpirun", 3), ("date", 0)):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n[ {name} = date ] && echo 7; exit {first}\n")
        program.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(job_script(tmp_path, plays))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VENV": "/nowhere"}
    subprocess.run(["sh", str(script)], check=True, env=env, timeout=60)
    for number in range(2):
        place = tmp_path / str(number)
        assert (place / "ended.txt").read_text().split() == ["0", "3", "3"]
        assert (place / "output-0.txt").exists()
        assert (place / "output-1.txt").exists()
