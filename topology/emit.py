"""A plan as files and a command line for a launcher: ``psdist plan --emit LAUNCHER --out DIR``.

    write(files(plan, cluster, "openmpi5", script="train.py"), Path("job"))

The launcher brings each rank to its host. Roles and cores come from plan.json, which every rank
reads: it binds itself. Where a launcher can be told the cores as well, it is, so that MPI starts on
them. Only Open MPI's rankfile names host and cores of each rank. MPICH and Intel MPI take cores by
local rank, the same on every host. A mask outside of the step's PUs kills a step of Slurm's.

The syntax is what the launchers were seen to take: Slurm 22.05, Open MPI 4.1.4 and 5.0.11, MPICH
5.0.2; for Intel MPI, Flux and PBS, that of their manuals. Starts nothing. Host names reach shells
from here, so they are checked again.

Longer than other modules: the syntax of eight launchers.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from psdist.errors import PlacementError
from psdist.topology.network import Cluster
from psdist.topology.plan import Plan, PlannedRank, encode
from psdist.topology.text import shown
from psdist.topology.text.bitmap import format_list
from psdist.topology.text.hostlist import compress

Launcher: TypeAlias = Literal[
    "slurm", "openmpi4", "openmpi5", "mpich", "intel", "hostfile", "pbs", "flux", "json"
]

PLAN_FILE = "plan.json"
MAX_RANKFILE_ENTRY: Final = 63
"""Characters of ``HOST slot=LIST``. Open MPI 4.1.4 overruns a buffer beyond, PRRTE 3.0.14 cuts the
text and binds another core."""
MAX_ARGUMENT: Final = 100_000
"""Bytes in one word of a command line; Linux refuses 128 KiB."""
MAX_NOTED_HOSTS: Final = 200
"""Characters of a host list in a note."""

_ADDRESS = re.compile(r"[0-9.]+")
_SELF_BINDING = "each rank binds itself to the cores that plan.json has for it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The arguments and files of one launcher; ``command`` ends where the program begins."""

    files: dict[str, str]
    command: tuple[str, ...]
    notes: tuple[str, ...]


def slurm(plan: Plan, _cluster: Cluster) -> Parts:
    """A host per rank, in rank order. Hosts are called as in slurm.conf."""
    notes = [
        f"srun has no words for the cores of each rank: {_SELF_BINDING}; leave out -c and --exact, "
        "which take cores away from it",
        "srun may need --mpi=pmix (Open MPI 5) or --mpi=pmi2 (MPICH), where that is not the "
        "site's default",
    ]
    hosts = compress(plan.hosts)
    if len(hosts) <= MAX_NOTED_HOSTS:
        notes.append(f"inside an allocation it needs these hosts: --nodelist={hosts}")
    return Parts(
        files={"slurm.hosts": _lines(each.host for each in plan.ranks)},
        command=(
            "SLURM_HOSTFILE=slurm.hosts",
            "srun",
            *("-n", str(len(plan.ranks)), "-N", str(len(plan.hosts))),
            "--distribution=arbitrary",
            "--cpu-bind=none",
        ),
        notes=tuple(notes),
    )


def openmpi(plan: Plan, cluster: Cluster, *, version: int) -> Parts:
    """A rankfile of flat lists of logical cores: all that versions 4 and 5 read correctly.

    Where one rank cannot be told its cores, none is. Version 4 refuses a rankfile without cores
    (rmaps_rank_file.c, "no-slot-list"), and takes a host per rank from its sequential mapper.
    Version 5 takes one, binds no rank then, and refuses an explicit ``--bind-to none``.
    """
    _check_short_names(plan)
    start = ("mpirun", "-n", str(len(plan.ranks)))
    why = _why_no_cores(plan, cluster)
    notes = () if why is None else (f"{why}: the file names hosts only, and {_SELF_BINDING}",)
    if why is not None and version == 4:
        return Parts(
            files={"openmpi.hosts": _lines(each.host for each in plan.ranks)},
            command=(
                *start,
                *("--hostfile", "openmpi.hosts", "--map-by", "seq", "--bind-to", "none"),
            ),
            notes=notes,
        )
    entry = _rankfile_entry if why is None else _host_of
    name = "openmpi.rankfile"
    option = ("--rankfile", name) if version == 4 else ("--map-by", f"rankfile:FILE={name}")
    return Parts(
        files={name: _lines(f"rank {each.rank}={entry(each)}" for each in plan.ranks)},
        command=(*start, *option),
        notes=notes,
    )


def mpich(plan: Plan, _cluster: Cluster) -> Parts:
    """Hosts with their numbers of ranks, in the order of first ranks; a map where ranks mix."""
    counts = Counter(each.host for each in plan.ranks)
    hosts = _lines(f"{host}:{counts[host]}" for host in plan.hosts)
    command = ["mpiexec", "-f", "mpich.hosts", "-n", str(len(plan.ranks))]
    notes: list[str] = []
    if len(_runs(plan)) > len(plan.hosts):
        position = {host: str(index) for index, host in enumerate(plan.hosts)}
        rank_map = ",".join(position[each.host] for each in plan.ranks)
        if len(rank_map) > MAX_ARGUMENT:
            raise PlacementError(
                f"plan: {len(plan.ranks)} ranks that change hosts {len(_runs(plan))} times are too "
                "many for mpiexec's command line: number the ranks of each host one after another"
            )
        command += ["-rankmap", rank_map]
        notes.append("-rankmap is an option of MPICH 5; an older mpiexec refuses it")
    alike = _cpus_by_local_rank(plan)
    if alike is None:
        command += ["-bind-to", "none"]
        notes.append(f"the hosts do not bind their ranks alike: {_SELF_BINDING}")
    else:
        command += ["-bind-to", "user:" + ",".join("+".join(map(str, cpus)) for cpus in alike)]
    return Parts(files={"mpich.hosts": hosts}, command=tuple(command), notes=tuple(notes))


def intel(plan: Plan, _cluster: Cluster) -> Parts:
    """A machine file is filled in order, and may name a host again (Developer Reference)."""
    runs = _runs(plan)
    alike = _cpus_by_local_rank(plan)
    notes: tuple[str, ...] = ()
    if alike is None or len(runs) > len(plan.hosts):
        pinning = ("I_MPI_PIN", "off")
        why = "the hosts do not bind their ranks alike" if alike is None else "the ranks mix hosts"
        notes = (f"{why}: {_SELF_BINDING}",)
    else:
        masks = (f"{sum(1 << cpu for cpu in cpus):#x}" for cpus in alike)
        pinning = ("I_MPI_PIN_DOMAIN", f"[{','.join(masks)}]")
    return Parts(
        files={"intel.machines": _lines(f"{host}:{count}" for host, count in runs)},
        command=(
            "mpirun",
            *("-machinefile", "intel.machines", "-n", str(len(plan.ranks)), "-genv", *pinning),
        ),
        notes=notes,
    )


def hostfile(plan: Plan, _cluster: Cluster) -> Parts:
    """Hosts with their slots, as Open MPI takes them everywhere and Kubernetes' MPI operator
    writes them; filled in order."""
    _check_short_names(plan)
    counts = [f"{host} slots={count}" for host, count in _filled_in_order(plan)]
    return Parts(
        files={"hostfile": _lines(counts)},
        command=(
            *("mpirun", "-n", str(len(plan.ranks)), "--hostfile", "hostfile"),
            *("--map-by", "slot", "--bind-to", "none"),
        ),
        notes=(
            f"{_SELF_BINDING}; in the launcher of an MPIJob, this file takes the place of "
            "/etc/mpi/hostfile",
        ),
    )


def pbs(plan: Plan, cluster: Cluster) -> Parts:
    """A machine file with one line per rank, as in $PBS_NODEFILE; MPICH's and Intel MPI's mpiexec
    fill it in order. Open MPI 5 gives a host that is listed once a slot per core. PBS itself takes
    words (-l select), not a file; a chunk without ncpus has one core."""
    cores = {node.name: len(node.machine.cores) for node in cluster.nodes}
    chunks = [
        f"1:host={host}:ncpus={cores[host]}:mpiprocs={count}"
        for host, count in _filled_in_order(plan)
    ]
    return Parts(
        files={
            "pbs.nodes": _lines(each.host for each in plan.ranks),
            "pbs.select": f"-l select={'+'.join(chunks)} -l place=excl\n",
        },
        command=("mpiexec", "-n", str(len(plan.ranks)), "-machinefile", "pbs.nodes"),
        notes=(
            "instead of $PBS_NODEFILE, for MPICH and Intel MPI; Open MPI reads it otherwise: "
            f"--emit hostfile or openmpi5; {_SELF_BINDING}",
            "a job that gets these hosts: qsub $(cat pbs.select)",
        ),
    )


def flux(plan: Plan, _cluster: Cluster) -> Parts:
    """A host per rank, in rank order: flux-run's task map of a host file."""
    hosts = compress(plan.hosts)
    needs = (f"--requires=hosts:{hosts}",) if len(hosts) <= MAX_ARGUMENT else ()
    return Parts(
        files={"flux.hosts": _lines(each.host for each in plan.ranks)},
        command=(
            *("flux", "run", "-N", str(len(plan.hosts)), "-n", str(len(plan.ranks))),
            *("--exclusive", *needs, "--taskmap=hostfile:flux.hosts", "-o", "cpu-affinity=off"),
        ),
        notes=(f"{_SELF_BINDING}; Open MPI 5 may need -o pmi=pmix",),
    )


BUILDERS: Final[dict[str, Callable[[Plan, Cluster], Parts]]] = {
    "slurm": slurm,
    "openmpi4": partial(openmpi, version=4),
    "openmpi5": partial(openmpi, version=5),
    "mpich": mpich,
    "intel": intel,
    "hostfile": hostfile,
    "pbs": pbs,
    "flux": flux,
}


def _why_no_cores(plan: Plan, cluster: Cluster) -> str | None:
    """Why a rankfile cannot name the cores of this plan's ranks; None when it can."""
    machines = {node.name: node.machine for node in cluster.nodes}
    for host in plan.hosts:
        # mpirun counts the cores that it finds, and finds fewer inside a cgroup.
        logical = [core.logical for core in machines[host].cores]
        if sorted(logical) != list(range(len(logical))):
            return f"the job has a part of {host} only, whose cores mpirun may count otherwise"
        # PRRTE 3.0.14 takes threads for cores if the first core has but one, and binds too little.
        threads = [len(core.cpus) for core in machines[host].cores]
        if threads[0] < max(threads):
            return (
                f"on {host} the first core has fewer hardware threads than others, whose numbers "
                "mpirun then miscounts"
            )
    taken: set[tuple[str, int]] = set()
    for each in plan.ranks:
        if not each.cores:
            return f"rank {each.rank} is not to be bound"
        places = {(each.host, core) for core in each.cores}
        if taken & places:
            return f"rank {each.rank} shares a core with another rank, which mpirun refuses"
        taken |= places
        if len(_rankfile_entry(each)) > MAX_RANKFILE_ENTRY:
            return (
                f"the cores of rank {each.rank} take more than the {MAX_RANKFILE_ENTRY} characters "
                "that mpirun reads correctly"
            )
    return None


def _check_short_names(plan: Plan) -> None:
    """Raise PlacementError for hosts that Open MPI, which cuts names at the dot, takes for one."""
    full: dict[str, str] = {}
    for host in plan.hosts:
        if _ADDRESS.fullmatch(host):  # left whole
            continue
        other = full.setdefault(host.partition(".")[0], host)
        if other != host:
            raise PlacementError(
                f"plan: hosts {other} and {host} are one to Open MPI, which cuts names at the "
                "first dot: use another launcher, or names that differ before it"
            )


def _host_of(each: PlannedRank) -> str:
    return each.host


def _rankfile_entry(each: PlannedRank) -> str:
    return f"{each.host} slot={format_list(each.cores)}"


def _runs(plan: Plan) -> list[tuple[str, int]]:
    """(host, number of ranks) for each run of neighbouring ranks on one host."""
    return [(host, len(list(run))) for host, run in groupby(plan.ranks, _host_of)]


def _filled_in_order(plan: Plan) -> list[tuple[str, int]]:
    """(host, number of ranks) for files that are filled from the top, rank by rank."""
    runs = _runs(plan)
    if len(runs) > len(plan.hosts):
        host = next(host for host, count in Counter(host for host, _ in runs).items() if count > 1)
        raise PlacementError(
            f"plan: the ranks of {host} are not numbered one after another, and this file is "
            "filled host by host: use --emit openmpi5, mpich, slurm or flux"
        )
    return runs


def _cpus_by_local_rank(plan: Plan) -> list[tuple[int, ...]] | None:
    """The PUs of a host's ranks in order, where all hosts have the same ones; else None."""
    by_host: dict[str, list[tuple[int, ...]]] = {}
    for each in plan.ranks:
        by_host.setdefault(each.host, []).append(each.cpus)
    longest = max(by_host.values(), key=len)
    is_alike = all(cpus == longest[: len(cpus)] for cpus in by_host.values())
    return longest if is_alike and all(longest) else None


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """Everything a launcher needs for a plan."""

    files: dict[str, str]
    """Content by name; all belong into one directory."""
    commands: tuple[str, ...]
    """Lines for a shell whose working directory is that one; any one of them starts the job."""
    notes: tuple[str, ...]
    """Notes for the user, and what the launcher cannot be given; a sentence each."""


def files(
    plan: Plan, cluster: Cluster, launcher: Launcher, *, script: str = "train.py"
) -> Emission:
    """The files and the command that start ``script`` as planned.

    A relative ``script`` is looked for in the directory of the files. Raises PlacementError for a
    plan that is not sound, or does not fit the cluster's machines, a launcher or a script that
    cannot be, and hosts that this launcher takes for one.
    """
    if launcher not in get_args(Launcher):
        known = ", ".join(get_args(Launcher))
        raise PlacementError(f"launcher {shown(launcher)} is not known: give one of {known}")
    text = encode(plan).decode("ascii")
    _check_fits(plan, cluster)
    program = ["psdist", "run", "--placement", PLAN_FILE, _word(script)]
    if launcher == "json":
        return Emission(
            files={PLAN_FILE: text},
            commands=(shlex.join(program),),
            notes=(
                f"start this command as {len(plan.ranks)} ranks, under a launcher that puts each "
                "on the host that plan.json names for it",
            ),
        )
    parts = BUILDERS[launcher](plan, cluster)
    return Emission(
        files={PLAN_FILE: text, **parts.files},
        commands=(shlex.join([*parts.command, *program]),),
        notes=parts.notes,
    )


def write(emission: Emission, directory: Path) -> None:
    """Write the files into ``directory``, which is made if it is missing.

    Files of the same names are replaced. Raises PlacementError where the system refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in emission.files.items():
            (directory / name).write_text(content, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise PlacementError(
            f"{shown(str(directory))}: the plan cannot be written there ({reason}): give another "
            "directory"
        ) from None


def _word(script: str) -> str:
    """The script as a word that no program takes for an option, and no terminal obeys."""
    if not script or not script.isprintable():
        raise PlacementError(
            f"script {shown(script)} is empty or has control characters: give a plain file name"
        )
    return f"./{script}" if script.startswith("-") else script


def _check_fits(plan: Plan, cluster: Cluster) -> None:
    """Raise PlacementError where the plan names hosts, cores or PUs that the cluster lacks."""
    machines = {node.name: node.machine for node in cluster.nodes}
    if len(machines) < len(cluster.nodes):
        twice = Counter(node.name for node in cluster.nodes).most_common(1)[0][0]
        raise PlacementError(
            f"cluster ({cluster.source}): two nodes are called {shown(twice)}: name each once"
        )
    cpus_of = {
        name: {core.logical: core.cpus for core in machine.cores}
        for name, machine in machines.items()
    }
    for each in plan.ranks:
        if each.host not in machines:
            raise PlacementError(
                f"plan: rank {each.rank}: host {shown(each.host)} is not in the cluster "
                f"({cluster.source}): make the plan for this cluster"
            )
        cores = cpus_of[each.host]
        if missing := set(each.cores) - cores.keys():
            raise PlacementError(
                f"plan: rank {each.rank}: core {min(missing)} is not one of the {len(cores)} of "
                f"{each.host}: make the plan for this machine"
            )
        if missing := set(each.cpus).difference(*(cores[core] for core in each.cores)):
            raise PlacementError(
                f"plan: rank {each.rank}: cpu {min(missing)} is on none of its cores on "
                f"{each.host}: make the plan for this machine"
            )
