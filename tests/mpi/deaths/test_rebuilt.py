"""A server without a buddy is killed by SIGKILL, and another one makes its shard anew of what
workers hold: status 0, `psdist check` proves the rest and lists what is lost, no process is left.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands.check import Report, check_run
from psdist.history.files import read_histories
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "kills_server.py"


def run(
    path: Path,
    *,
    kills: str | None,
    mode: str = "sync",
    servers: int = 3,
    launcher_args: tuple[str, ...] = ("--with-ft", "ulfm"),
    more: tuple[str, ...] = (),
    optimizer: str = "sgd",
    checkpoint_at: int = -1,
) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--mode", mode, "--group", "rank"]
    words += ["--servers", str(servers), "--set", "chunk_bytes=4096"]
    words += ["--set", "on_server_death=rebuild", *more]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "PSDIST_PROGRESS": "off", "OPTIMIZER": optimizer}
    env["CHECKPOINT_AT"] = str(checkpoint_at)
    if kills is not None:
        env["KILLS"] = kills
    return run_mpi(
        2 + servers,
        [*words, str(PROGRAM)],
        timeout_s=120,
        env=env,
        launcher_args=launcher_args,
    )


def prove(done: Completed, path: Path, servers: list[int]) -> Report:
    assert done.returncode == 0, done.text
    summary = json.loads((path / "run" / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert [each["server"] for each in summary["deaths"]] == servers
    report = check_run(path / "run", read_histories(path / "run"))
    assert report.proved, (report.violations, report.notes)
    notes = " ".join(report.notes)
    for server in servers:
        assert f"server {server} died, and its shard was made anew" in notes
        assert f"made the shard of server {server} anew of what workers held: " in done.stderr
    return report


def parameters_of(done: Completed) -> str:
    (found,) = re.findall(r"^parameters (\w{8})$", done.stdout, re.MULTILINE)
    return str(found)


def test_the_death_of_a_server_is_survived(tmp_path: Path) -> None:
    done = run(tmp_path, kills="1", servers=2)
    report = prove(done, tmp_path, [1])
    assert "no update is lost" in " ".join(report.notes)
    assert "the optimizer's state there is a fresh one" in done.stderr


@pytest.mark.slow
def test_in_sync_without_optimizer_state_no_bit_is_another_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(tmp_path / "whole", kills=None)
    assert whole.returncode == 0, whole.text
    killed = run(tmp_path / "killed", kills="1")
    prove(killed, tmp_path / "killed", [1])
    assert parameters_of(killed) == parameters_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_one_server_after_the_other_dies(mode: str, tmp_path: Path) -> None:
    """The second one had made the shard of the first anew, or the third has."""
    done = run(tmp_path, kills="2,1", mode=mode, optimizer="adam")
    assert done.returncode == 0, done.text
    deaths = json.loads((tmp_path / "run" / "summary.json").read_text())["deaths"]
    prove(done, tmp_path, [each["server"] for each in deaths])
    assert {each["server"] for each in deaths} == {1, 2}
    assert deaths[-1]["rebuilt_by"] == 0
    for each in deaths:
        lost = f"at most {each['num_lost']} updates, each of one chunk, are lost"
        assert (lost if each["num_lost"] else "no update is lost") in done.stderr


@pytest.mark.slow
def test_the_optimizers_state_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """Which was made in front of the iteration in which the server dies: in sync no bit is another
    one."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(tmp_path / "whole", kills=None, optimizer="adam", checkpoint_at=5)
    assert whole.returncode == 0, whole.text
    killed = run(tmp_path / "killed", kills="1", optimizer="adam", checkpoint_at=5)
    prove(killed, tmp_path / "killed", [1])
    assert "the optimizer's state there is as checkpoint step-00000005 has it" in killed.stderr
    (death,) = json.loads((tmp_path / "killed" / "run" / "summary.json").read_text())["deaths"]
    assert death["optimizer_state"] == "step-00000005"
    assert parameters_of(killed) == parameters_of(whole)


@pytest.mark.slow
def test_the_registrars_death_ends_the_job(tmp_path: Path) -> None:
    """Whoever hears of it says so: nobody is there to be told."""
    done = run(tmp_path, kills="0")
    assert done.returncode == 1, done.text
    lines = [each for each in done.stderr.splitlines() if "it is the registrar, without" in each]
    assert lines
    assert all("server 0 (rank 0 on" in line for line in lines)


@pytest.mark.slow
def test_without_ulfm_or_another_server_the_setting_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, kills=None, launcher_args=())
    assert done.returncode == 2, done.text
    words = "on_server_death = rebuild needs"
    (line,) = [each for each in done.stderr.splitlines() if words in each]
    assert "mpirun --with-ft ulfm (psdist run -n passes it)" in line
