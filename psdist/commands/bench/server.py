"""``psdist bench server``: the pushes per second that a server on this host can take.

    psdist bench server --codec none --codec int8 --optimizer SGD --optimizer Adam

One process does what a server does in a sync round, without MPI and without decisions: for each
chunk it receives the push of each group (a copy, as MPI makes one), sums them, makes a step, and
copies the parameters for each group's reply. The time of a round is that of G pushes and of one
step. So the time of other models and numbers of groups follows, and how many groups a server can
take if each makes a step every ``every_s`` seconds.

The limit of each figure is a copy by one core in the same run: sums and steps only read and write
memory. Network, MPI and decisions (50 us a message) come on top.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
from rich.table import Table

from psdist.codecs import Raw
from psdist.codecs.coders import HostCoder
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.commands.bench import measured_on, show, size_text, write_result
from psdist.config.sources import resolve
from psdist.protocol.memory import as_bytes
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
"""Name -> class, hyperparameters, and the values that a step reads and writes per parameter."""
MODELS: Final = (2**26, 2**28, 2**30)
"""Bytes of parameters for which the report has the number of groups."""
_WIDTH: Final = 1024
_COPY_BYTES: Final = 2**26


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    num_bytes: int
    """Of the float32 parameters of the shard that is measured."""
    groups: int
    every_s: float
    """Seconds from one step of a group to its next."""
    repeats: int
    codecs: Sequence[str]
    """As the setting ``codec``."""
    optimizers: Sequence[str]
    """Of :data:`OPTIMIZERS`."""
    json_path: Path | None


@dataclass(kw_only=True)
class Row:
    """One codec and optimizer. Medians of rounds, in seconds."""

    codec: str
    optimizer: str
    fold_bytes: int
    """Memory that a round's sums read and write."""
    step_bytes: int
    """The same of its steps, without their replies' codec."""
    receive_s: list[float] = field(default_factory=list)
    fold_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    reply_s: list[float] = field(default_factory=list)

    def seconds(self, groups: int, options: ServerOptions) -> float:
        """Return the time of a round per byte of parameters."""
        each = (self.receive_s, self.fold_s, self.reply_s)
        per_push_s = sum(map(statistics.median, each)) / options.groups
        return (groups * per_push_s + statistics.median(self.step_s)) / options.num_bytes

    def pushed_per_s(self, options: ServerOptions) -> float:
        """Return the bytes of gradients, before a codec, that the server takes per second."""
        return options.groups / self.seconds(options.groups, options)

    def groups(self, model_bytes: int, options: ServerOptions) -> int:
        """Return how many groups a server with all of such a model can take."""
        step_s, both_s = self.seconds(0, options), self.seconds(1, options)
        return max(0, int((options.every_s / model_bytes - step_s) / (both_s - step_s)))


def server(options: ServerOptions) -> int:
    """Measure on this process's core, print a table, and return the exit status 0."""
    torch.set_num_threads(1)
    copied = _copied_per_s(options.repeats)
    rows = []
    for codec in options.codecs:
        for optimizer in options.optimizers:
            with torch.no_grad():
                rows.append(_measured(codec, optimizer, options))
    _report(rows, copied, options)
    return 0


def _copied_per_s(repeats: int) -> float:
    """Return the bytes per second that one core reads and writes in a copy."""
    source, target = (torch.ones(_COPY_BYTES // 4) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began_s)
    return 2 * _COPY_BYTES / statistics.median(seconds[1:])


def _measured(codec: str, optimizer: str, options: ServerOptions) -> Row:
    rows = max(1, options.num_bytes // 4 // _WIDTH)  # of a matrix: codecs may leave vectors alone
    piece = Piece(
        name="w", shape=(rows, _WIDTH), stride=(_WIDTH, 1), dtype="float32", optimizer_group=0
    )
    partition = Partition.cut([piece], chunk_bytes=None)
    wire = wire_of(resolve(command_line={"codec": codec}, environment={}).config)
    name, hyper, num_values = OPTIMIZERS[optimizer]
    packed, chunks = pack_hyperparameters([hyper]), range(len(partition.chunks))
    shard = TensorShard(
        ShardSpec(
            partition=partition,
            chunks=tuple(chunks),
            optimizer=name,
            traits=traits(name),
            hyper=packed,
            wire=wire,
        )
    )
    slots = shard.make_slots(len(chunks) + 1)
    codings, replies = wire.pushes(partition), wire.replies(partition)
    payloads = []
    for chunk in partition.chunks:
        values = torch.randn(chunk.length) * 1e-3
        payload = as_bytes(values)
        if codings is not None:
            payload = memoryview(bytearray(codings.largest(chunk.index)))
            encoder = PushEncoder(codings, mine=[chunk.index], seed=0, group=0, has_feedback=False,
                                  compare_every=1 << 40, coder=HostCoder())  # fmt: skip
            terms = PushTerms(1.0, ())
            num = encoder.encode(chunk.index, values, payload, clock=1, terms=terms)
            payload = payload[:num]
        payloads.append(payload)
        shard.load(Load(chunk.index, slots[0]))
    out = memoryview(bytearray(max(
        chunk.num_bytes if replies is None else replies.largest(chunk.index)
        for chunk in partition.chunks
    )))  # fmt: skip
    is_raw = isinstance(wire.push, Raw)
    pushed = sum(map(len, payloads))
    sums = options.groups * (pushed + 2 * options.num_bytes)
    row = Row(
        codec=codec,
        optimizer=optimizer,
        # The first push is the sum, or what it is decoded to.
        fold_bytes=sums - options.num_bytes - (pushed + options.num_bytes if is_raw else 0),
        step_bytes=num_values * options.num_bytes,
    )
    marks = {"receive": row.receive_s, "fold": row.fold_s, "step": row.step_s, "reply": row.reply_s}
    for clock in range(options.repeats + 2):
        spent = dict.fromkeys(marks, 0.0)

        def took(part: str, since_s: float) -> float:
            now_s = time.perf_counter()
            spent[part] += now_s - since_s  # noqa: B023 - called in this round only
            return now_s

        now_s = time.perf_counter()
        for group in range(options.groups):
            for chunk in chunks:
                slot, payload = (slots[-1] if group else slots[chunk]), payloads[chunk]
                assert slot.payload is not None
                slot.payload[: len(payload)] = payload
                slot.num_received = len(payload)
                now_s = took("receive", now_s)
                if group:
                    shard.fold(Fold(chunk, slot, slots[chunk], 1.0, clock))
                else:
                    shard.start_sum(StartSum(chunk, slot, 1.0, clock))
                now_s = took("fold", now_s)
        for chunk in chunks:
            shard.step(
                Step(
                    chunk=chunk,
                    gradient=slots[chunk],
                    content=SlotContent.SUM,
                    gradient_scale=1.0 / options.groups,
                    lr_scale=1.0,
                    hyper=packed,
                    absent=frozenset(),
                    source=0,
                    target=0,
                    contributions=(Contribution(0, clock, 1.0, is_empty=False),),
                )
            )
            now_s = took("step", now_s)
        for group in range(options.groups):
            for chunk in chunks:
                token = ReplyToken(group, chunk, 0, clock)
                reply = Reply(token, clock, clock, 0, 0, version=clock + 1, held=clock)
                shard.begin_reply(reply)
                if replies is None:
                    values = shard.payload(chunk, 0)
                    out[: len(values)] = values
                else:
                    shard.encode(reply, into=out)
                now_s = took("reply", now_s)
        if clock >= 2:
            for part, seconds in marks.items():
                seconds.append(spent[part])
    return row


def _report(rows: Sequence[Row], copied: float, options: ServerOptions) -> None:
    table = Table(
        title=(
            f"a server's work in a sync round of {size_text(options.num_bytes)} and "
            f"{options.groups} groups, on one core, which copies {copied / 1e9:.1f} GB/s of memory "
            f"traffic; medians of {options.repeats}; right: how many groups it can take, at a step "
            f"every {options.every_s:g} s"
        )
    )
    shares = ("sum, of copy", "step, of copy", "pushes, GB/s")
    for name in ("codec", "optimizer", *shares, *map(size_text, MODELS)):
        table.add_column(name, justify="right")
    found = []
    for row in rows:
        of_copy = {
            "fold_of_copy": row.fold_bytes / statistics.median(row.fold_s) / copied,
            "step_of_copy": row.step_bytes / statistics.median(row.step_s) / copied,
        }
        rate, groups = row.pushed_per_s(options), {m: row.groups(m, options) for m in MODELS}
        table.add_row(row.codec, row.optimizer, *(f"{each:.2f}" for each in of_copy.values()),
                      f"{rate / 1e9:.2f}", *map(str, groups.values()))  # fmt: skip
        found.append(asdict(row) | of_copy | {"pushed_per_s": rate, "groups_by_bytes": groups})
    show(table, width=100)
    facts = measured_on("none") | {"cores": f"1 of {os.cpu_count()}"}
    given = {"bytes": options.num_bytes, "groups": options.groups, "every_s": options.every_s}
    write_result(options.json_path, {**facts, **given, "copied_per_s": copied, "rows": found})
