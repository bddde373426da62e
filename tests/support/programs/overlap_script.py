"""The same model without and with overlap; its layers sleep, and what has left travels.

Prints a digest of the parameters of each, whether a thread drives the loop, and how many steps have
returned before their replies. POLLING=1: as where MPI has no THREAD_MULTIPLE. DEVICE: cpu; cuda; or
"late", which is the CPU as a device whose copies come late and whose gradients come in a thread of
their own, as a GPU's do. One thread at a time may use MPI: two are an error.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

import psdist
from tests.support.jobs import trainers_of
from tests.support.late_transfers import on_a_device

DEVICE = os.environ.get("DEVICE", "cpu")
STEPS = 21
"""16 are watched where a job has several sets."""
LAYERS = 6
WIDTH = 48


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004 - torch's signature
        time.sleep(0.01)  # long enough for a group to hide its buckets behind
        return gradients[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Sleep.apply(torch.tanh(layer(x)))  # type: ignore[no-untyped-call] # torch's
        return x


def one_at_a_time(owner: type[Any], name: str, turn: threading.RLock) -> Any:
    """``owner.name``, in which no thread may be while another is in what has the same ``turn``."""
    original: Callable[..., Any] = getattr(owner, name)

    def guarded(*args: Any, **options: Any) -> Any:
        assert turn.acquire(blocking=False), f"two threads use MPI: {owner.__name__}.{name}"
        try:
            return original(*args, **options)
        finally:
            turn.release()

    return mock.patch.object(owner, name, guarded)


def watch_threads(stack: ExitStack) -> None:
    from psdist.transport.mpi import MpiTransport  # now that MPI has begun
    from psdist.workers.group.operations import Operation

    turn = threading.RLock()
    for owner, name in (
        *((MpiTransport, name) for name in ("poll", "send", "accept", "send_control")),
        *([(Operation, "is_done")] if os.environ.get("PSDIST_GROUP_TIER") == "mpi" else []),
    ):
        stack.enter_context(one_at_a_time(owner, name, turn))


def train(job: psdist.Job, overlap: Literal["auto", "off", "full"]) -> set[str]:
    model = Model().to("cuda" if DEVICE == "cuda" else "cpu")
    device = next(model.parameters()).device
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = job.prepare(model, made, overlap=overlap)
    generator = torch.Generator().manual_seed(job.worker)
    names: set[str] = set()
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if DEVICE == "late":
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
        else:
            loss.backward()
        names |= {each.name for each in threading.enumerate()}
        if step % 2:
            job.log(step=step)
            job.barrier()
        optimizer.step()
        if step % 3:
            job.log(step=step)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"parameters {digest.hexdigest()}", flush=True)
    return names


def main(stack: ExitStack) -> None:
    job = psdist.init()
    watch_threads(stack)
    train(job, "off")
    print(f"has a thread: {'psdist-loop' in train(job, 'auto')}", flush=True)
    train(job, "full")
    print(f"late steps: {trainers_of(job)[-1].strategy.num_late}", flush=True)


with ExitStack() as stack:
    if os.environ.get("POLLING"):
        patch = mock.patch("psdist.ranks.rank.Comms.may_use_threads", False)
        stack.enter_context(patch)
    if DEVICE == "late":
        stack.enter_context(on_a_device())
    main(stack)
