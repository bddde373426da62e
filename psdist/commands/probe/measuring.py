"""All steps, one after the other, in every rank; all methods are collective.

    results = Measuring(comm, hosts, scale=1, say=print).steps(schedule(ranks, racks))

A rank that is in no pair of a step sleeps until the step ends.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgpack

from psdist.commands.probe.exchange import REPEATS, Flow, Line
from psdist.commands.probe.report import Result
from psdist.commands.probe.schedule import Step, StepKind
from psdist.ranks.agreement import allgather
from psdist.topology.machine.gpus import torch_bus_id
from psdist.topology.network.catalogue import Pair, Speed

if TYPE_CHECKING:
    from mpi4py import MPI


# For all steps together; a step has at least the one and at most the other.
_ALL_STEPS_S: Final = 8.0
_STEP_S: Final = (0.2, 1.0)
_GPU_BYTES: Final = 64 << 20
_WHAT: Final[dict[StepKind, str]] = {
    "core": "within a socket",
    "socket": "across the sockets of a node",
    "node": "between nodes of a rack",
    "rack": "between nodes of different racks",
    "uplink": "uplinks of racks",
}


class Measuring:
    """``scale`` is how many times shorter than usual everything is; ``say`` takes the progress."""

    def __init__(
        self, comm: MPI.Comm, hosts: Sequence[str], *, scale: int, say: Callable[[str], None]
    ) -> None:
        self._comm, self._hosts, self._scale, self._say = comm, hosts, scale, say
        self._rank = comm.Get_rank()
        self._line = Line(comm)

    def steps(self, steps: Sequence[Step]) -> list[Result]:
        """All results, on every rank."""
        shortest_s, longest_s = (limit_s / self._scale for limit_s in _STEP_S)
        window_s = min(longest_s, max(shortest_s, _ALL_STEPS_S / self._scale / max(1, len(steps))))
        mine: list[Any] = []
        for number, step in enumerate(steps):
            if number == 0 or steps[number - 1].kind != step.kind:
                count = sum(other.kind == step.kind for other in steps)
                self._say(f"{_WHAT[step.kind]} ({count} in turn)")
            with _bound(step.cpus.get(self._rank)):
                mine += self._take_part(number, step, window_s)
        everybody = allgather(self._comm, msgpack.packb(mine))
        return [
            Result(
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

    def _take_part(self, number: int, step: Step, window_s: float) -> list[Any]:
        """This rank's part in a step: its result where it leads a pair."""
        pair = next((pair for pair in step.pairs if self._rank in pair), None)
        leads = pair is not None and pair[0] == self._rank
        peer = -1 if pair is None else pair[1] if leads else pair[0]
        latency_s, num_bytes, flow = 0.0, 0, None
        self._line.wait_for_all()
        if pair is not None and step.kind != "uplink":
            latency_s = self._line.latency(peer, leads=leads)
        self._line.wait_for_all()
        if pair is not None:
            num_bytes = self._line.prepare(peer, leads=leads, window_s=window_s)
        self._line.wait_for_all()
        if pair is not None:
            flow = self._line.stream(peer, leads=leads, num_bytes=num_bytes, window_s=window_s)
        if pair is None or flow is None or not leads:
            return []
        times = flow.done_s if step.kind == "uplink" else ()
        return [(number, *pair, latency_s, flow.bytes_per_s, flow.num_bytes, times)]

    def gpus(self) -> list[Pair]:
        """Copies of all GPUs, on every rank; of each host one GPU at a time."""
        visible = visible_gpus()
        everybody = [msgpack.unpackb(each) for each in
                     allgather(self._comm, msgpack.packb(list(visible)))]  # fmt: skip
        owners: dict[str, dict[str, int]] = defaultdict(dict)
        for rank, (host, names) in enumerate(zip(self._hosts, everybody, strict=True)):
            for name in names:
                owners[host].setdefault(name, rank)
        turns = max(map(len, owners.values()), default=0)
        if turns:
            self._say(f"host and GPU ({turns} in turn)")
        host = self._hosts[self._rank]
        mine: list[Any] = []
        for turn in range(turns):
            self._line.wait_for_all()
            at_it = list(owners[host].items())[turn : turn + 1]
            for name, owner in at_it:
                if owner == self._rank:
                    to, back = measure_gpu(visible[name], num_bytes=_GPU_BYTES // self._scale)
                    there = f"{host}/{name}"
                    mine.append((host, there, to.latency_s, to.bytes_per_s))
                    mine.append((there, host, back.latency_s, back.bytes_per_s))
        self._line.wait_for_all()
        return [
            Pair(first=first, second=second, kind="gpu", latency_s=latency_s, bytes_per_s=rate)
            for each in allgather(self._comm, msgpack.packb(mine))
            for first, second, latency_s, rate in msgpack.unpackb(each)
        ]


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


# Drivers of NVIDIA, AMD and Windows' Linux: without one of them, no torch sees a GPU.
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_WARM_UP: Final = 2


def visible_gpus() -> dict[str, int]:
    """Return torch's number of each GPU that this process sees, by the GPU's name.

    The name is the same for all ranks: the PCI bus id, or the UUID if this torch has no bus id. If
    a GPU is sliced, one slice is returned. torch is imported only if a driver is there.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return {}
    import torch

    found: dict[str, int] = {}
    for number in range(torch.cuda.device_count()):
        found[_name(torch.cuda.get_device_properties(number), number)] = number
    return found


def measure_gpu(number: int, *, num_bytes: int) -> tuple[Speed, Speed]:
    """Return the speeds of copies over pinned memory to torch's GPU ``number`` and back: medians,
    with the latency of 8 bytes."""
    import torch

    device = torch.device("cuda", number)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def seconds(copy: Callable[[], Any]) -> float:
        times = []
        for _ in range(_WARM_UP + REPEATS):
            torch.cuda.synchronize(device)
            before_s = time.perf_counter()
            copy()
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - before_s)
        return statistics.median(times[_WARM_UP:])

    def speed(into: torch.Tensor, source: torch.Tensor) -> Speed:
        return Speed(
            latency_s=seconds(lambda: into[:8].copy_(source[:8], non_blocking=True)),
            bytes_per_s=num_bytes / seconds(lambda: into.copy_(source, non_blocking=True)),
            is_lower_bound=False,
        )

    return speed(there, host), speed(host, there)


def _name(properties: Any, number: int) -> str:
    return torch_bus_id(properties) or str(getattr(properties, "uuid", "")) or f"gpu{number}"
