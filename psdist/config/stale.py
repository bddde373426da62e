"""What goes with settings against stale updates: one function decides; docs/stale.md has its table.

contradiction_of_stale(config)            # "" where the run can be

python -m psdist.config.stale             # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

OTHERS: Final = (
    Other(
        {"mode": "sync"},
        "in sync no update is stale, and here sync may come",
        "mode = ssp or async",
    ),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other(
        {"pipeline": 1, "mode": "ssp"},
        "a gradient is made on older parameters than its worker holds when it pushes",
        "pipeline = 0",
    ),
    Other(
        {"push_codec": "int8", "mode": "ssp"},
        "what a codec leaves out comes later, computed elsewhere and under another factor",
        "push_codec = none",
    ),
    Other(
        {"pull_codec": "fp16", "mode": "ssp"},
        "coded pulls were not tried with it yet",
        "pull_codec = none",
    ),
    Other(
        {"local_steps": 2, "mode": "ssp"},
        "local steps were not tried with it yet",
        "local_steps = 1",
    ),
    Other({"max_deaths": 1, "mode": "ssp"}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2, "mode": "ssp"},
        "a second copy does not know what each group was given",
        "replication = none",
    ),
    Other({"resume": True, "mode": "ssp"}, ""),
    Other({"overlap": "full", "mode": "ssp"}, ""),
    Other({"group": "node", "mode": "ssp"}, ""),
    Other({"checkpoint_every": "100", "mode": "ssp"}, ""),
)


def contradiction_of_stale(config: RunConfig) -> str:
    """What does not go with ``stale_lr`` or ``delay_compensation``, and what to do; "" where all
    does."""
    if config.stale_lr != "off":
        mine, off = f"stale_lr = {config.stale_lr}", "stale_lr = off"
    elif config.delay_compensation:
        mine = f"delay_compensation = {config.delay_compensation:g}"
        off = "delay_compensation = 0"
    else:
        return ""
    return refusal(config, OTHERS, mine=mine, off=off)


if __name__ == "__main__":
    print(table(OTHERS), end="")
