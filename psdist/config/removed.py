"""Settings that earlier versions had, with the remedy for each.

why_removed("no_setting_at_all")     # ""
"""

from __future__ import annotations

from typing import Final

REMOVED: Final = {
    "watch": "call job.report(loss) in the script",
    "round_weights": "leave it out; groups weigh alike, however many local steps they make",
    "inner_state": "leave it out; the optimizer's state is kept from round to round",
    "on_server_death": "set replication = buddy, or make checkpoints (checkpoint_every, resume)",
    "min_groups": "set max_deaths; the job continues while one group is left",
    "spares_for": "set max_deaths = 0, with which spares take the places of servers alone",
    "samples_of_dead": "leave it out; the samples of a failed worker are dropped, and counted in "
    "dropped_samples of summary.json",
    "checkpoint_memory": "leave it out; servers keep the memory for the next checkpoint",
}
"""Setting -> the remedy."""


def why_removed(key: str) -> str:
    """Return what is wrong with giving ``key``; "" unless it was a setting once."""
    remedy = REMOVED.get(key)
    return f"is no setting any more: {remedy}" if remedy is not None else ""
