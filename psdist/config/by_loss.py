"""What local steps by the loss go with: one function decides, and docs/local-steps.md has its
table.

contradiction_of_loss(config)            # "" where the run can be

python -m psdist.config.by_loss          # the table
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
    Other({"global_batch": 1}, ""),
    Other({"pipeline": 1, "mode": "ssp"}, ""),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "fp16"}, ""),
    Other({"outer": "nesterov"}, ""),
    Other(
        {"outer": "accumulate"},
        "there is nothing in which groups drift apart, which shorter rounds are for",
        "outer = average",
    ),
    Other({"max_deaths": 1}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2},
        "the registrar's deputy does not keep what is recorded of terms",
        "replication = none",
    ),
    Other({"resume": True}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"group": "node"}, ""),
)


def reads_losses(config: RunConfig) -> bool:
    """Whether anything is decided by what scripts report."""
    is_guarded = config.loss_patience is not None or config.rollback is not None
    return config.steps_by == "loss" or is_guarded


def contradiction_of_loss(config: RunConfig) -> str:
    """What does not go with ``steps_by = loss``, and what to do; "" where all does."""
    if config.steps_by != "loss":
        return ""
    if config.local_steps == 1:
        return (
            "steps_by = loss with local_steps = 1: rounds become shorter as the loss falls, and "
            "none is shorter than one step; set local_steps to 2 or more, or steps_by = count"
        )
    return refusal(config, OTHERS, mine="steps_by = loss", off="steps_by = count")


if __name__ == "__main__":
    print(table(OTHERS), end="")
