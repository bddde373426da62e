"""A group's share of an iteration: the GroupChannel beside torch's own all-reduce, in turns.

    python -m tests.benchmarks.group                      # 2 and 4 workers, 1 and 16 MiB
    python -m tests.benchmarks.group --workers 3 --mib 64 --repeats 20

One process per worker on this machine, over gloo. In each repetition every way is timed once, the
slowest worker counts; medians, least and greatest are printed. *all-reduce* is what version 0.1
did: two agreements, an all-reduce of the gradient, a broadcast of each slice of the parameters.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from psdist.protocol.ids import worker_id
from psdist.protocol.partition import Span
from psdist.transport.virtual import VirtualNetwork
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.group.channel import GroupChannel
from psdist.workers.protocol.seat import Seat
from tests.support.process_groups import run_in_group

PARTS = ("agree", "reduce", "gather")


def measure(channel: GroupChannel, *, num_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each part of each way in each repetition, as this worker saw them."""
    length = num_bytes // 4
    bounds = [length * place // channel.size // 64 * 64 for place in range(channel.size)]
    bounds.append(length)
    spans = [Span(0, *bounds[place : place + 2]) for place in range(channel.size)]
    slices = [[span] for span in spans]
    gradient, values = torch.ones(length), torch.ones(length)
    row = [1.0, 0.0, 0.0]
    loop = make_loop(
        VirtualNetwork().endpoint(worker_id(channel.place)),  # brings nothing
        Seat(worker=channel.place, group=0, members=(channel.place,), num_servers=1),
        waiting=Waiting(is_spinning=False),
    )

    def agree_twice() -> None:
        for _ in range(2):
            mine = torch.tensor(row, dtype=torch.float64)
            table = [torch.empty_like(mine) for _ in range(channel.size)]
            dist.all_gather(table, mine)
            [each.tolist() for each in table]

    def broadcast_each() -> None:
        for place, (_, start, stop) in enumerate(spans):
            dist.broadcast(values[start:stop], src=place)

    ways: dict[str, Callable[[], object]] = {
        "all-reduce agree": agree_twice,
        "all-reduce reduce": lambda: dist.all_reduce(gradient),
        "all-reduce gather": broadcast_each,
        "channel agree": lambda: loop.wait_for(channel.agree("optimizer.step", row), "agree"),
        "channel reduce": lambda: loop.wait_for(
            channel.reduce_scatter([gradient], slices), "reduce"
        ),
        "channel gather": lambda: loop.wait_for(channel.all_gather([values], slices), "gather"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, call in ways.items():
            gradient.fill_(1.0)
            dist.barrier()
            began_s = time.perf_counter()
            call()
            if repeat >= 2:
                times[name].append(time.perf_counter() - began_s)
    return times


def report(workers: int, mib: float, by_place: list[dict[str, list[float]]]) -> None:
    slowest = {
        name: [max(at) for at in zip(*(each[name] for each in by_place), strict=True)]
        for name in by_place[0]
    }
    for way in ("all-reduce", "channel"):
        sums = zip(*(slowest[f"{way} {part}"] for part in PARTS), strict=True)
        slowest[f"{way} all"] = list(map(sum, sums))
    for part in (*PARTS, "all"):
        before, now = slowest[f"all-reduce {part}"], slowest[f"channel {part}"]
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        print(
            f"{workers} workers, {mib:g} MiB, {part:6}: all-reduce {_shown(before)}, "
            f"channel {_shown(now)}, paired ratio {statistics.median(ratios):.2f}",
            flush=True,
        )


def _shown(times: list[float]) -> str:
    middle, least, most = (f(times) * 1e3 for f in (statistics.median, min, max))
    return f"{middle:.2f} ({least:.2f} to {most:.2f}) ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    for workers in arguments.workers:
        for mib in arguments.mib:
            script = functools.partial(
                measure, num_bytes=int(mib * 2**20), repeats=arguments.repeats
            )
            report(workers, mib, run_in_group(workers, script))


if __name__ == "__main__":
    main()
