"""Compare two measurements of a network: which links got slower, and which got faster.

    print(*compare(old, new).slower)        # n3 -> n4: 11.2 -> 4.1 GB/s (2.7x slower)

A change counts beyond a threshold and beyond the scatter of its kind: three times the typical
deviation of the ratios from the common one, and among many links what noise reaches in one of a
hundred comparisons. A change that all links share is seen in the typical pair.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from psdist.errors import PlacementError
from psdist.topology.network.catalogue import UNMEASURED, Kind, Network, Speed
from psdist.topology.text.hostlist import listed, natural_key

BANDWIDTH_THRESHOLD: Final = 0.1
LATENCY_THRESHOLD: Final = 0.25
"""Minimum for latencies: a scheduler's turn is long compared with a microsecond."""
_LEAST: Final = 1e-30
"""Anything above 0 is taken for measured, but ratios must have a logarithm."""
_FEWEST: Final = 5
"""Minimum number of ratios for a scatter."""
_LEAST_DEVIATIONS: Final = 3.0
_CHANCE: Final = 0.01
"""That noise alone has one link of a kind called slower."""
_MAD: Final = 1.4826
"""Standard deviations in a median absolute deviation, of a normal distribution."""
_OF_MEDIAN: Final = 1.2533
"""Standard deviation of a median, times the root of the number, of a normal distribution."""

Section: TypeAlias = Literal["between hosts", "same host", "host and GPU"]
Quantity: TypeAlias = Literal["bandwidth", "latency"]
Group: TypeAlias = Kind | Literal["link", "uplink"]
_SECTIONS: Final[dict[Group, Section]] = {
    "node": "between hosts",
    "rack": "between hosts",
    "link": "between hosts",
    "uplink": "between hosts",
    "socket": "same host",
    "core": "same host",
    "gpu": "host and GPU",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One quantity that both measured, before and after."""

    name: str
    """``n3 -> n4``, ``link of n3``, ``typical node pair``."""
    group: Group
    quantity: Quantity
    old: float
    new: float
    """Bytes per second, or seconds."""
    limit: float
    """How many times slower or faster is a change here."""
    is_typical: bool

    @property
    def section(self) -> Section:
        return _SECTIONS[self.group]

    @property
    def times_slower(self) -> float:
        return _ratio(self.new, self.old, self.quantity)

    @property
    def times_faster(self) -> float:
        return _ratio(self.old, self.new, self.quantity)

    @property
    def is_slower(self) -> bool:
        return self.times_slower > self.limit

    @property
    def is_faster(self) -> bool:
        return self.times_faster > self.limit

    @property
    def verdict(self) -> str:
        if self.is_slower:
            return f"{self.times_slower:.2g}x slower"
        return f"{self.times_faster:.2g}x faster" if self.is_faster else "the same"

    def __str__(self) -> str:
        if self.quantity == "latency":
            values = f"latency {self.old * 1e6:.3g} -> {self.new * 1e6:.3g} us"
        else:
            unit, scale = ("GB/s", 1e9) if max(self.old, self.new) >= 1e9 else ("MB/s", 1e6)
            values = f"{self.old / scale:.3g} -> {self.new / scale:.3g} {unit}"
        return f"{self.name}: {values} ({self.verdict})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    new_hosts: tuple[str, ...]
    gone_hosts: tuple[str, ...]
    compared: tuple[Change, ...]
    """All that both measured, the worst first."""

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(each for each in self.compared if each.is_slower)

    @property
    def faster(self) -> tuple[Change, ...]:
        """The most improved first."""
        return tuple(each for each in self.compared[::-1] if each.is_faster)


def compare(
    old: Network,
    new: Network,
    *,
    threshold: float = BANDWIDTH_THRESHOLD,
    latency_threshold: float | None = None,
) -> Comparison:
    """All that both measured. ``threshold`` is a share (0.1: 10 %); that of latencies is the larger
    of it and LATENCY_THRESHOLD where none is given.

    Skips what only one of the two measured, and a bandwidth with a lower bound on one side that the
    other side does not contradict. Raises PlacementError where no host is in both.
    """
    before, after = set(old.hosts), set(new.hosts)
    if not before & after:
        raise PlacementError(
            f"no host is in both measurements ({listed(old.hosts, 3) or 'no host'}; "
            f"{listed(new.hosts, 3) or 'no host'}): "
            "give two of one cluster"
        )
    beyond: dict[Quantity, float] = {
        "bandwidth": threshold,
        "latency": max(threshold, LATENCY_THRESHOLD)
        if latency_threshold is None
        else latency_threshold,
    }
    compared = list(_limited(list(_both(old, new)), beyond))
    compared.sort(key=lambda each: (-each.times_slower, natural_key(each.name), each.quantity))
    return Comparison(
        new_hosts=tuple(host for host in new.hosts if host not in before),
        gone_hosts=tuple(host for host in old.hosts if host not in after),
        compared=tuple(compared),
    )


def lines(comparison: Comparison) -> list[str]:
    """A line for all that changed, the worst first; hosts that are new or gone come before."""
    return [
        *(f"{host}: new" for host in comparison.new_hosts),
        *(f"{host}: gone" for host in comparison.gone_hosts),
        *map(str, comparison.slower),
        *map(str, comparison.faster[::-1]),
    ]


def _ratio(one: float, other: float, quantity: Quantity) -> float:
    """How many times as good ``other`` is as ``one``."""
    one, other = max(one, _LEAST), max(other, _LEAST)
    return one / other if quantity == "latency" else other / one


def _both(old: Network, new: Network) -> Iterator[Change]:
    before, after = _measured(old), _measured(new)
    for name in before.keys() & after.keys():
        (group, was, is_typical), (_, now, _) = before[name], after[name]
        quantities: list[tuple[Quantity, float, float]] = []
        slower, faster = sorted((was, now), key=lambda each: each.bytes_per_s)
        # "At least 4" and 5 may be the same.
        if slower.bytes_per_s == faster.bytes_per_s or not slower.is_lower_bound:
            quantities.append(("bandwidth", was.bytes_per_s, now.bytes_per_s))
        quantities.append(("latency", was.latency_s, now.latency_s))
        for quantity, first, second in quantities:
            if first and second:
                yield Change(
                    name=name,
                    group=group,
                    quantity=quantity,
                    old=first,
                    new=second,
                    limit=1.0,
                    is_typical=is_typical,
                )


def _measured(network: Network) -> dict[str, tuple[Group, Speed, bool]]:
    """(group, speed, whether it is the typical one) of all that was measured, by words for it."""
    found: dict[str, tuple[Group, Speed, bool]] = {
        f"typical {kind} pair": (kind, speed, True) for kind, speed in network.classes.items()
    }
    for host, speed in network.node_links.items():
        found[f"link of {host}"] = ("link", speed, False)
    for name, speed in network.switch_uplinks.items():
        found[f"uplink of {name}"] = ("uplink", speed, False)
    for pair in network.pairs:
        name = f"{pair.first} -> {pair.second}"
        if pair.kind in ("socket", "core", "gpu"):
            name += f" ({pair.kind})"
        speed = replace(UNMEASURED, latency_s=pair.latency_s, bytes_per_s=pair.bytes_per_s)
        found[name] = (pair.kind, speed, False)
    return found


def _limited(changes: Sequence[Change], beyond: dict[Quantity, float]) -> Iterator[Change]:
    """The changes, each with its limit."""
    ratios: dict[tuple[Group, Quantity], list[float]] = defaultdict(list)
    for each in changes:
        if not each.is_typical:
            ratios[each.group, each.quantity].append(math.log(each.times_slower))
    scatters = {key: _scatter(these) for key, these in ratios.items()}
    for each in changes:
        these = ratios.get((each.group, each.quantity), [])
        scatter = scatters.get((each.group, each.quantity), 0.0)
        if each.is_typical and these:
            scatter *= _LEAST_DEVIATIONS * _OF_MEDIAN / math.sqrt(len(these))
        else:
            scatter *= _deviations(len(these))
        yield replace(each, limit=max(1 + beyond[each.quantity], math.exp(scatter)))


def _deviations(number: int) -> float:
    """How many of them an outlier needs among so many ratios."""
    return max(_LEAST_DEVIATIONS, statistics.NormalDist().inv_cdf(1 - _CHANCE / max(1, number)))


def _scatter(ratios: Sequence[float]) -> float:
    """The deviation of logarithms from their median; 0 where they are too few to tell."""
    if len(ratios) < _FEWEST:
        return 0.0
    middle = statistics.median(ratios)
    return _MAD * statistics.median(abs(each - middle) for each in ratios)
