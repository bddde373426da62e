"""The factory of workers: whoever needs one, in a job, a benchmark or a test, gets it here.

    loop = make_loop(transport, seat, waiting=waiting)          # takes part in collectives
    trainer = make_trainer(loop, group, partition=partition, ...)       # trains a model, too

A worker without a model pushes and pulls after ``loop.take_slice`` with memory of any kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import ModelError
from psdist.history.writers import WorkerHistory
from psdist.protocol.control import TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR
from psdist.protocol.partition import Partition
from psdist.tracing.tracer import Tracer
from psdist.transport.base import Transport
from psdist.transport.waiting import Waiting
from psdist.workers.early.group_overlap import Sums
from psdist.workers.early.progress import Driver
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.seat import Seat
from psdist.workers.traced import TracedLoop
from psdist.workers.trainer import Trainer


def make_loop(
    transport: Transport,
    seat: Seat,
    *,
    waiting: Waiting,
    now_s: Callable[[], float] = time.monotonic,
    describe_group: Callable[[int], str] = lambda group: f"group {group}",
    tracer: Tracer | None = None,
    survives_workers: bool = False,
    replace: TakePlace | None = None,
    heard: Sequence[PeerLost | ControlArrived] = (),
) -> WorkerLoop:
    """A worker that can take part in collectives. ``now_s()``: the job's clock, by which it
    measures; ``describe_group(group)`` names a group to people; ``tracer``: where its spans go, if
    they are wanted; ``survives_workers``: as :class:`WorkerCore`; ``heard``, ``replace``: what a
    substitute was told, and then asked, before there was a loop."""
    core = WorkerCore(seat, describe_group=describe_group, survives_workers=survives_workers)
    loop = WorkerLoop(transport, core, waiting=waiting, now_s=now_s)
    if tracer is not None:
        loop = TracedLoop(transport, core, waiting=waiting, now_s=now_s, tracer=tracer)
    for event in heard:
        loop.hear(event)
    if replace is not None:  # it is answered later, by begin_join()
        loop.hear(ControlArrived(COORDINATOR, replace))
    return loop


def make_trainer(
    loop: WorkerLoop,
    group: GroupChannel,
    *,
    partition: Partition,
    owners: Sequence[int],
    credits: int,
    parameters: Sequence[torch.nn.Parameter],
    hyperparameters: Callable[[], bytes],
    wire: Wire = RAW_WIRE,
    look_for_changes: Callable[[FlatModel, int], None] = lambda _flat, _clock: None,
    on_nonfinite: Literal["error", "skip"] = "error",
    max_norm: float = 0.0,
    clips_itself: bool = True,
    history: WorkerHistory | None = None,
    on_iteration: Callable[[], None] = lambda: None,
    order: Sequence[int] = (),
    overlap: Literal["auto", "strict", "off", "full"] = "off",
    progress: Driver | None = None,
    is_training: Callable[[], bool] = lambda: True,
    beside: GroupChannel | None = None,
    first_clock: int = 0,
    module: torch.nn.Module | None = None,
    is_pipelined: bool = False,
    make: Callable[..., Trainer] = Trainer,
    may_miss: bool = False,
    on_missed: Callable[[int], None] = lambda _rounds: None,
) -> Trainer:
    """Move ``parameters`` (``parameters[i]`` is piece i) into flat memory, of which the worker
    behind ``loop`` pushes and pulls its slice; iterations are the trainer's.

    ``owners``: chunk -> server; ``credits``: messages outstanding at one server, at most; ``wire``:
    the codecs of pushes and replies; ``order``: in which all groups send the chunks of the model,
    none of them for ascending; ``beside``: another end of ``group``, over which gradients are
    reduced during backward; ``first_clock``: iterations of a checkpoint that it goes on from;
    ``module``: whose parameters are awaited where they are read, after step(); ``make``: what
    makes the trainer of all that, another one where iterations are rounds of several steps; the
    rest, ``may_miss`` and ``on_missed`` too, as in :class:`Trainer`. Raises :class:`ModelError`
    where a device is to encode, and the model is on the CPU.
    """
    encodes_there = wire.encode_on != "host" and beside is None
    flat = FlatModel(partition, parameters, allocate=group.allocate, encodes_there=encodes_there)
    if wire.encode_on == "device" and not flat.encodes_there:
        raise ModelError(
            f"codec.encode_on = device, but the model is on {flat.device}, where the host encodes: "
            "call model.to(job.device) before job.prepare(), or set codec.encode_on = auto"
        )
    sums = None
    if beside is not None:
        sums = Sums(flat, partition, partition.slices(group.size, order)[group.place])
    loop.take_slice(
        partition,
        owners=owners,
        credits=credits,
        frames=flat if sums is None else sums,
        wire=wire,
        order=order,
        first_clock=first_clock,
        on_device=flat if flat.encodes_there else None,
    )
    options: dict[str, Any] = {
        "worker": loop.core.seat.worker,
        "partition": partition,
        "owners": owners,
        "flat": flat,
        "loop": loop,
        "group": group,
        "order": order,
        "look_for_changes": look_for_changes,
        "hyperparameters": hyperparameters,
        "on_nonfinite": on_nonfinite,
        "max_norm": max_norm,
        "clips_itself": clips_itself,
        "history": history,
        "on_iteration": on_iteration,
        "overlap": overlap,
        "progress": progress,
        "is_training": is_training,
        "beside": beside,
        "sums": sums,
        "first_clock": first_clock,
        "module": module,
        "is_pipelined": is_pipelined,
        "may_miss": may_miss,
        "on_missed": on_missed,
    }
    return make(**options)
