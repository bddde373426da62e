"""Ranks without MPI, for unit tests of one rank.

rank = make_rank(roles, endpoint, tmp_path, max_deaths=1)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.protocol.roles import Roles
from psdist.ranks.rank import Bootstrap, Comms, Rank


def make_rank(
    roles: Roles,
    transport: Any,
    path: Path,
    *,
    comm: Any = None,
    parent: Any = None,
    bootstrap: dict[str, Any] | None = None,
    **settings: Any,
) -> Rank:
    """Return the rank whose id ``transport`` has. ``comm``: instead of MPI's world; ``bootstrap``:
    further fields of :class:`Bootstrap`."""
    return Rank(
        Bootstrap(
            resolved=Resolved(config=RunConfig(**settings), sources={}),
            roles=roles,
            path=path,
            started_s=0.0,
            **(bootstrap or {}),
        ),
        number=roles.rank_of_peer[transport.me],
        transport=transport,
        core_share=1.0,
        comms=Comms(comm),
        parent=parent,
    )
