"""Launchers understand what is written for them: each rank gets its host and exactly its cores.

Open MPI maps without starting anything (``--rtos donotlaunch``), against a machine from a file.
MPICH starts its ranks, here, through a stand-in for ssh that only notes the host: what rank is on
what host is then its own word. Its bindings, of machines from files, it prints. Slurm runs on the
test cluster. Machines are read by hwloc's own tools, not by psdist.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from psdist.topology.emit import Emission, Launcher, files, write
from psdist.topology.machine import Machine
from psdist.topology.network import one_rack
from psdist.topology.plan import Plan
from tests.support.hand_made_plans import Place, hyperthreaded, machine_of, planned
from tests.support.machine_files import machine_file, real
from tests.support.mpirun import environment_prefix, require, run_program
from tests.support.slurm.cluster import SlurmCluster

TAIL = ["psdist", "run", "--placement", "plan.json", "train.py"]
TIMEOUT_S = 60.0

# A machine is an XML file; `Made` makes one in a directory.
Made = Callable[[Path], Path]


def hwloc(tool: str, *args: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"hwloc is not installed: there is no {tool}")
    done = run_program([tool, *args], timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.text
    return done.stdout


def described(text: str, *, allowed: str = "") -> Made:
    """The machine that lstopo makes of a description, and of it only some PUs (a mask)."""

    def make(folder: Path) -> Path:
        path = folder / "machine.xml"
        hwloc("lstopo", "--input", text, "--of", "xml", "--force", str(path))
        if allowed:
            arguments = ["--input", str(path), "--restrict", allowed]
            path = folder / "part.xml"
            hwloc("lstopo", *arguments, "--of", "xml", "--force", str(path))
        return path

    return make


def from_file(name: str) -> Made:
    return lambda _: machine_file(name).resolve()


def machine_in(path: Path) -> Machine:
    """The machine by hwloc's word: its cores in logical order, with the OS numbers of their PUs."""
    listed = hwloc("hwloc-calc", "-i", str(path), "--po", "-H", "package.core.pu", "all").split()
    split = [re.fullmatch(r"(Package:\d+\.Core:\d+)\.PU:(\d+)", word) for word in listed]
    pairs = [(match[1], int(match[2])) for match in split if match]
    assert len(pairs) == len(listed) > 0
    return machine_of(
        [tuple(cpu for _, cpu in each) for _, each in groupby(pairs, lambda pair: pair[0])]
    )


def shuffled_plan(machine: Machine, hosts: Sequence[str], seed: int) -> Plan:
    """Ranks on hosts in any order, with runs of cores that no other rank of the host has."""
    chosen = random.Random(seed)
    logical = [core.logical for core in machine.cores]
    seats: list[tuple[str, list[int]]] = []
    for host in hosts:
        left = list(logical)
        for _ in range(min(4, len(left))):
            start = chosen.randrange(len(left))
            taken = left[start : start + chosen.randint(1, 6)]
            left = [core for core in left if core not in taken]
            seats.append((host, taken))
            if not left:
                break
    chosen.shuffle(seats)
    places: list[Place] = [
        (host, "worker" if number else "server", cores)
        for number, (host, cores) in enumerate(seats)
    ]
    return planned(one_rack(hosts, machine), places)


def emission_for(
    plan: Plan, machine: Machine, launcher: Launcher, folder: Path
) -> tuple[Emission, list[str]]:
    """Emitted and written into ``folder``; the words of the command before the program."""
    emission = files(plan, one_rack(plan.hosts, machine), launcher)
    write(emission, folder)
    words = shlex.split(emission.commands[0])
    assert words[-len(TAIL) :] == TAIL
    return emission, words[: -len(TAIL)]


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


# --- Open MPI 5


def mapped_by_open_mpi(
    command: Sequence[str], path: Path, folder: Path
) -> dict[int, tuple[str, set[int] | None]]:
    """Host and PUs (OS numbers) of each rank as mpirun would have them; None: not bound."""
    require("openmpi")
    assert command[0] == "mpirun"
    argv = [str(environment_prefix("openmpi") / "bin" / "mpirun")]
    argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    argv += ["--prtemca", "hwloc_use_topo_file", str(path), "--rtos", "donotlaunch"]
    argv += ["--display", "bind", *command[1:], *TAIL]
    done = run_program(argv, timeout_s=TIMEOUT_S, cwd=folder)
    assert done.returncode == 0, done.text
    line = re.compile(r"^Proc \[\S+,(\d+)\] Node (\S+) (is UNBOUND|bound to .*)$", re.MULTILINE)
    assert line.search(done.stdout), done.text
    cores = {core.logical: core.cpus for core in machine_in(path).cores}
    has_hyperthreads = any(len(cpus) > 1 for cpus in cores.values())

    def cpus_shown(where: str) -> set[int] | None:
        if where == "is UNBOUND":
            return None
        shown = set().union(*(numbers(each) for each in re.findall(r"core:L([0-9,-]+)", where)))
        # Where a core has but one PU, what is called core:L are OS numbers of PUs.
        return {cpu for core in shown for cpu in cores[core]} if has_hyperthreads else shown

    return {int(rank): (host, cpus_shown(where)) for rank, host, where in line.findall(done.stdout)}


OPEN_MPI_READS: dict[str, Made] = {
    "two sockets": described("pack:2 numa:1 l3:2 core:8 pu:2"),
    "no hyperthreads": described("pack:2 numa:2 core:4 pu:1"),
    "128 cores": described("pack:2 numa:1 core:64 pu:2"),
    "384 processors": described("pack:2 numa:4 l3:3 core:8 pu:2"),
    "processors from 8 on": described(
        f"pack:1 core:16 pu:2(indexes={','.join(map(str, range(8, 40)))})"
    ),
    "no hyperthreads, interleaved": described("pack:2 core:4 pu:1(indexes=0,4,1,5,2,6,3,7)"),
    "interleaved": described("pack:2 core:4 pu:2(indexes=0,8,2,10,4,12,6,14,1,9,3,11,5,13,7,15)"),
    "sparse": described("pack:2 core:8 pu:2", allowed="0xf0f0ff0c"),
    **{
        name.partition(".")[0]: from_file(name)
        for name in (
            "four-quarters.xml",
            "part-of-machine.xml",
            "two-sockets.xml",
            *real(
                "cts1-pascal.xml",
                "eas-tioga.xml",
                "epyc-corona.xml",
                "g4dnmetal.xml",
                "nvidiaDGX2.v2.xml",
            ),
        )
    },
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", OPEN_MPI_READS)
def test_open_mpi_5_gives_each_rank_its_host_and_exactly_its_cores(
    name: str, tmp_path: Path
) -> None:
    path = OPEN_MPI_READS[name](tmp_path)
    machine = machine_in(path)
    for seed in range(3):
        plan = shuffled_plan(machine, ["n1.example.org", "gpu-02", "n3"], seed)
        emission, command = emission_for(plan, machine, "openmpi5", tmp_path)
        assert emission.notes == ()
        assert mapped_by_open_mpi(command, path, tmp_path) == {
            each.rank: (each.host, set(each.cpus)) for each in plan.ranks
        }


@pytest.mark.mpi
def test_open_mpi_5_is_told_hosts_where_it_would_miscount_the_cores(tmp_path: Path) -> None:
    """The first core has one processor, all others have two."""
    path = described("pack:2 core:4 pu:2", allowed="0xfffe")(tmp_path)
    machine = machine_in(path)
    plan = shuffled_plan(machine, ["n1", "n2"], 1)
    _, command = emission_for(plan, machine, "openmpi5", tmp_path)
    assert mapped_by_open_mpi(command, path, tmp_path) == {
        each.rank: (each.host, None) for each in plan.ranks
    }


@pytest.mark.mpi
def test_open_mpi_5_reads_the_longest_entry_that_is_written(tmp_path: Path) -> None:
    path = described("pack:2 core:32 pu:2")(tmp_path)
    machine = machine_in(path)
    cores = [*range(0, 33, 2), 35, 37, 39]
    plan = planned(
        one_rack(["a01"], machine), [("a01", "server", cores), ("a01", "worker", range(40, 64))]
    )
    emission, command = emission_for(plan, machine, "openmpi5", tmp_path)
    entry = emission.files["openmpi.rankfile"].splitlines()[0].partition("=")[2]
    assert len(entry) == 63
    assert mapped_by_open_mpi(command, path, tmp_path) == {
        each.rank: ("a01", set(each.cpus)) for each in plan.ranks
    }


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("server", "worker"),
    [
        (range(0, 64, 2), [1]),  # too long a list
        ([], [1]),  # not to be bound
        ([0, 1], [1, 2]),  # a shared core
    ],
)
def test_open_mpi_5_puts_ranks_on_hosts_where_it_cannot_be_told_their_cores(
    server: Sequence[int], worker: Sequence[int], tmp_path: Path
) -> None:
    path = described("pack:2 core:32 pu:2")(tmp_path)
    machine = machine_in(path)
    host = "a-host-with-a-name-of-more-than-63-characters.in-a-domain.example.org"
    places: list[Place] = [
        ("n2", "worker", [0]),
        (host, "server", server),
        (host, "worker", worker),
    ]
    plan = planned(one_rack([host, "n2"], machine), places)
    emission, command = emission_for(plan, machine, "openmpi5", tmp_path)
    assert "binds itself" in emission.notes[0]
    assert mapped_by_open_mpi(command, path, tmp_path) == {
        0: ("n2", None),
        1: (host, None),
        2: (host, None),
    }


@pytest.mark.mpi
def test_open_mpi_5_fills_the_hosts_of_a_host_file_in_order(tmp_path: Path) -> None:
    path = described("pack:2 numa:2 core:4 pu:1")(tmp_path)
    machine = machine_in(path)
    hosts = ["n2", "n2", "n2", "n1", "n3.example.org", "n3.example.org"]
    places: list[Place] = [
        (host, "worker" if rank else "server", [rank]) for rank, host in enumerate(hosts)
    ]
    plan = planned(one_rack(["n1", "n2", "n3.example.org"], machine), places)
    _, command = emission_for(plan, machine, "hostfile", tmp_path)
    # Mapping by slots it shows names as far as the first dot.
    assert mapped_by_open_mpi(command, path, tmp_path) == {
        rank: (host.partition(".")[0], None) for rank, host in enumerate(hosts)
    }


# --- MPICH


# Called as ssh is: options, the host, and the words of a command line for a shell.
STAND_IN_FOR_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
ON_HOST=$1; export ON_HOST; shift
eval "exec $*"
"""
STAND_IN_FOR_PSDIST = """#!/bin/sh
echo "rank $PMI_RANK on $ON_HOST runs: $*"
"""


@dataclass(frozen=True, kw_only=True)
class Started:
    hosts: dict[int, str]
    bindings: list[tuple[int, set[int]]]
    """(local rank, OS numbers of its PUs), for each rank that was bound, sorted by local rank."""


def started_by_mpich(emission: Emission, folder: Path, machine: Path | None = None) -> Started:
    """Run the emitted command line, by a shell, as it is."""
    require("mpich")
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("ssh", STAND_IN_FOR_SSH), ("psdist", STAND_IN_FOR_PSDIST)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{environment_prefix('mpich') / 'bin'}:{os.environ['PATH']}",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(programs / "ssh"),
    }
    if machine is not None:
        environment |= {
            "HWLOC_XMLFILE": str(machine), "HWLOC_THISSYSTEM": "0", "HYDRA_TOPO_DEBUG": "1",
        }  # fmt: skip
    line = emission.commands[0]
    done = run_program(["sh", "-c", line], timeout_s=TIMEOUT_S, env=environment, cwd=folder)
    assert done.returncode == 0, done.text
    said = re.findall(r"^rank (\d+) on (\S+) runs: (.*)$", done.stdout, re.MULTILINE)
    assert {words for _, _, words in said} == {shlex.join(TAIL[1:])}, done.text
    masks = re.findall(r"^process (\d+) binding: ([01]+)$", done.stdout, re.MULTILINE)
    bindings = [
        (int(local), {cpu for cpu, bit in enumerate(mask) if bit == "1"}) for local, mask in masks
    ]
    return Started(
        hosts={int(rank): host for rank, host, _ in said},
        bindings=sorted(bindings, key=lambda each: each[0]),
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    "hosts",
    [
        ["n1", "n1", "n2", "n2"],
        ["n2", "n1", "n1", "n2", "n1", "n3.example.org"],
        ["n3", "n3", "n1", "n2", "n3"],
    ],
)
def test_mpich_starts_each_rank_on_its_host(hosts: list[str], tmp_path: Path) -> None:
    machine = machine_of(hyperthreaded(8))
    places: list[Place] = [
        (host, "worker" if rank else "server", [rank]) for rank, host in enumerate(hosts)
    ]
    plan = planned(one_rack(sorted(set(hosts)), machine), places)
    emission, _ = emission_for(plan, machine, "mpich", tmp_path)
    assert started_by_mpich(emission, tmp_path).hosts == dict(enumerate(hosts))


@pytest.mark.mpi
def test_mpich_fills_the_hosts_of_a_pbs_list_in_order(tmp_path: Path) -> None:
    hosts = ["n2", "n2", "n1", "n3.example.org", "n3.example.org"]
    machine = machine_of(hyperthreaded(8))
    places: list[Place] = [
        (host, "worker" if rank else "server", [rank]) for rank, host in enumerate(hosts)
    ]
    plan = planned(one_rack(sorted(set(hosts)), machine), places)
    emission, _ = emission_for(plan, machine, "pbs", tmp_path)
    assert started_by_mpich(emission, tmp_path).hosts == dict(enumerate(hosts))


MPICH_READS: dict[str, Made] = {
    name: made
    for name, made in OPEN_MPI_READS.items()
    if name
    in (
        *("two sockets", "384 processors", "processors from 8 on", "sparse"),
        *("four-quarters", "eas-tioga"),
    )
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", MPICH_READS)
def test_mpich_binds_ranks_alike_on_all_hosts_to_exactly_their_processors(
    name: str, tmp_path: Path
) -> None:
    path = MPICH_READS[name](tmp_path)
    machine = machine_in(path)
    num_cores = len(machine.cores)
    places: list[Place] = [
        ("n1", "server", [0]),
        ("n2", "server", [0]),
        ("n1", "worker", range(1, num_cores - 1)),
        ("n2", "worker", range(1, num_cores - 1)),
        ("n1", "worker", [num_cores - 1]),
    ]
    plan = planned(one_rack(["n1", "n2"], machine), places)
    emission, command = emission_for(plan, machine, "mpich", tmp_path)
    assert command[-2] == "-bind-to"
    started = started_by_mpich(emission, tmp_path, path)
    assert started.hosts == {0: "n1", 1: "n2", 2: "n1", 3: "n2", 4: "n1"}
    # It shows as many bits as there are PUs: on a machine with gaps in its numbers, not the last.
    can_show = set(range(sum(len(core.cpus) for core in machine.cores)))
    cpus = [set(each.cpus) & can_show for each in plan.ranks]
    assert any(cpus)
    assert started.bindings == [(0, cpus[0])] * 2 + [(1, cpus[2])] * 2 + [(2, cpus[4])]


@pytest.mark.mpi
def test_mpich_binds_nobody_where_hosts_differ(tmp_path: Path) -> None:
    path = described("pack:1 core:8 pu:2")(tmp_path)
    machine = machine_in(path)
    places: list[Place] = [("n1", "server", [0]), ("n1", "worker", [1]), ("n2", "worker", [2])]
    plan = planned(one_rack(["n1", "n2"], machine), places)
    emission, _ = emission_for(plan, machine, "mpich", tmp_path)
    assert "binds itself" in emission.notes[0]
    started = started_by_mpich(emission, tmp_path, path)
    assert started.hosts == {0: "n1", 1: "n1", 2: "n2"}
    assert started.bindings == []


# --- Slurm


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_slurm_starts_each_rank_on_its_host(slurm_cluster: SlurmCluster) -> None:
    hosts = ["h3", "h1", "h4", "h3", "h2", "h1", "h3", "h4", "h1", "h1"]
    machine = machine_of([(0,), (1,), (2,), (3,)])
    places: list[Place] = [
        (host, "worker" if rank else "server", [hosts[:rank].count(host)])
        for rank, host in enumerate(hosts)
    ]
    plan = planned(one_rack(["h1", "h2", "h3", "h4"], machine), places)
    folder = slurm_cluster.directory("emitted")
    _, (hostfile, srun, *options) = emission_for(plan, machine, "slurm", folder)
    assert srun == "srun"
    variable, _, name = hostfile.partition("=")
    done = slurm_cluster.srun(
        [*options, "sh", "-c", "echo $SLURM_PROCID $(hostname) $(pwd)"],
        env={variable: name},
        cwd=folder,
        timeout_s=60,
    )
    assert done.returncode == 0, done.text
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert said == {str(rank): f"{host} {folder}" for rank, host in enumerate(hosts)}, done.text
