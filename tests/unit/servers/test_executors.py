"""Both executors of a server's actions: what they compute, count and charge."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.chunks import ChunkCodings, Content, Form
from psdist.codecs.wire import RAW_WIRE, Wire, WireFrom
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag
from psdist.protocol.memory import as_bytes, as_tensor
from psdist.protocol.optimizers import pack_hyperparameters, traits
from psdist.protocol.partition import Partition, Piece
from psdist.servers.protocol.actions import (
    BLOCK_ELEMENTS,
    Contribution,
    Fold,
    Hold,
    Load,
    Reply,
    ReplyToken,
    SlotContent,
    StartSum,
    Step,
    num_blocks,
)
from psdist.servers.shard.executor import Executor, ShardSpec
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.servers.shard.tensors import CodedGradients, TensorShard
from tests.support.rounding import Rounding
from tests.support.virtual.sizes import CostModel, SizeShard

HYPER = pack_hyperparameters([{"lr": 0.5, "momentum": 0.9}])
MODEL = CostModel(
    fold_s_per_byte=1.0, step_s_per_byte=100.0, copy_s_per_byte=10_000.0, state_bytes_per_byte=1.0
)


def spec(
    *,
    dtype: str = "float32",
    chunks: Sequence[int] = (0, 1),
    wire: Wire = RAW_WIRE,
    is_holding: bool = False,
) -> ShardSpec:
    piece = Piece(name="p", shape=(128,), stride=(1,), dtype=dtype, optimizer_group=0)
    partition = Partition.cut([piece], chunk_bytes=64 * (4 if dtype == "float32" else 2))
    assert [chunk.length for chunk in partition.chunks] == [64, 64]
    return ShardSpec(
        partition=partition,
        chunks=tuple(chunks),
        optimizer="torch.optim.SGD",
        traits=traits("torch.optim.SGD"),
        hyper=HYPER,
        wire=wire,
        is_holding=is_holding,
    )


def codings_of(shard: TensorShard) -> ChunkCodings | None:
    """How pushes are coded; None for raw ones."""
    gradients = shard.gradients
    return gradients.codings if isinstance(gradients, CodedGradients) else None


def step(
    slot: Frame | None,
    content: SlotContent,
    *,
    scale: float = 1.0,
    source: int = 0,
    target: int = 0,
) -> Step:
    return Step(
        chunk=0,
        gradient=slot,
        content=content,
        gradient_scale=scale,
        lr_scale=1.0,
        hyper=HYPER,
        absent=frozenset(),
        source=source,
        target=target,
        contributions=(Contribution(0, 0, 1.0, False),),
    )


def fill(slot: Frame, dtype: str, value: float) -> None:
    assert slot.payload is not None
    as_tensor(slot.payload, dtype, 64).fill_(value)


def values(shard: TensorShard, dtype: str, buffer: int = 0) -> torch.Tensor:
    return as_tensor(shard.payload(0, buffer), dtype, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_on_a_gradient_and_one_on_a_sum_of_it_move_alike(dtype: str) -> None:
    moved = {}
    for content in SlotContent:
        shard = TensorShard(spec(dtype=dtype, is_holding=True))
        (slot,) = shard.make_slots(1)
        fill(slot, dtype, 2.0)
        shard.load(Load(0, slot))
        fill(slot, dtype, 0.25)
        if content is not SlotContent.GRADIENT:
            shard.start_sum(StartSum(0, slot, 1.0, 0))
        if content is SlotContent.HELD:
            shard.hold(Hold(0, slot, 1.0))
            fill(slot, "float32", 7.0)  # it is another message's
        shard.step(step(None if content is SlotContent.HELD else slot, content))
        moved[content] = values(shard, dtype).clone()
    assert torch.equal(moved[SlotContent.GRADIENT], moved[SlotContent.SUM])
    assert torch.equal(moved[SlotContent.HELD], moved[SlotContent.SUM])
    assert torch.equal(
        moved[SlotContent.SUM], torch.full((64,), 1.875, dtype=getattr(torch, dtype))
    )


def executors(given: ShardSpec) -> list[Executor]:
    return [TensorShard(given), SizeShard(given, model=MODEL)]


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 4)])
@pytest.mark.parametrize("is_holding", [False, True])
def test_held_memory_is_one_shard_in_the_servers_dtype_from_the_start(
    dtype: str, item_bytes: int, is_holding: bool
) -> None:
    for executor in executors(spec(dtype=dtype, chunks=(1,), is_holding=is_holding)):
        assert executor.statistics().held_bytes == is_holding * 64 * item_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_is_scaled_when_it_is_held_and_the_squares_are_of_that(dtype: str) -> None:
    shard = TensorShard(spec(dtype=dtype, is_holding=True))
    (slot,) = shard.make_slots(1)
    fill(slot, dtype, 3.0)
    shard.start_sum(StartSum(0, slot, 2.0, 0))
    assert shard.hold(Hold(0, slot, 0.25)) == (64 * 1.5**2,)
    shard.step(step(None, SlotContent.HELD, scale=0.5))
    assert values(shard, dtype)[0] == -0.375
    fill(slot, dtype, 3.0)
    shard.start_sum(StartSum(0, slot, 1.0, 0))
    assert shard.hold(Hold(0, slot, 1.0)) == (64 * 9.0,)


def large_spec() -> ShardSpec:
    """A chunk of two blocks and a half."""
    length = 2 * BLOCK_ELEMENTS + 128
    piece = Piece(name="p", shape=(length,), stride=(1,), dtype="float32", optimizer_group=0)
    return ShardSpec(
        partition=Partition.cut([piece], chunk_bytes=4 * length),
        chunks=(0,),
        optimizer="torch.optim.SGD",
        traits=traits("torch.optim.SGD"),
        hyper=HYPER,
        wire=RAW_WIRE,
        is_holding=True,
    )


def test_squares_are_summed_by_blocks_in_float64_with_the_same_bits_for_any_number_of_threads() -> (
    None
):
    shard = TensorShard(large_spec())
    (slot,) = shard.make_slots(1)
    assert slot.payload is not None
    numbers = as_tensor(slot.payload, "float32", 2 * BLOCK_ELEMENTS + 128)
    numbers.copy_(torch.randn(numbers.shape, generator=torch.Generator().manual_seed(1)))
    seen = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        seen.append(shard.hold(Hold(0, slot, 1.0)))
    torch.set_num_threads(before)
    assert seen == [seen[0]] * 3
    exact = [float((block.double() ** 2).sum()) for block in numbers.split(BLOCK_ELEMENTS)]
    assert seen[0] == pytest.approx(exact, rel=1e-14)
    assert len(seen[0]) == num_blocks(len(numbers)) == 3


def test_sizes_have_blocks_as_tensors_have_and_holding_costs_what_folding_does() -> None:
    shard = SizeShard(large_spec(), model=MODEL)
    (slot,) = shard.make_slots(1)
    assert shard.hold(Hold(0, slot, 1.0)) == (0.0, 0.0, 0.0)
    assert shard.take_cost_s() == 4 * (2 * BLOCK_ELEMENTS + 128)


@pytest.mark.parametrize(
    ("num_elements", "blocks"), [(64, 1), (65536, 1), (65600, 2), (131072, 2), (131136, 3)]
)
def test_blocks_are_counted_from_the_start_of_a_chunk(num_elements: int, blocks: int) -> None:
    assert num_blocks(num_elements) == blocks


def test_what_a_slot_was_before_is_forgotten() -> None:
    """The same slot as a sum, then as a gradient of float16: only the action says which."""
    shard = TensorShard(spec(dtype="float16"))
    (slot,) = shard.make_slots(1)
    fill(slot, "float16", 1.0)
    shard.start_sum(StartSum(0, slot, 1.0, 0))
    fill(slot, "float16", 1.0)  # a step never came: the next push lands here
    shard.step(step(slot, SlotContent.GRADIENT))
    assert torch.equal(values(shard, "float16"), torch.full((64,), -0.5, dtype=torch.float16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weighted_mean_is_summed_in_the_servers_dtype(dtype: str) -> None:
    shard = TensorShard(spec(dtype=dtype))
    first, second = shard.make_slots(2)
    fill(first, dtype, 1.0)
    fill(second, dtype, 3.0)
    shard.start_sum(StartSum(0, first, 1.0, 0))
    shard.fold(Fold(0, second, first, 3.0, 0))
    assert first.payload is not None
    assert torch.equal(as_tensor(first.payload, "float32", 64), torch.full((64,), 10.0))
    shard.step(step(first, SlotContent.SUM, scale=0.25))
    assert torch.equal(values(shard, dtype), torch.full((64,), -1.25, dtype=getattr(torch, dtype)))


def test_a_step_to_the_other_buffer_leaves_the_open_replys_bytes() -> None:
    shard = TensorShard(spec())
    (slot,) = shard.make_slots(1)
    fill(slot, "float32", 1.0)
    before = bytes(shard.payload(0, 0))
    shard.step(step(slot, SlotContent.GRADIENT, source=0, target=1))
    assert bytes(shard.payload(0, 0)) == before
    assert (
        shard.checksum(0, 1, encoded=None) == zlib.crc32(shard.payload(0, 1)) != zlib.crc32(before)
    )


def push(shard: TensorShard, slot: Frame, gradient: torch.Tensor) -> None:
    """As a transport leaves it: the encoded bytes at the slot's start, and how many they are."""
    assert slot.payload is not None
    pushes = codings_of(shard)
    assert pushes is not None
    slot.num_received = pushes[0].encode(gradient, slot.payload, whole=gradient, seed=0)


def test_encoded_gradients_are_decoded_and_then_summed_in_the_servers_dtype() -> None:
    codec, gradient = Rounding("bfloat16"), torch.linspace(-1.0, 1.0, 64)
    seen = codec.rounded(gradient, 0)
    assert not torch.equal(seen, gradient)
    shard = TensorShard(spec(wire=Wire(push=codec, reply=RAW, seed=0)))
    first, second = shard.make_slots(2)
    push(shard, first, gradient)
    shard.start_sum(StartSum(0, first, 3.0, 0))
    push(shard, second, gradient)
    shard.fold(Fold(0, second, first, 1.0, 0))
    shard.step(step(first, SlotContent.SUM, scale=0.25))
    assert torch.equal(values(shard, "float32"), -0.5 * seen)
    push(shard, second, gradient)
    shard.step(step(second, SlotContent.GRADIENT))
    assert torch.equal(values(shard, "float32"), -0.5 * seen - 0.5 * (0.9 * seen + seen))


def loaded(wire: Wire) -> TensorShard:
    shard = TensorShard(spec(wire=wire))
    (slot,) = shard.make_slots(1)
    assert slot.payload is not None
    as_tensor(slot.payload, "float32", 64).copy_(torch.linspace(-1.0, 1.0, 64))
    shard.load(Load(0, slot))
    return shard


def reply(*, held: int = 0, version: int = 1, flags: int = 0) -> Reply:
    return Reply(ReplyToken(0, 0, 0, 0), 3, 0, flags, 0, version, held)


def of(shard: TensorShard) -> torch.Tensor:
    """A copy of what its first chunk steps."""
    (region,) = shard.snapshot(0, SnapshotMemory(), set_index=0)
    return region.values


def test_an_encoded_reply_has_memory_of_its_own_and_the_checksum_of_what_is_decoded() -> None:
    codec = Rounding("float16")
    wire = Wire(push=RAW, reply=codec, seed=0)
    shard, raw = loaded(wire), loaded(RAW_WIRE)
    first, second = shard.payload(0, 0), shard.payload(0, 0)
    num_bytes = shard.encode(reply(), into=first)
    assert num_bytes == 8 + 128
    assert first != second, "replies that are open at the same time share nothing"
    seen = shard.replies.coding(0, 0).read(first[:num_bytes]).values()
    assert torch.equal(seen, codec.rounded(of(raw), 0))
    assert shard.checksum(0, 0, encoded=first[:num_bytes]) == zlib.crc32(as_bytes(seen))
    sizes = SizeShard(spec(wire=wire), model=MODEL)
    assert sizes.encode(reply(), into=None) == num_bytes


def test_a_relative_reply_says_what_has_changed_to_who_has_the_version_before() -> None:
    codec = Rounding("float16")
    shard = loaded(Wire(push=RAW, reply=codec, seed=0, is_relative=True, compare_every=1))
    before, (slot,) = of(shard), shard.make_slots(1)
    into = shard.payload(0, 0)

    def content(each: Reply) -> Content:
        return shard.replies.coding(0, 0).read(into[: shard.encode(each, into=into)])

    assert content(reply(held=0)).form is Form.RAW
    fill(slot, "float32", 1.0 / 3)
    shard.step(step(slot, SlotContent.GRADIENT))
    master = of(shard)
    expected = before + codec.rounded(master - before, 0)
    for held, form in ((1, Form.CHANGE), (0, Form.RAW), (2, Form.RAW)):
        seen, found = before.clone(), content(reply(version=2, held=held))
        assert found.form is form
        assert found.change(seen)
        assert torch.equal(seen, expected)
    assert not torch.equal(master, expected)
    assert torch.equal(content(reply(version=2, flags=Flag.FRESH)).values(), master)
    assert shard.checksum(0, 0, encoded=None) == zlib.crc32(as_bytes(expected))
    assert content(reply(version=2, held=1)).change(before + 1) is False, (
        "another one to begin with"
    )
    # What was left out comes with the next change.
    shard.step(step(slot, SlotContent.GRADIENT))
    master = of(shard)
    assert torch.equal(content(reply(version=3, held=0)).values(),
                       expected + codec.rounded(master - expected, 0))  # fmt: skip
    # Values that are set are all there is to say.
    fill(slot, "float32", 5.0)
    shard.load(Load(0, slot))
    assert content(reply(version=4, held=3)).form is Form.RAW
    assert torch.equal(content(reply(version=4, held=3)).values(), torch.full((64,), 5.0))


def test_a_change_that_another_rounds_codec_has_made_is_not_sent_as_this_ones() -> None:
    first = Rounding("float16")
    later = (WireFrom(round=9, push=RAW, reply=Rounding("bfloat16")),)
    shard = loaded(Wire(push=RAW, reply=first, seed=0, is_relative=True, later=later))
    before, (slot,) = of(shard), shard.make_slots(1)
    fill(slot, "float32", 1.0 / 3)
    shard.step(step(slot, SlotContent.GRADIENT))
    expected = before + first.rounded(of(shard) - before, 0)
    into = shard.payload(0, 0)
    for clock, form in ((8, Form.CHANGE), (9, Form.RAW)):
        sent = reply(version=2, held=1)._replace(clock=clock)
        found = shard.replies.coding(0, clock).read(into[: shard.encode(sent, into=into)])
        seen = before.clone()
        assert found.form is form
        assert found.change(seen)
        assert torch.equal(seen, expected)


def test_a_slot_is_as_large_as_the_largest_of_what_may_lie_in_it() -> None:
    class Padded(Rounding):
        def num_bytes(self, num_values: int) -> int:
            return 1000 if num_values else 0

    (slot,) = TensorShard(spec(wire=Wire(push=Padded("float16"), reply=RAW, seed=0))).make_slots(1)
    assert slot.capacity == 8 + 8 + 1000  # the head, what may be left out, and the codec's


def drive(executor: Executor) -> list[float]:
    """One of each action on a chunk of 64 elements; the cost of each, in order."""
    first, second = executor.make_slots(2)
    costs = []
    for act in (
        lambda: executor.load(Load(0, first)),
        lambda: executor.load(Load(1, first)),
        lambda: executor.start_sum(StartSum(0, first, 1.0, 0)),
        lambda: executor.fold(Fold(0, second, first, 1.0, 0)),
        lambda: executor.step(step(first, SlotContent.SUM)),
        lambda: executor.step(step(first, SlotContent.GRADIENT, source=0, target=1)),
        lambda: executor.payload(0, 1),
        lambda: executor.checksum(0, 1, encoded=None),
    ):
        act()
        costs.append(executor.take_cost_s())
    return costs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_count_the_memory_that_tensors_take(dtype: str) -> None:
    sizes, tensors = SizeShard(spec(dtype=dtype), model=MODEL), TensorShard(spec(dtype=dtype))
    assert sizes.statistics().optimizer_state_bytes == 0
    drive(sizes)
    drive(tensors)
    assert sizes.statistics() == tensors.statistics()
    assert sizes.statistics().optimizer_state_bytes == 64 * 4
    (one,), (other,) = sizes.make_slots(1), tensors.make_slots(1)
    assert (one.capacity, one.payload) == (other.capacity, None)


def test_sizes_charge_what_the_model_says_and_tensors_nothing() -> None:
    assert drive(TensorShard(spec())) == [0.0] * 8
    sizes = SizeShard(spec(), model=MODEL)
    per_byte = [10_000.0, 10_000.0, 1.0, 1.0, 100.0, 10_100.0, 0.0, 0.0]
    assert drive(sizes) == [256 * cost for cost in per_byte]
    assert sizes.busy_s == 256 * sum(per_byte)


def test_sizes_charge_the_copy_that_float16_replies_need() -> None:
    sizes = SizeShard(spec(dtype="float16"), model=MODEL)
    assert drive(sizes)[4:6] == [256 * 10_100.0, 256 * 10_100.0]


def test_sizes_have_neither_bytes_nor_chunks_of_others() -> None:
    sizes = SizeShard(spec(chunks=[1]), model=MODEL)
    assert sizes.payload(1, 0) is None
    assert sizes.checksum(1, 0, encoded=None) is None
    assert sizes.statistics().num_chunks == 1
    with pytest.raises(KeyError):
        sizes.load(Load(0, Frame()))


def test_a_server_of_sizes_imports_no_torch() -> None:
    program = (
        "import sys, psdist.servers.loop, psdist.servers.protocol.state; "
        "import tests.support.virtual.sizes; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_stays_what_it_was_and_another_shard_goes_on_from_it(dtype: str) -> None:
    def advance(shard: TensorShard, slot: Frame, gradient: float) -> torch.Tensor:
        fill(slot, dtype, gradient)
        shard.step(step(slot, SlotContent.GRADIENT))
        return values(shard, dtype).clone()

    shard = TensorShard(spec(dtype=dtype))
    (slot,) = shard.make_slots(1)
    fill(slot, dtype, 2.0)
    shard.load(Load(0, slot))
    advance(shard, slot, 0.25)
    memory = SnapshotMemory()
    (region,) = shard.snapshot(0, memory, set_index=0)
    assert region.values.dtype == torch.float32
    kept = {"values": region.values.clone(), **{k: v.clone() for k, v in region.elements.items()}}
    assert set(kept) == {"values", "momentum_buffer"}
    expected = [advance(shard, slot, gradient) for gradient in (0.1, 0.3)]
    assert torch.equal(region.values, kept["values"])
    assert torch.equal(region.elements["momentum_buffer"], kept["momentum_buffer"])

    other = TensorShard(spec(dtype=dtype))
    (slot,) = other.make_slots(1)
    other.restore(0, [region])
    assert other.value_checksum(0) == zlib.crc32(as_bytes(kept["values"]))
    assert torch.equal(values(other, dtype), kept["values"].to(getattr(torch, dtype)))
    for gradient, value in zip((0.1, 0.3), expected, strict=True):
        assert torch.equal(advance(other, slot, gradient), value)
    # What was restored is a copy, too.
    assert torch.equal(region.values, kept["values"])
    assert torch.equal(region.elements["momentum_buffer"], kept["momentum_buffer"])


def test_whole_tensors_go_on_the_same_whether_they_share_a_chunk_or_have_one_each() -> None:
    name, hyper = "torch.optim.Adafactor", {"lr": 0.1}
    packed = pack_hyperparameters([hyper])
    pieces = [
        Piece(name=name, shape=shape, stride=(shape[1], 1), dtype="float32", optimizer_group=0)
        for name, shape in (("a", (3, 5)), ("b", (8, 16)))
    ]

    def shard(chunk_bytes: int) -> tuple[Partition, TensorShard]:
        partition = Partition.cut(pieces, chunk_bytes=chunk_bytes, whole_tensors=True)
        chunks = range(len(partition.chunks))
        found = ShardSpec(
            partition=partition,
            chunks=tuple(chunks),
            optimizer=name,
            traits=traits(name),
            hyper=packed,
            wire=RAW_WIRE,
        )
        return partition, TensorShard(found)

    def advance(partition: Partition, shard: TensorShard, rounds: range) -> list[torch.Tensor]:
        (slot,) = shard.make_slots(1)
        assert slot.payload is not None
        seen = []
        for chunk in partition.chunks:
            gradient = as_tensor(slot.payload, "float32", chunk.length)
            for number in rounds:
                gradient.zero_()
                for segment in chunk.segments:
                    its = torch.arange(segment.length) + segment.piece + 0.5 * number
                    gradient[segment.offset : segment.offset + segment.length] = its.cos()
                action = step(slot, SlotContent.GRADIENT)
                shard.step(replace(action, chunk=chunk.index, hyper=packed))
            held = as_tensor(shard.payload(chunk.index, 0), "float32", chunk.length)
            seen += [held[each.offset :][: each.length].clone() for each in chunk.segments]
        return seen

    one_each, together = shard(4 * 64), shard(64 * 1024)
    assert [len(partition.chunks) for partition, _ in (one_each, together)] == [2, 1]
    for here, there in zip(
        *(advance(*each, range(4)) for each in (one_each, together)), strict=True
    ):
        assert torch.equal(here, there)
    regions = [
        region
        for chunk in range(2)
        for region in one_each[1].snapshot(chunk, SnapshotMemory(), set_index=0)
    ]
    resumed = shard(64 * 1024)
    resumed[1].restore(0, regions)
    after = [advance(*each, range(4, 8)) for each in (one_each, together, resumed)]
    for alone, shared, restored in zip(*after, strict=True):
        assert torch.equal(alone, shared)
        assert torch.equal(alone, restored)


def test_a_snapshot_takes_the_memory_of_the_one_before_or_what_was_made_for_it() -> None:
    def addresses(memory: SnapshotMemory) -> list[int]:
        (region,) = shard.snapshot(0, memory, set_index=1)
        tensors = [region.values, *region.elements.values()]
        assert all(torch.equal(each, live) for each, live in zip(tensors, live_ones(), strict=True))
        return [each.data_ptr() for each in tensors]

    def live_ones() -> list[torch.Tensor]:
        (live,) = shard._live_regions(0)
        return [live.values, *live.elements.values()]

    shard = TensorShard(spec())
    (slot,) = shard.make_slots(1)
    fill(slot, "float32", 2.0)
    shard.load(Load(0, slot))
    memory = SnapshotMemory()
    assert not shard.reserve_snapshot(0, memory, set_index=1)  # SGD has no momentum yet
    assert memory.num_bytes(1) == 0
    before = addresses(memory)
    shard.step(step(slot, SlotContent.GRADIENT))
    with_momentum = addresses(memory)
    assert with_momentum[:1] == before
    assert len(with_momentum) == 2
    assert addresses(memory) == with_momentum
    assert not set(with_momentum) & {each.data_ptr() for each in live_ones()}
    num_bytes = sum(each.nbytes for each in live_ones())
    assert (memory.num_bytes(0), memory.num_bytes(1)) == (0, num_bytes)

    reserved = SnapshotMemory()
    assert shard.reserve_snapshot(0, reserved, set_index=1)
    assert reserved.num_bytes(1) == num_bytes
    held = {each.data_ptr() for each in reserved._held.values()}
    assert set(addresses(reserved)) == held


def test_memory_of_another_shape_or_dtype_is_not_taken_for_a_copy() -> None:
    memory, at = SnapshotMemory(), (0, 0, 0, "exp_avg")
    for values in (torch.arange(4.0), torch.ones(1), torch.ones(1, dtype=torch.float64)):
        copied = memory.room(at, values).copy_(values)
        assert (copied.shape, copied.dtype) == (values.shape, values.dtype)
        assert torch.equal(copied, values)
    assert memory.num_bytes(0) == 8
