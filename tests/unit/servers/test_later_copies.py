"""Copies for a checkpoint that are made behind its cut: whatever happens to a chunk meanwhile, they
are the bits of the cut."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import FileRecord
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import InvariantError
from psdist.protocol.control import Finish, Registered, Resume, Resumed, Setup, Written
from psdist.protocol.events import Arrived, Frame
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.protocol.memory import as_tensor
from psdist.protocol.optimizer_state import PerElement, PieceState
from psdist.protocol.optimizers import HyperValue, pack_hyperparameters, traits
from psdist.protocol.partition import Partition, Piece
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.servers.loop import ServerLoop
from psdist.servers.protocol.actions import (
    Contribution,
    Fold,
    Hold,
    Load,
    LoadState,
    Reply,
    ReplyToken,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.set_loop import SetLoop
from psdist.servers.shard.chunk_memory import ChunkMemory
from psdist.servers.shard.executor import Executor, ShardSpec
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import ChunkCopy, SnapshotMemory
from psdist.servers.shard.tensors import TensorShard
from psdist.transfers import Transfers
from tests.support.late_transfers import LateTransfers
from tests.support.rounding import Rounding
from tests.support.virtual.sizes import CostModel, SizeShard
from tests.unit.servers.test_executors import codings_of
from tests.unit.servers.test_sets import Wire as Network
from tests.unit.servers.test_sets import control, from_coordinator, make_loop, registers, tell

OPTIMIZERS: dict[str, dict[str, HyperValue]] = {
    "torch.optim.SGD": {"lr": 0.05, "momentum": 0.9},
    "torch.optim.AdamW": {"lr": 0.01, "amsgrad": True},
    "torch.optim.NAdam": {"lr": 0.01},
    "torch.optim.Adafactor": {"lr": 0.1},
}
RELATIVE = Wire(push=Rounding("bfloat16"), reply=Rounding("float16"), seed=0, is_relative=True)
STATE: PieceState = {"momentum_buffer": PerElement("float32")}


def spec_of(
    optimizer: str = "torch.optim.SGD",
    *,
    dtype: str = "float32",
    wire: Wire = RAW_WIRE,
    freeze_step: int = 0,
    states: dict[int, PieceState] | None = None,
) -> ShardSpec:
    marks = traits(optimizer)
    pieces = [
        Piece(name=name, shape=(rows, 8), stride=(8, 1), dtype=dtype, optimizer_group=0)
        for name, rows in (("a", 9), ("b", 20), ("c", 3), ("d", 8))
    ]
    partition = Partition.cut(
        pieces,
        chunk_bytes=128 * (4 if dtype == "float32" else 2),
        whole_tensors=optimizer == "torch.optim.Adafactor",
    )
    assert len(partition.chunks) > 1
    return ShardSpec(
        partition=partition,
        chunks=tuple(range(len(partition.chunks))),
        optimizer=optimizer,
        traits=marks,
        hyper=pack_hyperparameters([OPTIMIZERS[optimizer]]),
        wire=wire,
        is_holding=True,
        freeze_step=freeze_step,
        states=states or {},
    )


class Shard:
    """A shard that is driven at random."""

    def __init__(self, given: ShardSpec, seed: int, transfers: Transfers | None = None) -> None:
        self.given = given
        self.executor = TensorShard(given, transfers)
        self.slots = self.executor.make_slots(2)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.current = dict.fromkeys(given.chunks, 0)
        for chunk in given.chunks:
            self.load(chunk)

    def arrive(self, slot: Frame, chunk: int, *, is_pushed: bool) -> None:
        its = self.given.partition.chunks[chunk]
        values = torch.randn(its.length, generator=self.generator)
        self.executor.settle(slot)
        assert slot.payload is not None
        pushes = codings_of(self.executor)
        if is_pushed and pushes is not None:
            slot.num_received = pushes[chunk].encode(values, slot.payload, whole=values, seed=0)
        else:
            as_tensor(slot.payload, its.dtype, its.length).copy_(values)

    def load(self, chunk: int) -> None:
        self.arrive(self.slots[0], chunk, is_pushed=False)
        self.executor.load(Load(chunk, self.slots[0], target=self.current[chunk]))

    def step(self, chunk: int) -> None:
        source, self.current[chunk] = self.current[chunk], self.random.choice([0, 1])
        pieces = [each.piece for each in self.given.partition.chunks[chunk].segments]
        content = self.random.choice(list(SlotContent))
        self.arrive(self.slots[0], chunk, is_pushed=True)
        if content is not SlotContent.GRADIENT:
            self.executor.start_sum(StartSum(chunk, self.slots[0], 0.5, 0))
            self.arrive(self.slots[1], chunk, is_pushed=True)
            self.executor.fold(Fold(chunk, self.slots[1], self.slots[0], 0.5, 0))
        if content is SlotContent.HELD:
            self.executor.hold(Hold(chunk, self.slots[0], 1.0))
        self.executor.step(
            Step(
                chunk=chunk,
                gradient=None if content is SlotContent.HELD else self.slots[0],
                content=content,
                gradient_scale=1.0,
                lr_scale=1.0,
                hyper=self.given.hyper,
                absent=frozenset({self.random.choice(pieces)} if len(pieces) > 1 else ()),
                source=source,
                target=self.current[chunk],
                contributions=(Contribution(0, 0, 1.0, False),),
            )
        )

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step(self.random.choice(self.given.chunks))

    def snapshot(self, into: SnapshotMemory, *, is_later: bool = False) -> list[Region]:
        return [
            each
            for chunk in self.given.chunks
            for each in self.executor.snapshot(chunk, into, set_index=0, is_later=is_later)
        ]


def same(one: Region, other: Region) -> bool:
    return (
        (one.piece, one.start, one.state) == (other.piece, other.start, other.state)
        and torch.equal(one.values, other.values)
        and list(one.elements) == list(other.elements)
        and all(map(torch.equal, one.elements.values(), other.elements.values()))
    )


def are_same(some: list[Region], others: list[Region]) -> bool:
    return len(some) == len(others) > 0 and all(map(same, some, others))


CASES = {
    **{name: spec_of(name) for name in OPTIMIZERS},
    "bfloat16": spec_of("torch.optim.AdamW", dtype="bfloat16"),
    "frozen": spec_of("torch.optim.AdamW", freeze_step=4),
    "relative": spec_of(wire=RELATIVE),
}


@pytest.mark.parametrize("is_on_a_device", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_copies_made_while_training_goes_on_are_those_of_the_cut(
    case: str, seed: int, is_on_a_device: bool
) -> None:
    shard = Shard(CASES[case], seed, LateTransfers(seed) if is_on_a_device else None)
    shard.train(20)
    kept = SnapshotMemory()
    for _ in range(2):  # the second to the memory of the first
        at_once = shard.snapshot(SnapshotMemory())
        later = shard.snapshot(kept, is_later=True)
        shard.train(1)
        while kept.make_next():
            shard.train(shard.random.choice([0, 1, 1, 4]))
        shard.train(4)
        assert are_same(later, at_once)
        assert not are_same(shard.snapshot(SnapshotMemory()), at_once)


# -- every action ----------------------------------------------------------------------------------


def reply(chunk: int) -> Reply:
    return Reply(ReplyToken(0, chunk, 0, 0), 1, 0, 0, 0, 1, 0)


def changes(shard: Shard) -> dict[str, Callable[[], object]]:
    """What changes chunk 0, by the method of the executor."""
    (region, *more) = regions = Shard(shard.given, seed=99).executor.snapshot(
        0, SnapshotMemory(), set_index=0
    )
    state = STATE if shard.given.states else {}
    regions = [
        replace(each, state=state, elements=dict.fromkeys(state, each.values + 1))
        for each in (region, *more)
    ]
    values = b"\x01" * sum(4 * each.length for each in shard.given.partition.chunks[0].segments)
    found: dict[str, Callable[[], object]] = {
        "load": lambda: shard.load(0),
        "step": lambda: shard.step(0),
        "restore": lambda: shard.executor.restore(0, regions),
    }
    if shard.given.states:
        found["load_state"] = lambda: shard.executor.load_state(LoadState(0, 0, values))
    return found


def begun(name: str = "load_state") -> Shard:
    """Its optimizer has state from the start."""
    states = dict.fromkeys(range(4), STATE)
    return Shard(spec_of(states=states if name == "load_state" else None), seed=5)


def methods() -> list[str]:
    return [name for name, _ in inspect.getmembers(Executor, inspect.isfunction) if name[0] != "_"]


def reads(shard: Shard) -> dict[str, Callable[[], object]]:
    """What leaves chunk 0 as it is."""
    executor, (first, second) = shard.executor, shard.slots
    memory = SnapshotMemory()
    return {
        "make_slots": lambda: executor.make_slots(1),
        "settle": lambda: executor.settle(first),
        "state": lambda: executor.state(0, 0),
        "snapshot": lambda: executor.snapshot(0, memory, set_index=0),
        "reserve_snapshot": lambda: executor.reserve_snapshot(0, memory, set_index=0),
        "value_checksum": lambda: executor.value_checksum(0),
        "start_sum": lambda: executor.start_sum(StartSum(0, first, 2.0, 0)),
        "fold": lambda: executor.fold(Fold(0, second, first, 2.0, 0)),
        "hold": lambda: executor.hold(Hold(0, first, 2.0)),
        "payload": lambda: executor.payload(0, 1),
        "begin_reply": lambda: executor.begin_reply(reply(0)),
        "encode": lambda: executor.encode(reply(0), into=executor.payload(0, 0)),
        "checksum": lambda: executor.checksum(0, 0, encoded=None),
        "statistics": executor.statistics,
        "take_cost_s": executor.take_cost_s,
    }


def test_every_action_of_an_executor_is_known_to_change_a_chunk_or_not() -> None:
    shard = begun()
    assert sorted([*changes(shard), *reads(shard)]) == sorted(methods())


@pytest.mark.parametrize("name", reads(Shard(CASES["relative"], 0)))
def test_what_only_reads_leaves_a_chunk_as_it_is(name: str) -> None:
    shard = Shard(CASES["relative"], seed=5)
    shard.train(8)
    for slot in shard.slots:
        shard.arrive(slot, 0, is_pushed=True)
    before = shard.snapshot(SnapshotMemory())
    reads(shard)[name]()
    assert are_same(shard.snapshot(SnapshotMemory()), before)


@pytest.mark.parametrize("name", changes(begun()))
def test_what_changes_a_chunk_copies_it_first(name: str) -> None:
    shard, memory = begun(name), SnapshotMemory()
    at_once = shard.snapshot(SnapshotMemory())
    later = shard.snapshot(memory, is_later=True)
    changes(shard)[name]()
    assert not are_same(shard.snapshot(SnapshotMemory()), at_once)
    while memory.make_next():
        pass
    assert are_same(later, at_once)


@pytest.mark.parametrize("name", changes(begun()))
def test_a_change_that_copies_nothing_first_is_noticed(name: str) -> None:
    """A fault on purpose: else the test before would prove nothing."""
    shard, memory = begun(name), SnapshotMemory()
    at_once = shard.snapshot(SnapshotMemory())
    later = shard.snapshot(memory, is_later=True)
    with mock.patch.object(ChunkMemory, "begin_change"):
        changes(shard)[name]()
    if name != "load_state":
        with pytest.raises(InvariantError, match="chunk 0 changed before a checkpoint had its"):
            memory.make_next()
        return
    while memory.make_next():
        pass
    assert not are_same(later, at_once)


def test_a_copy_for_a_new_buddy_is_made_at_once_beside_one_that_is_owed() -> None:
    shard, memory = Shard(CASES["torch.optim.SGD"], seed=5), SnapshotMemory()
    shard.train(8)
    before = shard.snapshot(SnapshotMemory())
    owed = shard.snapshot(memory, is_later=True)
    shard.train(8)
    filled = shard.snapshot(SnapshotMemory())
    shard.train(8)
    while memory.make_next():
        pass
    assert are_same(owed, before)
    assert not are_same(filled, before)


# -- sizes -----------------------------------------------------------------------------------------

MODEL = CostModel(
    fold_s_per_byte=0.0, step_s_per_byte=1.0, copy_s_per_byte=100.0, state_bytes_per_byte=1.0
)


def test_sizes_charge_a_copy_when_it_is_made() -> None:
    def cost_of(act: Callable[[], object]) -> float:
        act()
        return shard.take_cost_s() / 512

    shard, memory = SizeShard(spec_of(), model=MODEL), SnapshotMemory()
    assert [shard._chunks[chunk].num_master_bytes for chunk in (0, 1)] == [512, 512]
    (slot,) = shard.make_slots(1)
    advance = Step(
        chunk=0, gradient=slot, content=SlotContent.GRADIENT, gradient_scale=1.0, lr_scale=1.0,
        hyper=b"", absent=frozenset(), source=0, target=0, contributions=(),
    )  # fmt: skip
    changing: Iterator[tuple[float, Callable[[], object]]] = iter(
        [
            (1.0, lambda: shard.step(advance)),
            (100.0, lambda: shard.load(Load(0, slot))),
            (100.0, lambda: shard.restore(0, [])),
            (0.0, lambda: shard.load_state(LoadState(0, 0, b""))),
        ]
    )
    assert cost_of(lambda: shard.snapshot(0, memory, set_index=0)) == 200.0
    for cost, change in changing:
        for chunk in (0, 1):
            assert (
                cost_of(lambda: shard.snapshot(chunk, memory, set_index=0, is_later=True)) == 0.0  # noqa: B023 - now
            )
        assert cost_of(change) == 200.0 + cost
        assert cost_of(change) == cost
        assert cost_of(memory.make_next) == 200.0
        assert not memory.make_next()


# -- files -----------------------------------------------------------------------------------------


def write(folder: Folder, keeper: FileKeeper, shard: Shard, between: Callable[[], object]) -> bytes:
    """The file, with ``between`` in front of each moment in which the server has nothing to do."""
    folder.begin("step-00000004")
    for chunk in shard.given.chunks:
        keeper.keep(0, shard.executor.snapshot(chunk, keeper.memory, set_index=0, is_later=True))
    keeper.write("step-00000004")
    while True:
        between()
        assert keeper.is_busy
        assert not keeper.is_reserving
        with pytest.raises(InvariantError, match="before the last one was written"):
            _ = keeper.memory
        with pytest.raises(InvariantError, match="before the last one was written"):
            keeper.write("step-00000005")
        if not keeper.go_on():
            break
    told = keeper.outcome()
    assert isinstance(told, Written)
    assert not keeper.is_busy
    assert not keeper.go_on()
    (path,) = folder.partial("step-00000004").iterdir()
    return path.read_bytes()


def test_a_file_is_that_of_the_cut_though_training_went_on_at_once(tmp_path: Path) -> None:
    files = []
    for number, is_training in enumerate((False, True)):
        folder, shard = Folder(tmp_path / str(number)), Shard(CASES["torch.optim.AdamW"], seed=7)
        keeper = FileKeeper(folder, 0, restored=None, is_behind=False)
        shard.train(20)
        files.append(write(folder, keeper, shard, lambda: shard.train(2 * is_training)))  # noqa: B023 - now
    assert files[0] == files[1]


def test_no_byte_is_written_before_the_last_one_is_copied(tmp_path: Path) -> None:
    folder, events = Folder(tmp_path), list[str]()
    keeper = FileKeeper(folder, 0, restored=None, is_behind=False)
    folder.begin("step-00000004")
    for name in ("a", "b"):
        keeper.memory.owe(ChunkCopy(lambda name=name: events.append(name)))  # type: ignore[misc]
    keeper.write("step-00000004")

    def write_file(*_: object) -> FileRecord:
        events.append("file")
        return FileRecord(name="server-0.safetensors", num_bytes=0, crc32=0)

    with mock.patch("psdist.ranks.checkpointing.files.write_file", write_file):
        assert [keeper.go_on() for _ in range(4)] == [True, True, True, False]
    assert events == ["a", "b", "file"]


# -- a server --------------------------------------------------------------------------------------


def serving(keeper: FileKeeper) -> tuple[ServerLoop, Network]:
    """Server 1 of two, with two sets of two chunks each."""
    loop, wire = make_loop(keeper)
    piece = Piece(name="p", shape=(8192,), stride=(1,), dtype="float32", optimizer_group=0)
    partition = Partition.cut([piece], chunk_bytes=8192)
    setup = Setup(
        partition=partition.encode(),
        optimizer="torch.optim.SGD",
        hyper=pack_hyperparameters([{"lr": 0.1}]),
    )
    for index in (0, 1):
        tell(loop, wire, control(setup, index))
        each = loop.sets[index]
        for chunk in each.core.chunks:
            slot = each.core.rule.pool._free.pop()  # as if it had been accepted
            assert slot.payload is not None
            as_tensor(slot.payload, "float32", 2048).fill_(10.0 * index + chunk)
            header = Header(kind=Kind.INIT, sender=worker_id(0), chunk=chunk, length=8192, dtype=1)
            each.do(each.core.handle(Arrived(worker_id(0), header, slot)))
    return loop, wire


def test_a_server_answers_before_it_copies_and_copies_when_it_has_nothing_to_do(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)
    keeper = FileKeeper(folder, 1, restored=None, is_behind=False)
    loop, wire = serving(keeper)
    folder.begin("step-00000000")

    def copied() -> int:
        return sum(each.is_made for each in owed)

    answer = tell(loop, wire, from_coordinator(Resume(seq=1, checkpoint="step-00000000")))
    assert answer == [(COORDINATOR, Resumed(seq=1, server=1), 0)]
    owed = list(keeper._memory._owed)
    assert (len(owed), copied()) == (4, 0)
    wire.events.append(registers(0, 0))
    assert loop.turn()
    assert copied() == 0, "what has come goes first"
    assert tell(loop, wire, registers(1, 0), from_coordinator(Finish())) != []
    loop.sets[1].execute(set_to(loop.sets[1], loop.sets[1].core.chunks[0], 99.0))
    assert copied() == 1
    turns = []
    while not any(isinstance(message, Written) for _, message, _ in wire.sent):
        wire.sent.clear()
        turns.append((loop.turn(), copied()))
        assert not loop.is_finished
    # Three copies; the file is begun; what has become of it is told, and nothing is left to do.
    assert turns == [(True, 2), (True, 3), (True, 4), (True, 4), (False, 4)]
    (path,) = folder.partial("step-00000000").iterdir()
    found = load_file(path)
    assert len(found) == 4
    for each in loop.sets:
        for chunk in each.core.chunks:
            (values,) = (
                value
                for name, value in found.items()
                if name.startswith(f"{each.set_index}/0/{2048 * chunk}/")
            )
            assert torch.equal(values, torch.full((2048,), 10.0 * each.set_index + chunk))


def test_a_server_on_a_virtual_network_looks_for_messages_between_two_copies(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)
    keeper = FileKeeper(folder, 1, restored=None, is_behind=False)
    loop, wire = serving(keeper)
    folder.begin("step-00000000")
    costs = [0.0, 0.0]
    for each, index in zip(loop.sets, (0, 1), strict=True):
        each._built.take_cost_s = lambda index=index: costs[index]  # type: ignore[method-assign, misc]
    turns = loop.actor()
    assert next(turns) is None
    wire.events.append(from_coordinator(Resume(seq=1, checkpoint="step-00000000")))
    assert next(turns) == 0.0
    assert len(keeper._memory._owed) == 3
    costs[:] = 2.0, 0.5
    assert next(turns) == 2.5, "what copies cost all sets"
    costs[:] = 0.0, 0.0
    wire.events.append(registers(0, 0))
    assert next(turns) == 0.0
    assert len(keeper._memory._owed) == 1
    assert wire.sent[-1] == (worker_id(0), Registered(group=0, server=1), 0)
    # The last copy; the file is begun; what has become of it is told.
    assert [next(turns) for _ in range(3)] == [0.0, 0.0, None]
    assert isinstance(wire.sent[-1][1], Written)


def set_to(each: SetLoop, chunk: int, value: float) -> Load:
    (slot,) = each._built.make_slots(1)
    assert slot.payload is not None
    as_tensor(slot.payload, "float32", 2048).fill_(value)
    return Load(chunk, slot)
