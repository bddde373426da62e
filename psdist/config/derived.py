"""Questions that several settings answer together.

take_workers_places(config)      # spares may replace failed workers
reads_losses(config)             # something is decided by job.report
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig


def take_workers_places(config: RunConfig) -> bool:
    """True if spares, where the run has some, take the places of workers, perhaps among others."""
    return config.replication == "none" or config.max_deaths > 0


def take_servers_places(config: RunConfig) -> bool:
    """True if spares, where the run has some, take the places of servers, perhaps among others."""
    return config.replication == "buddy"


def without_substitutes(config: RunConfig) -> str:
    """Return what to set where a script does not work with spares for workers' places."""
    return (
        "set failures.max_deaths = 0"
        if take_servers_places(config)
        else "leave failures.spares out"
    )


def reforms_groups(config: RunConfig) -> bool:
    """True if a group continues without its failed workers."""
    return config.on_group_death == "reform"


def misses_rounds(config: RunConfig) -> bool:
    """True if rounds close without the slowest groups, which miss them."""
    return config.backup > 0


def reads_losses(config: RunConfig) -> bool:
    """True if anything is decided by the losses that scripts report."""
    is_guarded = config.loss_patience is not None or config.rollback is not None
    return config.steps_by == "loss" or is_guarded
