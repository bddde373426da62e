"""All ranks agree on one plan: who serves, who works, on which cores; then they bind themselves.

    placed = place(comm, places, config)
    placed.plan, placed.roles, placed.files

One rank of each host says what its machine is, rank 0 solves and everybody gets the plan. After
binding, what the ranks really have is compared with it. What a good plan is, is decided in
:mod:`psdist.topology`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from psdist.agreement import agreed, allgather, decided, gather
from psdist.config import RunConfig
from psdist.errors import PlacementError, UserError
from psdist.roles import Place, Roles, from_plan
from psdist.topology import (
    binding,
    bitmap,
    draw_text,
    live,
    machine_codec,
    network,
    plan_codec,
    slurm,
)
from psdist.topology.cluster import Cluster
from psdist.topology.emit import PLAN_FILE
from psdist.topology.machine import Machine
from psdist.topology.plan import Plan
from psdist.topology.planning import PlanRequest, RankFacts, Strategy, plan_job
from psdist.topology.sources import build_cluster, port_guids, read_tree
from psdist.topology.untrusted import file_bytes

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
    """What a run directory shows of it, by name; on rank 0, else empty."""


def place(comm: MPI.Intracomm, places: Sequence[Place], config: RunConfig) -> Placed:
    """Collective over all ranks of the job. Raises AgreedExit where there can be no such plan."""
    rank = comm.Get_rank()
    machines = gather(comm, _describe_host(places, rank))
    files: dict[str, str] = {}
    made: bytes | UserError = b""
    if rank == 0:
        try:
            cluster = _cluster(places, machines, config)
            plan = _make_plan(cluster, places, config)
            made = plan_codec.encode(plan)
            files = {"plan.txt": draw_text.tree(plan, cluster), PLAN_FILE: made.decode("ascii")}
        except UserError as error:
            made = error
    plan = plan_codec.decode(decided(comm, made), where="the plan of rank 0")
    mine = plan.ranks[rank]
    if config.bind == "auto" and mine.cpus and _is_same_host(mine.host, places[rank].host):
        cores = binding.bind(mine.cpus)
    else:
        cores = frozenset(places[rank].cores)
    has = [tuple(msgpack.unpackb(each)) for each in allgather(comm, msgpack.packb(sorted(cores)))]
    bound = [replace(each, cores=cores) for each, cores in zip(places, has, strict=True)]
    _compare(comm, plan, bound, config)
    return Placed(plan=plan, roles=from_plan(bound, plan), files=files)


def _describe_host(places: Sequence[Place], rank: int) -> bytes:
    """What rank 0 hears of this rank's host: its machine from the first rank there."""
    host = places[rank].host
    here = [place for place in places if place.host == host]
    if here[0].rank != rank:
        return b""
    usable = {core for place in here for core in place.cores}
    packed: bytes = msgpack.packb(machine_codec.pack(live.this_machine(affinity=usable)))
    return packed


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
        path = Path(config.placement)
        data, where = file_bytes(path, max_bytes=plan_codec.MAX_BYTES)
        plan = plan_codec.decode(data, where=where)
        if len(plan.ranks) != len(places):
            raise PlacementError(
                f"placement = {where}: a plan for {len(plan.ranks)} ranks, but the job has "
                f"{len(places)}; start as many as planned, or make a new plan"
            )
        return plan
    ranks = [
        RankFacts(
            rank=each.rank,
            host=each.host,
            cpus=frozenset(each.cores),
            gpus=each.gpus,
            kernel=each.kernel,
        )
        for each in places
    ]
    request = PlanRequest(
        servers=config.servers,
        group=config.group,
        placement=strategy,
        may_bind=config.bind == "auto",
    )
    return plan_job(cluster, ranks, request)


def _compare(comm: MPI.Intracomm, plan: Plan, places: Sequence[Place], config: RunConfig) -> None:
    """Every rank knows the same: one speaks, or all end."""
    differences: list[str] = []
    for planned, found in zip(plan.ranks, places, strict=True):
        if not _is_same_host(planned.host, found.host):
            differences.append(f"rank {found.rank} is on {found.host}, planned on {planned.host}")
        elif config.bind == "auto" and planned.cpus and set(found.cores) != set(planned.cpus):
            differences.append(
                f"rank {found.rank} on {found.host} has processors {_listed(found.cores)}, "
                f"planned {_listed(planned.cpus)}"
            )
    if not differences:
        return
    more = len(differences) - _NAMED_AT_MOST
    told = "; ".join(differences[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")
    if config.strict_placement:
        agreed(
            comm,
            PlacementError(
                f"the job is not placed as planned: {told}; start it with the files of psdist "
                "plan --emit, or leave --strict-placement out"
            ),
        )
    if comm.Get_rank() == 0:
        print(f"psdist: warning: the job is not placed as planned: {told}", file=sys.stderr,
              flush=True)  # fmt: skip


def _is_same_host(one: str, other: str) -> bool:
    """``n1`` is ``n1.example.org``: a launcher's names may be longer than those of the hosts."""
    if "." in one and "." in other:
        return one == other
    return one.partition(".")[0] == other.partition(".")[0]


def _listed(cores: Sequence[int]) -> str:
    return bitmap.format_list(cores) or "none"
