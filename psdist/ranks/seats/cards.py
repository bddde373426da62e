"""Choose the network card of a rank's MPI and NCCL, before either starts.

    nic = choose_card(resolved, detect(os.environ))       # sets variables; "" if MPI chooses

MPI reads its variables in MPI_Init, and ranks can agree on a plan only after that. So each rank
chooses alone: from the plan's file if the job has one, else from its own processors, or, if its
launcher has not bound it, from its number on the host, as the plan will place it.
:func:`card_notes` compares the choice with the plan.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.errors import PlacementError, UserError
from psdist.install import Launcher
from psdist.install.eager import SEND_BUFFER_BYTES
from psdist.protocol.roles import Place
from psdist.topology import plan as plan_codec
from psdist.topology.machine import UNKNOWN, Device, Machine, cards, sysfs
from psdist.topology.network import Cluster, catalogue
from psdist.topology.network.catalogue import UNMEASURED
from psdist.topology.network.same_host import is_same_host
from psdist.topology.network.sources import read_tree
from psdist.topology.plan import Plan, seating
from psdist.topology.text import file_bytes

_STRATEGIES: Final = ("auto", "block", "cyclic")
_TASKS: Final = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def described_link(outcome: Resolved | UserError, *, host: str | None = None) -> float:
    """Return the speed of this host's link (bytes/s, one direction), as ``hosts.network`` has
    measured or ``hosts.racks`` describes it; 0 if neither does, or if a round trip carries more
    than MPI's small send buffer."""
    if isinstance(outcome, UserError):
        return 0.0
    config, name = outcome.config, socket.gethostname() if host is None else host
    speeds: dict[str, float] = {}
    with suppress(PlacementError):  # rank 0 reports it when it makes the plan
        if config.network is not None:
            measured = catalogue.read(Path(config.network))
            round_trip_s = 2 * measured.classes.get("node", UNMEASURED).latency_s
            speeds = {
                each: link.bytes_per_s
                for each, link in measured.node_links.items()
                if link.bytes_per_s * round_trip_s <= SEND_BUFFER_BYTES
            }
        elif config.racks is not None:
            speeds = {each.name: each.bytes_per_s for each in read_tree(Path(config.racks)).nodes}
    return next((speed for each, speed in speeds.items() if is_same_host(each, name)), 0.0)


def choose_card(
    outcome: Resolved | UserError,
    launcher: Launcher,
    *,
    environment: MutableMapping[str, str] | None = None,
    root: Path = Path("/"),
    usable: Iterable[int] | None = None,
) -> str:
    """Confine this process's MPI and NCCL to cards near it, by variables; their names with commas.

    ``environment``, ``root`` and ``usable`` (PUs) are this process's and host's where not given.

    The result is one card if the number of the host's ranks that use the network is at least the
    number of its cards; with a group on each host, these are its leader and its server. If fewer
    ranks use the network, the result is all cards of the rank's NUMA node or package, so that MPI
    can send over several. It is "" if the user has set one of the variables, if the job runs on one
    host, or if some card may not reach every other (:mod:`psdist.topology.machine.cards`).
    """
    found = os.environ if environment is None else environment
    if isinstance(outcome, UserError) or outcome.config.nics == "off":
        return ""
    if any(name in found for name in cards.VARIABLES):
        return ""
    here = ranks_here(launcher, found)
    if here is None:
        return ""
    local_rank, local_size = here
    ports = cards.read_ports(root)
    if launcher.size == local_size or len({port.pci for port in ports}) < 2:
        return ""
    try:
        machine = sysfs.read_machine(root)
    except PlacementError:
        return ""
    choice = cards.selectable(machine, ports)
    mine = frozenset(os.sched_getaffinity(0) if usable is None else usable) & machine.cpus
    if not choice or not mine:
        return ""
    card = _planned(outcome.config, launcher, choice) or nearest(
        machine, mine, choice, local_rank=local_rank, local_size=local_size
    )
    chosen = [card]
    if talkers(outcome.config, machine, local_size) < len(choice):
        chosen = _beside(card, choice)
        if len(chosen) == 1:
            return ""
    found.update(cards.variables(chosen, ports))
    return ",".join(each.name for each in chosen)


def talkers(config: RunConfig, machine: Machine, local_size: int) -> int:
    """Return the number of a host's workers that send over its cards: the leaders of its groups,
    and all workers of a group on several hosts. The server may share a leader's card."""
    most = {
        "node": 1,
        "socket": len({core.package for core in machine.cores}),
        "numa": len({core.numa for core in machine.cores}),
    }
    return min(local_size, most.get(str(config.group), local_size))


def _beside(card: Device, choice: Sequence[Device]) -> list[Device]:
    """Return the card and the others of its NUMA node, or of its package if there are none."""
    others = [each for each in choice if each is not card]
    in_node = [each for each in others if each.numa == card.numa != UNKNOWN]
    in_package = [each for each in others if each.package == card.package != UNKNOWN]
    return [card, *(in_node or in_package)]


def ranks_here(launcher: Launcher, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this rank's number among the ranks of its host, and their number; None: unknown."""
    size = launcher.local_size
    if size is None and launcher.name == "slurm":
        node = environment.get("SLURM_NODEID", "")
        tasks = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if node.isascii() and node.isdecimal() and int(node[:6]) < len(tasks):
            size = tasks[int(node[:6])]
    if launcher.local_rank is None or size is None or launcher.local_rank >= size:
        return None
    return launcher.local_rank, size


def tasks_of_nodes(text: str) -> list[int]:
    """Return Slurm's ``2(x3),1`` as ``[2, 2, 2, 1]``; [] for other text."""
    tasks: list[int] = []
    for word in text.split(","):
        match = _TASKS.fullmatch(word)
        if match is None or len(tasks) > 1 << 16:
            return []
        tasks += [int(match[1])] * min(int(match[2] or 1), 1 << 16)
    return tasks


def nearest(
    machine: Machine,
    usable: frozenset[int],
    choice: Sequence[Device],
    *,
    local_rank: int,
    local_size: int,
) -> Device:
    """Return the card for a rank that may use the processors ``usable`` of ``machine``.

    If the ranks of the host together may use more than it has, they are not bound: the plan will
    place them as workers. Otherwise they are bound, and the ranks of a package (or NUMA node)
    divide its cards by their position in it.
    """
    mine = machine.restricted(usable)
    if len(mine.cores) * local_size > len(machine.cores):
        among = replace(mine, devices=(*mine.gpus, *choice))
        name = seating.seat(among, ["worker"] * local_size)[local_rank].nic
        return next(each for each in choice if each.name == name)
    packages = {core.package for core in mine.cores}
    nodes = {core.numa for core in mine.cores}
    in_package = [each for each in choice if {each.package} == packages]
    in_node = [each for each in in_package if {each.numa} == nodes]
    equals = in_node or in_package or list(choice)
    around = [
        core
        for core in machine.cores
        if not in_package or (core.numa in nodes if in_node else core.package in packages)
    ]
    before = sum(core.logical < mine.cores[0].logical for core in around)
    return equals[before * len(equals) // len(around)]


def _planned(config: RunConfig, launcher: Launcher, choice: Sequence[Device]) -> Device | None:
    """Return the card that a plan's file gives to this rank on this host."""
    if config.placement in _STRATEGIES or launcher.rank is None:
        return None
    try:
        data, where = file_bytes(Path(config.placement), max_bytes=plan_codec.MAX_BYTES)
        plan = plan_codec.decode(data, where=where)
    except (PlacementError, OSError):
        return None  # rank 0 prints the error, once
    if launcher.rank >= len(plan.ranks):
        return None
    mine = plan.ranks[launcher.rank]
    if not is_same_host(mine.host, socket.gethostname()):
        return None
    return next((each for each in choice if mine.nic in each.names), None)


def card_notes(
    plan: Plan, cluster: Cluster, places: Sequence[Place], config: RunConfig
) -> list[str]:
    """Return notes on ranks that use another card than planned, and on hosts where MPI chooses."""
    if len({each.host for each in places}) < 2:
        return []
    several = {
        node.name: [card.name for card in cards.fabric_cards(node.machine)]
        for node in cluster.nodes
        if len(cards.fabric_cards(node.machine)) > 1
    }
    notes = []
    names = {
        (node.name, name): card.names
        for node in cluster.nodes
        for card in node.machine.nics
        for name in card.names
    }
    other = [
        planned.rank
        for planned, found in zip(plan.ranks, places, strict=True)
        if (has := found.nic.split(","))[0]
        and not set(has).intersection(names.get((found.host, planned.nic), has))
    ]
    if other:
        notes.append(
            f"network cards are chosen before the plan is made: {_ranks(other)} not on the one "
            "that the plan names; --placement with this run's plan.json starts them there"
        )
    free = [each for each in places if each.host in several and not each.nic]
    if free:
        host = free[0].host
        why = (
            config.setting_text("nics")
            if config.nics == "off"
            else "MPI chooses among network cards"
        )
        notes.append(
            f"{why}: {_ranks([each.rank for each in free])} (on {host}: "
            f"{', '.join(several[host])}); to confine a rank to the one that the plan names, set "
            "UCX_NET_DEVICES (UCX), FI_CXI_DEVICE_NAME (Slingshot) or HFI_UNIT (Omni-Path), and "
            "NCCL_IB_HCA, for it before it starts"
        )
    return notes


def _ranks(found: Iterable[int]) -> str:
    numbers = list(found)
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers[:5]))}{more}"
