"""Optimizer state on a server: which parts it takes and tells, and what a chunk continues with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psdist.errors import OptimizerRefusedError, ProtocolError
from psdist.protocol.control import (
    Register,
    Setup,
    StateHeld,
    StateTaken,
    StateValues,
    StateWanted,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.protocol.optimizer_state import (
    MOST_KEYS,
    Entry,
    OneValue,
    PerElement,
    PieceState,
    Plain,
    StatePart,
    Uncut,
)
from psdist.protocol.optimizers import traits
from psdist.servers.protocol.actions import (
    Accept,
    Fail,
    LoadState,
    Reply,
    SendControl,
    SendState,
)
from psdist.servers.protocol.state import ServerCore
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec
from psdist.servers.shard.optimizer_state import begin, bytes_of, describe, fill
from tests.unit.servers.test_state import built, core_of, make_core, push

CHIEF = worker_id(0)
PARTS = (StatePart(0, 0, 8), StatePart(0, 64, 4), StatePart(1, 0, 8))
LENGTHS = (100, 64)


def waiting_core(mode: str = "async") -> ServerCore:
    """Two chunks, whose state is announced."""
    core = make_core(mode)
    setup = Setup(partition=b"", optimizer="", hyper=b"")
    core.handle(ControlArrived(CHIEF, setup))
    event = built(2, [Frame(capacity=4) for _ in range(4)])
    event.lengths, event.state = LENGTHS, PARTS
    core.handle(event)
    return core


def send(core: ServerCore, part: StatePart, *, peer: int = CHIEF, num_bytes: int = -1) -> list[Any]:
    values = bytes(part.num_bytes if num_bytes < 0 else num_bytes)
    message = StateValues(chunk=part.chunk, start=part.start, values=values)
    return core.handle(ControlArrived(peer, message))


def refusal(actions: list[Any], peer: int = CHIEF) -> str:
    (fail,) = actions
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert str(fail.error).startswith(f"server 0: {describe_peer(peer)} ")
    return str(fail.error)


# -- what the machine decides ----------------------------------------------------------------------


def test_parts_are_taken_in_order_and_each_is_answered() -> None:
    core = waiting_core()
    for part in PARTS:
        load, answer = send(core, part)
        assert load == LoadState(part.chunk, part.start, bytes(part.num_bytes))
        assert answer == SendControl(CHIEF, StateTaken(chunk=part.chunk, start=part.start))


def test_a_second_delivery_is_dropped() -> None:
    core = waiting_core()
    for part in PARTS:
        assert len(send(core, part)) == 2
        assert send(core, part) == []


@pytest.mark.parametrize(
    ("num_before", "part", "num_bytes"),
    [(0, 1, 4), (0, 0, 7), (0, 0, 0), (1, 2, 8), (2, 0, 8), (3, 1, 4)],
)
def test_a_part_that_is_not_the_next_one_or_of_another_size_is_refused(
    num_before: int, part: int, num_bytes: int
) -> None:
    core = waiting_core()
    for each in PARTS[:num_before]:
        send(core, each)
    told = refusal(send(core, PARTS[part], num_bytes=num_bytes))
    assert f"sent {num_bytes} bytes of optimizer state of chunk {PARTS[part].chunk} from" in told
    expected = (*PARTS, None)[num_before]
    if expected is None:
        assert told.endswith("no more are expected")
    else:
        assert f"{expected.num_bytes} bytes of chunk {expected.chunk} from element" in told


def test_state_comes_from_the_chief_alone_and_where_it_was_announced() -> None:
    other = worker_id(1)
    assert "worker 0 has the optimizer's state" in refusal(
        send(waiting_core(), PARTS[0], peer=other), other
    )
    assert "no more are expected" in refusal(send(core_of("async"), PARTS[0]))
    assert "no more are expected" in refusal(send(make_core("async"), PARTS[0]))


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.INIT])
def test_nothing_changes_values_before_the_state_is_complete(kind: Kind) -> None:
    header = Header(
        kind=kind, sender=CHIEF, chunk=0, settings=1, length=4, weight=1.0, dtype=Dtype.FLOAT32,
        pull_number=1 if kind == Kind.INIT else 0,
    )  # fmt: skip
    core = waiting_core()
    for part in PARTS[:-1]:
        send(core, part)
    told = refusal(core.handle(Arrived(CHIEF, header, Frame(capacity=4))))
    assert f"message of kind {int(kind)} before the optimizer's state was complete" in told


def initial(chunk: int) -> Header:
    return Header(kind=Kind.INIT, sender=CHIEF, chunk=chunk, length=4, dtype=Dtype.FLOAT32)


def load(core: ServerCore, chunk: int) -> None:
    (accept,) = core.handle(Offered(CHIEF, Kind.INIT, chunk, 4, "ticket"))
    assert isinstance(accept, Accept)
    assert not isinstance(core.handle(Arrived(CHIEF, initial(chunk), accept.slot))[0], Fail)


def test_initial_values_and_pulls_of_them_do_not_wait_for_state_and_pushes_come_behind() -> None:
    core = waiting_core()
    load(core, 0)
    pull = Header(kind=Kind.PULL, sender=CHIEF, chunk=0, pull_number=1, flags=Flag.FRESH)
    for part in PARTS:
        send(core, part)
    assert core._on[Arrived] == core._on_arrived, "messages cost no more from now on"
    core.handle(ControlArrived(CHIEF, Register(group=0, workers=[0], clock=0)))
    (reply,) = core.handle(Arrived(CHIEF, pull, None))
    assert isinstance(reply, Reply)


def test_the_chief_is_told_the_state_of_a_part_that_begins_there() -> None:
    core = waiting_core()
    load(core, 0)
    for part in PARTS:
        send(core, part)
    wanted = StateWanted(number=3, chunk=0, start=0)
    assert core.handle(ControlArrived(CHIEF, wanted)) == [SendState(CHIEF, 3, 0, 0)]
    load(core, 1)
    wanted = StateWanted(number=4, chunk=1, start=0)
    assert core.handle(ControlArrived(CHIEF, wanted)) == [SendState(CHIEF, 4, 1, 0)]


@pytest.mark.parametrize(
    ("chunk", "start", "told"),
    [
        (0, 1, "from element 1 on, where no part begins"),
        (0, -1, "where no part begins"),
        (0, 2**18, "where no part begins"),
        (1, 0, "before there were any values"),
        (2, 0, "which this server does not hold"),
    ],
)
def test_state_that_there_is_not_is_refused(chunk: int, start: int, told: str) -> None:
    core = waiting_core()
    load(core, 0)
    for part in PARTS:
        send(core, part)
    wanted = StateWanted(number=1, chunk=chunk, start=start)
    assert told in refusal(core.handle(ControlArrived(CHIEF, wanted)))


def test_state_is_told_to_the_chief_alone_when_it_is_complete_and_nothing_is_under_way() -> None:
    core = waiting_core()
    load(core, 0)
    wanted = StateWanted(number=1, chunk=0, start=0)
    other = worker_id(1)
    assert "asks for state" in refusal(core.handle(ControlArrived(other, wanted)), other)
    assert "before it has sent all of it" in refusal(core.handle(ControlArrived(CHIEF, wanted)))

    core = core_of("sync")
    load(core, 0)
    push(core, 0, 0)
    assert "in the middle of updates" in refusal(core.handle(ControlArrived(CHIEF, wanted)))


def test_no_server_takes_the_answers_of_servers() -> None:
    for message in (
        StateTaken(chunk=0, start=0),
        StateHeld(number=1, chunk=0, start=0, described=b"", values=b""),
    ):
        peer = server_id(1)
        actions = core_of("sync").handle(ControlArrived(peer, message))
        assert "which this set does not take" in refusal(actions, peer)


# -- what a chunk's optimizer continues with ------------------------------------------------------

LENGTH = 192


def adam(*, pieces: int = 2, **hyper: Any) -> ChunkOptimizer:
    """On a chunk of 64 elements of piece 0, 40 of piece 1 and, of three, 12 of piece 2."""
    segments = [(0, 0, 64), (1, 64, 40), (2, 128, 12)][:pieces]
    return ChunkOptimizer(
        name="torch.optim.Adam",
        traits=traits("torch.optim.Adam"),
        hyper={"lr": 0.1, **hyper},
        values=torch.ones(LENGTH),
        segments=[SegmentSpec(piece=p, offset=at, length=n) for p, at, n in segments],
    )


def adam_state(step: float = 2.0) -> PieceState:
    return {
        "step": OneValue("float64", 0, step),
        "exp_avg": PerElement("bfloat16"),
        "exp_avg_sq": PerElement("float64"),
    }


def step(optimizer: ChunkOptimizer, values: torch.Tensor, absent: frozenset[int]) -> None:
    grad = torch.linspace(-1, 1, LENGTH)
    optimizer.step(values=values, grad=grad, hyper={"lr": 0.1}, lr_scale=1.0, absent=absent)


def test_pieces_of_one_state_stay_one_tensor_and_others_are_split_at_once() -> None:
    same, other_step, some = adam(), adam(), adam(pieces=3)
    same.begin_state({0: adam_state(), 1: adam_state()})
    assert len(same._parts) == 1
    other_step.begin_state({0: adam_state(), 1: adam_state(3.0)})
    assert len(other_step._parts) == 2
    some.begin_state({0: adam_state(), 2: adam_state()})
    assert sorted(some.describe_state()) == [0, 2]
    fresh = adam()
    fresh.begin_state({})
    fresh.begin_state({7: adam_state()})
    assert (len(fresh._parts), fresh.describe_state()) == (1, {})


@pytest.mark.parametrize(
    ("key", "entry"),
    [("exp_avg", OneValue("float32", 1, 0.0)), ("step", PerElement("float32"))],
)
def test_state_that_torchs_code_would_write_behind_is_refused(key: str, entry: Entry) -> None:
    with pytest.raises(OptimizerRefusedError, match=f"cannot continue with .* as state '{key}'"):
        adam().begin_state({0: {**adam_state(), key: entry}})


def test_state_has_the_servers_dtype_and_a_fused_steps_count_float32() -> None:
    optimizer = adam()
    optimizer.begin_state({0: adam_state(), 1: adam_state()})
    described: PieceState = {
        "step": OneValue("float32", 0, 2.0),
        "exp_avg": PerElement("float32"),
        "exp_avg_sq": PerElement("float32"),
    }
    assert optimizer.describe_state() == {0: described, 1: described}
    assert not optimizer.state_elements("exp_avg", 0, LENGTH).any()
    assert optimizer.state_bytes() == 2 * 4 * LENGTH + 4


@pytest.mark.parametrize("absent", [frozenset[int](), frozenset({0})])
def test_a_chunk_that_goes_on_makes_the_steps_of_one_that_never_stopped(
    absent: frozenset[int],
) -> None:
    """Elements are brought to where they were, one by one; split, too."""
    for pieces in (1, 2, 3):
        before, values = adam(pieces=pieces), torch.ones(LENGTH)
        step(before, values, frozenset())
        step(before, values, absent)
        after = adam(pieces=pieces)
        described = before.describe_state()
        after.begin_state(described)
        for segment in before._segments:
            for key, entry in described[segment.piece].items():
                if isinstance(entry, PerElement):
                    for at in (segment.offset, segment.offset + 5):
                        source = before.state_elements(key, at, 5)
                        fill(after.state_elements(key, at, 5), bytes_of(source), entry.dtype)
                    rest = segment.offset + 10, segment.length - 10
                    source = before.state_elements(key, *rest)
                    fill(after.state_elements(key, *rest), bytes_of(source), entry.dtype)
        again = values.clone()
        step(before, values, frozenset())
        step(after, again, frozenset())
        for segment in before._segments:
            own = slice(segment.offset, segment.offset + segment.length)
            assert torch.equal(values[own], again[own])


def test_a_momentum_that_is_none_counts_as_no_state() -> None:
    """Beside one that there is: torch's fused step does not take both together."""
    optimizer = ChunkOptimizer(
        name="torch.optim.SGD",
        traits=traits("torch.optim.SGD"),
        hyper={"lr": 1.0, "momentum": 0.5},
        values=torch.zeros(128),
        segments=[SegmentSpec(piece=p, offset=64 * p, length=64) for p in (0, 1)],
    )
    optimizer.begin_state(
        {0: {"momentum_buffer": Plain(None)}, 1: {"momentum_buffer": PerElement("float32")}}
    )
    optimizer.state_elements("momentum_buffer", 64, 64).fill_(2.0)
    values = torch.zeros(128)
    for _ in range(2):
        optimizer.step(
            values=values,
            grad=torch.ones(128),
            hyper={"lr": 1.0, "momentum": 0.5},
            lr_scale=1.0,
            absent=frozenset(),
        )
    assert torch.equal(values[:64], torch.full((64,), -(1.0 + 1.5)))
    assert torch.equal(values[64:], torch.full((64,), -(2.0 + 2.0)))


def test_every_kind_of_entry_is_made_and_described_again() -> None:
    described: PieceState = {
        "a": PerElement("int8"),
        "b": PerElement("float32"),
        "c": OneValue("int64", 1, -7),
        "d": OneValue("bool", 0, True),
        "e": Plain(None),
        "f": Plain(1.5),
        "g": Plain(True),
        "step": OneValue("float64", 0, 3.0),
    }
    state = begin(described, (4,), torch.float32, is_fused=False, device=torch.device("cpu"))
    assert describe(state, (4,)) == described
    assert state["c"].shape == (1,)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(3, 1), "a float32 tensor of the shape (3, 1)"),
        (torch.zeros(4, dtype=torch.complex64), "a complex64 tensor of the shape (4,)"),
        ([1], "a list"),
        ("text", "a str"),
    ],
)
def test_what_cannot_be_cut_is_said_in_words(value: Any, what: str) -> None:
    assert describe({"a": value}, (4,)) == {"a": Uncut(what)}


def test_a_state_of_very_many_or_odd_keys_is_said_to_be_one() -> None:
    many = {f"k{n}": 1 for n in range(MOST_KEYS + 1)}
    for state in (many, {1: 1}, {"\n": 1}):
        (only,) = describe(state, (4,)).values()  # type: ignore[arg-type]
        assert isinstance(only, Uncut)
