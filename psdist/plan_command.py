"""``psdist plan``: place a job before it starts, draw it, and write the files for its launcher.

    psdist plan --machine node.xml --racks topology.conf --nodes 'n[1-64]' --workers-per-node 8 \\
        --model-bytes 4G --emit openmpi5 --out plan

Runs on a login node: it needs neither MPI nor torch nor a GPU. Reading, placing, drawing and
emitting are psdist.topology's; this puts them together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from psdist.errors import PlacementError
from psdist.topology import draw_svg, draw_text, emit, hostlist, hwloc_xml, live, network
from psdist.topology.cluster import DEFAULT_LINK_BYTES_PER_S, Cluster
from psdist.topology.emit import Launcher
from psdist.topology.machine import Machine
from psdist.topology.planning import Grouping, PlanRequest, Strategy, plan_ahead
from psdist.topology.rack_table import parse_speed
from psdist.topology.sources import build_cluster, read_tree
from psdist.topology.what_if import what_if

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGTP]?)(i?)B?", re.IGNORECASE)
GROUPINGS: Mapping[str, Grouping] = {each: each for each in get_args(Grouping)}
STRATEGIES: Mapping[str, Strategy] = {each: each for each in get_args(Strategy)}
LAUNCHERS: Mapping[str, Launcher] = {each: each for each in get_args(Launcher)}
_Choice = TypeVar("_Choice")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What was asked for, as words; :func:`run` says what is wrong with them."""

    machines: Sequence[str] = ()
    """``FILE`` for all nodes, or ``HOSTS=FILE``."""
    racks: Path | None = None
    nodes: str | None = None
    network: Path | None = None
    link: str | None = None
    servers: str = "auto"
    server_nodes: str | None = None
    workers_per_node: int = 1
    workers: Sequence[str] = ()
    """``HOSTS=N``: other numbers of workers for some nodes."""
    group: str = "node"
    placement: str = "auto"
    model_bytes: str = "1G"
    launcher: str | None = None
    out: Path = Path("plan")
    svg: Path | None = None
    explain: bool = False
    script: str = "train.py"


def run(options: PlanOptions) -> int:
    """Plan, print, write; the exit status. Raises PlacementError for what is wrong, in one line."""
    launcher = None
    if options.launcher is not None:
        launcher = _one_of(options.launcher, LAUNCHERS, "--emit")
    cluster = _cluster(options)
    request = PlanRequest(
        servers=_servers(options.servers),
        group=_one_of(options.group, GROUPINGS, "--group"),
        placement=_one_of(options.placement, STRATEGIES, "--placement"),
        model_bytes=parse_bytes(options.model_bytes),
    )
    names = [node.name for node in cluster.nodes]
    workers = [options.workers_per_node] * len(names)
    for word in options.workers:
        hosts, count = _assigned(word, "--workers", "a number of workers")
        if not count.isdecimal() or len(count) > 6:
            raise PlacementError(f"--workers {word!r}: {count!r} is no number of workers")
        for host in _known(hosts, names, f"--workers {word!r}"):
            workers[names.index(host)] = int(count)
    server_nodes = () if options.server_nodes is None else _known(
        options.server_nodes, names, "--server-nodes"
    )  # fmt: skip
    for host in server_nodes:
        workers[names.index(host)] = 0
    plan = plan_ahead(cluster, request, workers=workers, server_nodes=server_nodes)
    print(draw_text.tree(plan, cluster), end="")
    if options.explain:
        alternatives = what_if(cluster, plan, request, workers=workers, server_nodes=server_nodes)
        print()
        print(draw_text.explain(plan, cluster, alternatives=alternatives), end="")
    if options.svg is not None:
        _write(options.svg, draw_svg.picture(plan, cluster))
    if launcher is not None:
        emission = emit.files(plan, cluster, launcher, script=os.path.abspath(options.script))
        emit.write(emission, options.out)
        print()
        print(f"written to {options.out}: {', '.join(sorted(emission.files))}")
        for note in emission.notes:
            print(f"note: {note}")
        print(f"start it in {options.out}:")
        for command in emission.commands:
            print(f"  {command}")
    return 0


def parse_bytes(text: str) -> float:
    """``4G`` is 4e9, ``4GiB`` is 4 * 2**30. Raises PlacementError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    number = float(match[1]) if match else 0.0
    if match is None or number <= 0:
        raise PlacementError(
            f"--model-bytes {text[:40]!r}: not a size; write bytes, or a number with K, M, G, T "
            "(powers of 1000) or KiB, MiB, GiB, TiB"
        )
    return number * float((1024 if match[3] else 1000) ** _POWERS[match[2].upper()])


def _one_of(value: str, choices: Mapping[str, _Choice], option: str) -> _Choice:
    if value not in choices:
        raise PlacementError(f"{option} {value[:40]!r}: must be {', '.join(choices)}")
    return choices[value]


def _servers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text.isdecimal() and 0 < len(text) <= 6 and int(text) > 0:
        return int(text)
    raise PlacementError(f"--servers {text[:40]!r}: must be a whole number from 1 up, or auto")


def _cluster(options: PlanOptions) -> Cluster:
    tree = None if options.racks is None else read_tree(options.racks)
    if options.nodes is not None:
        names = hostlist.expand(options.nodes)
    elif tree is not None and tree.nodes:
        names = [node.name for node in tree.nodes]
    elif os.environ.get("SLURM_JOB_NODELIST"):
        names = hostlist.expand(os.environ["SLURM_JOB_NODELIST"])
    else:
        names = [os.uname().nodename]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlacementError(f"--nodes: {twice} is named twice; name each node once")
    machines = _machines(options, names)
    speed = DEFAULT_LINK_BYTES_PER_S
    if options.link is not None:
        speed = parse_speed(options.link, where="--link")
    return build_cluster(
        names,
        machines,
        tree=tree,
        network=None if options.network is None else network.read(options.network),
        default_bytes_per_s=speed,
    )


def _machines(options: PlanOptions, names: Sequence[str]) -> Mapping[str, Machine]:
    read: dict[str, Machine] = {}
    everywhere: Machine | None = None
    special: dict[str, Machine] = {}
    for word in options.machines:
        hosts, equals, path = word.rpartition("=")
        machine = read.setdefault(path, hwloc_xml.read(Path(path)))
        if not equals:
            everywhere = machine
        for host in _known(hosts, names, f"--machine {word!r}") if equals else ():
            special[host] = machine
    missing = [name for name in names if name not in special]
    if missing and everywhere is None:
        if options.machines:
            raise PlacementError(
                f"--machine: none for {hostlist.compress(missing)}; add one --machine FILE "
                "without HOSTS= for all others"
            )
        everywhere = live.this_machine()
    return {name: special[name] if name in special else _given(everywhere) for name in names}


def _given(machine: Machine | None) -> Machine:
    assert machine is not None
    return machine


def _assigned(word: str, option: str, what: str) -> tuple[str, str]:
    hosts, equals, value = word.rpartition("=")
    if not equals or not hosts:
        raise PlacementError(f"{option} {word[:80]!r}: not HOSTS=N, with {what}")
    return hosts, value


def _known(hosts: str, names: Sequence[str], where: str) -> list[str]:
    found = hostlist.expand(hosts)
    unknown = [host for host in found if host not in set(names)]
    if unknown:
        raise PlacementError(
            f"{where}: {hostlist.compress(unknown)} not among the nodes of the job "
            f"({hostlist.compress(names)})"
        )
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlacementError(f"{path}: cannot be written: {error.strerror}") from error
