"""A stream of equal blocks between two ranks, and the speed that its times tell.

    flow = Flow(num_bytes=1 << 20, done_s=(0.1, 0.2, ...))
    flow.bytes_per_s                # of this pair alone
    together([flow, other])         # what all of them carried at the same time

The first blocks and the last do not count: there the network fills and empties.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REPEATS: Final = 10
"""Measurements of which a median is taken, at least."""
DEPTH: Final = 8
"""Blocks that fly at once, each way. One is not enough: what a rank says about the block that it
is to receive waits behind the blocks that it sends, and the two ways would take turns."""
FEWEST: Final = REPEATS + 3 * DEPTH
"""Blocks of a flow, at least: a measured stretch is DEPTH of them, and as many are left out at
either end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    num_bytes: int
    """Of a block."""
    done_s: tuple[float, ...]
    """When each had arrived, in seconds since all pairs began; ascending, FEWEST or more."""

    @property
    def inner_s(self) -> tuple[float, ...]:
        return self.done_s[DEPTH:-DEPTH]

    @property
    def bytes_per_s(self) -> float:
        """The median over all stretches of DEPTH blocks."""
        inner = self.inner_s
        stretches = [end - begin for begin, end in zip(inner, inner[DEPTH:], strict=False)]
        return DEPTH * self.num_bytes / statistics.median(stretches)

    def bytes_until(self, at_s: float) -> float:
        """What had arrived by then, blocks on their way counted in part."""
        after = bisect.bisect_right(self.done_s, at_s)
        if after in (0, len(self.done_s)):
            return float(after * self.num_bytes)
        begin, end = self.done_s[after - 1], self.done_s[after]
        return self.num_bytes * (after + (at_s - begin) / (end - begin))


def together(flows: Sequence[Flow]) -> float:
    """Bytes per second of all flows, over the time in which all of them were under way; 0 for
    none. Pairs that share a link take more of it in turns: their medians do not add up."""
    begin = max((flow.inner_s[0] for flow in flows), default=0.0)
    end = min((flow.inner_s[-1] for flow in flows), default=0.0)
    if begin >= end:
        return 0.0
    carried = sum(flow.bytes_until(end) - flow.bytes_until(begin) for flow in flows)
    return carried / (end - begin)
