"""A rank is killed by SIGKILL: the job ends at once, under ULFM with one line that names the rank.

tests/support/mpirun.py fails a run that does not end, and one whose processes outlive the launcher.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Completed, Mpi, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "killed.py"
TIMEOUT_S = 120
"""The job would train for ever: what it takes is its start, and until the death is noticed."""

ANYBODY = r"(server|worker) \d"
"""The coordinator prints the first report: its own error or that of another rank."""


def run_killed(
    killed: int, path: Path, *, ranks: int = 4, group: str = "rank", servers: int = 1,
    mpi: Mpi = "openmpi", launcher_args: tuple[str, ...] = ("--with-ft", "ulfm"),
) -> Completed:  # fmt: skip
    words = ["-m", "psdist", "run", "--group", group, "--servers", str(servers), str(PROGRAM)]
    env = {"PSDIST_RUN_DIR": str(path / "run"), "PSDIST_PROGRESS": "off", "KILLED": str(killed)}
    env["PSDIST_CHUNK_BYTES"] = "4096"
    return run_mpi(ranks, words, timeout_s=TIMEOUT_S, mpi=mpi, env=env, launcher_args=launcher_args)


def errors_of_psdist(done: Completed) -> list[str]:
    """Lines of ours: what the launcher says of an abort is not."""
    return [line for line in done.stderr.splitlines() if re.search("psdist|Traceback", line)]


@pytest.mark.parametrize(
    ("killed", "servers", "group", "who", "speaker"),
    [
        pytest.param(
            3,
            1,
            "node",
            "worker 2 (rank 3 on {host})",
            ANYBODY,
            id="of-a-group",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1,
            2,
            "rank",
            "server 1 (rank 1 on {host})",
            ANYBODY,
            id="server",
            marks=pytest.mark.slow,
        ),
        pytest.param(0, 2, "rank", "server 0 (rank 0 on {host})", "server 1", id="registrar"),
        pytest.param(
            0,
            1,
            "rank",
            "server 0 (rank 0 on {host})",
            "worker 0",
            id="only-server",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_under_ulfm_one_line_names_the_rank_that_was_killed(
    killed: int, servers: int, group: str, who: str, speaker: str, tmp_path: Path
) -> None:
    done = run_killed(killed, tmp_path, servers=servers, group=group)
    assert done.returncode == 1, done.text
    who = who.format(host=socket.gethostname())
    (line,) = errors_of_psdist(done)
    assert re.fullmatch(
        rf"psdist: {speaker} \(rank \d+ on \S+\): error( at killed\.py line \d+)?: "
        rf"{re.escape(who)} has failed; this job does not survive the failure of a rank "
        r"\(failures.max_deaths and failures.replication do some\): restart the job",
        line,
    ), done.text


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_without_ulfm_the_launcher_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    done = run_killed(2, tmp_path, ranks=3, mpi=mpi, launcher_args=())
    assert done.returncode != 0, done.text
    assert "completed" not in done.stdout, done.text
