"""The report of ``psdist bench convergence``: options, the result, a table, plots.

    report(result_of(context, options, measured), options)

**Measured** are losses, seconds, and bytes: those of schemes by the run's summary, of DDP what
gloo's ring all-reduce sends for the values that its hook leaves. **Computed**, and marked so, is
what the same steps would take over given links: the step alone, then the bytes on the busiest link,
pushes and pulls one after another. Ranks of a host share its link; where all are on one host, every
rank counts as a host of its own. The bound of a scheme's speed-up, (t_c + t_n) / (t_c + t_n /
ratio), has t_c from the steps alone, t_n from what the baseline takes beyond them, and the ratio of
bytes. A scheme that hides communication may pass the bound. **CPU** is what all ranks together,
servers too, take of the cores in a step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from psdist.commands.bench import crowd_words, measured_on, plot, sees_all, show, write_result
from psdist.commands.bench.schemes import Rival, Scheme
from psdist.commands.bench.step_report import ranks_to_cores
from psdist.protocol.roles import Roles
from psdist.ranks.rank import Rank

REACHED: Final = 1.02
"""A scheme has come as far as the baseline where its loss stays below so many times its last."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions:
    task: str
    width: int | None
    """Width of the model of chars; None: that of the task."""
    steps: int
    every: int
    """Steps between points of the curves."""
    batch_size: int
    seed: int
    schemes: Sequence[Scheme]
    """The first is what others are compared with."""
    rivals: Sequence[Rival]
    links: Mapping[str, float]
    """Bytes per second, by what they are called: for what is computed."""
    servers: int | None
    json_path: Path | None
    plot_path: Path | None = None


def result_of(
    context: Rank, options: ConvergenceOptions, everybody: list[dict[str, Any]]
) -> dict[str, Any]:
    from mpi4py import MPI

    roles = context.roles
    workers = [each for each in everybody if "rows" in each]
    chief = next(each for each in workers if any(row["curve"] for row in each["rows"]))
    (summaries,) = [each["summaries"] for each in everybody if each.get("summaries")]
    sent = [
        [sum(both) for both in zip(*counts, strict=True)]
        for counts in zip(*(each["sent"] for each in everybody), strict=True)
    ]
    names = [*(each.name for each in options.schemes), *(each.name for each in options.rivals)]
    rows = []
    for number, (name, row) in enumerate(zip(names, chief["rows"], strict=True)):
        slowest = max(each["rows"][number]["seconds"] for each in workers)
        if number < len(summaries):
            told = _of_summary(summaries[number], roles)
        else:
            told = _of_ring(row["values"], len(workers))
        rows.append(
            {
                "name": name,
                "loss": row["curve"][-1][2],
                "seconds": slowest,
                "cpu_s": _summed("cpu_s", number, workers) if sees_all(roles) else None,
                "curve": row["curve"],
                "hosts_sent_bytes": sent[number][0],
                "hosts_sent_packets": sent[number][1],
                **told,
            }
        )
    result = {
        **measured_on(MPI.Get_library_version()),
        "gloo_interface": chief["gloo"],
        "servers": roles.num_servers,
        "workers": roles.num_workers,
        "groups": len(roles.groups),
        "hosts": len({place.host for place in roles.places}),
        "ranks_to_cores": ranks_to_cores(context),
        "load": round(os.getloadavg()[0], 1),
        "task": options.task,
        "parameters": chief["parameters"],
        "unit": chief["unit"],
        "steps": options.steps,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "alone_s": max(each["alone_s"] for each in workers),
        "links": dict(options.links),
        "rows": rows,
    }
    compare(result)
    return result


def _summed(key: str, number: int, workers: list[dict[str, Any]]) -> float:
    total: float = sum(each["rows"][number][key] for each in workers)
    return total


def _of_summary(summary: dict[str, Any], roles: Roles) -> dict[str, Any]:
    pushed, pulled = summary["bytes_pushed"], summary["bytes_pulled"]
    to_servers, to_workers = busiest(roles)
    coding = summary["coding"] or {}
    return {
        "bytes": pushed + pulled,
        "bytes_pushed": pushed,
        "bytes_pulled": pulled,
        "bytes_sent": summary["bytes_sent"],
        "link_bytes": pushed * to_servers + pulled * to_workers,
        "staleness": summary["max_staleness_seen"],
        "left_out": coding.get("error"),
    }


def _of_ring(values: float, num_workers: int) -> dict[str, Any]:
    """A ring all-reduce sends every value from worker to worker, once to sum and once to
    distribute, except each worker's own part. All workers send and receive the same number."""
    each = 4 * values * 2 * (num_workers - 1) / num_workers
    return {
        "bytes": round(each * num_workers),
        "link_bytes": each,
        "staleness": 0,
        "left_out": None,
    }


def busiest(roles: Roles) -> tuple[float, float]:
    """Which part of all pushed bytes the busiest link carries, one way; and of all that are pulled.
    Every worker pushes an equal part, to servers by their weight."""
    hosts = [place.host for place in roles.places]
    if len(set(hosts)) == 1:
        hosts = [str(place.rank) for place in roles.places]
    weights = roles.shard_weights
    shares = [weight / sum(weights) for weight in weights]
    out: dict[str, float] = dict.fromkeys(hosts, 0.0)
    into = dict(out)
    for worker in roles.worker_ranks:
        for server, share in zip(roles.server_ranks, shares, strict=True):
            if hosts[worker] != hosts[server]:
                out[hosts[worker]] += share / roles.num_workers
                into[hosts[server]] += share / roles.num_workers
    most = max(*out.values(), *into.values())
    return most, most  # pulls go the same ways, backwards


def compare(result: dict[str, Any]) -> None:
    """Add to the rows their ratios to the first one, and their times over the given links."""
    steps, alone_s = result["steps"], result["alone_s"]
    base = result["rows"][0]
    wanted = REACHED * base["loss"]
    for row in result["rows"]:
        row["step_s"] = row["seconds"] / steps
        row["cpu_step_s"] = None if row["cpu_s"] is None else row["cpu_s"] / steps
        row["against"] = row["loss"] / base["loss"] - 1
        row["ratio"] = ratio = base["bytes"] / row["bytes"] if row["bytes"] else math.inf
        row["faster"] = base["seconds"] / row["seconds"]
        base_s = base["seconds"] / steps
        network_s = max(0.0, base_s - alone_s)
        row["bound"] = base_s / (min(alone_s, base_s) + network_s / ratio)
        row["reached_step"] = step = reached(row["curve"], wanted)
        row["reached_s"] = None if step is None else row["step_s"] * step
        row["at_link"] = {
            name: alone_s + row["link_bytes"] / steps / rate
            for name, rate in result["links"].items()
        }


def reached(curve: Sequence[Sequence[float]], wanted: float) -> float | None:
    """Return the first step after which the loss stays at or below ``wanted``; None if it never
    does."""
    found = None
    for step, _, loss in reversed(curve):
        if loss > wanted:
            break
        found = step
    return found


def report(result: dict[str, Any], options: ConvergenceOptions) -> None:
    print(header(result), flush=True)
    show(table(result), width=130)
    write_result(options.json_path, result)
    if options.plot_path is not None:
        plot.write(options.plot_path, drawn(result))


def header(result: dict[str, Any]) -> str:
    crowded = crowd_words(*result["ranks_to_cores"])
    return "\n".join(
        [
            f"{result['task']}, {result['parameters']:,} parameters, {result['steps']} steps of "
            f"{result['batch_size']} samples a worker, seed {result['seed']}; "
            f"{result['servers']} servers, {result['workers']} workers "
            f"in {result['groups']} groups on {result['hosts']} hosts; {result['mpi']}",
            f"a step alone {1e3 * result['alone_s']:.1f} ms; {crowded}; load {result['load']}",
        ]
    )


def table(result: dict[str, Any]) -> Table:
    links = result["links"]
    computed = f"; at a link: computed, not measured ({', '.join(links)})" if links else ""
    made = Table(
        title=f"loss in {result['unit']}, on validation data; CPU: of all ranks in a step{computed}"
    )
    made.add_column("", overflow="fold")
    for name in (
        *("loss", "against", "MB", "x fewer", "s a step", "CPU s", "x as fast", "bound"),
        *(f"s to {REACHED} x", "stale", "left out"),
        *(f"at {name}" for name in links),
    ):
        made.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        made.add_row(
            row["name"],
            f"{row['loss']:.4f}",
            f"{100 * row['against']:+.2f} %",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['ratio']:.1f}",
            f"{row['step_s']:.4f}",
            "" if row["cpu_step_s"] is None else f"{row['cpu_step_s']:.4f}",
            f"{row['faster']:.2f}",
            f"{row['bound']:.2f}",
            "never" if row["reached_s"] is None else f"{row['reached_s']:.1f}",
            str(row["staleness"]),
            "" if row["left_out"] is None else f"{row['left_out']:.2f}",
            *(f"{seconds:.4f}" for seconds in row["at_link"].values()),
        )
    return made


def drawn(result: dict[str, Any]) -> str:
    """Loss over measured time, over bytes, and over the computed time of each link."""
    steps = result["steps"]

    def lines(of_step: Any) -> list[plot.Line]:
        return [
            plot.Line(row["name"], [(of_step(row, step), loss) for step, _, loss in row["curve"]])
            for row in result["rows"]
        ]

    panels = [
        plot.Panel("seconds, measured", lines(lambda row, step: row["step_s"] * step)),
        plot.Panel("MB, all ranks together", lines(
            lambda row, step: row["bytes"] / 1e6 * step / steps)),
        *(
            plot.Panel(f"seconds at {name}, computed", lines(
                lambda row, step, name=name: row["at_link"][name] * step))
            for name in result["links"]
        ),
    ]  # fmt: skip
    note = (
        f"{result['task']}, {result['parameters']:,} parameters, {steps} steps of "
        f"{result['batch_size']} samples a worker; "
        f"{result['servers']} servers, {result['workers']} workers on {result['hosts']} hosts; "
        f"{result['mpi']}, {result['date']}"
    )
    return plot.curves(f"Loss ({result['unit']})", panels, note=note)
