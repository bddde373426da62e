"""``psdist plan``: place a job before it starts, draw it, and write the files for its launcher.

    psdist plan --machine node.xml --racks topology.conf --nodes 'n[1-64]' --workers-per-node 8 \\
        --model-bytes 4G --emit openmpi5 --out plan

Runs on a login node: it needs neither MPI nor torch nor a GPU.

Longer than other modules: every option is looked at for itself, to say what to give instead.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

from psdist import sizes
from psdist.commands import discard
from psdist.commands.cli_plan import PlanOptions
from psdist.config.settings import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    allowed_values,
    parse_size,
)
from psdist.errors import PlacementError
from psdist.protocol.partition import auto_chunk_bytes, chunk_bytes_for_all, empty_servers
from psdist.topology import emit
from psdist.topology.draw import matrix as draw_matrix
from psdist.topology.draw import size as draw_size
from psdist.topology.draw import svg as draw_svg
from psdist.topology.draw import text as draw_text
from psdist.topology.emit import Emission, Launcher
from psdist.topology.machine import Machine, live
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.network import Cluster, host_files
from psdist.topology.network import catalogue as network
from psdist.topology.network.host_files import HostFile
from psdist.topology.network.rack_table import parse_speed
from psdist.topology.network.sources import build_cluster, read_tree
from psdist.topology.plan import Plan, encode
from psdist.topology.plan.planning import Grouping, PlanRequest, Strategy, plan_ahead
from psdist.topology.plan.what_if import what_if
from psdist.topology.text import hostlist

_COUNT = re.compile(r"[0-9]{1,6}")
GROUPINGS: Mapping[str, Grouping] = {each: each for each in get_args(get_args(Grouping)[0])}
STRATEGIES: Mapping[str, Strategy] = {each: each for each in get_args(Strategy)}
LAUNCHERS: Mapping[str, Launcher] = {each: each for each in get_args(Launcher)}
_MIN_WIDTH, _PIPE_WIDTH, _MAX_WIDTH = 60, 100, 200
"""Columns of text."""
_MAX_LISTED = 200
"""Characters of a host list in a message or note."""
_PLAIN = str.maketrans("│├└─━╌", "||`-#.")
_Choice = TypeVar("_Choice")


def run(options: PlanOptions) -> int:
    """Plan, write, print; the exit status. Raises PlacementError for what is wrong, in one line.

    Nothing is written before all of it is made.
    """
    launcher = _launcher(options)
    model_bytes = parse_bytes(options.model_bytes)
    request = PlanRequest(
        servers=_servers(options.servers),
        group=_group(options.group),
        placement=_one_of(options.placement, STRATEGIES, "--placement"),
        model_bytes=model_bytes,
        apply_bytes_per_s=None
        if options.apply is None
        else parse_speed(options.apply, where="--apply"),
    )
    given = _given_hosts(options.hostfile, nodes=options.nodes, racks=options.racks)
    cluster = _cluster(options, given)
    workers, server_nodes = _workers(
        options, [node.name for node in cluster.nodes], {} if given is None else given.slots
    )
    chunks = _Chunks.of(model_bytes, options.chunk_bytes, cluster)
    plan = _plan(cluster, request, chunks, workers=workers, server_nodes=server_nodes)
    if given is not None:
        plan = replace(plan, notes=(*plan.notes, *given.notes, *_beyond_slots(plan, given)))
    width = _width()
    text = draw_text.tree(plan, cluster, width=width)
    if options.matrix:
        text += "\n" + draw_matrix.tables(plan, cluster, width=width)
    if options.explain:
        alternatives = what_if(
            cluster,
            plan,
            request,
            workers=workers,
            server_nodes=server_nodes,
            is_useful=lambda other: not chunks.empty_servers(other),
        )
        text += "\n" + draw_text.explain(plan, cluster, alternatives=alternatives, width=width)
    drawing = "" if options.svg is None else draw_svg.picture(plan, cluster)
    if launcher is not None:
        script = "train.py" if options.script is None else options.script
        path = os.path.abspath(script) if script else ""  # emit refuses an empty one
        emission = emit.files(plan, cluster, launcher, script=path)
        out = Path("plan") if options.out is None else options.out
        emit.write(emission, out)
        text += "\n" + _emitted(emission, out, path, width)
    if options.svg is not None:
        _write(options.svg, drawing)
    _show(encode(plan).decode("ascii") if options.as_json else text)
    return 0


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """How a run cuts a model of this size, as far as that is known before there is one."""

    model_bytes: float
    chunk_bytes: int

    @classmethod
    def of(cls, model_bytes: float, chunk_bytes: str, cluster: Cluster) -> _Chunks:
        if chunk_bytes == "auto":
            slowest = min(node.bytes_per_s for node in cluster.nodes)
            size: object = auto_chunk_bytes(int(model_bytes), slowest)
        else:
            size = parse_size(chunk_bytes)
        if not isinstance(size, int) or not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES:
            raise PlacementError(
                f"--chunk-bytes {chunk_bytes[:40]!r}: must be {allowed_values('chunk_bytes')}"
            )
        return cls(model_bytes=model_bytes, chunk_bytes=size)

    @property
    def number(self) -> int:
        return max(1, math.ceil(self.model_bytes / self.chunk_bytes))

    def empty_servers(self, plan: Plan) -> tuple[int, ...]:
        return empty_servers(plan.weights, self.number)

    @property
    def words(self) -> str:
        noun = "chunk" if self.number == 1 else f"chunks of {self.chunk_bytes:,} bytes"
        return f"{draw_size(self.model_bytes)} are cut into {self.number} {noun}"


def _plan(
    cluster: Cluster,
    request: PlanRequest,
    chunks: _Chunks,
    *,
    workers: Sequence[int],
    server_nodes: Sequence[str],
) -> Plan:
    """A plan in which every server gets a chunk; raises PlacementError where it cannot be."""
    plan = plan_ahead(cluster, request, workers=workers, server_nodes=server_nodes)
    note: tuple[str, ...] = ()
    while empty := chunks.empty_servers(plan):
        useful = len(plan.weights) - len(empty)
        if request.servers != "auto":
            size = chunk_bytes_for_all(chunks.model_bytes, plan.weights)
            finer = (
                f", or cut it finer, --chunk-bytes {size} (in the run: transfer.chunk_bytes)"
                if size >= MIN_CHUNK_BYTES
                else ""
            )
            raise PlacementError(
                f"--servers {request.servers}: {len(empty)} of them would hold nothing, since "
                f"{chunks.words}; ask for {useful}{finer}"
            )
        fewer = replace(request, servers=useful)
        plan = plan_ahead(cluster, fewer, workers=workers, server_nodes=server_nodes)
        note = (
            f"no more servers, which would hold nothing: {chunks.words}; --chunk-bytes cuts finer",
        )
    return replace(plan, notes=(*plan.notes, *note))


def parse_bytes(text: str) -> float:
    """``4G`` is 4e9, ``4GiB`` is 4 * 2**30. Raises PlacementError for anything else."""
    found = float(sizes.parse_bytes(text) or 0)
    if found < 1:
        raise PlacementError(
            f"--model-bytes {text[:40]!r}: not a size; write bytes, or a number with K, M, G, T "
            "(powers of 1000) or KiB, MiB, GiB, TiB"
        )
    return found


def _one_of(value: str, choices: Mapping[str, _Choice], option: str) -> _Choice:
    if value not in choices:
        raise PlacementError(f"{option} {value[:40]!r}: must be one of {', '.join(choices)}")
    return choices[value]


def _group(text: str) -> Grouping:
    if _COUNT.fullmatch(text) and int(text) > 0:
        return int(text)
    if text not in GROUPINGS:
        raise PlacementError(
            f"--group {text[:40]!r}: must be one of {', '.join(GROUPINGS)}, or a number of hosts"
        )
    return GROUPINGS[text]


def _launcher(options: PlanOptions) -> Launcher | None:
    if options.launcher is not None:
        return _one_of(options.launcher, LAUNCHERS, "--emit")
    for option, value in (("--out", options.out), ("--script", options.script)):
        if value is not None:
            raise PlacementError(
                f"{option} {str(value)[:80]!r}: no files are written without --emit; add --emit "
                f"with one of {', '.join(LAUNCHERS)}"
            )
    return None


def _servers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if _COUNT.fullmatch(text) and int(text) > 0:
        return int(text)
    raise PlacementError(f"--servers {text[:40]!r}: must be a whole number from 1 up, or auto")


def _cluster(options: PlanOptions, given: HostFile | None) -> Cluster:
    tree = None if options.racks is None else read_tree(options.racks)
    if given is not None:
        names = list(given.names)
    elif options.nodes is not None:
        names = _hosts(options.nodes, "--nodes")
    elif tree is not None and tree.nodes:
        names = [node.name for node in tree.nodes]
    elif os.environ.get("SLURM_JOB_NODELIST"):
        names = _hosts(os.environ["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
    else:
        names = [os.uname().nodename]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlacementError(f"--nodes: {twice} is named twice; name each node once")
    machines = _machines(options, names)
    speed = None if options.link is None else parse_speed(options.link, where="--link")
    return build_cluster(
        names,
        machines,
        tree=tree,
        network=None if options.network is None else network.read(options.network),
        default_bytes_per_s=speed,
    )


def _given_hosts(
    hostfile: Path | None, *, nodes: str | None, racks: Path | None
) -> HostFile | None:
    """Return what a file says of the hosts: the one that was named, else that of a PBS job."""
    if hostfile is not None:
        if nodes is not None:
            raise PlacementError(
                "--hostfile and --nodes both name the hosts of the job: leave one out"
            )
        return host_files.read(hostfile)
    if nodes is None and racks is None and os.environ.get("PBS_NODEFILE"):
        return host_files.read(Path(os.environ["PBS_NODEFILE"]))
    return None


def _beyond_slots(plan: Plan, given: HostFile) -> tuple[str, ...]:
    """Return a note where a launcher that is given that file would refuse the plan's ranks."""
    ranks = Counter(each.host for each in plan.ranks)
    beyond = [host for host in given.names if 0 < given.slots[host] < ranks[host]]
    if not beyond:
        return ()
    host = beyond[0]
    return (
        f"{hostlist.compress(beyond)[:_MAX_LISTED]}: more ranks than slots in {given.source} "
        f"({host}: {ranks[host]} of {given.slots[host]}), servers come in addition to workers: "
        "start it with the files that --emit writes, or give --workers-per-node",
    )


def _workers(
    options: PlanOptions, names: Sequence[str], slots: Mapping[str, int]
) -> tuple[list[int], list[str]]:
    """(number of workers on each of ``names``, the nodes that only serve)."""
    given: dict[str, int] = {}
    for host, count in _by_host(options.workers or (), "--workers", "N", names).items():
        if not _COUNT.fullmatch(count):
            raise PlacementError(
                f"--workers {host}={count[:40]}: must be a whole number of workers, like {host}=4"
            )
        given[host] = int(count)
    server_nodes: list[str] = []
    if options.server_nodes is not None:
        server_nodes = _known(options.server_nodes, names, "--server-nodes")
    for host in server_nodes:
        if given.setdefault(host, 0):
            raise PlacementError(
                f"--server-nodes: {host} has {given[host]} workers by --workers, but a server node "
                "has none; leave one of the two out"
            )
    usual = options.workers_per_node
    workers = [
        given.get(name, (slots.get(name) or 1) if usual is None else usual) for name in names
    ]
    return workers, server_nodes


def _machines(options: PlanOptions, names: Sequence[str]) -> Mapping[str, Machine]:
    everywhere = [word for word in options.machines or () if "=" not in word]
    if len(everywhere) > 1:
        raise PlacementError(
            f"--machine {everywhere[1]!r}: {everywhere[0]!r} is for all nodes already; write "
            f"HOSTS={everywhere[1]} for some"
        )
    special = _by_host(
        [word for word in options.machines or () if "=" in word], "--machine", "FILE", names
    )
    missing = [name for name in names if name not in special]
    if missing and special and not everywhere:
        raise PlacementError(
            f"--machine: none for {_listed(missing)}; add one --machine FILE without HOSTS= for "
            "all others"
        )
    read = {path: hwloc_xml.read(Path(path)) for path in {*special.values(), *everywhere}}
    if everywhere:
        other = read[everywhere[0]]
    elif missing:
        other = live.this_machine()
    return {name: read[special[name]] if name in special else other for name in names}


def _by_host(words: Sequence[str], option: str, what: str, names: Sequence[str]) -> dict[str, str]:
    """The value for each host, out of words like ``HOSTS=VALUE``."""
    found: dict[str, str] = {}
    for word in words:
        where = f"{option} {word[:80]!r}"
        hosts, _, value = word.partition("=")
        if not hosts or not value:
            raise PlacementError(f"{where}: must be HOSTS={what}, like n[1-4]={what}")
        for host in _known(hosts, names, where):
            if host in found:
                raise PlacementError(
                    f"{where}: {host} has {found[host][:80]!r} already; name each node once"
                )
            found[host] = value
    return found


def _known(hosts: str, names: Sequence[str], where: str) -> list[str]:
    found = _hosts(hosts, where)
    known = set(names)
    unknown = [host for host in found if host not in known]
    if unknown:
        raise PlacementError(
            f"{where}: {_listed(unknown)} not among the nodes of the job ({_listed(names)})"
        )
    return found


def _hosts(text: str, where: str) -> list[str]:
    found = hostlist.expand(text, where=where)
    if not found:
        raise PlacementError(f"{where}: no host in it; write hosts like n[1-4]")
    return found


def _listed(names: Sequence[str]) -> str:
    text = hostlist.compress(names)
    return text if len(text) <= _MAX_LISTED else f"{text[:_MAX_LISTED]}..."


def _width() -> int:
    """Columns of the terminal, or of COLUMNS; into a pipe 100."""
    given = os.environ.get("COLUMNS", "")
    found = int(given) if given.isascii() and given.isdecimal() and len(given) < 6 else 0
    if not found and sys.stdout.isatty():
        found = os.get_terminal_size(sys.stdout.fileno()).columns
    return min(max(found, _MIN_WIDTH), _MAX_WIDTH) if found else _PIPE_WIDTH


def _emitted(emission: Emission, out: Path, script: str, width: int) -> str:
    notes = list(emission.notes)
    if not os.path.exists(script):
        notes.append("the script is not there yet; --script names another")
    lines = [f"written to {out}: {', '.join(sorted(emission.files))}"]
    for note in notes:
        lines += textwrap.wrap(
            f"note: {note}",
            width,
            subsequent_indent=" " * len("note: "),
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines += [f"start it in {out}:", *(f"  {command}" for command in emission.commands)]
    return "\n".join(lines) + "\n"


def _show(text: str) -> None:
    """Onto standard output, in ASCII where it takes no more; a reader that leaves is no error."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        discard()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlacementError(
            f"{path}: cannot be written ({error.strerror}): give another file to --svg"
        ) from error
