"""What local steps by speed go with: one function decides, and docs/local-steps.md has its table.

contradiction_of_speed(config)            # "" where the run can be

python -m psdist.config.by_speed          # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other(
        {"global_batch": 1},
        "a joint batch is of as many samples as steps make it",
        "no global_batch",
    ),
    Other({"pipeline": 1, "mode": "ssp"}, ""),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "fp16"}, ""),
    Other({"outer": "nesterov"}, ""),
    Other(
        {"outer": "accumulate"},
        "servers step with the script's lr, which groups that have made other numbers of steps do "
        "not share",
        "outer = average",
    ),
    Other({"max_deaths": 1}, "what a dead group was dealt would be lost", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2},
        "the registrar's deputy does not keep what is recorded of terms",
        "replication = none",
    ),
    Other({"resume": True}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"group": "node"}, ""),
)


def contradiction_of_speed(config: RunConfig) -> str:
    """What does not go with ``steps_by = speed``, and what to do; "" where all does."""
    if config.steps_by != "speed":
        return ""
    if config.local_steps == 1:
        return (
            "steps_by = speed with local_steps = 1: no group can make fewer than one; set "
            "local_steps to 8 or more, which lets speeds be told apart, or steps_by = count"
        )
    return refusal(config, OTHERS, mine="steps_by = speed", off="steps_by = count")


if __name__ == "__main__":
    print(table(OTHERS), end="")
