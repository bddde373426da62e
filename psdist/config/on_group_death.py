"""What groups that go on without their dead go with: one function decides; docs/failures.md has the
table.

contradiction_of_reforming(config)         # "" where the run can be

python -m psdist.config.on_group_death     # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table
from psdist.errors import UsageError

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_TRIED: Final = "not tried with it yet"

OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other({"mode": "auto"}, ""),
    Other({"staleness_to": 8, "mode": "ssp"}, ""),
    Other({"schedule": "0: sync; 100: ssp:2"}, ""),
    Other({"set_mode": "allowed"}, ""),
    Other({"group_tier": "shared_memory"}, ""),
    Other({"group_tier": "torch"}, ""),
    Other(
        {"group_tier": "mpi"},
        "Open MPI makes a communicator of those who are left in a call that blocks; the one that "
        "does not fails behind a death",
        "group_tier = auto",
    ),
    Other({"group_tier": "nccl"}, f"it was {_TRIED}", "group_tier = auto"),
    Other({"replication": "buddy", "servers": 2}, ""),
    Other({"spares": 1}, "a spare takes the place of a whole group", "spares = 0"),
    Other({"push_codec": "int8"}, f"what a codec keeps was {_TRIED}", "push_codec = none"),
    Other({"pull_codec": "int8"}, f"what a codec keeps was {_TRIED}", "pull_codec = none"),
    Other({"local_steps": 2}, f"a round of local steps was {_TRIED}", "local_steps = 1"),
    Other(
        {"pipeline": 1, "mode": "async"}, f"a reply that is used late was {_TRIED}", "pipeline = 0"
    ),
    Other({"overlap": "auto"}, ""),
    Other({"overlap": "strict"}, "a group reduces in step() alone then", "overlap = auto or off"),
    Other({"overlap": "full"}, "a group reduces in step() alone then", "overlap = auto or off"),
    Other({"freeze_step": 1}, f"it was {_TRIED}", "freeze_step = 0"),
    Other({"server_device": "cuda"}, f"servers on a GPU were {_TRIED}", "server_device = cpu"),
    Other({"checkpoint_every": "100"}, ""),
    Other({"resume": True}, ""),
    Other({"global_batch": 1}, ""),
)


def reforms_groups(config: RunConfig) -> bool:
    """Whether a group goes on without those of its workers that have died."""
    return config.on_group_death == "reform"


def contradiction_of_reforming(config: RunConfig) -> str:
    """What does not go with ``on_group_death = reform``, and what to do; "" where all does."""
    if not reforms_groups(config):
        return ""
    mine, off = "on_group_death = reform", "on_group_death = leave"
    if not config.max_deaths:
        return (
            f"{mine} with max_deaths = 0: a worker's death ends the job; set max_deaths = 1 or "
            f"more, or {off}"
        )
    return refusal(config, OTHERS, mine=mine, off=off)


def refuse_with_reforming(call: str) -> UsageError:
    """For what a script calls that does not go with it."""
    return UsageError(
        f"{call} with on_group_death = reform was {_TRIED}; leave it out, or set on_group_death = "
        "leave"
    )


if __name__ == "__main__":
    print(table(OTHERS), end="")
