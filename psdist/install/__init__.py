"""The installation and the launcher: the MPI library, mpirun, and who started this process.

``mpi`` finds the library and the mpirun that belongs to it, here is what the environment says that
srun or mpirun left, ``distributions`` finds other distributions that provide psdist, ``trials``
runs trials in processes of their own, ``room`` checks what this host must have left for MPI, and
``quirks`` has the remedies for faults of others. Imports errors only; starts MPI only in a trial's
own process.

Environment variables come from a mapping that is passed in. Slurm's variables alone are no
launcher: the shell of an sbatch script and of ``srun --pty bash`` has them too. A Slurm *step* of
more than one task is.

    launcher = detect(os.environ)
    launcher.name, launcher.rank, launcher.size          # "openmpi", 3, 6
    explain_mismatch(os.environ, library_version=MPI.Get_library_version())   # before MPI_Init
    explain_singleton(os.environ, world_size=1, library_version=MPI.Get_library_version())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

LauncherName: TypeAlias = Literal["openmpi", "mpich", "pmix", "slurm", "none"]
Family: TypeAlias = Literal["openmpi", "mpich", "intel", "unknown"]

# Value of `srun --mpi=` for each family of MPI libraries.
SRUN_MPI: Final[Mapping[Family, str]] = {
    "openmpi": "pmix",
    "mpich": "pmi2",
    "intel": "pmi2",
}
FAMILY_NAMES: Final[Mapping[Family, str]] = {
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "intel": "Intel MPI",
    "unknown": "another MPI",
}
# Family of the mpirun that set the variables.
_FAMILY_OF_LAUNCHER: Final[Mapping[LauncherName, Family]] = {"openmpi": "openmpi", "mpich": "mpich"}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The launcher of this process, its rank and size; None for what the launcher does not set.

    `name` is the program that started the ranks: ``openmpi`` and ``mpich`` are the mpirun or
    mpiexec of that family, ``slurm`` is a step of srun, ``pmix`` another PMIx launcher, and
    ``none`` is a process started alone.
    """

    name: LauncherName
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def is_present(self) -> bool:
        return self.name != "none"


def detect(environment: Mapping[str, str]) -> Launcher:
    """The launcher of this process. mpirun inside a Slurm job is mpirun, not Slurm."""

    def number(name: str) -> int | None:
        return _number(environment, name)

    # mpirun first: it starts its daemons as Slurm steps, whose variables its ranks get.
    if (size := number("OMPI_COMM_WORLD_SIZE")) is not None:
        return Launcher(
            name="openmpi",
            rank=number("OMPI_COMM_WORLD_RANK"),
            size=size,
            local_rank=number("OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size=number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        )
    slurm_rank = number("SLURM_PROCID")
    # `srun --mpi=pmi2` sets PMI_SIZE as well; MPI_LOCALRANKID comes from an mpiexec only.
    if "PMI_SIZE" in environment and (slurm_rank is None or "MPI_LOCALRANKID" in environment):
        return Launcher(
            name="mpich",
            rank=number("PMI_RANK"),
            size=number("PMI_SIZE"),
            local_rank=number("MPI_LOCALRANKID"),
            local_size=number("MPI_LOCALNRANKS"),
        )
    tasks = number("SLURM_STEP_NUM_TASKS")
    if slurm_rank is not None:
        # A step of one task may be an interactive shell, in which the user starts mpirun, and it
        # has PMI or PMIx variables wherever the cluster's MpiDefault says so.
        if tasks is None or tasks <= 1:
            return Launcher(name="none")
        return Launcher(
            name="slurm", rank=slurm_rank, size=tasks, local_rank=number("SLURM_LOCALID")
        )
    if (rank := number("PMIX_RANK")) is not None:
        return Launcher(name="pmix", rank=rank)
    return Launcher(name="none")


def survives_deaths(environment: Mapping[str, str]) -> bool:
    """Whether MPI tells the ranks of the death of one, instead of ending them all: Open MPI's does
    under ``mpirun --with-ft ulfm``."""
    return environment.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")


def slurm_switches(environment: Mapping[str, str]) -> tuple[str, str]:
    """The switches above this host, as Slurm names them, and what each part of that is:
    ``("spine.rack1.h1", "switch.switch.node")``; empty texts where Slurm has no topology."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    return (address, pattern) if len(address) + len(pattern) < 4096 else ("", "")


def boot_id() -> str:
    """Return the boot id of the running kernel: processes that read the same one share their
    processors. "" where the kernel does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def family_of(library_version: str) -> Family:
    """The family of an MPI library, from what MPI.Get_library_version() answers."""
    text = library_version.lower()
    if "open mpi" in text:
        return "openmpi"
    if "intel" in text and "mpi library" in text:
        return "intel"
    # MPICH's relatives (MVAPICH, Cray) speak the same PMI.
    return "mpich" if "mpich" in text or "mvapich" in text else "unknown"


def library_name(library_version: str) -> str:
    """``Open MPI v5.0.11`` or ``MPICH 5.0.2``: the first words of the long version text."""
    # Open MPI's text ends with a null byte in mpi4py 4.1.
    first = library_version.strip("\0 \n").split("\n")[0].split(",")[0]
    return " ".join(first.replace("Version:", " ").split()) or FAMILY_NAMES["unknown"]


def explain_mismatch(environment: Mapping[str, str], *, library_version: str) -> str | None:
    """Why this library must not even be initialised under this launcher; None where it may be.

    To be asked before MPI_Init (MPI.Get_library_version() needs none): MPICH aborts the process
    in MPI_Init when it finds PMIx only, and no error text of ours could follow that.
    """
    launcher = detect(environment)
    family = family_of(library_version)
    library = library_name(library_version)
    # MPICH may be built with PMIx; its version text has the options it was configured with.
    lacks_pmix = family in ("mpich", "intel") and "pmix" not in library_version.lower()
    if launcher.name == "slurm" and "PMIX_RANK" in environment and lacks_pmix:
        return (
            f"srun started this job with --mpi=pmix, but {library} has no PMIx: "
            f"use srun --mpi={SRUN_MPI[family]}"
        )
    if (launcher.name == "openmpi" and lacks_pmix) or (
        launcher.name == "mpich" and family == "openmpi" and launcher.size != 1
    ):
        return _other_mpirun(launcher, library)
    return None


def explain_singleton(
    environment: Mapping[str, str], *, world_size: int, library_version: str
) -> str | None:
    """Why MPI's world has one rank where the launcher started several; None where all is well.

    Without the launcher's help an MPI library starts as "rank 0 of 1", silently, N times over.
    """
    launcher = detect(environment)
    if world_size != 1 or launcher.size is None or launcher.size <= 1:
        return None
    family = family_of(library_version)
    library = library_name(library_version)
    if launcher.name != "slurm":
        return _other_mpirun(launcher, library)
    started = f"srun started {launcher.size} tasks, but each is alone (an MPI world of 1 rank)"
    used = environment.get("SLURM_MPI_TYPE")
    now = f", not --mpi={used}" if used else ""
    if family not in SRUN_MPI:
        return f"{started}: {library} needs another srun --mpi= value{now}; see srun --mpi=list"
    expected = SRUN_MPI[family]
    if used == expected:
        return (
            f"{started} although srun ran with --mpi={expected}: {library} and Slurm's {expected} "
            "plugin do not understand each other; use mpirun inside sbatch or salloc"
        )
    return f"{started}: {library} needs srun --mpi={expected}{now}"


def explain_torchrun(environment: Mapping[str, str]) -> str | None:
    """Return the error for a process that torchrun, not an MPI launcher, started (RANK and
    WORLD_SIZE > 1 are set); None for other processes."""
    size = _number(environment, "WORLD_SIZE")
    if "RANK" not in environment or size is None or size <= 1:
        return None
    return (
        f"WORLD_SIZE = {size} and RANK are set, as by torchrun, and no MPI launcher has started "
        "this process: each of them would train a model of its own; start the script with psdist "
        "run -n N, mpirun or srun, or unset WORLD_SIZE to train in one process"
    )


def _other_mpirun(launcher: Launcher, library: str) -> str:
    starter = FAMILY_NAMES[_FAMILY_OF_LAUNCHER.get(launcher.name, "unknown")]
    return (
        f"mpirun of {starter} started {launcher.size} ranks, but mpi4py loads {library}, so each "
        "would be alone: start the job with the mpirun of that installation "
        "(`psdist doctor` shows which is which)"
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
