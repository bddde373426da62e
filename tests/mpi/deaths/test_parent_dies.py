"""The parent, mpirun or the terminal ends: some seconds later no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mpirun import (
    REPOSITORY,
    Mpi,
    command_line,
    end_processes,
    environment_prefix,
    processes_of,
    program_environment,
    require,
    wait_until_gone,
)
from tests.support.terminal import Terminal, are_stopped, heed_signals

MPIS: tuple[Mpi, ...] = ("openmpi", "mpich")
START_S = 120.0
JOB = ("-m", "tests.support.programs.idle_job", "parent", "2")

pytestmark = pytest.mark.mpi


class IdleJob:
    """Two ranks that wait, their mpirun, and its parent."""

    def __init__(self, mpi: Mpi, folder: Path) -> None:
        self.marker = uuid.uuid4().hex
        self.out, self.err = folder / "out", folder / "err"
        python = str(environment_prefix(mpi) / "bin" / "python")
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.parent = subprocess.Popen(
                [python, *JOB],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=REPOSITORY,
                env=program_environment(self.marker, {}),
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        self.ranks = self._wait_for_ranks()
        (self.mpirun,) = (
            pid for pid in processes_of(self.marker) if parent_of(pid) == self.parent.pid
        )

    def _wait_for_ranks(self) -> list[int]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.parent.poll() is None:
            pids = re.findall(r"is up as (\d+)", self.out.read_text())
            if len(pids) == 2:
                return [int(pid) for pid in pids]
            time.sleep(0.02)
        raise AssertionError(f"the ranks did not start:\n{self.text}")

    @property
    def text(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def left(self) -> list[str]:
        return [command_line(pid) for pid in wait_until_gone(self.marker)]

    def end(self) -> None:
        end_processes(self.marker, dump_stacks=False)
        self.parent.wait()


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture(params=MPIS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IdleJob]:
    require(request.param)
    started = IdleJob(request.param, tmp_path)
    yield started
    started.end()


def test_nothing_outlives_a_parent_that_is_killed(job: IdleJob) -> None:
    os.kill(job.parent.pid, signal.SIGKILL)
    job.parent.wait()
    assert job.left() == []


def test_nothing_outlives_a_parent_that_is_killed_while_the_job_is_stopped(job: IdleJob) -> None:
    for pid in job.ranks:
        os.kill(pid, signal.SIGSTOP)
    os.kill(job.parent.pid, signal.SIGKILL)
    job.parent.wait()
    assert job.left() == []


def test_nothing_outlives_an_mpirun_that_is_killed_and_the_parent_says_so(job: IdleJob) -> None:
    os.kill(job.mpirun, signal.SIGKILL)
    assert job.parent.wait(60) == 128 + signal.SIGKILL
    assert job.left() == []
    assert job.err.read_text().splitlines()[-1] == (
        "psdist: error: mpirun was ended by signal 9 (SIGKILL); its ranks on this host have been "
        "ended"
    )


def test_a_rank_that_is_killed_ends_the_job_and_is_named(job: IdleJob) -> None:
    os.kill(job.ranks[1], signal.SIGKILL)
    assert job.parent.wait(60) == 128 + signal.SIGKILL
    assert job.left() == []
    _, line = job.err.read_text().splitlines()  # the command comes first
    assert re.fullmatch(
        r"psdist: error: rank [01](?: on \S+)? was ended by signal 9 \(SIGKILL\); out of memory\? "
        r"\(dmesg would say so\)",
        line,
    )


@pytest.mark.parametrize("mpi", MPIS)
def test_a_closed_terminal_ends_the_job(mpi: Mpi) -> None:
    require(mpi)
    python = environment_prefix(mpi) / "bin" / "python"
    with Terminal() as terminal:
        terminal.type(f"{python} {' '.join(JOB)}\n")
        for _ in range(2):
            terminal.wait_for(r"is up as \d+", timeout_s=START_S)
        assert terminal.processes()
        terminal.close()
        assert terminal.left() == []


@pytest.mark.parametrize("mpi", MPIS)
def test_a_job_that_is_stopped_dies_with_its_terminal(mpi: Mpi) -> None:
    require(mpi)
    python = environment_prefix(mpi) / "bin" / "python"
    with Terminal() as terminal:
        terminal.type(f"{python} {' '.join(JOB)}\n")
        pids = [int(terminal.wait_for(r"is up as (\d+)", timeout_s=START_S)[1]) for _ in range(2)]
        terminal.type("\x1a")
        terminal.wait_for(r"Stopped", timeout_s=30)
        assert are_stopped(pids, timeout_s=30)
        terminal.close()
        assert terminal.left() == []
