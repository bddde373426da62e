"""All ranks agree on one plan of roles and cores, and bind themselves.

    placed = agree_on_plan(comm, places, config)
    placed.plan, placed.roles, placed.files

One rank of each host describes its machine, rank 0 makes the plan (:mod:`psdist.topology`), and
every rank receives it. After binding, the cores of the ranks are compared with the plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from psdist.config.compatibility import take_servers_places, take_workers_places
from psdist.config.settings import RunConfig
from psdist.errors import ConfigError, LaunchError, PlacementError, UserError
from psdist.install import survives_deaths
from psdist.protocol.roles import Place, Roles
from psdist.ranks.agreement import agreed, allgather, decided, gather
from psdist.ranks.seats.cards import card_notes
from psdist.servers.protocol.replication.pairs import Pairs, pair
from psdist.topology import machine as machine_codec
from psdist.topology import plan as plan_codec
from psdist.topology.draw import text as draw_text
from psdist.topology.emit import PLAN_FILE
from psdist.topology.machine import Machine, live
from psdist.topology.machine import live as binding
from psdist.topology.network import Cluster, slurm
from psdist.topology.network import catalogue as network
from psdist.topology.network.same_host import is_same_host
from psdist.topology.network.sources import build_cluster, port_guids, read_tree
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, RankFacts, Strategy, on_hosts, plan_job
from psdist.topology.plan.spares import choose_spares, with_spares
from psdist.topology.text import bitmap, file_bytes, shown

if TYPE_CHECKING:
    from mpi4py import MPI

_STRATEGIES: dict[str, Strategy] = {"auto": "auto", "block": "block", "cyclic": "cyclic"}
_NAMED_AT_MOST = 5


@dataclass(frozen=True, kw_only=True)
class Placed:
    plan: Plan
    roles: Roles
    """Its places have the cores that each rank really has after binding."""
    files: dict[str, str]
    """Texts of the plan for the run directory, by file name; empty except on rank 0."""


def agree_on_plan(
    comm: MPI.Intracomm,
    places: Sequence[Place],
    config: RunConfig,
    *,
    num_workers: int | None = None,
) -> Placed:
    """Return the plan and roles of the job. Collective over all its ranks. Raises AgreedExit if no
    such plan exists, or none with ``num_workers`` workers (None: any number)."""
    rank = comm.Get_rank()
    machines = gather(comm, _describe_host(places, rank))
    files: dict[str, str] = {}
    made: bytes | UserError = b""
    if rank == 0:
        try:
            cluster = _cluster(places, machines, config)
            plan = _make_plan(cluster, places, config)
            of_cards = card_notes(plan, cluster, places, config)
            for note in of_cards:
                print(f"psdist: note: {note}", file=sys.stderr, flush=True)
            plan = replace(plan, notes=(*plan.notes, *of_cards))
            error = unexpected_workers(
                num_workers,
                num_servers=len(plan.server_ranks),
                num_spares=len(plan.spare_ranks),
                num_ranks=len(places),
            )
            if error is not None:
                raise error
            made = plan_codec.encode(plan)
            files = {"plan.txt": draw_text.tree(plan, cluster), PLAN_FILE: made.decode("ascii")}
        except UserError as error:
            made = error
    plan = plan_codec.decode(decided(comm, made), where="the plan of rank 0")
    cores = frozenset(places[rank].cores)
    if config.bind == "auto":
        # A plan's file may name processors that the launcher gave to another job.
        planned = _usable_cores(places, rank).intersection(plan.ranks[rank].cpus)
        cores = binding.bind(planned) if planned else cores
    has = [tuple(msgpack.unpackb(each)) for each in allgather(comm, msgpack.packb(sorted(cores)))]
    bound = [replace(each, cores=cores) for each, cores in zip(places, has, strict=True)]
    _compare(comm, plan, bound, config)
    roles = roles_of_plan(
        bound,
        plan,
        has_spares=take_servers_places(config),
        has_substitutes=take_workers_places(config),
    )
    return Placed(plan=plan, roles=roles, files=files)


def unexpected_workers(
    expected: int | None, *, num_servers: int, num_ranks: int, num_spares: int = 0
) -> LaunchError | None:
    """Return why the number of workers is not that of ``--workers``; None if it is."""
    num_workers = num_ranks - num_servers - num_spares
    if expected in (None, num_workers):
        return None
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    beside = f" besides {num_servers} that serve" if num_servers else ""
    beside += f" and {num_spares} spare" if num_spares else ""
    return LaunchError(
        f"--workers {expected} does not fit: the launcher started {ranks}; {num_workers} of them "
        f"would work{beside}; start as many ranks as workers and servers together, say with "
        "--servers how many serve, or leave --workers out"
    )


def _describe_host(places: Sequence[Place], rank: int) -> bytes:
    """Return this host's machine, packed, on the first rank of the host; b"" on others."""
    host = places[rank].host
    if next(each for each in places if each.host == host).rank != rank:
        return b""
    machine = live.this_machine(affinity=_usable_cores(places, rank))
    packed: bytes = msgpack.packb(machine_codec.pack(machine))
    return packed


def _usable_cores(places: Sequence[Place], rank: int) -> set[int]:
    """Return the cores that the ranks of this host may use together."""
    host = places[rank].host
    return {core for each in places if each.host == host for core in each.cores}


def _cluster(places: Sequence[Place], packed: Sequence[bytes], config: RunConfig) -> Cluster:
    machines: dict[str, Machine] = {}
    for each, data in zip(places, packed, strict=True):
        if data:
            machines[each.host] = machine_codec.unpack(msgpack.unpackb(data))
    tree = None
    if config.racks is not None:
        tree = read_tree(Path(config.racks), hosts=port_guids(machines))
    elif all(each.switches[0] for each in places):
        tree = slurm.from_addresses({each.host: each.switches for each in places})
    measured = None if config.network is None else network.read(Path(config.network))
    return build_cluster(list(machines), machines, tree=tree, network=measured)


def _make_plan(cluster: Cluster, places: Sequence[Place], config: RunConfig) -> Plan:
    strategy = _STRATEGIES.get(config.placement)
    if strategy is None:
        return _given_plan(cluster, places, config)
    hosts = [each.host for each in places]
    spares = choose_spares(hosts, config.spares)
    ranks = [
        RankFacts(
            rank=each.rank,
            host=each.host,
            cpus=frozenset(each.cores),
            gpus=each.gpus,
            kernel=each.kernel,
            nic=each.nic,
        )
        for each in places
        if each.rank not in spares
    ]
    request = PlanRequest(
        servers=config.servers,
        group=config.group,
        placement=strategy,
        may_bind=config.bind == "auto",
    )
    return with_spares(plan_job(cluster, ranks, request), hosts, spares)


def _given_plan(cluster: Cluster, places: Sequence[Place], config: RunConfig) -> Plan:
    """Return the plan of a file, on the hosts where the launcher has started the ranks."""
    if not os.path.exists(config.placement):
        raise PlacementError(
            f"hosts.placement = {shown(config.placement)}: must be {', '.join(_STRATEGIES)} or the "
            "path of a plan.json, and there is no such file"
        )
    data, where = file_bytes(Path(config.placement), max_bytes=plan_codec.MAX_BYTES)
    plan = plan_codec.decode(data, where=where)
    if len(plan.ranks) != len(places):
        raise PlacementError(
            f"hosts.placement = {where}: a plan for {len(plan.ranks)} ranks, but the job has "
            f"{len(places)}; start {len(plan.ranks)} ranks, or make a new plan"
        )
    if config.servers not in ("auto", len(plan.weights)):
        raise PlacementError(
            f"servers = {config.servers}, but the plan {where} has {len(plan.weights)}: leave one "
            "of the two settings out"
        )
    if config.spares != len(plan.spare_ranks):
        raise PlacementError(
            f"failures.spares = {config.spares}, but the plan {where} has {len(plan.spare_ranks)}: "
            "ask for as many, or make a new plan (hosts.placement = auto)"
        )
    pairs = list(zip(plan.ranks, places, strict=True))
    moved = [
        f"rank {found.rank} is on {found.host}, planned on {planned.host}"
        for planned, found in pairs
        if not is_same_host(planned.host, found.host)
    ]
    if moved and config.strict_placement:
        raise _misplaced(moved)
    if moved:
        _warn(moved)
    ranks = (
        replace(planned, host=found.host) if is_same_host(planned.host, found.host) else planned
        for planned, found in pairs
    )
    plan = replace(plan, ranks=tuple(ranks))
    return on_hosts(plan, cluster, [each.host for each in places])


def _compare(comm: MPI.Intracomm, plan: Plan, places: Sequence[Place], config: RunConfig) -> None:
    """Compare the cores after binding with the plan: rank 0 warns, or every rank ends."""
    differences = [
        f"rank {found.rank} on {found.host} has processors {_listed(found.cores)}, "
        f"planned {_listed(planned.cpus)}"
        for planned, found in zip(plan.ranks, places, strict=True)
        if config.bind == "auto" and planned.cpus and set(found.cores) != set(planned.cpus)
    ]
    if differences and config.strict_placement:
        agreed(comm, _misplaced(differences))
    if differences and comm.Get_rank() == 0:
        _warn(differences)


def _misplaced(differences: Sequence[str]) -> PlacementError:
    return PlacementError(
        f"the job is not placed as planned: {_some_of(differences)}; start it with the files of "
        "psdist plan --emit, or leave --strict-placement out"
    )


def _warn(differences: Sequence[str]) -> None:
    text = f"psdist: warning: the job is not placed as planned: {_some_of(differences)}"
    print(text, file=sys.stderr, flush=True)


def _some_of(differences: Sequence[str]) -> str:
    more = len(differences) - _NAMED_AT_MOST
    return "; ".join(differences[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")


def _listed(cores: Sequence[int]) -> str:
    return bitmap.format_list(cores) or "none"


def roles_of_plan(
    places: Sequence[Place], plan: Plan, *, has_spares: bool = True, has_substitutes: bool = False
) -> Roles:
    """Return the roles that ``plan`` gives to ``places``, both with one entry per rank in rank
    order. ``has_spares``: spares take servers' places; ``has_substitutes``: workers' places."""
    members: dict[int, list[int]] = {}
    for planned in plan.ranks:
        if planned.role == "worker":
            members.setdefault(planned.group, []).append(planned.index)
    groups = [tuple(members[group]) for group in sorted(members)]
    substitutes = plan.spare_ranks if has_substitutes else ()
    first = len(plan.worker_ranks)
    groups += [(first + index,) for index in range(len(substitutes))]
    return Roles(
        places=tuple(places),
        server_ranks=plan.server_ranks,
        worker_ranks=(*plan.worker_ranks, *substitutes),
        groups=tuple(groups),
        weights=plan.weights,
        spare_ranks=plan.spare_ranks if has_spares else (),
        num_substitutes=len(substitutes),
    )


def refusal_of_substitutes(roles: Roles, *, sees_run_dir: bool) -> PlacementError | None:
    """Return why spares cannot take workers' places in a job with these roles. ``sees_run_dir``:
    this rank finds the files of rank 0 in the run directory."""
    if not roles.num_substitutes:
        return None
    without = (
        "set failures.max_deaths = 0" if roles.has_shared_spares else "leave failures.spares out"
    )
    large = [group for group, workers in enumerate(roles.groups) if len(workers) > 1]
    if large:
        return PlacementError(
            f"spares for failed workers' places: {roles.describe_group(large[0])} has "
            f"{len(roles.groups[large[0]])} workers: a group fails as a whole, and one spare is "
            f"one worker; set group = rank, or {without}"
        )
    if not sees_run_dir:
        return PlacementError(
            "spares for failed workers' places: the chief's state comes to them in run_dir, which "
            "must lie on a file system that all hosts of the job share; set another run_dir, or "
            f"{without}"
        )
    return None


def pairs_of(config: RunConfig, roles: Roles, environment: Mapping[str, str]) -> Pairs | None:
    """Return which server stores the replica of each shard; None without replication. Raises
    :class:`ConfigError` if the failure of a server would end the job all the same."""
    if config.replication == "none":
        return None
    num_servers = roles.num_servers
    pairs = pair(hosts=hosts_of(roles)[:num_servers], racks=racks_of(roles)[:num_servers])
    if not survives_deaths(environment):
        raise ConfigError(
            "failures.replication = buddy needs an MPI that survives the failure of a rank, which "
            "is Open MPI under mpirun --with-ft ulfm (psdist run -n passes it); under srun, and "
            "with MPICH, the launcher ends the job: set failures.replication = none, and make "
            "checkpoints"
        )
    return pairs


def hosts_of(roles: Roles) -> list[str]:
    """Return the hosts of the servers, then of the spares."""
    return [roles.places[rank].host for rank in (*roles.server_ranks, *roles.spare_ranks)]


def racks_of(roles: Roles) -> list[str]:
    """Return the racks of the servers, then of the spares; "" if a rack is unknown."""
    return [_rack(roles.places[rank]) for rank in (*roles.server_ranks, *roles.spare_ranks)]


def _rack(place: Place) -> str:
    """Return the path of the place's first switch; "" if it is unknown."""
    address, _pattern = place.switches
    return address.rpartition(".")[0]
