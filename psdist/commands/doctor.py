"""`psdist doctor`: what is installed here, what does not fit together, and what to do about it.

    findings = examine(os.environ)
    [finding.remedy for finding in findings if finding.state == "error"]

Every question has a deadline, one that fails never keeps the others from being asked, and MPI and
torch are only loaded by processes of their own.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from psdist.commands import print_json
from psdist.errors import LaunchError
from psdist.install import FAMILY_NAMES, SRUN_MPI, detect
from psdist.install.distributions import rivals
from psdist.install.eager import limits_are_chosen
from psdist.install.mpi import (
    INSTALL_MPI,
    MpiLibrary,
    Mpirun,
    Output,
    examine_mpirun,
    find_mpirun,
    launch_environment,
    loaded_library,
    mpirun_command,
    mpirun_on_path,
    num_physical_cores,
    output_of,
    python_flags,
)
from psdist.version import VERSION

State: TypeAlias = Literal["ok", "note", "warning", "error"]

COMMAND_TIMEOUT_S: Final = 10.0
ROUND_TRIP_TIMEOUT_S: Final = 60.0
TORCH_TIMEOUT_S: Final = 120.0
# Open MPI maps some MiB per rank there, and torch's loader processes share batches through it.
ENOUGH_SHARED_MEMORY_BYTES: Final = 256 << 20

_STYLES: Final[Mapping[State, str]] = {
    "ok": "green",
    "note": "dim",
    "warning": "yellow",
    "error": "bold red",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One answer. An ``error`` means that training would fail; a remedy says what to do."""

    subject: str
    value: str
    state: State = "ok"
    remedy: str = ""


def main(console: Console | None = None, *, as_json: bool = False) -> int:
    """Print all findings and the remedies. Returns 1 if training would fail here, else 0.

    Raises LaunchError under mpirun or srun, on one rank.
    """
    launcher = detect(os.environ)
    if (launcher.size or 1) > 1:
        if launcher.rank:
            return 0
        raise LaunchError(
            f"psdist doctor starts its own ranks, and here it is one of {launcher.size}: "
            "run it without mpirun or srun"
        )
    findings = examine(os.environ)
    can_train = not any(finding.state == "error" for finding in findings)
    if as_json:
        print_json("doctor", {"can_train": can_train, "findings": list(map(asdict, findings))})
    else:
        _print(findings, console or Console())
    return 0 if can_train else 1


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Ask every question once, in an order in which later ones can use earlier answers."""
    examination = _Examination(launch_environment(environment))
    for question in (
        examination.python,
        examination.distributions,
        examination.torch,
        examination.cores,
        examination.shared_memory,
        examination.hwloc,
        examination.mpi_library,
        examination.slurm,
        examination.mpirun_of_library,
        examination.mpirun_of_path,
        examination.round_trip,
        examination.device_messages,
    ):
        _ask(question, examination)
    return examination.findings


def _ask(question: Callable[[], None], examination: _Examination) -> None:
    try:
        question()
    except Exception as error:  # whatever happens to one question, the others must be asked
        subject = question.__name__.replace("_", " ")
        value = f"could not be found out ({type(error).__name__}: {error})"
        examination.add(subject, value, "warning", "please report this with the line above")


class _Examination:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.findings: list[Finding] = []
        self.mpi: MpiLibrary | None = None
        self.mpirun: Mpirun | None = None
        self.srun_types: frozenset[str] = frozenset()
        self.has_gpu = self.has_two_ranks = False

    def add(self, subject: str, value: str, state: State = "ok", remedy: str = "") -> None:
        self.findings.append(Finding(subject=subject, value=value, state=state, remedy=remedy))

    def output_of(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Output:
        return output_of(command, timeout_s=timeout_s, environment=self.environment)

    def python(self) -> None:
        self.add("python", f"{platform.python_version()} in {sys.prefix}")
        self.add("psdist", f"{VERSION} in {Path(__file__).resolve().parents[1]}")

    def distributions(self) -> None:
        for rival in rivals(sys.path, package=Path(__file__).absolute().parents[1]):
            state: State = "error" if rival.is_error else "warning"
            self.add("distribution", rival.problem, state, rival.remedy)

    def torch(self) -> None:
        command = [sys.executable, *python_flags(), "-m", "psdist.install.trials", "torch"]
        output = self.output_of(*command, timeout_s=TORCH_TIMEOUT_S)
        facts = output.facts()
        if facts is None:
            value = output.last_line() if output.status is not None else "took too long to load"
            self.add("torch", value, "error", "torch must be importable: pip install torch")
            return
        cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
        self.add("torch", f"{facts['version']}, {cuda}")
        devices = facts["devices"]
        self.has_gpu = bool(devices)
        if devices:
            self.add("GPUs", f"{len(devices)} x {devices[0]}")
        else:
            self.add("GPUs", "none that torch can use", "note")
        offered = [name for name in ("gloo", "nccl") if facts[name]]
        value = f"torch.distributed has {' and '.join(offered) or 'neither gloo nor nccl'}"
        if not facts["gloo"]:
            remedy = "workers of a group reduce over gloo: install a torch built with it"
            self.add("reduction", value, "error", remedy)
        elif devices and not facts["nccl"]:
            remedy = "groups on GPUs would reduce over gloo, slowly: install a torch with NCCL"
            self.add("reduction", value, "warning", remedy)
        else:
            self.add("reduction", value)

    def cores(self) -> None:
        threads = len(os.sched_getaffinity(0))
        value = (
            f"{num_physical_cores()} for this process ({threads} of {os.cpu_count()} "
            "hardware threads)"
        )
        if threads < 2:
            remedy = (
                "a server and a worker will take turns on one core: ask for more "
                "(srun --cpus-per-task, taskset)"
            )
            self.add("cores", value, "warning", remedy)
        else:
            self.add("cores", value)

    def shared_memory(self) -> None:
        try:
            status = os.statvfs("/dev/shm")
        except OSError as error:
            remedy = "MPI's shared-memory transport needs it: mount a tmpfs there"
            self.add("/dev/shm", str(error.strerror), "warning", remedy)
            return
        total, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
        value = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        if free < ENOUGH_SHARED_MEMORY_BYTES:
            remedy = "free some, or give the container more (docker run --shm-size=1g)"
            self.add("/dev/shm", value, "warning", remedy)
        else:
            self.add("/dev/shm", value)

    def hwloc(self) -> None:
        for name in ("lstopo-no-graphics", "lstopo"):
            if path := shutil.which(name, path=self.environment.get("PATH")):
                version = self.output_of(path, "--version").last_line()
                self.add("hwloc", f"{version} in {path}")
                return
        self.add("hwloc", "no lstopo on PATH: sockets and cores are read from /sys", "note")

    def mpi_library(self) -> None:
        try:
            self.mpi = loaded_library(self.environment)
        except LaunchError as error:
            self.add("MPI", "none that mpi4py can load", "error", str(error))
            return
        mpi = self.mpi
        place = f", {mpi.file}" if mpi.file else ""
        self.add("MPI", f"{mpi.name} ({mpi.origin}{place}), mpi4py {mpi.mpi4py}")
        if mpi.family == "unknown":
            remedy = "psdist is tested with Open MPI 5 and MPICH 5 only"
            self.add("MPI family", mpi.name, "warning", remedy)
        if mpi.family == "openmpi":
            is_chosen = limits_are_chosen(self.environment, str(mpi.file) if mpi.file else None)
            whose = "your own" if is_chosen else "psdist raises them in jobs on several hosts"
            self.add("TCP eager limits", whose)

    def slurm(self) -> None:
        srun = shutil.which("srun", path=self.environment.get("PATH"))
        if srun is None:
            self.add("Slurm", "no srun on PATH", "note")
            return
        output = self.output_of(srun, "--mpi=list")
        if output.status != 0:
            reason = output.last_line() if output.status is not None else "it does not answer"
            self.add("Slurm", f"{srun} reaches no cluster: {reason}", "note")
            return
        self.srun_types = _srun_types(output.text)
        version = self.output_of(srun, "--version").last_line()
        self.add("Slurm", f"{version}, srun --mpi= {', '.join(sorted(self.srun_types))}")
        self._partitions()
        expected = SRUN_MPI.get(self.mpi.family) if self.mpi is not None else None
        if self.mpi is None or expected is None:
            return
        if expected in self.srun_types:
            self.add("srun --mpi=", f"{expected} fits {self.mpi.name}")
        else:
            remedy = "use mpirun inside sbatch or salloc"
            value = f"{self.mpi.name} needs {expected}, which srun does not offer"
            self.add("srun --mpi=", value, "warning", remedy)

    def _partitions(self) -> None:
        if sinfo := shutil.which("sinfo", path=self.environment.get("PATH")):
            output = self.output_of(sinfo, "--noheader", "--format=%P %D nodes %t")
            if output.status == 0:
                lines = [line.strip() for line in output.text.splitlines() if line.strip()]
                self.add("partitions", "; ".join(lines[:8]) or "none")
            else:
                reason = output.last_line() if output.status is not None else "no answer"
                self.add("partitions", f"sinfo: {reason}", "warning", "is slurmctld running?")

    def mpirun_of_library(self) -> None:
        if self.mpi is None:
            return
        try:
            self.mpirun = find_mpirun(self.mpi, self.environment)
        except LaunchError as error:
            expected = SRUN_MPI.get(self.mpi.family)
            if expected in self.srun_types:
                remedy = f"start jobs with srun --mpi={expected}; psdist run -n needs an mpirun"
                self.add("mpirun", str(error), "warning", remedy)
            else:
                self.add("mpirun", f"none of {self.mpi.name}", "error", str(error))
            return
        self.add("mpirun", f"{self.mpirun.name} in {self.mpirun.path}")

    def mpirun_of_path(self) -> None:
        if self.mpi is None or self.mpirun is None:
            return
        path = mpirun_on_path(self.environment)
        if path is None:
            remedy = f"psdist run -n finds it; for plain mpirun put {self.mpirun.path.parent} there"
            self.add("mpirun on PATH", "none", "note", remedy)
            return
        found = examine_mpirun(path, self.environment)
        if found.belongs_to(self.mpi):
            self.add("mpirun on PATH", f"{path}, fits")
        else:
            remedy = (
                f"`mpirun` would start {self.mpi.name} as ranks that are each alone: "
                f"put {self.mpirun.path.parent} first on PATH, or use psdist run -n"
            )
            value = f"{path} is {found.name or FAMILY_NAMES['unknown']}"
            self.add("mpirun on PATH", value, "warning", remedy)

    def round_trip(self) -> None:
        if self.mpirun is None:
            return
        command = self._on_two_ranks(self.mpirun, "round-trip")
        output = self.output_of(*command, timeout_s=ROUND_TRIP_TIMEOUT_S)
        facts = output.facts()
        by_hand = f"see its whole output: {shlex.join(command)}"
        if output.status is None:
            value = f"no end within {ROUND_TRIP_TIMEOUT_S:.0f} s"
            self.add("two ranks", value, "error", by_hand)
        elif facts is None or output.status != 0:
            value = f"failed with status {output.status}: {output.first_cause()}"
            self.add("two ranks", value, "error", by_hand)
        elif facts["world_size"] != 2:
            value = f"started, but each in a world of {facts['world_size']}"
            remedy = f"the mpirun and the library do not fit together: {INSTALL_MPI}"
            self.add("two ranks", value, "error", remedy)
        elif not facts["unchanged"]:
            value = "1 MiB came back with other bytes"
            self.add("two ranks", value, "error", f"MPI damages messages here; {by_hand}")
        else:
            self.has_two_ranks = True
            self.add("two ranks", f"1 MiB there and back in {1e3 * facts['seconds']:.2f} ms")
            self._thread_level(is_multiple=facts["multiple"])
            self._fault_tolerance(has_ulfm=facts["ulfm"])

    def _on_two_ranks(self, mpirun: Mpirun, trial: str) -> list[str]:
        return [
            *mpirun_command(mpirun, 2, self.environment),
            *(sys.executable, *python_flags(), "-m", "psdist.install.trials", trial),
        ]

    def device_messages(self) -> None:
        """Whether MPI takes memory of a GPU: found out by doing it. However that ends, training is
        none the worse."""
        if self.mpirun is None or not (self.has_gpu and self.has_two_ranks):
            return
        command = self._on_two_ranks(self.mpirun, "device-messages")
        output = self.output_of(*command, timeout_s=TORCH_TIMEOUT_S)
        facts = output.facts()
        if output.status is None:
            answer = f"no: no end within {TORCH_TIMEOUT_S:.0f} s"
        elif facts is None or output.status != 0:
            answer = f"no: it ended with status {output.status}: {output.first_cause()}"
        elif facts["world_size"] != 2 or not facts["unchanged"]:
            answer = "no: other bytes came back"
        else:
            answer = f"yes: 4 MiB there and back in {1e3 * facts['seconds']:.2f} ms"
        value = f"{answer}; psdist sends from pinned memory of the host in any case"
        self.add("GPU memory over MPI", value, "note")

    def _thread_level(self, *, is_multiple: bool) -> None:
        if is_multiple:
            self.add("threads", "MPI_THREAD_MULTIPLE")
        else:
            remedy = f"use an MPI built with thread support: {INSTALL_MPI}"
            self.add("threads", "no MPI_THREAD_MULTIPLE", "error", remedy)

    def _fault_tolerance(self, *, has_ulfm: bool) -> None:
        value = "ULFM (with mpirun --with-ft ulfm): failures.max_deaths can be set"
        if not has_ulfm:
            value = "no ULFM: the death of a rank ends the job, and it restarts from a checkpoint"
        self.add("fault tolerance", value, "ok" if has_ulfm else "note")


def _srun_types(text: str) -> frozenset[str]:
    """The values that ``srun --mpi=list`` names: one a line, and pmix's versions after a colon."""
    words: list[str] = []
    for line in text.splitlines():
        if re.fullmatch(r"\s*\w+\s*", line):
            words.append(line.strip())
        elif line.startswith("specific"):
            words += [word.strip() for word in line.partition(":")[2].split(",")]
    return frozenset(filter(None, words))


def _print(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.state]
        state = f"[{style}]{finding.state}[/{style}]"
        table.add_row(state, escape(finding.subject), escape(finding.value))
    console.print(table)
    advice = [finding for finding in findings if finding.remedy]
    if advice:
        console.print("\n[bold]What to do[/bold]")
    for finding in advice:
        style = _STYLES[finding.state]
        line = f"[{style}]{finding.state}[/{style}] {escape(finding.subject)}: "
        console.print(line + escape(finding.remedy), soft_wrap=True, highlight=False)
    num_errors = sum(finding.state == "error" for finding in findings)
    if num_errors:
        console.print(f"\nTraining would fail here (errors: {num_errors}).")
    else:
        console.print("\nTraining can start here.")
