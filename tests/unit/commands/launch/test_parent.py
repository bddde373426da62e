"""The parent's loop over a launcher that is a small program: no MPI, no ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from psdist.commands.launch.ending import Ending
from tests.support.mpirun import REPOSITORY
from tests.support.terminal import heed_signals
from tests.unit.commands.launch.test_noise import (
    ABORTED,
    BAD_TERMINATION,
    EXITED,
    LINE,
    LOST_DAEMON,
)

TIMEOUT_S = 60.0
PARENT = """
import os, signal, sys
from psdist.commands.launch import make_parent
from psdist.config.settings import RunConfig
command = [sys.executable, "-c", sys.argv[1]]
with make_parent(num_ranks=2, script="train.py", config=RunConfig(progress="off")) as parent:
    sys.exit(parent.run(command, os.environ, death_signal=signal.SIGTERM))
"""


def start(
    launcher: str,
    *,
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, launcher],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=REPOSITORY,
        preexec_fn=heed_signals,
    )


def run(launcher: str) -> tuple[int, bytes, list[str]]:
    """Status, standard output, and the lines of standard error after that with the command."""
    process = start(launcher)
    output, error = process.communicate(timeout=TIMEOUT_S)
    lines = error.decode().splitlines()
    assert lines[0].startswith(sys.executable), lines
    # A launcher of several lines is shown as it would be typed.
    return process.returncode, output, lines[launcher.count("\n") + 1 :]


def test_what_a_launcher_prints_passes_but_for_its_noise_and_its_status_counts() -> None:
    launcher = (
        "import sys\n"
        f"print('one', {BAD_TERMINATION!r}, 'two', sep='', end='')\n"
        f"print({ABORTED + EXITED!r}, {LINE!r}, 'advice', file=sys.stderr, sep='')\n"
        "sys.exit(7)"
    )
    status, output, lines = run(launcher)
    assert (status, output) == (7, b"one" + BAD_TERMINATION.encode() + b"two")
    assert lines == [
        LINE.strip(),
        "advice",
        "psdist: error: mpirun ended with status 7 before any rank had started; its output is "
        "above",
    ]


def test_a_block_of_noise_that_begins_a_line_is_taken_out_of_standard_output_as_well() -> None:
    status, output, _ = run(f"print('one\\n', {BAD_TERMINATION!r}, 'two', sep='', end='')")
    assert (status, output) == (0, b"one\ntwo")


def test_a_reader_that_is_slow_gets_everything() -> None:
    process = start("import sys\nfor n in range(100_000): print('line', n)")
    time.sleep(1.0)  # far more than pipes and buffers hold is waiting by now
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert output == b"".join(b"line %d\n" % number for number in range(100_000))
    assert process.returncode == 0


def test_where_nobody_reads_any_more_the_job_goes_on() -> None:
    process = start("import sys, time\nfor n in range(2000): print('x' * 1000, flush=True)")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 0
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("launcher_status", [0, 7])
def test_a_job_whose_output_finds_no_space_goes_on_and_fails(
    stream: str, launcher_status: int, tmp_path: Path
) -> None:
    launcher = (
        "import pathlib, sys\n"
        f"for n in range(2000): print('x' * 1000, file=sys.{stream}, flush=True)\n"
        f"pathlib.Path({str(tmp_path / 'end')!r}).touch()\n"
        f"sys.exit({launcher_status})"
    )
    with open("/dev/full", "w") as full:
        process = start(launcher, **{stream: full})
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (launcher_status or 2)
    assert (tmp_path / "end").exists()
    if stream == "stdout":
        told = [line for line in error.decode().splitlines() if "standard output" in line]
        assert told == [
            "psdist: error: standard output: cannot be written (No space left on device): the job "
            "continues without it and ends with a failure; free some space, or send it elsewhere"
        ]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_stay_nobodys(closed: str) -> None:
    words = [sys.executable, "-c", PARENT, "import sys; print('out'); sys.exit(5)"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "-", *words],
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 5, done
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"out\n")
    assert (b"mpirun ended with status 5" in done.stderr) == ("2>&-" not in closed)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_before_a_rank_has_a_role_the_launcher_is_asked_to_end(number: int, status: int) -> None:
    process = start("import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status
    assert error.decode().splitlines()[1:] == [
        f"psdist: {signal.Signals(number).name}: ending the job; a second signal ends it at once"
    ]


def test_a_launcher_that_will_not_end_is_killed() -> None:
    process = start(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    process.communicate()
    assert Ending.LAUNCHER_S > 1.0  # it was the second signal, not the time


def test_ignored_signals_stay_ignored() -> None:
    launcher = "import time; print('up', flush=True); time.sleep(2)"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, launcher],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error


FAILS_AND_ITS_LAUNCHER_STAYS = """
import os, time
from psdist.ranks.parent_link import connect_to_parent
if os.fork():
    time.sleep(600)
connect_to_parent(os.environ, rank=0).failed(1)
os._exit(1)
"""


def test_a_launcher_that_waits_for_a_lost_host_is_ended_behind_a_job_that_has_failed() -> None:
    program = PARENT.replace(
        "command =", "import psdist.commands.launch as p\np._HANGING_S = 0.5\ncommand ="
    )
    done = subprocess.run(
        [sys.executable, "-c", program, FAILS_AND_ITS_LAUNCHER_STAYS],
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 1, done


def test_a_launcher_that_loses_a_host_and_ends_well_has_not_ended_well() -> None:
    status, output, lines = run(f"print({LOST_DAEMON!r}, end='')")
    assert (status, output) == (1, b"")
    assert [line.partition(", and ends")[0] for line in lines] == [
        "psdist: error: mpirun has lost h3, cut off or gone"
    ]


def test_a_program_that_is_not_there_is_one_line() -> None:
    program = PARENT.replace("command = [sys.executable", 'command = ["/nowhere/mpirun"')
    done = subprocess.run(
        [sys.executable, "-c", program, "pass"],
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=REPOSITORY,
        check=False,
        env=os.environ,
    )
    assert done.stderr.decode().splitlines()[-1] == (
        "psdist.errors.LaunchError: cannot start /nowhere/mpirun: No such file or directory"
    )


FAILS_AND_LOSES_ANOTHER = """
import os, signal, time
from pathlib import Path
from psdist.ranks.parent_link import connect_to_parent
ended = connect_to_parent(os.environ, rank=0)
failing = connect_to_parent(os.environ, rank=1)
parent = os.getppid()
os.kill(parent, signal.SIGSTOP)
while Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
failing.failed(3)
ended._connection.shutdown(2)
os.kill(parent, signal.SIGCONT)
time.sleep(60)
"""


def test_a_rank_that_another_ones_failure_has_ended_is_not_blamed_for_it() -> None:
    # Both are heard in one turn, and the rank that was ended comes first.
    status, _, lines = run(FAILS_AND_LOSES_ANOTHER)
    assert (status, lines) == (3, [])
