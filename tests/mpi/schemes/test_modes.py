"""Modes that change within a run, under mpirun: by a schedule, and by the script.

tests/support/programs/schemes/modes_script.py is the script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psdist.commands import check
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "schemes" / "modes_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}


def run_script(
    folder: Path,
    *options: str,
    passed: tuple[str, ...],
    servers: int = 2,
    launcher_args: tuple[str, ...] = (),
) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--group", "rank", *options]
    words += ["--servers", str(servers)]
    words += ["--run-dir", str(folder / "run"), SCRIPT, str(folder), *passed]
    return run_mpi(4, words, timeout_s=120, env=QUIET, launcher_args=launcher_args)


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*"))]


def summary(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return told


def test_a_schedule_rules_each_round_and_workers_end_alike_in_sync(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--schedule", "0: sync; 4: ssp:1; 6: sync", passed=("9",))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    first, second = seen(tmp_path)
    assert first["modes"] == [["sync", None]] * 4 + [["ssp", 1]] * 2 + [["sync", None]] * 3
    assert first["weights"] == second["weights"]
    assert summary(tmp_path)["modes"] == [
        {"round": 0, "mode": "sync", "staleness": None, "why": "schedule"},
        {"round": 4, "mode": "ssp", "staleness": 1, "why": "schedule"},
        {"round": 6, "mode": "sync", "staleness": None, "why": "schedule"},
    ]


@pytest.mark.slow
def test_a_script_sets_the_mode_and_the_check_proves_every_round(tmp_path: Path) -> None:
    options = ("--mode", "async", "--set", "set_mode=allowed")
    done = run_script(tmp_path, *options, passed=("12", "4=sync", "8=ssp:2"))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    first, second = seen(tmp_path)
    assert first["modes"] == second["modes"]
    assert first["modes"][3:9] == [["async", None], *[["sync", None]] * 4, ["ssp", 2]]
    began, in_sync, at_last = summary(tmp_path)["modes"]
    assert began == {"round": 0, "mode": "async", "staleness": None, "why": "settings"}
    assert in_sync["mode"] == "sync"
    assert in_sync["round"] == 5  # parameters for iteration 4 were there when the script asked
    assert (at_last["mode"], at_last["staleness"], at_last["round"]) == ("ssp", 2, 9)
    assert "the script, in collective" in at_last["why"]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "mode sync from iteration 5 on (the script, in collective" in log


@pytest.mark.slow
def test_psdist_goes_to_ssp_while_now_this_group_is_slow_and_now_that_one(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--mode", "auto", passed=("150", "slow=25"))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    assert seen(tmp_path)[0]["modes"] == [["auto", None]] * 150
    began, *changes = summary(tmp_path)["modes"]
    assert began == {"round": 0, "mode": "sync", "staleness": None, "why": "settings"}
    assert (changes[0]["mode"], changes[0]["staleness"]) == ("ssp", 3)
    assert "ms with bounded staleness" in changes[0]["why"]
    lines = (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
    assert sum("changed" in json.loads(line) for line in lines) == len(changes)


def test_psdist_goes_on_deciding_by_those_who_live_when_a_worker_has_died(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        *("--mode", "auto", "--set", "max_deaths=1"),
        passed=("80", "slow=25", "dies=3"),
        servers=1,
        launcher_args=("--with-ft", "ulfm"),
    )
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    told = summary(tmp_path)
    assert [each["worker"] for each in told["deaths"]] == [2]
    decisions = tmp_path / "run" / "decisions.jsonl"
    lines = [json.loads(each) for each in decisions.read_text().splitlines()]
    kinds = [next(iter(each)) for each in lines]
    gone = kinds.index("gone")
    assert lines[gone] == {"gone": {"group": 2}}
    assert "changed" in kinds[gone:]
    assert told["modes"][1]["mode"] == "ssp"
    decisions.write_text("".join(json.dumps(each) + "\n" for each in lines if "gone" not in each))
    assert check.main(tmp_path / "run") == 1


@pytest.mark.slow
def test_a_script_sets_the_mode_of_those_who_live(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        *("--mode", "async", "--set", "set_mode=allowed", "--set", "max_deaths=1"),
        passed=("30", "4=sync", "12=ssp:2", "20=sync", "dies=12"),
        servers=1,
        launcher_args=("--with-ft", "ulfm"),
    )
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    first, second = seen(tmp_path)
    assert first["modes"] == second["modes"]
    assert first["weights"] == second["weights"]
    assert [each["mode"] for each in summary(tmp_path)["modes"]] == [
        *("async", "sync", "ssp", "sync"),
    ]


@pytest.mark.slow
def test_psdist_moves_the_bound_while_now_this_group_is_slow_and_now_that_one(
    tmp_path: Path,
) -> None:
    options = ("--mode", "ssp", "--staleness", "0", "--set", "staleness_to=6")
    done = run_script(tmp_path, *options, passed=("60", "slow=25"))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    assert seen(tmp_path)[0]["modes"] == [["ssp", 6]] * 60
    began, *changes = summary(tmp_path)["modes"]
    assert began == {"round": 0, "mode": "ssp", "staleness": 0, "why": "settings"}
    assert {each["mode"] for each in changes} == {"ssp"}
    assert 0 < changes[0]["staleness"] <= 6
    assert "with staleness 0, " in changes[0]["why"]
