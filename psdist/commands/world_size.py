"""How many ranks `psdist run --workers N` starts: N workers and the servers beside them.

    num_ranks_for(4, config, os.environ)       # 5: one server for a job on one host

It reads the plan that ``placement`` names, and nothing else. Inside a job, where the ranks are
given, psdist.ranks.seats.placing compares the plan's workers with N.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from psdist.config.settings import RunConfig
from psdist.errors import LaunchError
from psdist.install.mpi import is_single_host

_STRATEGIES: Final = ("auto", "block", "cyclic")  # all else is the path of a plan
SERVERS_ON_ONE_HOST: Final = 1
"""What the mapper chooses for ``servers = auto`` there: at most one server per host."""


def num_ranks_for(num_workers: int, config: RunConfig, environment: Mapping[str, str]) -> int:
    """The size of the world; LaunchError where it cannot be known before the ranks are placed."""
    if config.placement not in _STRATEGIES:
        return _num_ranks_of_plan(num_workers, config.placement)
    if config.servers != "auto":
        return num_workers + config.servers + config.spares
    if not is_single_host(environment):
        raise LaunchError(
            f"--workers {num_workers} with servers = auto on several hosts: how many serve is "
            "decided once the ranks are placed; add --servers N, or give the number of all ranks "
            "with -n"
        )
    return num_workers + SERVERS_ON_ONE_HOST + config.spares


def _num_ranks_of_plan(num_workers: int, placement: str) -> int:
    from psdist.topology.plan import codec
    from psdist.topology.text.untrusted import file_bytes

    data, where = file_bytes(Path(placement), max_bytes=codec.MAX_BYTES)
    plan = codec.decode(data, where=where)
    if len(plan.worker_ranks) != num_workers:
        raise LaunchError(
            f"--workers {num_workers}, but the plan {where} has {len(plan.worker_ranks)}; leave "
            "--workers out (-n starts as many ranks as planned), or make a new plan"
        )
    return len(plan.ranks)
