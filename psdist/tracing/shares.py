"""Where the time of a worker's steps went, and how much of its communication was hidden.

A step is what lies between the ends of two calls of ``optimizer.step()`` (of the first parameter
set). Each moment of it has one cause, the first that fits:

    outside of psdist   passes      in a forward or backward pass
                        script      all else: data loading, the loss, the optimizer's schedule ...
    inside of psdist    network     a chunk or an operation of the group was moving
                        waits       none moved, and one waited for another worker (``exchange``)
                        servers     neither, and a server had a chunk
                        psdist      none of these

The script is inside of psdist in ``step()``, in a wait, in a collective and in ``job.save`` and the
like. *Communication* is the time of network and servers, whatever the script did meanwhile. It is
*hidden* while the script is outside of psdist. Waiting for others is no communication.

    steps = steps_of_all(traces)[0]            # of worker 0: nanoseconds, numpy arrays
    steps.hidden_share                         # of all communication of these steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from psdist.tracing import WAITS, Lane, Span
from psdist.tracing.covered import Covered, Times
from psdist.tracing.exchange import Ways, exchanges
from psdist.tracing.files import Trace

PASSES: Final = (Span.FORWARD, Span.EVALUATION, Span.BACKWARD)
STALLED: Final = (
    *(Span.STEP, Span.COLLECTIVE, Span.SAVE, Span.SET_VALUES, Span.PULL_ALL),
    *(Span.OPTIMIZER_STATE, *WAITS),
)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one worker, in nanoseconds. Six parts add up to ``ends - begins``: passes,
    script, psdist, network, servers and waits."""

    clocks: Times
    """Iterations, as the first set counts them."""
    begins: Times
    ends: Times
    passes: Times
    script: Times
    psdist: Times
    network: Times
    servers: Times
    waits: Times
    """Waits for others while the script was inside of psdist."""
    communication: Times
    hidden: Times
    waits_for: Mapping[int, Times]
    """Worker -> the part of ``waits`` in which something waited for it. Parts may overlap."""

    @property
    def hidden_share(self) -> float:
        """The hidden share of the communication of all steps; NaN without communication."""
        total = int(self.communication.sum())
        return int(self.hidden.sum()) / total if total else float("nan")

    def from_clock(self, clock: int) -> Steps:
        """Return the steps from iteration ``clock`` on."""
        keep = self.clocks >= clock
        cut: dict[str, Any] = {
            each.name: getattr(self, each.name)[keep]
            for each in fields(self)
            if each.name != "waits_for"
        }
        waits_for = {worker: times[keep] for worker, times in self.waits_for.items()}
        return Steps(**cut, waits_for=waits_for)

    def __len__(self) -> int:
        return len(self.clocks)


def steps_of_all(traces: Sequence[Trace]) -> dict[int, Steps]:
    """Return all steps of each worker except the first one, whose begin is not known."""
    ways = exchanges(traces)
    return {
        each.about.index: _steps(each, ways[each.about.index])
        for each in traces
        if each.about.is_worker
    }


def windows_of(trace: Trace) -> tuple[Times, Times, Times]:
    """Return iterations, begins and ends of this worker's steps, without the first one."""
    stepped = trace.of(Span.STEP)
    stepped = stepped[stepped["set_index"] == 0]
    stepped = stepped[np.argsort(stepped["end_ns"], kind="stable")]
    ends = stepped["end_ns"].astype(np.int64)
    return stepped["clock"][1:].astype(np.int64), ends[:-1], ends[1:]


def _steps(trace: Trace, ways: Ways) -> Steps:
    clocks, begins, ends = windows_of(trace)
    stalls = trace.of(*STALLED)
    stalled = Covered.of(stalls[stalls["lane"] == Lane.SCRIPT])
    moving = ways.moving
    active = moving.with_all(*ways.waiting.values())
    any_of_it = active.with_all(ways.at_servers)

    def length(covered: Covered) -> Times:
        return covered.within(begins, ends)

    def inside(covered: Covered) -> Times:
        """The part of it in which the script was inside of psdist."""
        return length(covered) + length(stalled) - length(covered.with_all(stalled))

    outside = ends - begins - length(stalled)
    passes = length(stalled.with_all(Covered.of(trace.of(*PASSES)))) - length(stalled)
    network, with_waits, with_servers = map(inside, (moving, active, any_of_it))
    servers = with_servers - with_waits
    communication = length(moving) + length(any_of_it) - length(active)
    return Steps(
        clocks=clocks,
        begins=begins,
        ends=ends,
        passes=passes,
        script=outside - passes,
        psdist=length(stalled) - with_servers,
        network=network,
        servers=servers,
        waits=with_waits - network,
        communication=communication,
        hidden=communication - network - servers,
        waits_for={
            worker: inside(moving.with_all(waiting)) - network
            for worker, waiting in ways.waiting.items()
        },
    )
