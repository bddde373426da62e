"""What second copies of shards go with: one function decides; docs/replication.md has the table.

contradiction_of_buddies(config)           # "" where the run can be

python -m psdist.config.buddies            # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_TERMS: Final = "the registrar's deputy does not keep what is recorded of terms"
_GIVEN: Final = "a second copy does not know what each group was given"

OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other({"mode": "auto"}, ""),
    Other({"staleness_to": 8, "mode": "ssp", "staleness": 2}, ""),
    Other({"schedule": "0: sync; 100: ssp:2"}, ""),
    Other({"set_mode": "allowed"}, ""),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "int8"}, ""),
    Other({"pull_copies": "on", "mode": "ssp"}, ""),
    Other({"codec": "auto"}, ""),
    Other({"freeze_step": 1}, ""),
    Other({"pipeline": 1, "mode": "async"}, ""),
    Other({"overlap": "full"}, ""),
    Other({"local_steps": 2}, ""),
    Other({"steps_by": "speed", "local_steps": 8}, _TERMS, "steps_by = count"),
    Other({"steps_by": "loss", "local_steps": 8}, _TERMS, "steps_by = count"),
    Other(
        {"backup": 1},
        "a second copy is not told which rounds have closed, and who has missed them",
        "backup = 0",
    ),
    Other({"stale_lr": "inverse", "mode": "ssp"}, _GIVEN, "stale_lr = off"),
    Other({"delay_compensation": 1e-9, "mode": "async"}, _GIVEN, "delay_compensation = 0"),
    Other({"server_device": "cuda"}, "second copies are kept on the CPU", "server_device = cpu"),
    Other(
        {"trace": True},
        "clocks are compared at the end among all ranks, also those that have died",
        "trace = false",
    ),
    Other({"max_deaths": 1}, ""),
    Other({"spares": 1}, ""),
    Other({"group": "node"}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"resume": True}, ""),
)


def contradiction_of_buddies(config: RunConfig) -> str:
    """What does not go with ``replication = buddy``, and what to do; "" where all does."""
    if config.replication != "buddy":
        return ""
    if config.servers == 1:
        return (
            "replication = buddy with servers = 1: a server's second copy is kept by another one; "
            "set servers = 2 or more, or replication = none"
        )
    return refusal(config, OTHERS, mine="replication = buddy", off="replication = none")


if __name__ == "__main__":
    print(table(OTHERS), end="")
