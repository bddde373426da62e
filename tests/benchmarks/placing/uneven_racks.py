"""The plan against the best three alternatives by prediction, measured in uneven racks.

    python -m tests.benchmarks.placing.uneven_racks --json docs/bench/uneven-racks.json

Three hosts and one; hosts' links of 1 Gbit/s, racks' uplinks of 500 and 250 Mbit/s; two ranks on
each host, every worker a group of its own. Every way of choosing the ranks that serve is predicted,
with its best shares, hosts of a rack being alike. The fastest is the plan (an assertion); it and
the next three are run as plan.json, in turns, in rounds whose order goes round, so that what else
the machine does meets all of them. The raw exchange of the same bytes between the same ranks, in
the same job, is what the network could do. Needs root and what the cluster needs; brings it up and
takes it down: nobody else may use it then. ``--predict`` only prints what is predicted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from psdist.topology.machine import flat_machine
from psdist.topology.network import Cluster as Network
from psdist.topology.network.sources import build_cluster, read_tree
from psdist.topology.plan import Plan, PlannedRank, encode
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_job
from psdist.topology.plan.serving_hosts import link_loads, problem_of
from psdist.topology.solver import placement
from tests.benchmarks.placing.cluster_placement import run
from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.mpirun import REPOSITORY
from tests.support.slurm.cluster import SlurmCluster

RACKS = REPOSITORY / "tests" / "benchmarks" / "placing" / "uneven_racks.toml"
HOSTS = ("h1", "h2", "h3", "h4")
RANKS_A_HOST = 2
ALTERNATIVES = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """So many servers on each host, with the shares that are best there."""

    servers: tuple[int, ...]
    shares: tuple[float, ...]
    predicted_s: float
    """For a model of 1 byte."""

    @property
    def name(self) -> str:
        shares = ",".join(f"{100 * share:.0f}" for share in self.shares)
        return f"{'+'.join(map(str, self.servers))} ({shares} %)"


def network() -> Network:
    return build_cluster(HOSTS, flat_machine(range(4)), tree=read_tree(RACKS))


def ways(cluster: Network, count: int) -> list[Way]:
    """All ways of so many servers, the fastest first; of hosts alike in a rack one order."""
    found = []
    for servers in itertools.product(range(RANKS_A_HOST + 1), repeat=len(HOSTS)):
        if sum(servers) != count or list(servers[:3]) != sorted(servers[:3], reverse=True):
            continue
        groups = [float(RANKS_A_HOST - each) for each in servers]
        problem = problem_of(cluster, servers, groups, PlanRequest(), count)
        solution = placement.solve(problem)
        held = solution.bytes_at[-len(HOSTS) :]
        found.append(
            Way(
                servers=servers,
                shares=tuple(each / problem.model_bytes for each in held),
                predicted_s=solution.cost_s / problem.model_bytes,
            )
        )
    return sorted(found, key=lambda way: (way.predicted_s, max(way.shares)))


def plan_of(cluster: Network, way: Way) -> Plan:
    """The first ranks of each host serve, every worker is a group."""
    ranks: list[PlannedRank] = []
    weights: list[float] = []
    workers = 0
    for host, (name, count) in enumerate(zip(HOSTS, way.servers, strict=True)):
        for local in range(RANKS_A_HOST):
            serves = local < count
            ranks.append(
                PlannedRank(
                    rank=len(ranks),
                    host=name,
                    role="server" if serves else "worker",
                    index=len(weights) if serves else workers,
                    group=-1 if serves else workers,
                    cores=(),
                    cpus=(),
                    package=-1,
                    numa=-1,
                    gpu="",
                    nic="",
                )
            )
            if serves:
                weights.append(way.shares[host] / count)
            else:
                workers += 1
    groups = [float(RANKS_A_HOST - count) for count in way.servers]
    links = link_loads(cluster, groups, way.shares, PlanRequest())
    return Plan(
        ranks=tuple(ranks),
        weights=tuple(weights),
        links=links,
        model_bytes=PlanRequest().planned_bytes,
        placement="auto",
        cost_s=max(link.seconds for link in links),
        bound_s=0.0,
        compared={},
        source=cluster.source,
    )


def check_is_the_plan(cluster: Network, best: Way) -> None:
    """The mapper's own plan in such a job is as fast as the fastest of all ways."""
    hosts = [host for host in HOSTS for _ in range(RANKS_A_HOST)]
    facts = [
        RankFacts(rank=rank, host=host, cpus=frozenset(range(4))) for rank, host in enumerate(hosts)
    ]
    request = PlanRequest(servers=sum(best.servers), group="rank")
    plan = plan_job(cluster, facts, request)
    least_s = best.predicted_s * plan.model_bytes
    assert abs(plan.cost_s / least_s - 1) < 1e-6, (plan.cost_s, least_s)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--size", default="4MiB")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cluster = network()
    chosen = {}
    for count in options.servers:
        found = ways(cluster, count)
        check_is_the_plan(cluster, found[0])
        chosen[count] = found[: 1 + ALTERNATIVES]
        for way in found[: len(found) if options.predict else 1 + ALTERNATIVES]:
            print(
                f"{count} servers: {way.name:<28} {way.predicted_s * 2**22 * 1e3:6.0f} ms of 4MiB"
            )
    if options.predict:
        return 0
    results = []
    try:
        with taken_cluster(shape="1gbit", uplink=("500mbit", "250mbit"), racks="3+1") as hosts:
            for count in options.servers:
                results.append(measure(hosts, options, count, cluster, chosen[count]))
    finally:
        if options.json is not None and results:
            content = {
                "date": time.strftime("%Y-%m-%d"),
                "links": "1 Gbit/s a host; racks of 3 and 1 hosts, uplinks 500 and 250 Mbit/s",
                "ranks": "2 on each of 4 hosts, every worker a group",
                "size": options.size,
                "results": results,
            }
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(
    slurm: SlurmCluster,
    options: argparse.Namespace,
    count: int,
    cluster: Network,
    chosen: Sequence[Way],
) -> dict[str, object]:
    """All rounds of one number of servers; prints a table."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    predicted: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=slurm.directory("plans")) as folder:
        paths = {}
        for number, way in enumerate(chosen):
            paths[way.name] = Path(folder) / f"{number}.json"
            paths[way.name].write_bytes(encode(plan_of(cluster, way)))
        names = list(paths)
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                print(f"{count} servers, round {number + 1}, {name}", file=sys.stderr, flush=True)
                row = run(slurm, options, count, str(paths[name]), racks=RACKS)
                predicted[name] = row["predicted_s"]
                times[name]["measured"] += row["all_push_pull_s"]
                times[name]["raw"] += row["all_raw_chunks_s"]
                times[name]["rounds"].append(statistics.median(row["all_push_pull_s"]))
    print(f"\n{count} servers, {options.size}, {options.rounds} x {options.repeats} exchanges")
    print(f"{'servers on h1+h2+h3+h4 (shares)':<34}{'predicted':>12}{'measured':>12}"
          f"{'quartiles':>18}{'raw MPI':>12}{'plan faster in':>16}")  # fmt: skip
    for name in names:
        low, middle, high = statistics.quantiles(times[name]["measured"], n=4)
        raw = statistics.median(times[name]["raw"])
        pairs = list(zip(times[names[0]]["rounds"], times[name]["rounds"], strict=True))
        faster = sum(plan < other for plan, other in pairs)
        print(
            f"{name:<34}{predicted[name] * 1e3:>9.0f} ms{middle * 1e3:>9.0f} ms"
            f"{f'{low * 1e3:.0f} .. {high * 1e3:.0f}':>18}{raw * 1e3:>9.0f} ms"
            + ("" if name == names[0] else f"{f'{faster} of {len(pairs)}':>16}"),
            flush=True,
        )
    return {"servers": count, "predicted_s": predicted, "times_s": times}


if __name__ == "__main__":
    sys.exit(main())
