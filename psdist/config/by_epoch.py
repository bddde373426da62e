"""What rounds of an epoch go with: one function decides, and docs/local-steps.md has its table.

contradiction_of_epoch(config)            # "" where the run can be

python -m psdist.config.by_epoch          # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_SAID_BY_LOADER: Final = "how many steps a pass has its loader says"
OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other({"global_batch": 1}, ""),
    Other({"pipeline": 1, "mode": "ssp"}, ""),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "fp16"}, ""),
    Other({"outer": "nesterov"}, ""),
    Other(
        {"outer": "accumulate"},
        "a round weighs by how many of its steps were made, and how many it has nobody knows "
        "before the pass is over",
        "outer = average",
    ),
    Other({"steps_by": "speed"}, _SAID_BY_LOADER, "steps_by = count"),
    Other({"steps_by": "loss"}, _SAID_BY_LOADER, "steps_by = count"),
    Other({"max_deaths": 1}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other({"replication": "buddy", "servers": 2}, ""),
    Other({"resume": True}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"group": "node"}, ""),
)


def contradiction_of_epoch(config: RunConfig) -> str:
    """What does not go with ``local_steps = epoch``, and what to do; "" where all does."""
    if config.local_steps != "epoch":
        return ""
    return refusal(config, OTHERS, mine="local_steps = epoch", off="local_steps = a number")


if __name__ == "__main__":
    print(table(OTHERS), end="")
