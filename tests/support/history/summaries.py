"""summary.json of a virtual job and of a toy run, as server 0 writes it of a real job.

check(job.history(), summary=summary_of(job))
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from psdist.history.summary import Summary
from psdist.ranks.reporting.coding import coding_of
from psdist.ranks.reporting.summary import together

if TYPE_CHECKING:
    from tests.support.history.toy_parts import Server
    from tests.support.history.toy_run import ToyRun
    from tests.support.virtual.job import SetOfJob, VirtualJob


def summary_of(job: VirtualJob) -> Summary:
    """Return summaries of workers that have trained tensors."""
    run = job.history().run
    sets = [_of_set(each) for each in job.sets]
    common = {
        "mode": run.mode,
        "staleness": run.staleness,
        "servers": len(job.servers),
        "workers": len(job.workers),
        "groups": len(job.groups),
        "codecs": [each.model_dump(include={"round", "push", "pull"}) for each in run.codecs],
        "exit": "completed",
    }
    return Summary.model_validate_json(json.dumps({**common, **together(sets), "sets": sets}))


def _of_set(job: SetOfJob) -> dict[str, Any]:
    from tests.support.virtual.job import since

    run = job.history().run
    loops = [job.loop_of(server) for server in range(len(job.servers))]
    counts = [loop.statistics()["sets"][job.set_index] for loop in loops]
    trained = [worker.trainer.statistics() for worker in job.workers]
    staleness = sum((Counter(each.staleness) for each in trained), Counter())
    return {
        "empty_servers": tuple(sorted(set(range(len(job.servers))) - set(job.owners))),
        "chunks": len(job.partition.chunks),
        "clocks": tuple(trained[members[0]].clock for members in job.groups),
        "updates_applied": min(each["updates"] for each in counts if each["num_chunks"]),
        "max_staleness_seen": max(each.max_staleness_seen for each in trained),
        "staleness_seen": {str(key): count for key, count in staleness.items()},
        "bytes_pushed": sum(each.bytes_pushed for each in trained),
        "bytes_pulled": sum(each.bytes_pulled for each in trained),
        "early_pushes": sum(each.early_pushes for each in trained),
        "local_steps": sum(each.local_steps for each in trained),
        "rounds_cut": sum(each.rounds_cut for each in trained),
        "rounds_missed": (
            tuple(trained[members[0]].rounds_missed for members in job.groups)
            if run.backup
            else None
        ),
        "coding": coding_of({at: each.as_told() for at, each in enumerate(trained)}),
        "modes": [since(each).model_dump() for each in job.modes],
        "recorded": {"pipeline": run.pipeline, "checksum_every": run.checksum_every},
        "per_server": tuple(counts),
    }


def summary_of_toy(toy: ToyRun) -> Summary:
    record = toy.record
    per_server = [_server_of_toy(toy, server) for server in toy.servers]
    return Summary.model_validate(
        {
            "mode": record.mode,
            "staleness": record.staleness,
            "servers": record.num_servers,
            "empty_servers": tuple(s.history.server for s in toy.servers if not s.chunks),
            "workers": record.num_workers,
            "groups": len(record.groups),
            "chunks": record.num_chunks,
            "clocks": tuple(group.iterations for group in toy.groups),
            "updates_applied": sum(group.iterations for group in toy.groups),
            "max_staleness_seen": max(toy.staleness, default=0),
            "staleness_seen": {str(key): count for key, count in toy.staleness.items()},
            "exit": "completed",
            "recorded": {
                "pipeline": record.pipeline,
                "checksum_every": record.checksum_every,
            },
            "per_server": tuple(per_server),
        }
    )


def _server_of_toy(toy: ToyRun, server: Server) -> dict[str, int]:
    iterations, index = sum(group.iterations for group in toy.groups), server.history.server
    return {
        "num_chunks": len(server.chunks),
        "updates": iterations if server.chunks else 0,
        "pushes": iterations * len(server.chunks),
        "steps": toy.num_steps[index],
        "replies": toy.num_replies[index],
        "copies_on_write": 0,
        "position": server.history.position,
        "checksums": server.history.num_checksums,
    }
