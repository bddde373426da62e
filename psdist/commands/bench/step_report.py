"""The report of ``psdist bench step``: options, ways to exchange, the result, a table.

report(result_of(context, options, measured), options)
"""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.table import Table

from psdist.commands.bench import (
    crowd_words,
    links,
    measured_on,
    plot,
    quartiles,
    show,
    size_text,
    write_result,
)
from psdist.commands.bench.sleeping import cut, layer_sizes
from psdist.ranks.rank import Rank

RAW_WHOLE, RAW_CHUNKS = "raw MPI, whole", "raw MPI, chunks"
ALLREDUCE, PSDIST = "MPI_Allreduce", "psdist step"
DDP, DDP_FP16 = "DDP (gloo) step", "DDP (gloo, fp16 hook) step"
WAYS: Final = (RAW_WHOLE, RAW_CHUNKS, ALLREDUCE, PSDIST, DDP, DDP_FP16)

Compute: TypeAlias = tuple[float, bool]
"""How long the layers of a step sleep: seconds, or (True) so many times the raw exchange."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    num_bytes: int
    layers: int
    compute: Compute
    repeats: int
    servers: int | None
    json_path: Path | None
    plot_path: Path | None = None
    steps: int = 1
    """Steps in a row; a repetition is their mean."""
    links: bool = False
    """Sample the hosts' interfaces."""
    ddp_bucket_mib: int = 25
    """Maximum size of DDP's buckets, by default torch's own."""


def result_of(
    context: Rank, options: StepOptions, everybody: list[dict[str, Any]]
) -> dict[str, Any]:
    from mpi4py import MPI

    workers = [each for each in everybody if "times" in each]
    rows = []
    for way in WAYS:
        slowest = [max(each) for each in zip(*(it["times"][way] for it in workers), strict=True)]
        num_steps = options.repeats * (options.steps if way in (PSDIST, DDP, DDP_FP16) else 1)
        most_sent = max(each["sent"][way] for each in everybody) / num_steps
        user_s, system_s = (
            sum(each["cpu"][way][part] for each in everybody) / num_steps for part in (0, 1)
        )
        workers_s = sum(sum(each["cpu"][way]) for each in workers) / num_steps
        # A worker sends its gradients and receives its values, whichever way.
        exchanged = 2 * options.num_bytes * len(workers)
        rows.append(
            {
                "way": way,
                "links": {
                    f"{place.host} {name}": idle
                    for place, each in zip(context.roles.places, everybody, strict=True)
                    for name, idle in each["links"].get(way, {}).items()
                },
                "sent_bytes": round(most_sent),
                "user_s": user_s,
                "system_s": system_s,
                "workers_s": workers_s,
                "servers_s": user_s + system_s - workers_s,
                "cpu_s_per_gb": (user_s + system_s) / exchanged * 1e9,
                "cores_busy": (user_s + system_s) / statistics.mean(slowest),
                "all_s": slowest,
            }
        )
    roles, plan, config = context.roles, context.bootstrap.plan, context.session.config
    partition = cut(context, layer_sizes(options.num_bytes, options.layers))
    link_s = plan.cost_s * partition.num_bytes / plan.model_bytes if plan and plan.links else None
    return {
        **measured_on(MPI.Get_library_version()),
        "components": {
            key: os.environ.get(f"OMPI_MCA_{key}", "default") for key in ("pml", "mtl", "btl")
        },
        "gloo_interface": workers[0]["gloo"],
        "servers": roles.num_servers,
        "workers": roles.num_workers,
        "hosts": len({place.host for place in roles.places}),
        "ranks_to_cores": ranks_to_cores(context),
        "load": round(os.getloadavg()[0], 1),
        "mode": config.mode,
        "num_bytes": partition.num_bytes,
        "layers": options.layers,
        "ddp_bucket_mib": options.ddp_bucket_mib,
        "chunks": len(partition.chunks),
        "chunk_bytes": partition.max_chunk_bytes,
        "credits": config.credits,
        "receive_buffers": config.receive_buffers,
        "slots": [each["slots"] for each in everybody if "slots" in each],
        "compute_s": workers[0]["compute_s"],
        "steps": options.steps,
        "prepare_s": max(each["prepare_s"] for each in workers),
        "repeats": options.repeats,
        "link_limit_s": link_s,
        "rows": rows,
    }


def ranks_to_cores(context: Rank) -> tuple[int, int]:
    """Return the ranks and the cores of the machine with the fewest cores per rank. Hosts of one
    kernel share their cores, whatever they claim."""
    machines: dict[str, list[tuple[int, ...]]] = {}
    for place in context.roles.places:
        machines.setdefault(place.kernel or place.host, []).append(place.cores)
    counted = [
        (len(ranks), max(1, len(set(itertools.chain.from_iterable(ranks)))))
        for ranks in machines.values()
    ]
    return max(counted, key=lambda each: each[0] / each[1])


def report(result: dict[str, Any], options: StepOptions) -> None:
    print(header(result), flush=True)
    show(table(result), width=120)
    if options.links and result["hosts"] > 1:
        show(links.table({row["way"]: row["links"] for row in result["rows"]}), width=120)
    elif options.links:
        print("--links: no link to show, because all ranks are on one host", flush=True)
    write_result(options.json_path, result)
    if options.plot_path is not None:
        plot.write(options.plot_path, drawn(result))


def drawn(result: dict[str, Any]) -> str:
    """The table as a plot."""
    ways = [plot.Way(row["way"], row["all_s"]) for row in result["rows"]]
    size = plot.Size(size_text(result["num_bytes"]), ways, limit_s=result["link_limit_s"])
    ranks, cores = result["ranks_to_cores"]
    note = (
        f"{result['servers']} servers, {result['workers']} workers on {result['hosts']} hosts, "
        f"{ranks} ranks on {cores} cores, {result['mode']}, {result['compute_s']:.3g} s of sleep a "
        f"step; {result['mpi']}; {result['repeats']} repetitions, {result['date']}"
    )
    return plot.plot("A training step, and other exchanges of as many bytes", [size], note=note)


def header(result: dict[str, Any]) -> str:
    """Return the lines on what was measured, where, and over which components."""
    components = ", ".join(f"{key} {name}" for key, name in result["components"].items())
    hosts = result["hosts"]
    carried = "nothing left a host" if hosts == 1 else "bytes sent are those of the hosts' links"
    return "\n".join(
        [
            f"step of {size_text(result['num_bytes'])} in {result['layers']} layers, "
            f"{result['compute_s']:.3f} s of sleep a step; {result['mode']}, "
            f"{result['servers']} servers, {result['workers']} workers on {hosts} hosts",
            f"{result['mpi']}, {components}; gloo over {result['gloo_interface']}; {carried}",
            f"{crowd_words(*result['ranks_to_cores'])}; load {result['load']}",
            f"{result['chunks']} chunks of at most {size_text(result['chunk_bytes'])}, credits "
            f"{result['credits']}, receive_buffers {result['receive_buffers']}: "
            f"{max(each['receive_slots'] for each in result['slots'])} slots a server, "
            f"{max(each['most_slots_used'] for each in result['slots'])} used",
        ]
    )


def table(result: dict[str, Any]) -> Table:
    made = Table(
        title=f"medians of {result['repeats']}, of the slowest worker; CPU time of workers and of "
        "servers, and of both for each GB that workers send and receive"
    )
    made.add_column("", no_wrap=True)
    for name in ("median", "quartiles", "of limit", "of raw", "host sends", "CPU", "s/GB"):
        made.add_column(name, justify="right", no_wrap=True)
    link_s = result["link_limit_s"]
    medians = {row["way"]: statistics.median(row["all_s"]) for row in result["rows"]}
    raw_s = min(medians[RAW_WHOLE], medians[RAW_CHUNKS])
    if link_s is not None:
        made.add_row("link limit, as planned", _ms(link_s), "", "1.00", "", "", "", "")
    for row in result["rows"]:
        median = medians[row["way"]]
        low, _, high = quartiles(row["all_s"])
        made.add_row(
            row["way"],
            _ms(median),
            _range(low, high),
            f"{median / link_s:.2f}" if link_s else "",
            f"{median / raw_s:.2f}",
            f"{row['sent_bytes'] / 2**20:.1f} MiB",
            f"{_ms(row['workers_s']).removesuffix(' ms')} + {_ms(row['servers_s'])}",
            f"{row['cpu_s_per_gb']:.2f}",
        )
    return made


def _range(low: float, high: float) -> str:
    return f"{_ms(low).removesuffix(' ms')} .. {_ms(high)}"


def _ms(seconds: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{seconds * 1e3:.{3 if seconds < 1 else 4}g} ms"
