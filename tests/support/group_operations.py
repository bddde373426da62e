"""Every operation of a GroupChannel, once, with what each must bring: for all implementations.

results = finish(operations(channel))         # a blocking implementation
assert results == expected(channel.place, channel.size)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Sequence
from typing import Any

import torch

from psdist.protocol.memory import as_bytes, as_tensor, dtype_name
from psdist.protocol.partition import Span
from psdist.workers.group.channel import GroupChannel, Pending, Slices

Operations = Generator[Pending[Any], None, dict[str, Any]]

FLATS = ((1000, torch.float32), (64, torch.float64), (700, torch.bfloat16), (300, torch.float16))
NUM_ROUNDS = 4


def flats_of(place: int, round_: int) -> list[torch.Tensor]:
    """Return the input of the worker at ``place``: sums of these depend on the order."""
    generator = torch.Generator().manual_seed(100 * round_ + place)
    return [
        (torch.randn(length, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for length, dtype in FLATS
    ]


def slices_of(size: int, round_: int) -> Slices:
    """Uneven shares; some places have nothing in some flats. The last rounds take turns, with parts
    that no place has."""
    pick = random.Random(f"{size} {round_}")
    if round_ >= 2:
        owned: list[list[Span]] = [[] for _ in range(size)]
        for index, (length, _) in enumerate(FLATS):
            cuts = sorted(pick.randrange(length) for _ in range(12))
            for start, stop in itertools.pairwise([0, *cuts, length]):
                place = pick.randrange(-1, size)
                if place >= 0 and start < stop:
                    owned[place].append(Span(index, start, stop))
        return owned
    bounds = []
    for length, _ in FLATS:
        cuts = [pick.choice([0, pick.randrange(length), length]) for _ in range(size - 1)]
        bounds.append([0, *sorted(cuts), length])
    return [
        [
            Span(index, at[place], at[place + 1])
            for index, at in enumerate(bounds)
            if at[place] < at[place + 1]
        ]
        for place in range(size)
    ]


def in_memory_of(channel: GroupChannel, flat: torch.Tensor) -> torch.Tensor:
    """A copy in memory that the channel is made for."""
    memory = channel.allocate(flat.nbytes)
    copy = as_tensor(memory, dtype_name(flat.dtype), len(flat))
    return copy.copy_(flat)


def values_of(place: int, round_: int) -> list[float]:
    """Values of different lengths; integers that only float64 can represent."""
    return [2.0**53 - place, -0.0, float(round_), *(place + 0.1 * i for i in range(30 * place))]


def operations(
    channel: GroupChannel, beside: GroupChannel, device: str | torch.device = "cpu"
) -> Operations:
    """``beside``: the result of ``channel.duplicate()``, or ``channel``. Each has one operation
    under way at a time. ``device``: of the tensors that are reduced."""
    device = torch.device(device)
    results: dict[str, Any] = {}
    for round_ in range(NUM_ROUNDS):
        rows = yield from _done(channel.agree("mean", values_of(channel.place, round_)))
        results[f"agree {round_}"] = rows
        slices = slices_of(channel.size, round_)
        flats = [flat.to(device) for flat in flats_of(channel.place, round_)]
        if round_ != 1 and device.type == "cpu":
            flats = [in_memory_of(channel, flat) for flat in flats]
        sums = [torch.empty_like(flats[index][at:to]) for index, at, to in slices[channel.place]]
        summed, met = beside.reduce_scatter(flats, slices, sums), channel.agree("any")
        yield from _done(met)
        yield from _done(summed)
        yield from _done(beside.agree("all"))
        results[f"sums {round_}"] = _bytes(sums)
        results[f"unchanged {round_}"] = _bytes(flats)
        yield from _done(channel.reduce_scatter(flats, slices))
        results[f"reduce_scatter {round_}"] = _bytes(flats)
        yield from _done(channel.all_gather(flats, slices))
        results[f"all_gather {round_}"] = _bytes(flats)
        place = round_ % channel.size
        tensor = flats_of(channel.place, round_)[0].to(device)
        yield from _done(channel.broadcast(tensor, place))
        results[f"broadcast {round_}"] = _bytes([tensor])
        rows = yield from _done(channel.agree("barrier"))
        results[f"meet {round_}"] = rows
    return results


def expected(place: int, size: int, hosts: Sequence[int] = ()) -> dict[str, Any]:
    """Expected result of the worker at ``place``, computed in plain torch; ``hosts``: the number
    of each place's host, where they are several."""
    results: dict[str, Any] = {}
    for round_ in range(NUM_ROUNDS):
        results[f"agree {round_}"] = [values_of(each, round_) for each in range(size)]
        brought = [flats_of(each, round_) for each in range(size)]
        sums = []
        for parts in zip(*brought, strict=True):
            of_hosts = [
                _sum([part for part, at in zip(parts, hosts, strict=True) if at == host])
                for host in dict.fromkeys(hosts)
            ]
            sums.append(_sum(of_hosts or parts))
        mine = flats_of(place, round_)
        spans = slices_of(size, round_)[place]
        results[f"sums {round_}"] = _bytes([sums[index][at:to] for index, at, to in spans])
        results[f"unchanged {round_}"] = _bytes(mine)
        for index, start, stop in slices_of(size, round_)[place]:
            mine[index][start:stop] = sums[index][start:stop]
        results[f"reduce_scatter {round_}"] = _bytes(mine)
        gathered = flats_of(place, round_)
        for spans in slices_of(size, round_):
            for index, start, stop in spans:
                gathered[index][start:stop] = sums[index][start:stop]
        results[f"all_gather {round_}"] = _bytes(gathered)
        results[f"broadcast {round_}"] = _bytes([brought[round_ % size][0]])
        results[f"meet {round_}"] = [[] for _ in range(size)]
    return results


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def finish(operations: Generator[Pending[Any], None, Any]) -> Any:
    """Run them to their end, blocking."""
    while True:
        try:
            pending = next(operations)
        except StopIteration as stop:
            return stop.value
        while not pending.is_done():
            pending.wait(0.05)


def _done(pending: Pending[Any]) -> Generator[Pending[Any], None, Any]:
    yield pending
    return pending.result()


def _bytes(flats: list[torch.Tensor]) -> list[bytes]:
    return [bytes(as_bytes(flat.cpu())) for flat in flats]
