"""The test cluster, for one benchmark alone.

with taken_cluster(shape="1gbit") as cluster:
    ...
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.hosts import Cluster, state_directory, why_unavailable


@contextmanager
def taken_cluster(*, shape: str, **more: Any) -> Iterator[SlurmCluster]:
    """Up meanwhile, with the links that :meth:`Cluster.up` is asked for, and down afterwards,
    whatever happens, SIGTERM too. Exits with status 1 where it cannot be had, or somebody uses it.
    """
    cluster = Cluster(directory=state_directory())
    reason = why_unavailable()
    if not reason and cluster.is_up():
        reason = "the test cluster is up: somebody uses it"
    if reason:
        sys.exit(reason)
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        cluster.up(shape=shape, keep=True, **more)
        yield SlurmCluster(cluster=cluster)
    finally:
        cluster.down()
        signal.signal(signal.SIGTERM, before)
