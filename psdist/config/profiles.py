"""Profiles: a few settings for a kind of cluster or run, which ``--profile NAME`` sets at once.

    PROFILES["uneven"].settings          # {"mode": "auto", "staleness": 4}

Every other source wins over a profile. docs/settings.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Profile(NamedTuple):
    purpose: str
    settings: Mapping[str, object]
    """Name of a setting -> its value."""


PROFILES: Final = {
    "slow-network": Profile(
        "the network decides how long a step takes",
        {"codec.push": "int8", "codec.pull": "fp16"},
    ),
    "unreliable": Profile(
        "hosts or processes fail during the run",
        {
            "servers": 2,
            "checkpoint.every": "10m",
            "failures.replication": "buddy",
            "failures.max_deaths": 1,
        },
    ),
    "uneven": Profile(
        "now one group is slow, now another one",
        {"mode": "auto", "staleness": 4},
    ),
    "study": Profile(
        "the run is examined afterwards",
        {
            "transfer.checksum": "sampled",
            "report.record": True,
            "report.trace": True,
            "report.progress": "lines",
        },
    ),
}
