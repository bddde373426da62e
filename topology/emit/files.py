"""A plan as files and a command line for a launcher: ``psdist plan --emit LAUNCHER --out DIR``.

Owns what all launchers have in common: the check that plan and cluster fit, plan.json, the end of
the command line, and writing. What each launcher reads is :mod:`psdist.topology.emit.launchers`'.
It starts nothing.

    emission = files(plan, cluster, "openmpi5", script="train.py")
    write(emission, Path("job"))
    print(*emission.commands, *emission.notes, sep="\\n")    # run the commands in job/

The launcher brings each rank to its host. Roles and cores come from plan.json, which every rank
reads: it binds itself, whatever the launcher did. Where a launcher can be told the cores as well,
it is, so that MPI starts on them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from psdist.errors import PlacementError
from psdist.topology.emit.launchers import BUILDERS
from psdist.topology.network.cluster import Cluster
from psdist.topology.plan.codec import encode
from psdist.topology.plan.plan import Plan
from psdist.topology.text.untrusted import shown

Launcher: TypeAlias = Literal[
    "slurm", "openmpi4", "openmpi5", "mpich", "intel", "hostfile", "pbs", "flux", "json"
]

PLAN_FILE = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """What a launcher needs for a plan."""

    files: dict[str, str]
    """Content by name; all belong into one directory."""
    commands: tuple[str, ...]
    """Lines for a shell whose working directory is that one; any one of them starts the job."""
    notes: tuple[str, ...]
    """What the user must know, and what the launcher cannot be told; a sentence each."""


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
