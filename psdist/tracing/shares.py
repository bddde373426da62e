"""What of a worker's communication was hidden behind computation, step by step.

A step is what lies between the ends of two calls of ``optimizer.step()`` (of the first parameter
set). *Communication* is the time in which a chunk was on its way: from its push, or from asking for
it, until the reply had landed, or in the reduction or the gathering of the group. *Computation* is
the time in which the script was not inside psdist: neither in ``step()`` nor in a wait nor in a
collective. Communication is *hidden* while the script computes.

    steps = steps_of(trace)                    # Steps: seconds of each, numpy arrays
    steps.hidden_share                         # of all communication of these steps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from psdist.tracing.files import Spans, Trace
from psdist.tracing.spans import WAITS, Lane, Span

COMMUNICATION: Final = (Span.PUSH, Span.PULL, Span.REDUCE, Span.GATHER)
STALLED: Final = (
    *(Span.STEP, Span.COLLECTIVE, Span.SAVE, Span.SET_VALUES, Span.PULL_ALL),
    *(Span.OPTIMIZER_STATE, *WAITS),
)

Times = npt.NDArray[np.int64]


class Covered:
    """The union of intervals, and how much of it lies before a time."""

    def __init__(self, begins: Times, ends: Times) -> None:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order].astype(np.int64), ends[order].astype(np.int64)
        reached = np.maximum.accumulate(ends) if len(ends) else ends
        is_first = np.ones(len(begins), bool)
        is_first[1:] = begins[1:] > reached[:-1]
        is_last = np.ones(len(begins), bool)
        is_last[:-1] = is_first[1:]
        self.begins, self.ends = begins[is_first], reached[is_last]
        lengths = self.ends - self.begins
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    @classmethod
    def of(cls, spans: Spans) -> Covered:
        return cls(spans["begin_ns"], spans["end_ns"])

    def with_all(self, other: Covered) -> Covered:
        return Covered(
            np.concatenate([self.begins, other.begins]), np.concatenate([self.ends, other.ends])
        )

    def until(self, times: Times) -> Times:
        """Nanoseconds of it before each of ``times``."""
        index = np.searchsorted(self.begins, times, side="right")
        inside = np.zeros(len(times), np.int64)
        has_one = index > 0
        last = index[has_one] - 1
        inside[has_one] = np.minimum(times[has_one], self.ends[last]) - self.ends[last]
        return self._before[index] + inside

    def within(self, begins: Times, ends: Times) -> Times:
        """Nanoseconds of it in each of these windows."""
        return self.until(ends) - self.until(begins)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Of one worker, by step, in nanoseconds."""

    clocks: Times
    """Iterations, as the first set counts them."""
    begins: Times
    ends: Times
    computation: Times
    communication: Times
    hidden: Times

    @property
    def hidden_share(self) -> float:
        """Of the communication of all of them; NaN where there was none."""
        total = int(self.communication.sum())
        return int(self.hidden.sum()) / total if total else float("nan")

    def from_clock(self, clock: int) -> Steps:
        """Without the iterations before ``clock``."""
        keep = self.clocks >= clock
        return Steps(**{name: values[keep] for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.clocks)


def steps_of(trace: Trace) -> Steps:
    """All steps of this worker but the first, whose begin is not known."""
    stepped = trace.of(Span.STEP)
    stepped = stepped[stepped["set_index"] == 0]
    stepped = stepped[np.argsort(stepped["end_ns"], kind="stable")]
    begins, ends = stepped["end_ns"][:-1].astype(np.int64), stepped["end_ns"][1:].astype(np.int64)
    stalls = trace.of(*STALLED)
    stalled = Covered.of(stalls[stalls["lane"] == Lane.SCRIPT])
    moving = Covered.of(trace.of(*COMMUNICATION))
    in_stalls, in_moves = stalled.within(begins, ends), moving.within(begins, ends)
    in_any = stalled.with_all(moving).within(begins, ends)
    return Steps(
        clocks=stepped["clock"][1:].astype(np.int64),
        begins=begins,
        ends=ends,
        computation=ends - begins - in_stalls,
        communication=in_moves,
        hidden=in_any - in_stalls,
    )
