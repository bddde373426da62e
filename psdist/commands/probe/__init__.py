"""``psdist probe``: how fast the network of a job is, measured and written to ``network.json``.

    srun --mpi=pmix -N 4 --ntasks-per-node=2 psdist probe

Here is the way from its start in every rank to the file that rank 0 writes; every mistake is one
line and ends all ranks with the same status. Reading order: ``schedule`` (who exchanges with whom,
when), ``measuring`` (all steps, GPUs), ``exchange`` (one pair, its speed), ``report`` (links from
pairs, the table). ``comparison`` is ``--compare``, which measures nothing.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgpack
from rich.console import Console

from psdist.commands.probe import report
from psdist.commands.probe.measuring import Measuring
from psdist.commands.probe.schedule import RankFacts, schedule
from psdist.config.sources import CommandLineValue, Resolved, resolve
from psdist.errors import LaunchError, PlacementError, UserError
from psdist.install import detect
from psdist.protocol.roles import Place
from psdist.ranks.agreement import AgreedExit, agreed, allgather, decided, exchange, start_mpi
from psdist.ranks.failure import end_all, format_error, ignore_interrupts, wait_until_read
from psdist.topology.draw import counted
from psdist.topology.machine import flat_machine
from psdist.topology.machine.sysfs import package_of_affinity
from psdist.topology.network import catalogue as network
from psdist.topology.network import changes, slurm
from psdist.topology.network.catalogue import Network
from psdist.topology.network.sources import build_cluster, read_tree
from psdist.topology.text.hostlist import natural_key

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_PATH: Final = Path("network.json")
_ALONE: Final = (
    "psdist probe measures between ranks, and there is only one: start it as "
    "`mpirun -n 4 psdist probe`, or `srun -N 4 --ntasks-per-node=2 psdist probe`"
)
_QUICK: Final = 4
"""How many times less of everything that is not a number of repetitions."""
_LINES: Final = 20


def probe(json_path: Path | None, quick: bool = False, racks: str | None = None) -> int:
    """Measure between all ranks of the job, print a table and write ``json_path`` (default
    ./network.json); the exit status.

    ``quick`` measures for a quarter of the time, which sees less of a network's bad moments.
    ``racks`` is a file that says which node hangs under which switch; without it Slurm's
    variables say so, or all nodes are taken for one rack.
    """
    launcher = detect(os.environ)
    if not launcher.is_present:
        print(f"psdist: error: {_ALONE}", file=sys.stderr)
        return LaunchError.exit_status
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress, through the launcher's pipe
    try:
        comm = start_mpi()
    except LaunchError as error:  # no MPI, so no agreeing: the launcher's rank 0 speaks for all
        if launcher.rank in (0, None):
            print(f"psdist: error: {error}", file=sys.stderr, flush=True)
            wait_until_read()
        return error.exit_status
    try:
        agreed(comm, LaunchError(_ALONE) if comm.Get_size() == 1 else None)
        return _Run(comm, json_path or DEFAULT_PATH, quick, racks).run()
    except AgreedExit as exit_:
        return exit_.status
    except BaseException as error:  # the others wait for this rank in the next exchange
        ignore_interrupts()
        heading = f"psdist: rank {comm.Get_rank()} on {socket.gethostname()}"
        end_all(comm, heading, *format_error(error))


class _Run:
    """One rank's part; making it and running it are collective."""

    def __init__(self, comm: MPI.Intracomm, path: Path, quick: bool, racks: str | None) -> None:
        self.comm, self.path = comm, path
        self.rank = comm.Get_rank()
        self.scale = _QUICK if quick else 1
        self.places, resolved = exchange(comm, _resolved(racks))
        self.config = resolved.config
        self.hosts = [place.host for place in self.places]
        self.old: Network | None = None
        self.racks = self._agree_on_racks()

    def run(self) -> int:
        steps = schedule(self._everybodys_packages(), self.racks)
        switches = sorted({rack for rack in self.racks.values() if rack}, key=natural_key)
        self._say(
            f"{counted(len(self.racks), 'node')}, {len(self.hosts)} ranks, "
            f"racks: {', '.join(switches) or 'none known'}"
        )
        measuring = Measuring(self.comm, self.hosts, scale=self.scale, say=self._say)
        results = measuring.steps(steps)
        copies = measuring.gpus()
        outcome: bytes | UserError = b""
        if self.rank == 0:
            from mpi4py import MPI

            found = report.catalogue(
                results,
                steps,
                hosts=self.hosts,
                racks=self.racks,
                gpus=copies,
                library=MPI.Get_library_version(),
            )
            # mpirun gives rank 0 a terminal of its own, whatever its output goes to in the end.
            Console(force_terminal=False).print(report.table(found))
            if self.old is not None:
                print(*_said_changes(self.path, self.old, found), sep="\n")
            try:
                _write(self.path, network.encode(found))
                print(f"written to {self.path}", flush=True)
            except PlacementError as error:
                outcome = error
        decided(self.comm, outcome)
        return 0

    def _agree_on_racks(self) -> dict[str, str]:
        """The rack of each host. Rank 0 also reads the older catalogue, if there is one."""
        outcome: bytes | UserError = b""
        if self.rank == 0:
            try:
                self.old = _older(self.path)
                outcome = msgpack.packb(list(_racks(self.places, self.config.racks).items()))
            except PlacementError as error:
                outcome = error
        return dict(msgpack.unpackb(decided(self.comm, outcome)))

    def _everybodys_packages(self) -> list[RankFacts]:
        mine: dict[int, list[int]] = defaultdict(list)
        for cpu in self.places[self.rank].cores:
            mine[package_of_affinity(affinity={cpu})].append(cpu)
        everybody = allgather(self.comm, msgpack.packb(list(mine.items())))
        return [
            RankFacts(
                rank=rank,
                host=self.hosts[rank],
                packages={package: frozenset(cpus) for package, cpus in msgpack.unpackb(packed)},
            )
            for rank, packed in enumerate(everybody)
        ]

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"psdist probe: {text}", flush=True)


def _said_changes(path: Path, old: Network, found: Network) -> list[str]:
    """Return lines on what changed since ``path`` was written."""
    try:
        lines = changes.lines(changes.compare(old, found))
    except PlacementError as error:  # of another cluster: it is replaced all the same
        return [f"not compared with {path} of {old.date}: {error}"]
    said = [f"compared with {path} of {old.date}:"]
    said += [f"  {text}" for text in lines[:_LINES]]
    if not lines:
        said.append("  nothing has changed beyond 10 % (latency: 25 %)")
    if len(lines) > _LINES:
        said.append(f"  and {len(lines) - _LINES} more")
    return said


def _resolved(racks: str | None) -> Resolved | UserError:
    given: dict[str, CommandLineValue] = {} if racks is None else {"hosts.racks": racks}
    try:
        return resolve(command_line=given, environment=os.environ, file=None)
    except UserError as error:
        return error


def _racks(places: Sequence[Place], path: str | None) -> dict[str, str]:
    """The switch of each host, by the name that a plan's cluster gives it; "" for the root."""
    tree = None
    if path is not None:
        tree = read_tree(Path(path))
    elif all(place.switches[0] for place in places):
        tree = slurm.from_addresses({place.host: place.switches for place in places})
    hosts = list(dict.fromkeys(place.host for place in places))
    cluster = build_cluster(hosts, flat_machine([0]), tree=tree)
    return {
        node.name: cluster.switches[node.switch].name if node.switch else ""
        for node in cluster.nodes
    }


def _older(path: Path) -> Network | None:
    """Return the content of the file that is to be written. Another kind of file is an error."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise PlacementError(
            f"{path}: no file can be written there: name one in a folder that is yours"
        )
    return network.read(path) if path.exists() else None


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise PlacementError(
            f"{path}: cannot be written ({error.strerror}): name another with --json"
        ) from error
