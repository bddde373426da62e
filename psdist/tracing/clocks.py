"""One clock for all ranks: where a rank's clock stands against rank 0's, from round trips. Pure.

    start = best([(sent_ns, answered_ns, received_ns), ...])     # Offset, of the least round trip
    line = Line.through(start, end)
    line.aligned(times_ns)                                       # on rank 0's clock

The answer of a round trip was given between its ends: the middle is taken, and half of it bounds
the error. Between start and end of a run the offset is taken to move evenly (the clocks drift), and
the larger bound holds. For a failed run only the start is known, and the drift is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

_FAR_NS = 2**61
Nanoseconds = Annotated[int, Field(gt=-_FAR_NS, lt=_FAR_NS)]
RoundTrip = tuple[int, int, int]
"""Rank 0 asks, on its clock; the other answers, on its own; rank 0 has the answer."""


class Offset(BaseModel):
    """At ``at_ns`` of a rank's clock rank 0's stands at ``at_ns + offset_ns``, give or take
    ``bound_ns``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    at_ns: Nanoseconds
    offset_ns: Annotated[int, Field(gt=-(2**62), lt=2**62)]
    bound_ns: Annotated[int, Field(ge=0, lt=_FAR_NS)]


def best(trips: Sequence[RoundTrip]) -> Offset:
    """Return the offset of the shortest round trip."""
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    took = received - sent
    return Offset(
        at_ns=answered, offset_ns=sent + took // 2 - answered, bound_ns=took // 2 + took % 2
    )


@dataclass(frozen=True)
class Line:
    """A rank's clock against rank 0's: ``offset_ns`` at ``at_ns``, and ``slope`` from there on."""

    at_ns: int
    offset_ns: int
    slope: float
    bound_ns: int
    is_drift_known: bool

    @classmethod
    def through(cls, start: Offset | None, end: Offset | None) -> Line:
        """Without any the rank's own clock is taken."""
        if start is None or end is None or end.at_ns <= start.at_ns:
            one = start or end
            if one is None:
                return cls(0, 0, 0.0, 0, False)
            return cls(one.at_ns, one.offset_ns, 0.0, one.bound_ns, False)
        slope = (end.offset_ns - start.offset_ns) / (end.at_ns - start.at_ns)
        bound_ns = max(start.bound_ns, end.bound_ns)
        return cls(start.at_ns, start.offset_ns, slope, bound_ns, True)

    def aligned(self, times_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """On rank 0's clock."""
        drift: npt.NDArray[np.int64] = np.rint((times_ns - self.at_ns) * self.slope).astype(
            np.int64
        )
        return times_ns + self.offset_ns + drift
