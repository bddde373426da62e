"""The start of a benchmark that measures between the ranks of a job.

return between_ranks({"group": "rank"}, why_not=alone("bench step", "mpirun -n 4"), run=measure)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from psdist.config.sources import resolve
from psdist.protocol.ids import COORDINATOR, worker_of
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.connecting import connect
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.rank import Rank
from psdist.servers.protocol.lobby import Lobby

if TYPE_CHECKING:
    from mpi4py import MPI


def between_ranks(
    settings: Mapping[str, str],
    *,
    why_not: Callable[[Rank], str],
    run: Callable[[Rank], int],
) -> int:
    """The exit status of ``run``; 2 where ``why_not`` says why these ranks cannot be measured."""
    try:
        context = connect(resolve(command_line=settings, environment=os.environ, file=None))
    except AgreedExit as agreed:
        return agreed.status
    if problem := why_not(context):
        if context.number == 0:
            print(f"psdist: error: {problem}", file=sys.stderr)
        context.exit.close()
        return 2
    return context.exit.run(lambda: run(context))


def alone(name: str, start: str) -> Callable[[Rank], str]:
    """Refuses one process; ``start``: how to begin instead."""
    return lambda context: (
        f"{name} measures between ranks; start it as {start} psdist {name}"
        if context.is_alone
        else ""
    )


def wait_for_all(between: MPI.Comm, rest_s: float) -> None:
    """Return when all ranks have called this; a rank that waits sleeps ``rest_s`` at a time."""
    over = between.Ibarrier()
    while not over.Test():
        time.sleep(rest_s)


def leave_job(context: Rank, lobby: Lobby | None) -> None:
    """Wait, as a server, until the workers have left, and end."""
    while wait_for_job(context, lobby):
        pass
    context.exit.close()


def lobby_of(context: Rank) -> Lobby | None:
    """Return the lobby if this rank is the coordinator."""
    roles = context.roles
    if context.me != COORDINATOR:
        return None
    return Lobby(num_workers=roles.num_workers, num_servers=roles.num_servers)


def start_torch(context: Rank, among: MPI.Comm) -> str:
    """torch's default process group, which may have been this worker's group's, becomes all
    workers'; returns which interface gloo was told to take. Collective over the workers."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    worker, workers = worker_of(context.me), context.roles.num_workers
    host = context.roles.places[context.roles.worker_ranks[0]].host
    is_first, is_one_host = worker == 0, len({each.host for each in context.roles.places}) == 1
    store = None
    for who in (True, False):  # the first opens the port before others come
        if is_first is who:
            port = 0 if is_first else among.bcast(None, root=0)
            address = "localhost" if is_first or is_one_host else host
            store = dist.TCPStore(  # type: ignore[attr-defined] # exported, not in __all__
                address, port, workers, is_master=is_first, wait_for_workers=False
            )
            if is_first:
                among.bcast(store.port, root=0)
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "of the host's name")
    if "GLOO_SOCKET_IFNAME" not in os.environ and is_one_host:
        gloo = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=worker, world_size=workers)
    return gloo
