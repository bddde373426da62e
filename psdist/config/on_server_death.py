"""What a shard that is made anew goes with: one function decides; docs/failures.md has the table.

contradiction_of_rebuild(config)           # "" where the run can be

python -m psdist.config.on_server_death    # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_TRIED: Final = "not tried with it yet"

OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other(
        {"replication": "buddy", "servers": 2},
        "there another server has a copy, and nothing is lost",
        "replication = none",
    ),
    Other({"mode": "auto"}, f"a mode that changes was {_TRIED}", "mode = sync, ssp or async"),
    Other(
        {"schedule": "0: sync; 100: ssp:2"},
        f"a mode that changes was {_TRIED}",
        "no schedule",
    ),
    Other({"set_mode": "allowed"}, f"a mode that changes was {_TRIED}", "set_mode = refused"),
    Other(
        {"push_codec": "int8"},
        "what a codec has left out of updates would be lost, too",
        "push_codec = none",
    ),
    Other(
        {"pull_codec": "int8"},
        "workers would hold other values than servers had",
        "pull_codec = none",
    ),
    Other(
        {"local_steps": 2},
        "what lies in memory between two rounds is no version of a server's",
        "local_steps = 1",
    ),
    Other({"backup": 1}, f"rounds that groups miss were {_TRIED}", "backup = 0"),
    Other({"stale_lr": "inverse", "mode": "ssp"}, f"it was {_TRIED}", "stale_lr = off"),
    Other(
        {"delay_compensation": 1e-9, "mode": "async"},
        f"it was {_TRIED}",
        "delay_compensation = 0",
    ),
    Other({"freeze_step": 1}, f"it was {_TRIED}", "freeze_step = 0"),
    Other({"pipeline": 1, "mode": "async"}, f"it was {_TRIED}", "pipeline = 0"),
    Other({"overlap": "full"}, f"steps that return early were {_TRIED}", "overlap = auto"),
    Other({"max_deaths": 1}, f"deaths of workers were {_TRIED}", "max_deaths = 0"),
    Other({"server_device": "cuda"}, f"servers on a GPU were {_TRIED}", "server_device = cpu"),
    Other(
        {"trace": True},
        "clocks are compared at the end among all ranks, also those that have died",
        "trace = false",
    ),
    Other({"group": "node"}, ""),
    Other({"overlap": "auto"}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"resume": True}, ""),
)


def survives_servers(config: RunConfig) -> bool:
    """Whether the job is to go on when a server has died."""
    return config.replication != "none" or config.on_server_death != "end"


def contradiction_of_rebuild(config: RunConfig) -> str:
    """What does not go with ``on_server_death = rebuild``, and what to do; "" where all does."""
    if config.on_server_death == "end":
        return ""
    if config.servers == 1:
        return (
            "on_server_death = rebuild with servers = 1: another server makes the dead one's shard "
            "anew; set servers = 2 or more, or on_server_death = end"
        )
    mine = "on_server_death = rebuild"
    return refusal(config, OTHERS, mine=mine, off="on_server_death = end")


if __name__ == "__main__":
    print(table(OTHERS), end="")
