"""torch's default process group of all workers over gloo, for what psdist is compared with.

gloo = start_torch(context, among)      # among: the communicator of the workers
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from psdist.protocol.ids import worker_of
from psdist.ranks.context import RankContext

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI


def start_torch(context: RankContext, among: MPI.Comm) -> str:
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
