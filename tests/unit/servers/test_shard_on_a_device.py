"""A server's shard on a device: whatever is done in whatever order, the bits of one on the CPU.

The device is none (tests/support/late_transfers.py): its copies come late.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag
from psdist.protocol.memory import as_bytes, as_tensor
from psdist.protocol.optimizers import pack_hyperparameters, traits
from psdist.protocol.partition import Partition, Piece
from psdist.servers.protocol.actions import (
    Contribution,
    Fold,
    Hold,
    Load,
    Reply,
    ReplyToken,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard.executor import ShardSpec
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.servers.shard.tensors import TensorShard
from psdist.transfers import Mark, Pairs, Transfers
from tests.support.late_transfers import LateCopy, LateTransfers
from tests.support.rounding import Rounding
from tests.unit.servers.test_executors import codings_of

OPTIMIZERS = {
    "torch.optim.SGD": {"lr": 0.05, "momentum": 0.9},
    "torch.optim.AdamW": {"lr": 0.01},
    "torch.optim.NAdam": {"lr": 0.01},
}
SLOTS = 4


def spec(optimizer: str, dtype: str, wire: Wire = RAW_WIRE, *, scale: int = 1) -> ShardSpec:
    """``scale``: how many times as large all is."""
    pieces = [
        Piece(name=name, shape=(scale * length,), stride=(1,), dtype=dtype, optimizer_group=0)
        for name, length in (("a", 70), ("b", 150), ("c", 36))
    ]
    partition = Partition.cut(pieces, chunk_bytes=scale * 128 * (4 if dtype == "float32" else 2))
    assert len(partition.chunks) > 1
    return ShardSpec(
        partition=partition,
        chunks=tuple(range(len(partition.chunks))),
        optimizer=optimizer,
        traits=traits(optimizer),
        hyper=pack_hyperparameters([OPTIMIZERS[optimizer]]),
        wire=wire,
        is_holding=True,
    )


class Driven:
    """Two shards that are told the same: one on the CPU, one on a device."""

    def __init__(
        self, given: ShardSpec, seed: int, devices: Sequence[Transfers | None] = ()
    ) -> None:
        """``devices``: others than these, of both."""
        self.given = given
        self.shards = [TensorShard(given, each) for each in devices or (None, LateTransfers(seed))]
        self.slots = [shard.make_slots(SLOTS) for shard in self.shards]
        self.payloads = [
            [[shard.payload(chunk, buffer) for buffer in (0, 1)] for chunk in given.chunks]
            for shard in self.shards
        ]
        """As frames of replies keep them."""
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.current = [0] * len(given.chunks)
        self.snapshots = (SnapshotMemory(), SnapshotMemory())

    def both(self, slot: int) -> Iterable[tuple[TensorShard, Frame]]:
        return ((shard, slots[slot]) for shard, slots in zip(self.shards, self.slots, strict=True))

    def arrive(self, slot: int, chunk: int, *, is_pushed: bool = True) -> None:
        """As the network fills a slot that is free."""
        its = self.given.partition.chunks[chunk]
        values = torch.randn(its.length, generator=self.generator)
        for shard, frame in self.both(slot):
            shard.settle(frame)
            assert frame.payload is not None
            pushes = codings_of(shard) if is_pushed else None
            if pushes is None:
                target = as_tensor(frame.payload, its.dtype, its.length)
                frame.num_received = target.copy_(values).nbytes
            else:
                frame.num_received = pushes[chunk].encode(
                    values, frame.payload, whole=values, seed=0
                )

    def load(self, chunk: int) -> None:
        self.arrive(0, chunk, is_pushed=False)
        for shard, frame in self.both(0):
            shard.load(Load(chunk, frame, target=self.current[chunk]))

    def advance(self, chunk: int) -> None:
        """One step, on a gradient, a sum of several, or one that was held."""
        kind, count = self.random.choice(list(SlotContent)), self.random.randint(1, 3)
        source = self.current[chunk]
        target = self.current[chunk] = self.random.choice([0, 1])
        count = 1 if kind is SlotContent.GRADIENT else count
        for slot in range(count):
            self.arrive(slot, chunk)
        if kind is not SlotContent.GRADIENT:
            for shard, frame in self.both(0):
                shard.start_sum(StartSum(chunk, frame, 0.5, 0))
            for slot in range(1, count):
                for (shard, frame), (_, total) in zip(self.both(slot), self.both(0), strict=True):
                    shard.fold(Fold(chunk, frame, total, 0.25, 0))
                self.arrive(slot, chunk)  # the slot is the network's again
        if kind is SlotContent.HELD:
            one, other = (shard.hold(Hold(chunk, frame, 0.7)) for shard, frame in self.both(0))
            assert one == other
            self.arrive(0, chunk)
        absent = frozenset(self.random.choice([(), (1,)]))
        for shard, frame in self.both(0):
            shard.step(
                Step(
                    chunk=chunk,
                    gradient=None if kind is SlotContent.HELD else frame,
                    content=kind,
                    gradient_scale=1.0 if kind is SlotContent.GRADIENT else 0.5,
                    lr_scale=1.0,
                    hyper=self.given.hyper,
                    absent=absent,
                    source=source,
                    target=target,
                    contributions=(Contribution(0, 0, 1.0, False),),
                )
            )

    def reply(self, chunk: int) -> bytes:
        """The bytes that leave."""
        found = []
        for shard, payloads in zip(self.shards, self.payloads, strict=True):
            buffer = self.current[chunk]
            shard.begin_reply(Reply(ReplyToken(0, chunk, buffer, 0), 0, 0, 0, 0, 1))
            left = bytes(payloads[chunk][buffer])
            assert shard.checksum(chunk, buffer, encoded=None) == zlib.crc32(left)
            found.append((left, shard.value_checksum(chunk)))
        assert found[0] == found[1]
        return found[0][0]

    def regions(self, chunk: int) -> list[Region]:
        ours, theirs = (
            shard.snapshot(chunk, memory, set_index=0)
            for shard, memory in zip(self.shards, self.snapshots, strict=True)
        )
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert same(one, other)
        assert self.shards[0].state(chunk, 0) == self.shards[1].state(chunk, 0)
        return theirs


def same(one: Region, other: Region) -> bool:
    return (
        (one.piece, one.start, one.state) == (other.piece, other.start, other.state)
        and torch.equal(one.values, other.values)
        and list(one.elements) == list(other.elements)
        and all(map(torch.equal, one.elements.values(), other.elements.values()))
    )


def parts_of(reply: bytes, given: ShardSpec) -> list[bytes]:
    """What of the first chunk's bytes is a parameter's; the rest is nobody's."""
    chunk = given.partition.chunks[0]
    item = chunk.num_bytes // chunk.length
    return [reply[item * s.offset : item * (s.offset + s.length)] for s in chunk.segments]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bits_are_those_of_the_cpu(optimizer: str, dtype: str, seed: int) -> None:
    drive(Driven(spec(optimizer, dtype), seed))


def drive(driven: Driven) -> None:
    """Whatever servers do, in some order; both shards have the same bits all along."""
    for chunk in driven.given.chunks:
        driven.load(chunk)
        driven.reply(chunk)
    seen = set()
    for _ in range(40):
        chunk = driven.random.choice(driven.given.chunks)
        driven.advance(chunk)
        if driven.random.random() < 0.6:
            seen.add(driven.reply(chunk))
        if driven.random.random() < 0.1:
            driven.regions(chunk)
        if driven.random.random() < 0.1:
            driven.load(chunk)
    assert len(seen) > 10
    for chunk in driven.given.chunks:
        driven.reply(chunk)
        driven.regions(chunk)


def test_what_was_encoded_is_decoded_on_its_way_to_the_device() -> None:
    wire = Wire(push=Rounding("bfloat16"), reply=RAW, seed=0)
    driven = Driven(spec("torch.optim.SGD", "float32", wire), seed=1)
    for _ in range(20):
        chunk = driven.random.choice(driven.given.chunks)
        driven.advance(chunk)
        driven.reply(chunk)


def encoded_reply(driven: Driven, *, held: int, version: int, flags: int) -> list[bytes]:
    """What each shard makes of it."""
    asked = Reply(ReplyToken(0, 0, driven.current[0], 0), 3, 0, flags, 0, version, held)
    found = []
    for shard in driven.shards:
        into = shard.payload(0, 0)
        found.append(bytes(into[: shard.encode(asked, into=into)]))
    return found


def test_replies_that_say_what_has_changed_are_those_of_the_cpu() -> None:
    wire = Wire(push=RAW, reply=Rounding("float16"), seed=0, is_relative=True, compare_every=1)
    driven = Driven(spec("torch.optim.AdamW", "float32", wire), seed=2)
    driven.load(0)
    lengths = set()
    for version in range(2, 12):
        driven.advance(0)
        for held, flags in ((version - 1, 0), (0, 0), (0, int(Flag.FRESH))):
            ours, theirs = encoded_reply(driven, held=held, version=version, flags=flags)
            assert ours == theirs
            lengths.add(len(ours))
        driven.regions(0)
    assert len(lengths) > 1


def test_another_shard_goes_on_from_a_snapshot_that_stays_what_it_was() -> None:
    driven = Driven(spec("torch.optim.AdamW", "bfloat16"), seed=3)
    chunk = 0
    driven.load(chunk)
    for _ in range(3):
        driven.advance(chunk)
    regions, before = driven.regions(chunk), driven.reply(chunk)
    kept = [bytes(as_bytes(each.values)) for each in regions]
    driven.advance(chunk)
    assert [bytes(as_bytes(each.values)) for each in regions] == kept

    other = Driven(driven.given, seed=4)
    for shard in other.shards:
        shard.restore(chunk, regions)
    assert parts_of(other.reply(chunk), driven.given) == parts_of(before, driven.given)
    other.advance(chunk)
    other.reply(chunk)
    assert [bytes(as_bytes(each.values)) for each in regions] == kept


class Ordered(LateTransfers):
    """Which copies were begun behind which marks, and what lies on the device."""

    def __init__(self) -> None:
        super().__init__(0)
        self.marks: list[Mark] = []
        self.behind: list[list[Mark]] = []
        self._storages: set[int] = set()

    def device_memory(self, dtype: str, num_elements: int) -> torch.Tensor:
        made = super().device_memory(dtype, num_elements)
        self._storages.add(made.untyped_storage().data_ptr())
        return made

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def mark(self) -> Mark:
        self.marks.append(object())
        return self.marks[-1]

    def begin(self, pairs: Pairs, *, after: Iterable[Mark]) -> LateCopy:
        found = list(after)
        self.behind.append(found)
        return super().begin(pairs, after=found)


def on_gradient(slot: Frame) -> Step:
    return Step(
        chunk=0,
        gradient=slot,
        content=SlotContent.GRADIENT,
        gradient_scale=1.0,
        lr_scale=1.0,
        hyper=pack_hyperparameters([OPTIMIZERS["torch.optim.SGD"]]),
        absent=frozenset(),
        source=0,
        target=0,
        contributions=(Contribution(0, 0, 1.0, False),),
    )


def test_copies_come_behind_what_was_computed_with_their_memory() -> None:
    """Of a stream that nothing else keeps in order with the one that computes."""
    device = Ordered()
    shard = TensorShard(spec("torch.optim.SGD", "float32"), device)
    (slot,) = shard.make_slots(1)

    for _ in range(2):
        shard.settle(slot)
        shard.step(on_gradient(slot))
    first_up, first_down, second_up, second_down = device.behind
    assert [len(each) for each in device.behind] == [1, 1, 1, 1]
    settled, stepped, settled_again, stepped_again = device.marks
    assert first_up == [settled]
    assert first_down == [stepped]
    assert second_up == [settled_again]
    assert second_down == [stepped_again]
    for num_fetched, fetch in enumerate(
        (
            lambda: shard.snapshot(0, SnapshotMemory(), set_index=0),
            lambda: shard.value_checksum(0),
            lambda: shard.state(0, 0),
        ),
        start=1,
    ):
        fetch()
        assert device.behind[4:] == [[mark] for mark in device.marks[4:]]
        assert len(device.marks) >= 4 + num_fetched
        assert not device.under_way


@pytest.mark.parametrize("wire", [RAW_WIRE, Wire(push=Rounding("bfloat16"), reply=RAW, seed=0)])
def test_steps_compute_with_memory_of_the_device_alone(wire: Wire) -> None:
    device = Ordered()
    shard = TensorShard(spec("torch.optim.SGD", "float32", wire), device)
    first, second = shard.make_slots(2)
    for slot in (first, second):
        assert slot.payload is not None
        if (codings := codings_of(shard)) is not None:
            values = torch.ones(shard._partition.chunks[0].length)
            slot.num_received = codings[0].encode(values, slot.payload, whole=values, seed=0)
    seen: list[bool] = []

    def watched(**of: Any) -> None:
        seen.extend([device.has(of["values"]), device.has(of["grad"])])

    optimizer = shard.memory[0].optimizer
    assert optimizer is not None
    with mock.patch.object(optimizer, "step", watched):
        shard.step(on_gradient(first))
        shard.start_sum(StartSum(0, first, 1.0, 0))
        shard.fold(Fold(0, second, first, 1.0, 0))
        shard.step(replace(on_gradient(first), content=SlotContent.SUM))
        shard.hold(Hold(0, first, 1.0))
        shard.step(replace(on_gradient(first), gradient=None, content=SlotContent.HELD))
    assert seen == [True] * 6


def test_a_buffer_holds_what_it_was_to_hold_though_no_reply_has_asked_for_it() -> None:
    driven = Driven(spec("torch.optim.SGD", "float32"), seed=0)
    found = []
    for shard, slots, payloads in zip(driven.shards, driven.slots, driven.payloads, strict=True):
        for value, target in ((0.5, 0), (2.0, 1)):
            shard.settle(slots[0])
            assert slots[0].payload is not None
            as_tensor(slots[0].payload, "float32", 128).fill_(value)
            shard.step(replace(on_gradient(slots[0]), target=target))
        shard.begin_reply(Reply(ReplyToken(0, 0, 0, 0), 0, 0, 0, 0, 1))
        found.append(bytes(payloads[0][0]))
    assert found[0] == found[1]


def test_memory_on_the_device_is_counted_beside_what_the_network_reads() -> None:
    given = spec("torch.optim.SGD", "float32")
    plain, device = TensorShard(given), TensorShard(given, LateTransfers(0))
    assert device.statistics().parameter_bytes == 2 * plain.statistics().parameter_bytes
    assert device.statistics().held_bytes == plain.statistics().held_bytes


def test_a_reply_of_the_servers_own_values_is_made_of_a_copy_on_the_host() -> None:
    wire = Wire(push=RAW, reply=Rounding("float16"), seed=0, is_relative=True)
    device = Ordered()
    shard = TensorShard(spec("torch.optim.SGD", "float32", wire), device)
    fresh = Reply(ReplyToken(0, 0, 0, 0), 3, 0, int(Flag.FRESH), 0, 1, 0)
    shard.encode(fresh, into=shard.payload(0, 0))
    assert device.behind == [device.marks]
