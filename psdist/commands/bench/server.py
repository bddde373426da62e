"""``psdist bench server``: the number of groups that a server on this host can take, by model size.

    psdist bench server --codec none --codec int8 --optimizer SGD --optimizer Adam

One process does what a server does in sync rounds, without MPI and without decisions: it copies
each push to a slot, as MPI does, sums the pushes of the groups, makes a step for each chunk, and
copies or encodes each reply. A round takes the time of G pushes with replies and of one step, so
the time of other models and numbers of groups follows.

A copy by one core in the same run is the limit: sums and steps only read and write memory. The
network, MPI and decisions (50 us a message) come on top.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
from rich.table import Table

from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.wire import Wire
from psdist.commands.bench import measured_on, show, size_text, write_result
from psdist.config.sources import resolve
from psdist.protocol.memory import allocate, as_bytes
from psdist.protocol.optimizers import HyperValue, pack_hyperparameters, traits
from psdist.protocol.partition import Partition, Piece
from psdist.ranks.wire import wire_of
from psdist.servers.protocol.actions import (
    Contribution,
    Fold,
    Load,
    Reply,
    ReplyToken,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard.executor import ShardSpec
from psdist.servers.shard.tensors import TensorShard

OPTIMIZERS: Final[dict[str, tuple[str, dict[str, HyperValue], int]]] = {
    "SGD": ("torch.optim.SGD", {"lr": 1e-3}, 3),
    "momentum": ("torch.optim.SGD", {"lr": 1e-3, "momentum": 0.9}, 5),
    "Adam": ("torch.optim.Adam", {"lr": 1e-3}, 7),
}
"""Name -> class, hyperparameters, and how many values a step reads and writes per parameter."""
_MODELS: Final = (2**26, 2**28, 2**30)
"""Bytes of parameters for which the report has the number of groups."""
_WIDTH: Final = 1024
_COPY_BYTES: Final = 2**26
_WARM_UP: Final = 2


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    num_bytes: int
    """Bytes of the float32 parameters of the shard that is measured, a multiple of 4 KiB."""
    groups: int
    every_s: float
    """Seconds from one step of a group to its next."""
    repeats: int
    codecs: Sequence[str]
    """As the setting ``codec``."""
    optimizers: Sequence[str]
    """Names of :data:`OPTIMIZERS`."""
    json_path: Path | None


@dataclass(kw_only=True)
class Row:
    """One codec and optimizer. Lists have the seconds of each round."""

    codec: str
    optimizer: str
    fold_bytes: int
    """Bytes of memory that the sums of a round read and write."""
    step_bytes: int
    """Bytes of memory that the optimizer reads and writes in a round."""
    receive_s: list[float] = field(default_factory=list)
    fold_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Times of steps; with a codec of pulls, they include its encoding."""
    reply_s: list[float] = field(default_factory=list)

    def _per_byte_s(self, options: ServerOptions) -> tuple[float, float]:
        """Return the time of a push with its reply, and of a step, per byte of parameters."""
        each = map(statistics.median, (self.receive_s, self.fold_s, self.reply_s))
        step_s = statistics.median(self.step_s) / options.num_bytes
        return sum(each) / options.groups / options.num_bytes, step_s

    def pushed_per_s(self, options: ServerOptions) -> float:
        """Return the bytes of gradients, before a codec, that the server takes per second."""
        push_s, step_s = self._per_byte_s(options)
        return options.groups / (options.groups * push_s + step_s)

    def groups(self, model_bytes: int, options: ServerOptions) -> int:
        """Return how many groups a server with all of such a model can take."""
        push_s, step_s = self._per_byte_s(options)
        return max(0, int((options.every_s / model_bytes - step_s) / push_s))


def server(options: ServerOptions) -> int:
    """Measure on one core, print a table, and return the exit status 0."""
    torch.set_num_threads(1)
    copied = _copied_per_s(options.repeats)
    with torch.no_grad():
        rows = [
            _measured(codec, optimizer, options)
            for codec in options.codecs
            for optimizer in options.optimizers
        ]
    _report(rows, copied, options)
    return 0


def _copied_per_s(repeats: int) -> float:
    """Return the bytes per second that one core reads and writes in a copy."""
    source, target = (torch.ones(_COPY_BYTES // 4) for _ in range(2))
    seconds = []
    for _ in range(repeats + _WARM_UP):
        began_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began_s)
    return 2 * _COPY_BYTES / statistics.median(seconds[_WARM_UP:])


def _payloads(wire: Wire, partition: Partition) -> list[memoryview]:
    """Return a push of each chunk."""
    codings, payloads = wire.pushes(partition), []
    for chunk in partition.chunks:
        values = torch.randn(chunk.length) * 1e-3
        payload = as_bytes(values)
        if codings is not None:
            encoder = PushEncoder(
                codings, mine=[chunk.index], seed=0, group=0, has_feedback=False, compare_every=4096
            )
            into, terms = allocate(codings.largest(chunk.index)), PushTerms(1.0, ())
            payload = into[: encoder.encode(chunk.index, values, into, clock=1, terms=terms)]
        payloads.append(payload)
    return payloads


def _measured(codec: str, optimizer: str, options: ServerOptions) -> Row:
    # A matrix, because codecs leave vectors alone.
    shape = options.num_bytes // 4 // _WIDTH, _WIDTH
    piece = Piece(name="w", shape=shape, stride=(_WIDTH, 1), dtype="float32", optimizer_group=0)
    partition = Partition.cut([piece], chunk_bytes=None)
    wire = wire_of(resolve(command_line={"codec": codec}, environment={}).config)
    name, given, num_values = OPTIMIZERS[optimizer]
    hyper, chunks = pack_hyperparameters([given]), range(len(partition.chunks))
    shard = TensorShard(
        ShardSpec(
            partition=partition,
            chunks=tuple(chunks),
            optimizer=name,
            traits=traits(name),
            hyper=hyper,
            wire=wire,
        )
    )
    *sums, slot = shard.make_slots(len(chunks) + 1)
    payloads, replies = _payloads(wire, partition), wire.replies(partition)
    for chunk in chunks:
        shard.load(Load(chunk, slot))
    most = max(each.num_bytes for each in partition.chunks)
    out = allocate(most if replies is None else max(map(replies.largest, chunks)))
    pushed = sum(map(len, payloads))
    # The first push becomes the sum: a raw one stays in place, another is decoded.
    first = 0 if wire.pushes(partition) is None else pushed + options.num_bytes
    row = Row(
        codec=codec,
        optimizer=optimizer,
        fold_bytes=first + (options.groups - 1) * (pushed + 2 * options.num_bytes),
        step_bytes=num_values * options.num_bytes,
    )
    parts = row.receive_s, row.fold_s, row.step_s, row.reply_s
    for clock in range(options.repeats + _WARM_UP):
        moments = [list[float]() for _ in parts]
        receive, fold, step, reply = moments
        for group in range(options.groups):
            for chunk in chunks:
                into, payload = slot if group else sums[chunk], payloads[chunk]
                assert into.payload is not None
                receive.append(-time.perf_counter())
                into.payload[: len(payload)] = payload
                into.num_received = len(payload)
                receive.append(time.perf_counter())
                fold.append(-receive[-1])
                if group:
                    shard.fold(Fold(chunk, into, sums[chunk], 1.0, clock))
                else:
                    shard.start_sum(StartSum(chunk, into, 1.0, clock))
                fold.append(time.perf_counter())
        step.append(-time.perf_counter())
        for chunk in chunks:
            shard.step(
                Step(
                    chunk=chunk,
                    gradient=sums[chunk],
                    content=SlotContent.SUM,
                    gradient_scale=1.0 / options.groups,
                    lr_scale=1.0,
                    hyper=hyper,
                    absent=frozenset(),
                    source=0,
                    target=0,
                    contributions=(Contribution(0, clock, 1.0, is_empty=False),),
                )
            )
        step.append(time.perf_counter())
        reply.append(-step[-1])
        for group in range(options.groups):
            for chunk in chunks:
                token = ReplyToken(group, chunk, 0, clock)
                answer = Reply(token, clock, clock, 0, 0, version=clock + 1, held=clock)
                shard.begin_reply(answer)
                if replies is None:
                    values = shard.payload(chunk, 0)
                    out[: len(values)] = values
                else:
                    shard.encode(answer, into=out)
        reply.append(time.perf_counter())
        if clock >= _WARM_UP:
            for part, each in zip(parts, moments, strict=True):
                part.append(sum(each))
    return row


def _report(rows: Sequence[Row], copied: float, options: ServerOptions) -> None:
    table = Table(
        title=(
            f"sync rounds of {options.groups} groups and {size_text(options.num_bytes)} on one "
            f"core, which copies {copied / 1e9:.1f} GB/s (read + written); medians of "
            f"{options.repeats}; right: groups that it can take with a step every "
            f"{options.every_s:g} s"
        )
    )
    names = ("codec", "optimizer", "sum / copy", "step / copy", "pushed GB/s")
    for name in (*names, *map(size_text, _MODELS)):
        table.add_column(name, justify="right")
    found = []
    for row in rows:
        figures = {
            "fold_of_copy": row.fold_bytes / statistics.median(row.fold_s) / copied,
            "step_of_copy": row.step_bytes / statistics.median(row.step_s) / copied,
            "pushed_per_s": row.pushed_per_s(options),
        }
        groups = {model: row.groups(model, options) for model in _MODELS}
        of_fold, of_step, rate = figures.values()
        texts = f"{of_fold:.2f}", f"{of_step:.2f}", f"{rate / 1e9:.2f}"
        table.add_row(row.codec, row.optimizer, *texts, *map(str, groups.values()))
        found.append({**asdict(row), **figures, "groups_by_bytes": groups})
    show(table, width=100)
    given = {"bytes": options.num_bytes, "groups": options.groups, "every_s": options.every_s}
    write_result(options.json_path, {**measured_on("none"), **given, "copied": copied,
                                     "rows": found})  # fmt: skip
