"""A server is killed by SIGKILL, and its buddy continues: status 0, `psdist check` proves it, in
sync the parameters are those of a run without the death, and no process is left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.files import read_histories
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "kills_server.py"
TIMEOUT_S = 240
CODED = ("codec=int4/sign", "codec_exact=*bias")


def run(
    path: Path,
    *,
    kills: int | str | None,
    standbys: str = "",
    mode: str | None = "sync",
    servers: int = 2,
    launcher_args: tuple[str, ...] = ("--with-ft", "ulfm"),
    settings: tuple[str, ...] = (),
    spares: int = 0,
    set_mode_at: int = -1,
) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--group", "rank"]
    words += ["--mode", mode] if mode is not None else []
    words += ["--servers", str(servers), "--set", "replication=buddy", "--set", "chunk_bytes=4096"]
    words += [f"--spares={spares}"] * bool(spares)
    words += [f"--set={each}" for each in settings]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "PSDIST_PROGRESS": "off"}
    env["SET_MODE_AT"] = str(set_mode_at)
    if kills is not None:
        env |= {"KILLS": str(kills), "DEPUTIES": standbys}
    return run_mpi(
        2 + servers + spares,
        [*words, str(PROGRAM)],
        timeout_s=TIMEOUT_S,
        env=env,
        launcher_args=launcher_args,
    )


def parameters_of(done: Completed) -> str:
    (found,) = re.findall(r"^parameters (\w{8})$", done.stdout, re.MULTILINE)
    return str(found)


def prove_survival(done: Completed, path: Path, *, server: int = 1) -> None:
    other = 1 - server
    assert done.returncode == 0, done.text
    summary = json.loads((path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["replication"]) == ("completed", "buddy")
    (death,) = summary["deaths"]
    assert (death["server"], death["taken_over_by"]) == (server, other)
    report = check_run(path / "run", read_histories(path / "run"))
    assert report.proved, (report.violations, report.notes)
    assert f"server {server} (rank {server} on" in done.stderr
    assert f"server {other} has taken its place" in done.stderr
    assert "completed in" in done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters of a run in sync without failures."""
    done = run(tmp_path_factory.mktemp("undisturbed"), kills=None)
    assert done.returncode == 0, done.text
    return parameters_of(done)


@pytest.mark.parametrize(
    ("settings", "server"),
    [
        pytest.param((), 0, id="the coordinator", marks=pytest.mark.slow),
        pytest.param((), 1, id="steps", marks=pytest.mark.slow),
        pytest.param(("local_steps=3", "outer=nesterov"), 1, id="rounds", marks=pytest.mark.slow),
        pytest.param(CODED, 1, id="codecs", marks=pytest.mark.slow),
        pytest.param(CODED, 0, id="codecs, the coordinator", marks=pytest.mark.slow),
    ],
)
def test_in_sync_the_death_of_a_server_changes_no_bit(
    settings: tuple[str, ...], server: int, undisturbed: str, tmp_path: Path
) -> None:
    """Server 0 is the coordinator. In rounds of local steps what is sent again is the difference
    that they have made; with codecs what they were encoded to."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    expected = undisturbed
    if settings:
        whole = run(tmp_path / "whole", kills=None, settings=settings)
        assert whole.returncode == 0, whole.text
        expected = parameters_of(whole)
    killed = run(tmp_path / "killed", kills=server, settings=settings)
    prove_survival(killed, tmp_path / "killed", server=server)
    assert parameters_of(killed) == expected


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        pytest.param("sync", [2, 0], id="sync, two of three, the coordinator among them"),
        pytest.param("sync", [3, 0, 2], id="sync, the coordinator second", marks=pytest.mark.slow),
        pytest.param("sync", [2, 1, 3], id="sync, its standby among them", marks=pytest.mark.slow),
        pytest.param("ssp", [2, 1, 3], id="ssp", marks=pytest.mark.slow),
        pytest.param("async", [0, 3, 2], id="async", marks=pytest.mark.slow),
    ],
)
def test_all_servers_but_one_die_one_after_the_other(
    mode: str, kills: list[int], undisturbed: str, tmp_path: Path
) -> None:
    """Whenever every shard has two copies again: in sync no bit is another one."""
    done = run(tmp_path, kills=",".join(map(str, kills)), servers=len(kills) + 1, mode=mode)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert [each["server"] for each in summary["deaths"]] == kills
    alone, every = summary["alone"], [*range(len(kills) + 1)]
    assert sorted({each["server"] for each in alone}) == every
    assert sorted(each["server"] for each in alone if each["until_s"] is None) == every
    assert all(each["until_s"] >= each["from_s"] for each in alone if each["kept_by"] is not None)
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
    if mode == "sync":  # by how many servers it is done is in no bit either
        assert parameters_of(done) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        pytest.param("sync", [2, 1], id="sync"),
        pytest.param("sync", [0, 2], id="sync, the coordinator first"),
        pytest.param("async", [2, 1], id="async"),
    ],
)
def test_a_spare_goes_on_in_the_place_of_the_second_server_that_dies(
    mode: str, kills: list[int], undisturbed: str, tmp_path: Path
) -> None:
    """The first one's buddy has its place, and the spare the two copies that are missing then."""
    done = run(tmp_path, kills=",".join(map(str, kills)), servers=3, mode=mode, spares=1)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["spares"]) == ("completed", 1)
    assert [each["server"] for each in summary["deaths"]] == kills
    assert summary["deaths"][1]["taken_over_by"] == "spare 0"
    assert [each["kept_by"] for each in summary["alone"]][:2] == ["spare 0", "spare 0"]
    assert "spare 0 has taken its place" in done.stderr
    ranks = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [each["role"] for each in ranks].count("spare") == 1
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
    if mode == "sync":
        assert parameters_of(done) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(["s0"], id="waits"),
        pytest.param(["2", "s0"], id="has two copies"),
        pytest.param(["2", "1", "s0"], id="has a place"),
    ],
)
def test_a_spare_dies_and_no_bit_is_another_one(
    kills: list[str], undisturbed: str, tmp_path: Path
) -> None:
    done = run(tmp_path, kills=",".join(kills), servers=3, spares=1)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["deaths"]) == len(kills)
    assert summary["deaths"][-1]["spare"] == 0
    assert "spare 0 (rank 5 on" in done.stderr
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
    assert parameters_of(done) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "standbys", "spares", "coordinator"),
    [
        pytest.param("0,1", "0,1", 2, "spare 0", id="the coordinator first"),
        pytest.param("1,0,s0", "0,1,2", 2, "spare 1", id="its standby first"),
    ],
)
def test_a_coordinator_that_has_followed_another_one_dies(
    kills: str, standbys: str, spares: int, coordinator: str, undisturbed: str, tmp_path: Path
) -> None:
    """Whenever it has a standby again: in sync no bit is another one."""
    done = run(tmp_path, kills=kills, standbys=standbys, servers=2, spares=spares)
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["registrar"]) == ("completed", coordinator)
    assert len(summary["deaths"]) == len(kills.split(","))
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
    assert parameters_of(done) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_the_death_of_a_server_is_survived(mode: str, server: int, tmp_path: Path) -> None:
    prove_survival(run(tmp_path, kills=server, mode=mode), tmp_path, server=server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", [pytest.param(0, id="the coordinator"), pytest.param(1, marks=pytest.mark.slow)]
)
def test_modes_and_codecs_that_change_go_on_behind_a_death(server: int, tmp_path: Path) -> None:
    schedule = "schedule=0: sync int4/bf16; 4: ssp:2 topk:0.1; 8: sync none"
    done = run(tmp_path, kills=server, mode=None, settings=(schedule,))
    prove_survival(done, tmp_path, server=server)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    told = [(each["round"], each["mode"]) for each in summary["sets"][0]["modes"]]
    assert told == [(0, "sync"), (4, "ssp"), (8, "sync")]


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("set_mode_at", [3, 5])
def test_a_mode_that_the_script_has_set_rules_behind_a_death(
    set_mode_at: int, server: int, tmp_path: Path
) -> None:
    """The server is killed after the change, or before the round from which it is in force."""
    settings = ("set_mode=allowed",)
    done = run(tmp_path, kills=server, settings=settings, set_mode_at=set_mode_at)
    prove_survival(done, tmp_path, server=server)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    told = [(each["round"], each["mode"]) for each in summary["sets"][0]["modes"]]
    assert told == [(0, "sync"), (set_mode_at + 1, "ssp")]


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_codecs_that_psdist_chooses_go_on_behind_a_death(server: int, tmp_path: Path) -> None:
    prove_survival(run(tmp_path, kills=server, settings=("codec=auto",)), tmp_path, server=server)


def test_without_ulfm_the_setting_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, kills=None, launcher_args=())
    assert done.returncode == 2, done.text
    (line,) = [
        each for each in done.stderr.splitlines() if "failures.replication = buddy needs" in each
    ]
    assert "mpirun --with-ft ulfm (psdist run -n passes it)" in line
