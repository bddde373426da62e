"""A group's own collectives: agreeing, reducing gradients, sharing slices, over torch.distributed.

In a worker, torch.distributed's default process group *is* the group. It is started over MPI:
the leader opens a store on a port that the system chooses and sends its address round; no port is
fixed. NCCL carries tensors on GPUs (each worker its own), gloo those on the CPU.

This tier is plain on purpose: one all-reduce per flat buffer; making it fast is another issue.

    group = Group(index=0, size=2)            # after start(...)
    table = group.agree([1.0, 2.0])           # [size, 2], the same on every worker
    group.reduce(flat_gradients, share=0.5)
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from psdist.errors import CollectiveError


def start(
    *,
    index: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    broadcast: Callable[[bytes | None], bytes],
) -> None:
    """Make the group torch.distributed's default process group.

    ``index``: this worker's place in the group of ``size``; ``broadcast`` hands the leader's bytes
    to all of the group. All workers of a group are on one host, so it talks over loopback.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined] # exported, but not in __all__
    else:
        is_leader = index == 0
        port = 0 if is_leader else int(broadcast(None))
        store = dist.TCPStore(  # type: ignore[attr-defined] # as HashStore
            "127.0.0.1", port, size, is_master=is_leader, wait_for_workers=False, timeout=timeout
        )
        if is_leader:
            broadcast(str(store.port).encode("ascii"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None:  # gloo would resolve the host's name, which need not lead to this host
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=timeout)
    finally:
        if chosen is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


class Group:
    def __init__(self, *, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def agree(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's ``values``, by place in the group."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(table, mine)
        return [row.tolist() for row in table]

    def meet(self, code: int, names: Sequence[str]) -> None:
        """All workers of the group come to the same call; ``names[code]`` is what I have called.

        Called before every group collective, so that a save on one worker and a step on another
        end in an error instead of hanging in each other's collectives.
        """
        if self.size == 1:
            return
        codes = [int(row[0]) for row in self.agree([float(code)])]
        if len(set(codes)) > 1:
            told = "; ".join(
                f"worker {place} of the group called {names[each]}"
                for place, each in enumerate(codes)
            )
            raise CollectiveError(
                f"workers of one group called different things at the same time: {told}; every "
                "worker must call the same ones in the same order"
            )

    def reduce(self, flats: Sequence[torch.Tensor], *, share: float) -> None:
        """flats = sum over the group of share * flats, in place; the shares of all add up to 1."""
        if self.size == 1:
            return
        for flat in flats:
            flat.mul_(share)
            dist.all_reduce(flat)

    def share_from(self, tensor: torch.Tensor, place: int) -> None:
        """Everybody's ``tensor`` becomes that of the worker at ``place``."""
        if self.size > 1:
            dist.broadcast(tensor, src=place)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
