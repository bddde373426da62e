"""summary.json of a job in the virtual network, as server 0 writes it of a real one.

check(job.history(), summary=summary_of(job))
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from psdist.history.summary import Summary

if TYPE_CHECKING:
    from tests.support.protocol import VirtualJob


def summary_of(job: VirtualJob) -> Summary:
    """Of workers that have trained tensors."""
    run = job.history().run
    counts = [server.statistics() for server in job.servers]
    trained = [worker.trainer.statistics() for worker in job.workers]
    staleness = sum((Counter(each.staleness) for each in trained), Counter())
    return Summary.model_validate(
        {
            "mode": run.mode,
            "staleness": run.staleness,
            "servers": len(job.servers),
            "empty_servers": tuple(sorted(set(range(len(job.servers))) - set(job.owners))),
            "workers": len(job.workers),
            "groups": len(job.groups),
            "chunks": len(job.partition.chunks),
            "clocks": tuple(trained[members[0]].clock for members in job.groups),
            "updates_applied": min(each["updates"] for each in counts if each["num_chunks"]),
            "max_staleness_seen": max(each.max_staleness_seen for each in trained),
            "staleness_seen": {str(key): count for key, count in staleness.items()},
            "exit": "completed",
            "recorded": {"pipeline": run.pipeline, "checksum_every": run.checksum_every},
            "per_server": tuple(counts),
        }
    )
