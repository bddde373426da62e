"""A script that says how long its steps take: a model of so many bytes in 16 parameters.

    psdist run tests/support/programs/timed_steps.py BYTES WATCHED MEASURED FILE
    srun python tests/support/programs/timed_steps.py ddp BYTES WATCHED MEASURED FILE

The chief writes the seconds of every measured step: of backward and step() on the slowest worker,
behind a barrier. With ``ddp`` the ranks are torch's DistributedDataParallel over gloo instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

LAYERS = 16


class Model(nn.Module):
    """No computation to speak of."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        each = num_bytes // 4 // LAYERS
        self.layers = nn.ParameterList([torch.randn(each) for _ in range(LAYERS)])

    def forward(self) -> torch.Tensor:
        return torch.stack([layer[:64].sum() for layer in self.layers]).sum()


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: tuple[int, int],
    barrier: Callable[[], object],
) -> list[float]:
    watched, measured = numbers
    seconds = []
    for iteration in range(watched + measured):
        optimizer.zero_grad()
        loss = model()
        barrier()
        before_s = time.perf_counter()
        loss.backward()
        optimizer.step()
        barrier()
        if iteration >= watched:
            seconds.append(time.perf_counter() - before_s)
    return seconds


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def psdist_job(num_bytes: int, numbers: tuple[int, int], file: Path) -> None:
    import psdist

    job = psdist.init()
    model = Model(num_bytes)
    prepared, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = steps(prepared, optimizer, numbers, job.barrier)
    if job.is_chief:
        file.write_text(json.dumps({"seconds": found, "digest": digest(model)}))


def ddp(num_bytes: int, numbers: tuple[int, int], file: Path) -> None:
    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    host = world.bcast(os.environ["ADDRESS_OF_" + os.uname().nodename], root=0)
    store = None
    for who in (True, False):
        if (rank == 0) is who:
            port = 0 if rank == 0 else world.bcast(None, root=0)
            store = dist.TCPStore(host, port, size, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined] # exported, but not in __all__
            if rank == 0:
                world.bcast(store.port, root=0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(Model(num_bytes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = steps(model, optimizer, numbers, world.Barrier)
    if rank == 0:
        file.write_text(json.dumps({"seconds": found, "digest": digest(model)}))
    dist.destroy_process_group()


def main() -> None:
    words = sys.argv[1:]
    run = ddp if words[0] == "ddp" else psdist_job
    if run is ddp:
        del words[0]
    num_bytes, watched, measured = map(int, words[:3])
    run(num_bytes, (watched, measured), Path(words[3]))


if __name__ == "__main__":
    main()
