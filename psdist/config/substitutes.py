"""What spares that take dead workers' places go with: one function decides, and docs/spares.md has
its table.

contradiction_of_spares(config)            # "" where the run can be

python -m psdist.config.substitutes        # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_TRIED: Final = "was not tried with it yet"

OTHERS: Final = (
    Other({"mode": "sync"}, ""),
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other({"mode": "auto"}, ""),
    Other({"staleness_to": 8, "mode": "ssp"}, ""),
    Other({"schedule": "0: sync; 100: ssp:2"}, ""),
    Other(
        {"set_mode": "allowed"},
        "what a script has set nobody tells one that joins",
        "set_mode = refused",
    ),
    Other({"push_codec": "int8"}, f"what a codec keeps {_TRIED}", "push_codec = none"),
    Other({"pull_codec": "int8"}, f"what a codec keeps {_TRIED}", "pull_codec = none"),
    Other({"local_steps": 2}, f"a round of local steps {_TRIED}", "local_steps = 1"),
    Other({"pipeline": 1, "mode": "async"}, f"a reply that is used late {_TRIED}", "pipeline = 0"),
    Other(
        {"overlap": "full"},
        f"a step that ends during the next forward pass {_TRIED}",
        "overlap = auto or off",
    ),
    Other({"overlap": "auto"}, ""),
    Other({"freeze_step": 1}, f"a second moment that is frozen {_TRIED}", "freeze_step = 0"),
    Other({"resume": True}, ""),
    Other({"checkpoint_every": "100"}, ""),
    Other({"global_batch": 1}, ""),
)


def take_workers_places(config: RunConfig) -> bool:
    """Whether the run's spares, if it has some, are for the places of workers, perhaps among
    others."""
    return config.replication == "none" or config.max_deaths > 0


def take_servers_places(config: RunConfig) -> bool:
    """Whether they are for the places of servers, perhaps among others."""
    return config.replication == "buddy"


def without_substitutes(config: RunConfig) -> str:
    """What to do where a script does not go with spares for workers' places."""
    return "set max_deaths = 0" if take_servers_places(config) else "leave spares out"


def contradiction_of_spares(config: RunConfig) -> str:
    """What does not go with spares, and what to do; "" where all does."""
    if not config.spares:
        return ""
    if not take_workers_places(config):
        return ""
    if not config.max_deaths:
        return (
            f"spares = {config.spares} with replication = none and max_deaths = 0: no place would "
            "ever be free; set max_deaths = 1 or more, with which spares take dead workers' "
            "places, or replication = buddy, with which they take dead servers', or leave spares "
            "out"
        )
    mine = f"spares = {config.spares} for dead workers' places"
    off = "max_deaths = 0" if take_servers_places(config) else "spares = 0"
    return refusal(config, OTHERS, mine=mine, off=off)


if __name__ == "__main__":
    print(table(OTHERS), end="")
