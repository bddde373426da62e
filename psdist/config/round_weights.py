"""What weights of rounds by their steps go with: one function decides, and docs/local-steps.md has
its table.

contradiction_of_weights(config)            # "" where the run can be

python -m psdist.config.round_weights       # the table, of fednova
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_ALONE: Final = (
    "a round is applied alone there, and what normalises it is of all groups' steps, or those of a "
    "round that a collective cuts would count as a whole one"
)
MODES: Final = (
    Other({"mode": "ssp"}, _ALONE, "round_weights = steps"),
    Other({"mode": "async"}, _ALONE, "round_weights = steps"),
)
"""But for ``steps`` these are right."""
OTHERS: Final = (
    Other({"steps_by": "speed"}, ""),
    Other({"steps_by": "loss"}, ""),
    Other({"local_steps": "epoch"}, ""),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "fp16"}, ""),
    Other({"outer": "nesterov"}, ""),
    Other({"outer": "accumulate"}, "its rounds weigh by their samples", "outer = average"),
    Other({"max_deaths": 1}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2},
        "second copies were not tried with it yet",
        "replication = none",
    ),
    Other({"resume": True}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"group": "node"}, ""),
)


def contradiction_of_weights(config: RunConfig) -> str:
    """What does not go with ``round_weights``, and what to do; "" where all does."""
    if config.round_weights == "equal":
        return ""
    mine = f"round_weights = {config.round_weights}"
    if config.local_steps == 1:
        return (
            f"{mine} with local_steps = 1: all groups make as many steps between two exchanges; "
            "set local_steps to 2 or more, or round_weights = equal"
        )
    if config.local_steps == "epoch" and config.mode != "sync" and config.round_weights == "steps":
        return (
            f"{mine} with local_steps = epoch and mode = {config.mode}: what a whole round weighs "
            "nobody knows before the pass is over; set mode = sync, or round_weights = equal"
        )
    others = OTHERS if config.round_weights == "steps" else (*MODES, *OTHERS)
    return refusal(config, others, mine=mine, off="round_weights = equal")


if __name__ == "__main__":
    print(table((*MODES, *OTHERS)), end="")
