"""Builds workers: in a job, a benchmark or a test.

    loop = make_loop(transport, seat, waiting=waiting)          # takes part in collectives
    memory = lay_out(loop, channel, layout, parameters, credits=4)     # has a slice of a model
    parts = Parts(Iteration(...), memory.group, memory.flat, loop, memory.values, WorkerRule())
    strategy = Blocking(parts)                                  # or another one
    trainer = Trainer(*parts[:5], strategy, ...)                # trains the model

A worker without a model pushes and pulls after ``loop.take_slice`` with memory of any kind.
psdist.set_assembly chooses the strategy of a job's parameter set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import ModelError
from psdist.history.writers import WorkerHistory
from psdist.protocol.control import TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR
from psdist.protocol.partition import Partition
from psdist.tracing.tracer import Tracer
from psdist.transport import Transport
from psdist.transport.waiting import Waiting
from psdist.workers.early.group_overlap import Sums
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.protocol import Seat
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.reduction import WorkerGroup
from psdist.workers.traced import TracedLoop
from psdist.workers.values import RecordedUses, Uses, Values


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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a parameter set is cut, and where its parts are."""

    partition: Partition
    owners: Sequence[int]
    """Chunk -> server."""
    order: Sequence[int] = ()
    """The order in which all groups send the chunks; empty: ascending."""


class SetMemory(NamedTuple):
    """The memory of a parameter set on this worker, and who pushes what of it."""

    group: WorkerGroup
    flat: FlatModel
    values: Values
    sums: Sums | None
    """The group's sums, if it reduces gradients during backward."""


def lay_out(
    loop: WorkerLoop,
    channel: GroupChannel,
    layout: Layout,
    parameters: Sequence[torch.nn.Parameter],
    *,
    credits: int,
    wire: Wire = RAW_WIRE,
    first_clock: int = 0,
    history: WorkerHistory | None = None,
    reduces_early: bool = False,
) -> SetMemory:
    """Move ``parameters`` (``parameters[i]`` is piece i) into flat memory. The worker of ``loop``
    pushes and pulls its slice of it.

    ``credits``: messages outstanding at one server, at most; ``wire``: the codecs of pushes and
    replies; ``first_clock``: finished iterations of the checkpoint that is resumed;
    ``reduces_early``: the group reduces gradients during backward. Raises :class:`ModelError` if a
    device is to encode, and the model is on the CPU.
    """
    partition, order = layout.partition, layout.order
    encodes_there = wire.encode_on != "host" and not reduces_early
    flat = FlatModel(partition, parameters, allocate=channel.allocate, encodes_there=encodes_there)
    if wire.encode_on == "device" and not flat.encodes_there:
        raise ModelError(
            f"codec.encode_on = device, but the model is on {flat.device}, where the host encodes: "
            "call model.to(job.device) before job.prepare(), or set codec.encode_on = auto"
        )
    seat = loop.core.seat
    group = WorkerGroup(channel, partition, order, seat.members, worker=seat.worker)
    sums = Sums(flat, partition, group.mine) if reduces_early else None
    loop.take_slice(
        partition,
        owners=layout.owners,
        credits=credits,
        frames=sums or flat,
        wire=wire,
        order=order,
        first_clock=first_clock,
        on_device=flat if flat.encodes_there else None,
    )
    uses = Uses() if history is None else RecordedUses(group, flat, layout.owners, history)
    return SetMemory(group, flat, Values(group, flat, loop, uses), sums)
