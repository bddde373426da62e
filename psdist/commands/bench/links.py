"""How long a host's links are idle in each direction while a step runs.

    sampler = LinkSampler()
    with sampler:                       # a thread samples the interfaces
        ...                             # one turn; turns add up
    sampler.idle()                      # {"eth0": Idle(sent=0.31, received=0.08, ...)}

A link is idle in a sample if it carried less than ``IDLE_SHARE`` of its rate. The rate is measured:
95 % of all samples of the interface, in both directions, are below it. An interface reports the
speed of its card, which may be above that of the network.
"""

from __future__ import annotations

import statistics
import threading
import time
from types import TracebackType
from typing import Any, Final, NamedTuple

from rich.table import Table

from psdist.commands.bench import carried

INTERVAL_S: Final = 0.01
IDLE_SHARE: Final = 0.1
_LEAST_BYTES: Final = 1 << 20
"""Interfaces that carried less in all turns together are left out."""


class Idle(NamedTuple):
    """One interface."""

    sent: float
    """Share of the time in which it sent almost nothing."""
    received: float
    """Share of the time in which it received almost nothing."""
    rate: float
    """Measured rate of the link, in bits per second."""


class LinkSampler:
    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._rates: dict[str, list[tuple[float, float]]] = {}
        """By interface, for each sample, bytes per second sent and received."""
        self._bytes: dict[str, int] = {}

    def __enter__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="links", daemon=True)
        self._thread.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        before, before_s = carried(), time.perf_counter()
        while not self._is_over.wait(self._interval_s):
            now, now_s = carried(), time.perf_counter()
            self.add(before, now, now_s - before_s)
            before, before_s = now, now_s

    def add(
        self, before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]], seconds: float
    ) -> None:
        """Add a sample of ``seconds``. Both arguments are answers of
        :func:`psdist.commands.bench.carried`."""
        for name, (sent, received) in now.items():
            sent_before, received_before = before.get(name, (sent, received))
            out, into = sent - sent_before, received - received_before
            self._rates.setdefault(name, []).append((out / seconds, into / seconds))
            self._bytes[name] = self._bytes.get(name, 0) + out + into

    def idle(self) -> dict[str, Idle]:
        """Return the interfaces that carried something, by name."""
        found: dict[str, Idle] = {}
        for name, rates in self._rates.items():
            if len(rates) < 2 or self._bytes[name] < _LEAST_BYTES:
                continue
            rate = statistics.quantiles((each for pair in rates for each in pair), n=20)[-1]
            shares = [
                sum(each < IDLE_SHARE * rate for each in direction) / len(rates)
                for direction in zip(*rates, strict=True)
            ]
            found[name] = Idle(shares[0], shares[1], 8 * rate)
        return found


def table(links: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """``links``: way -> host and interface -> fields of :class:`Idle`."""
    made = Table(title=f"time in which a link carried less than {IDLE_SHARE:.0%} of its rate")
    made.add_column("", no_wrap=True)
    made.add_column("link", no_wrap=True)
    for name in ("rate", "sent", "received"):
        made.add_column(name, justify="right", no_wrap=True)
    for way, by_link in links.items():
        for index, (link, each) in enumerate(sorted(by_link.items())):
            made.add_row(
                "" if index else way,
                link,
                f"{each['rate'] / 1e6:.0f} Mbit/s",
                f"{each['sent']:.0%}",
                f"{each['received']:.0%}",
            )
    return made
