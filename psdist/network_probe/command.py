"""``psdist probe`` from its start in every rank to the file that rank 0 writes.

    raise SystemExit(probe(Path("network.json")))

Owns agreeing on what is measured, the order of steps, and the file. Every mistake is one line and
ends all ranks with the same status.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgpack
from rich.console import Console

from psdist.agreement import AgreedExit, agreed, allgather, broadcast, exchange, start_mpi
from psdist.environment import detect
from psdist.errors import LaunchError, PlacementError, UserError
from psdist.failure import end_all, ignore_interrupts, told, wait_until_read
from psdist.network_probe import gpu, report
from psdist.network_probe.exchange import Line
from psdist.network_probe.flow import Flow
from psdist.network_probe.schedule import RankFacts, Step, StepKind, schedule
from psdist.resolving import Resolved, resolve
from psdist.topology import network, slurm
from psdist.topology.machine import flat_machine
from psdist.topology.network import Network, Pair
from psdist.topology.sources import build_cluster, read_tree
from psdist.topology.sysfs import package_of_affinity
from psdist.topology.untrusted import file_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_PATH: Final = Path("network.json")
_ALONE: Final = (
    "psdist probe measures between ranks, and there is only one: start it as "
    "`mpirun -n 4 psdist probe`, or `srun -N 4 --ntasks-per-node=2 psdist probe`"
)
# For all steps together; a step has at least the one and at most the other.
_ALL_STEPS_S: Final = 8.0
_STEP_S: Final = (0.2, 1.0)
_QUICK: Final = 4
"""How many times less of everything that is not a number of repetitions."""
_GPU_BYTES: Final = 64 << 20
_LINES: Final = 20
_WHAT: Final[dict[StepKind, str]] = {
    "core": "within a socket",
    "socket": "across the sockets of a node",
    "node": "between nodes of a rack",
    "rack": "between nodes of different racks",
    "uplink": "uplinks of racks",
}


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
        end_all(comm, heading, *told(error))


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of one rank, in the order in which they travel."""

    packages: list[tuple[int, list[int]]]
    """Its CPUs by package."""
    switches: tuple[str, str]
    """SLURM_TOPOLOGY_ADDR and its pattern, or empty."""


class _Run:
    """One rank's part. What has `measure`, `prepare` or `run` in its name is collective."""

    def __init__(self, comm: MPI.Intracomm, path: Path, quick: bool, racks: str | None) -> None:
        self.comm, self.path = comm, path
        self.rank = comm.Get_rank()
        self.scale = _QUICK if quick else 1
        self.places, _ = exchange(comm, _resolved())
        self.hosts = [place.host for place in self.places]
        self.facts = [_Facts(*msgpack.unpackb(each)) for each in allgather(comm, _facts())]
        self.racks, self.old = self._prepare(racks)

    def run(self) -> int:
        ranks = [
            RankFacts(
                rank=place.rank,
                host=place.host,
                packages={package: frozenset(cpus) for package, cpus in facts.packages},
            )
            for place, facts in zip(self.places, self.facts, strict=True)
        ]
        steps = schedule(ranks, self.racks)
        self._say(
            f"{len(self.racks)} nodes, {len(ranks)} ranks, "
            f"{len(set(self.racks.values()))} racks; {len(steps)} steps"
        )
        line = Line(self.comm)
        results = self._measure(line, steps)
        copies = self._measure_gpus(line)
        outcome: UserError | None = None
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
            Console().print(report.table(found))
            self._say_changes(found)
            try:
                _write(self.path, network.encode(found))
                print(f"written to {self.path}", flush=True)
            except PlacementError as error:
                outcome = error
        agreed(self.comm, outcome)
        return 0

    def _prepare(self, racks: str | None) -> tuple[dict[str, str], Network | None]:
        """The rack of each host, and on rank 0 the older catalogue, if there is one."""
        outcome: tuple[dict[str, str], Network | None] | UserError = ({}, None)
        if self.rank == 0:
            try:
                outcome = (_racks(self.hosts, self.facts, racks), _older(self.path))
            except PlacementError as error:
                outcome = error
        found, old = agreed(self.comm, outcome)
        packed = msgpack.packb(list(found.items()))
        return dict(msgpack.unpackb(broadcast(self.comm, packed))), old

    def _measure(self, line: Line, steps: Sequence[Step]) -> list[report.Result]:
        """All results, on every rank."""
        shortest_s, longest_s = (limit_s / self.scale for limit_s in _STEP_S)
        window_s = min(longest_s, max(shortest_s, _ALL_STEPS_S / self.scale / max(1, len(steps))))
        mine: list[Any] = []
        for number, step in enumerate(steps):
            if number == 0 or steps[number - 1].kind != step.kind:
                self._say(f"{_WHAT[step.kind]}, {sum(s.kind == step.kind for s in steps)} steps")
            with _bound(step.cpus.get(self.rank)):
                mine += self._take_part(line, number, step, window_s)
        everybody = allgather(self.comm, msgpack.packb(mine))
        return [
            report.Result(
                step=step,
                first=first,
                second=second,
                latency_s=latency_s,
                bytes_per_s=rate,
                flow=Flow(num_bytes=num_bytes, done_s=tuple(times)),
            )
            for each in everybody
            for step, first, second, latency_s, rate, num_bytes, times in msgpack.unpackb(each)
        ]

    def _take_part(self, line: Line, number: int, step: Step, window_s: float) -> list[Any]:
        """This rank's part in a step: its result where it leads a pair."""
        pair = next((pair for pair in step.pairs if self.rank in pair), None)
        leads = pair is not None and pair[0] == self.rank
        peer = -1 if pair is None else pair[1] if leads else pair[0]
        latency_s, num_bytes, flow = 0.0, 0, None
        line.wait_for_all()
        if pair is not None and step.kind != "uplink":
            latency_s = line.latency(peer, leads=leads)
        line.wait_for_all()
        if pair is not None:
            num_bytes = line.prepare(peer, leads=leads, window_s=window_s)
        line.wait_for_all()
        if pair is not None:
            flow = line.stream(peer, leads=leads, num_bytes=num_bytes, window_s=window_s)
        if pair is None or flow is None or not leads:
            return []
        times = flow.done_s if step.kind == "uplink" else ()
        return [(number, *pair, latency_s, flow.bytes_per_s, flow.num_bytes, times)]

    def _measure_gpus(self, line: Line) -> list[Pair]:
        """Copies of all GPUs, on every rank; of each host one GPU at a time."""
        visible = gpu.visible()
        everybody = [msgpack.unpackb(each) for each in
                     allgather(self.comm, msgpack.packb(list(visible)))]  # fmt: skip
        owners: dict[str, dict[str, int]] = defaultdict(dict)
        for rank, (host, names) in enumerate(zip(self.hosts, everybody, strict=True)):
            for name in names:
                owners[host].setdefault(name, rank)
        turns = max(map(len, owners.values()), default=0)
        if turns:
            self._say(f"host and GPU, {turns} steps")
        host = self.hosts[self.rank]
        mine: list[Any] = []
        for turn in range(turns):
            line.wait_for_all()
            at_it = list(owners[host].items())[turn : turn + 1]
            for name, owner in at_it:
                if owner == self.rank:
                    to, back = gpu.measure(visible[name], num_bytes=_GPU_BYTES // self.scale)
                    there = f"{host}/{name}"
                    mine.append((host, there, to.latency_s, to.bytes_per_s))
                    mine.append((there, host, back.latency_s, back.bytes_per_s))
        line.wait_for_all()
        return [
            Pair(first=first, second=second, kind="gpu", latency_s=latency_s, bytes_per_s=rate)
            for each in allgather(self.comm, msgpack.packb(mine))
            for first, second, latency_s, rate in msgpack.unpackb(each)
        ]

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"psdist probe: {text}", flush=True)

    def _say_changes(self, found: Network) -> None:
        if self.old is None:
            return
        lines = network.compare(self.old, found)
        print(f"compared with {self.path} of {self.old.date}:")
        for text in lines[:_LINES] or ["nothing has changed by more than 10 %"]:
            print(f"  {text}")
        if len(lines) > _LINES:
            print(f"  and {len(lines) - _LINES} more")


def _facts() -> bytes:
    """What the others must know of this rank, packed; :class:`_Facts` is its form."""
    packages: dict[int, list[int]] = defaultdict(list)
    for cpu in sorted(os.sched_getaffinity(0)):
        packages[package_of_affinity(affinity={cpu})].append(cpu)
    switches = [os.environ.get(f"SLURM_TOPOLOGY_ADDR{part}", "") for part in ("", "_PATTERN")]
    packed: bytes = msgpack.packb([list(packages.items()), switches])
    return packed


def _resolved() -> Resolved | UserError:
    try:
        return resolve(command_line={}, environment=os.environ, file=None)
    except UserError as error:
        return error


def _racks(hosts: Sequence[str], facts: Sequence[_Facts], path: str | None) -> dict[str, str]:
    """The switch of each host, by the name that a plan's cluster gives it; "" for the root."""
    tree = None
    if path is not None:
        tree = read_tree(Path(path))
    elif all(each.switches[0] for each in facts):
        switches = {host: each.switches for host, each in zip(hosts, facts, strict=True)}
        tree = slurm.from_addresses({host: (each[0], each[1]) for host, each in switches.items()})
    cluster = build_cluster(list(dict.fromkeys(hosts)), flat_machine([0]), tree=tree)
    return {
        node.name: cluster.switches[node.switch].name if node.switch else ""
        for node in cluster.nodes
    }


def _older(path: Path) -> Network | None:
    """What is in the file that is to be written; what is no catalogue is not overwritten."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise PlacementError(
            f"{path}: no file can be written there: name one in a folder that is yours"
        )
    if not path.exists():
        return None
    data, where = file_bytes(path, max_bytes=network.MAX_BYTES)
    return network.decode(data, where=where)


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


@contextmanager
def _bound(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run on these CPUs only, and on those of before afterwards."""
    before = os.sched_getaffinity(0)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
