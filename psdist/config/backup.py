"""What backup groups go with: one function decides, and docs/backup.md has its table.

contradiction_of_backup(config)            # "" where the run can be

python -m psdist.config.backup             # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig


OTHERS: Final = (
    Other({"mode": "ssp"}, "there every group's update is applied when it comes", "mode = sync"),
    Other({"mode": "async"}, "there every group's update is applied when it comes", "mode = sync"),
    Other({"mode": "auto"}, "a mode that changes was not tried with it yet", "mode = sync"),
    Other(
        {"schedule": "0: sync; 100: ssp:2"},
        "a mode that changes was not tried with it yet",
        "no schedule",
    ),
    Other(
        {"set_mode": "allowed"},
        "a mode that changes was not tried with it yet",
        "set_mode = refused",
    ),
    Other(
        {"push_codec": "int8"},
        "what a codec leaves out of an update that is dropped would be lost",
        "push_codec = none",
    ),
    Other({"pull_codec": "int8"}, ""),
    Other({"local_steps": 2}, "local steps were not tried with it yet", "local_steps = 1"),
    Other({"max_deaths": 1}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2},
        "a second copy is not told which rounds have closed, and who has missed them",
        "replication = none",
    ),
    Other({"resume": True}, ""),
    Other(
        {"overlap": "full"},
        "a round closes when gradients are sent in step()",
        "overlap = auto or off",
    ),
    Other(
        {"overlap": "strict"},
        "a round closes when gradients are sent in step()",
        "overlap = auto or off",
    ),
    Other({"group": "node"}, ""),
    Other({"checkpoint_every": "100"}, ""),
)


def contradiction_of_backup(config: RunConfig) -> str:
    """What does not go with backup groups, and what to do; "" where all does."""
    if not config.backup:
        return ""
    return refusal(config, OTHERS, mine=f"backup = {config.backup}", off="backup = 0")


if __name__ == "__main__":
    print(table(OTHERS), end="")
