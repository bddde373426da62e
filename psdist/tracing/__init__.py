"""Spans of a run: what each rank did when, for ``psdist run --trace`` and ``psdist trace``.

    RECORD.pack(begin_ns, end_ns, clock, chunk, other, num_bytes, sent_ns, took_ns, kind, lane, 0)
    np.frombuffer(data, DTYPE)["begin_ns"]

This module has the kinds and lanes of spans, and their 48 bytes in a file; times are nanoseconds of
the rank's own monotonic clock. ``tracer`` writes the file of a rank, ``files`` reads all of them
and aligns the clocks of hosts (``clocks``). The other modules make Perfetto's file (``perfetto``),
the activities and waits of chunks (``exchange``), the time of each step by part (``shares``, on
sets of times: ``covered``), and a picture of one step (``picture``). Spans are recorded at the
loops and the trainer (``psdist.workers.traced``, ``psdist.servers.traced``).

Must not import servers, workers, transport or protocol. Needs neither MPI nor torch.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import numpy as np

NONE: Final = -1
"""For a clock, a chunk or another one that a span has not; as an end: the span was still open."""


class Span(IntEnum):
    """Activity of a rank."""

    FORWARD = 1
    EVALUATION = 2
    """A forward pass without gradients."""
    BACKWARD = 3
    STEP = 4
    """``optimizer.step()``, all of it."""
    PUSH = 5
    """A chunk, from its push until its reply has landed."""
    PULL = 6
    """A chunk, from asking for it until it has landed."""
    AGREE = 7
    REDUCE = 8
    GATHER = 9
    BROADCAST = 10
    """These four in the group."""
    WAIT_REPLIES = 11
    WAIT_GROUP = 12
    WAIT_COLLECTIVE = 13
    WAIT_SERVERS = 14
    WAIT_END = 15
    """For the others' scripts, at the end."""
    COLLECTIVE = 16
    """``other``: the index of its name in COLLECTIVES."""
    SAVE = 17
    SET_VALUES = 18
    """``job.set_parameters()``."""
    PULL_ALL = 19
    """``job.pull()``."""
    OPTIMIZER_STATE = 20
    CHECKPOINT = 21
    RECEIVE = 32
    """On a server: a chunk of a worker (``other``), from its acceptance until it is here."""
    FOLD = 33
    """A gradient goes into a sum."""
    APPLY = 34
    """An optimizer step of a chunk; ``other``: the group whose update it is of, where of one."""
    REPLY = 35
    """A reply to a worker (``other``) that reads the parameters: until the network says so."""


NAMES: Final = {
    Span.PULL: "pull",
    Span.WAIT_REPLIES: "wait: replies",
    Span.WAIT_GROUP: "wait: group",
    Span.WAIT_COLLECTIVE: "wait: collective",
    Span.WAIT_SERVERS: "wait: servers",
    Span.WAIT_END: "wait: others to finish",
    Span.SET_VALUES: "job.set_parameters",
    Span.PULL_ALL: "job.pull",
    Span.SAVE: "job.save",
    Span.OPTIMIZER_STATE: "job.optimizer_state",
    Span.CHECKPOINT: "checkpoint",
}
"""Names of the kinds whose name is not the lower-case form."""

COLLECTIVES: Final = (
    *("prepare", "save", "mean", "barrier", "set_parameters", "optimizer_state"),
    *("any", "all", "loader", "finish", "start", "pull", "checkpoint", "written", "set_mode"),
)

WAITS: Final = (
    Span.WAIT_REPLIES,
    Span.WAIT_GROUP,
    Span.WAIT_COLLECTIVE,
    Span.WAIT_SERVERS,
    Span.WAIT_END,
)
IN_FLIGHT: Final = (Span.PUSH, Span.PULL, Span.RECEIVE, Span.REPLY)
"""Kinds that may overlap in a lane; in a lane, all others follow or contain one another."""


class Lane(IntEnum):
    SCRIPT = 1
    """The thread that runs the script."""
    LOOP = 2
    """Any other: psdist's that drives the loop during backward, autograd's."""
    GROUP = 3
    """Operation of this worker in its group."""
    EARLY = 4
    """The same, for gradients that leave during backward."""
    SERVER = 5


LANE_NAMES: Final = {
    Lane.SCRIPT: "script",
    Lane.LOOP: "psdist's thread",
    Lane.GROUP: "group",
    Lane.EARLY: "group, during backward",
    Lane.SERVER: "server",
}

RECORD: Final = Struct("<qqqiiIIIBBH")
DTYPE: Final = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("clock", "<i8"),
        ("chunk", "<i4"),
        ("other", "<i4"),
        ("num_bytes", "<u4"),
        ("sent_ns", "<u4"),
        ("took_ns", "<u4"),
        ("kind", "u1"),
        ("lane", "u1"),
        ("set_index", "<u2"),
    ]
)
"""Time to pass a push to the network (``sent_ns``), and to process its reply (``took_ns``)."""


def name_of(kind: int, other: int = NONE) -> str:
    """As people read it: ``"apply"``, ``"collective: save"``."""
    span = Span(kind)
    if span is Span.COLLECTIVE:
        known = 0 <= other < len(COLLECTIVES)
        return f"collective: {COLLECTIVES[other]}" if known else "collective"
    return NAMES.get(span, span.name.lower())
