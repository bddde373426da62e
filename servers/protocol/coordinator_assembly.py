"""Assemble the coordinator of a job; pure.

    coordinator = assemble(num_workers=4, num_servers=2, mode="ssp", staleness=3)
    coordinator.part(Takeovers)          # None: this job does not replicate shards

The parts of a job's features come as a list (psdist.ranks.coordinator_parts makes it).
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.servers.protocol.checkpoints import Checkpoints
from psdist.servers.protocol.collectives import MissedCalls
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorPart
from psdist.servers.protocol.membership import IsOut
from psdist.servers.protocol.pauses import Pauses, waits_within
from psdist.servers.protocol.views import Views


def assemble(
    *,
    num_workers: int,
    num_servers: int,
    mode: str = "sync",
    staleness: int = 0,
    groups: Sequence[Sequence[int]] = (),
    num_substitutes: int = 0,
    max_deaths: int = 0,
    is_out: IsOut = any,
    parts: Sequence[CoordinatorPart] = (),
) -> Coordinator:
    """Return the coordinator of a job.

    ``mode``: sync only if no other one may come, async if no group ever waits. ``staleness``: in
    ssp, the least number of iterations that a group may be ahead of what it waits for. ``groups``:
    the workers of each; without them each worker is a group of its own. ``num_substitutes``: the
    last workers, each a group of its own, wait to join. ``max_deaths``: workers that may fail.
    ``parts``: of features, in the order in which their hooks are called."""
    substitutes = range(num_workers - num_substitutes, num_workers)
    membership = Views(
        groups=groups or [(worker,) for worker in range(num_workers)],
        num_servers=num_servers,
        max_deaths=max_deaths,
        substitutes=substitutes,
        is_out=is_out,
    )
    of_mode = {"sync": [waits_within(0)], "ssp": [waits_within(staleness)]}.get(mode, [])
    pause = Pauses(
        num_workers=num_workers,
        groups=groups,
        waits=[*of_mode, *(part.waits for part in parts)],
        substitutes=substitutes,
    )
    # Workers that resume from a checkpoint prepare after different iterations.
    apart = {"sync": ()}.get(mode, ("prepare",))
    missed_calls = MissedCalls(
        mode=mode, apart={*apart, *(name for part in parts for name in part.APART)}
    )
    checkpoints = Checkpoints(
        num_workers=num_workers, num_servers=num_servers, substitutes=substitutes
    )
    return Coordinator(
        num_workers=num_workers,
        num_servers=num_servers,
        membership=membership,
        pause=pause,
        missed_calls=missed_calls,
        parts=[*parts, checkpoints],
    )
