"""Plans with groups that no mapper would make on one host of one socket.

plan_of_groups(tmp_path / "plan.json", [3, 1])      # for --set hosts.placement=
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plan_of_groups(path: Path, sizes: Sequence[int], *, servers: int = 1) -> Path:
    """``sizes``: workers of each group; servers come first."""
    of_all: dict[str, Any] = {"host": socket.gethostname(), "cores": [], "cpus": []}
    of_all |= {"package": 0, "numa": 0, "gpu": "", "nic": ""}
    ranks = [
        {"rank": each, "role": "server", "index": each, "group": -1, **of_all}
        for each in range(servers)
    ]
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    ranks += [
        {"rank": servers + each, "role": "worker", "index": each, "group": group, **of_all}
        for each, group in enumerate(groups)
    ]
    plan = {
        "format": "psdist plan",
        "version": 2,
        "ranks": ranks,
        "weights": [1 / servers] * servers,
        "links": [],
        "model_bytes": 1e9,
        "placement": "auto",
        "cost_s": 0.0,
        "bound_s": 0.0,
        "compared": {"block": 1.0, "cyclic": 1.0},
        "source": "one flat rack",
        "notes": [],
        "servers_s": 1.0,
        "cards_s": 0.0,
        "groups_s": 0.0,
    }
    path.write_text(json.dumps(plan))
    return path
