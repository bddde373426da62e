"""Which parameter set a message is about, and what all sets of a server have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from psdist.codecs import Raw
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.wire import RAW_WIRE, WireFrom
from psdist.codecs.wire import Wire as CodecWire
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import (
    BeginCodecs,
    CommitMode,
    Control,
    Enter,
    Finish,
    Finished,
    Leave,
    ModeProposed,
    ProposeMode,
    Register,
    Registered,
    Resume,
    Resumed,
    Settings,
    Setup,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import MOST_SETS, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.partition import Partition, Piece
from psdist.servers.loop import ServerLoop, ServerPart
from psdist.servers.parts import plain_loop
from psdist.servers.protocol.actions import (
    ChangeCodecs,
    Contribution,
    Load,
    SlotContent,
    Step,
    Unchanged,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.sets import SetNumbers
from psdist.servers.set_loop import ReplyFrame
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.servers.shard.tensors import TensorShard
from tests.support.rules import switching

LADDER = CodecWire(
    push=Raw(), reply=Raw(), seed=0, is_ladder=True,
    later=(WireFrom(round=0, push=Exact(), reply=Exact()),),
)  # fmt: skip
SETUP = Setup(partition=b"", optimizer="", hyper=b"")
REGISTER = Register(group=0, workers=[0], clock=0)
OTHERS_OF_A_SET = (
    Settings(version=1, hyper=b"", absent=[]),
    Suspend(group=0, clock=0, seq=1),
    Leave(group=0, clock=0),
    WhoIsMissing(chunk=0),
)


def control(message: Control, set_index: int) -> ControlArrived:
    return ControlArrived(worker_id(0), message, set_index)


def push(set_index: int) -> Arrived:
    header = Header(kind=Kind.PUSH, sender=worker_id(0), set_index=set_index)
    return Arrived(worker_id(0), header, None)


def offer(set_index: int) -> Offered:
    return Offered(worker_id(0), Kind.PUSH, 3, 4, None, set_index)


@pytest.mark.parametrize("begins", [SETUP, REGISTER])
def test_sets_are_begun_one_after_the_other(begins: Control) -> None:
    numbers = SetNumbers(server=3)
    for index in range(MOST_SETS):
        assert numbers.of(control(begins, index)) == index
        assert numbers.count == index + 1
    assert numbers.of(control(begins, 5)) == 5
    with pytest.raises(ProtocolError, match=rf"set {MOST_SETS}; there are {MOST_SETS}, "):
        numbers.of(control(begins, MOST_SETS))
    assert numbers.count == MOST_SETS


@pytest.mark.parametrize("begins", [SETUP, REGISTER])
def test_no_set_is_left_out(begins: Control) -> None:
    numbers = SetNumbers(server=3)
    with pytest.raises(ProtocolError, match=r"^server 3: worker 0 sent a message about parameter"):
        numbers.of(control(begins, 2))
    assert numbers.count == 1


@pytest.mark.parametrize("make", [push, offer])
def test_data_belongs_to_the_set_that_it_names_and_begins_none(make: Any) -> None:
    numbers = SetNumbers(server=0)
    with pytest.raises(ProtocolError, match="parameter set 1; there are 1, 64 at most"):
        numbers.of(make(1))
    numbers.of(control(REGISTER, 1))
    assert [numbers.of(make(index)) for index in (0, 1)] == [0, 1]


@pytest.mark.parametrize("message", OTHERS_OF_A_SET)
def test_what_speaks_of_a_set_begins_none(message: Control) -> None:
    numbers = SetNumbers(server=0)
    with pytest.raises(ProtocolError, match="there are 1"):
        numbers.of(control(message, 1))
    numbers.of(control(SETUP, 1))
    assert numbers.of(control(message, 1)) == 1


@pytest.mark.parametrize("message", [Resume(seq=1), Finish(), Registered(group=0, server=0)])
def test_what_concerns_the_whole_job_names_no_other_set(message: Control) -> None:
    numbers = SetNumbers(server=0)
    numbers.of(control(SETUP, 1))
    assert numbers.of(control(message, 0)) == 0
    with pytest.raises(ProtocolError, match=r"of set 1; it concerns the whole job"):
        numbers.of(control(message, 1))


# -- a server with several sets --------------------------------------------------------------------


class Wire:
    """A transport that keeps what is sent."""

    me = server_id(1)
    bytes_sent = 0

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.sent: list[tuple[int, Control, int]] = []

    def poll(self) -> Any:
        return self.events.pop(0) if self.events else None

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        self.sent.append((peer, message, set_index))


class Reserving:
    """A keeper of checkpoints that expects one."""

    is_busy = False
    is_reserving = True

    def __init__(self) -> None:
        self.memory = SnapshotMemory()

    def go_on(self) -> bool:
        return False


def make_loop(
    keeper: Any = None,
    *,
    is_changed: bool = False,
    codecs: CodecWire = RAW_WIRE,
    seats: Sequence[ServerPart] = (),
) -> tuple[ServerLoop, Wire]:
    """``is_changed``: the coordinator changes the mode, or codecs of a ladder."""

    switches = is_changed and not codecs.is_ladder
    rule = switching((0, "sync", 0)) if switches else rule_for("sync")
    wire = Wire()
    loop = plain_loop(
        wire,  # type: ignore[arg-type] # as much of a transport as it needs
        lambda _set_index, resumed_up_to: assemble_core(
            server=1, make_rule=rule, groups=[(0,), (1,)],
            resumed_up_to=resumed_up_to,
        ),
        ServerOptions(
            server=1, shard_weights=(1.0, 1.0), modes=("sync",), receive_buffers=2
        ),
        ShardStore(TensorShard, wire=codecs, keeper=keeper),
        seats=seats,
    )  # fmt: skip
    return loop, wire


def tell(loop: ServerLoop, wire: Wire, *events: Any) -> list[tuple[int, Control, int]]:
    wire.events += events
    wire.sent.clear()
    loop.turn()
    return wire.sent


def from_coordinator(message: Control, set_index: int = 0) -> ControlArrived:
    return ControlArrived(COORDINATOR, message, set_index)


def registers(worker: int, set_index: int) -> ControlArrived:
    message = Register(group=worker, workers=[worker], clock=0)
    return ControlArrived(worker_id(worker), message, set_index)


def test_a_set_answers_for_itself_and_a_collective_is_over_for_all() -> None:
    loop, wire = make_loop()
    assert tell(loop, wire, registers(0, 0)) == [(worker_id(0), Registered(group=0, server=1), 0)]
    answer = tell(loop, wire, from_coordinator(Resume(seq=1)))
    assert answer == [(COORDINATOR, Resumed(seq=1, server=1), 0)]
    assert tell(loop, wire, registers(0, 1)) == [(worker_id(0), Registered(group=0, server=1), 1)]
    suspends = [
        ControlArrived(worker_id(0), Suspend(group=0, clock=0, seq=2), index) for index in (0, 1)
    ]
    assert tell(loop, wire, *suspends) == []
    assert [each.core.resumed_up_to for each in loop.sets] == [1, 1]
    answer = tell(loop, wire, from_coordinator(Resume(seq=2)))
    assert answer == [(COORDINATOR, Resumed(seq=2, server=1), 0)]
    assert [each.core.resumed_up_to for each in loop.sets] == [2, 2]


def test_a_server_ends_when_the_groups_have_left_every_set() -> None:
    loop, wire = make_loop()
    tell(loop, wire, registers(0, 0), registers(0, 1))
    leaves = [ControlArrived(worker_id(0), Leave(group=0, clock=0), index) for index in (0, 1)]
    assert tell(loop, wire, leaves[0], from_coordinator(Finish())) == []
    ((peer, answer, _),) = tell(loop, wire, leaves[1])
    assert peer == COORDINATOR
    assert isinstance(answer, Finished)
    assert [each["num_chunks"] for each in answer.statistics["sets"]] == [0, 0]
    assert loop.is_finished


def changing_loop(codecs: CodecWire = RAW_WIRE) -> tuple[ServerLoop, Wire]:
    """Two sets, in a job whose mode, or codecs, the coordinator changes."""
    loop, wire = make_loop(is_changed=True, codecs=codecs)
    tell(loop, wire, registers(0, 0), registers(0, 1))
    return loop, wire


def test_a_change_is_answered_once_and_rules_every_set_from_a_round_of_its_own() -> None:
    loop, wire = changing_loop()
    for each, clock in zip(loop.sets, (4, 9), strict=True):
        each.core.rule.replies.highest_sent = clock
    answer = tell(loop, wire, from_coordinator(ProposeMode(number=1)))
    assert answer == [(COORDINATOR, ModeProposed(number=1, server=1, rounds=[4, 9]), 0)]
    commit = CommitMode(number=1, rounds=[6, 11, 20], mode="ssp", staleness=2)
    assert tell(loop, wire, from_coordinator(commit)) == []
    for each, start in zip(loop.sets, (6, 11), strict=True):
        rule = each.core.rule
        needed = [rule.required_min_done(at) for at in (start - 1, start)]
        assert needed == [start - 1, start - 2]
    # A set that is described later has its round from what was said then.
    assert tell(loop, wire, registers(0, 2)) == [(worker_id(0), Registered(group=0, server=1), 2)]


def test_new_codecs_are_told_to_the_workers_of_every_set_with_its_round() -> None:
    loop, wire = changing_loop(LADDER)
    tell(loop, wire, from_coordinator(ProposeMode(number=1)))
    commit = CommitMode(number=1, rounds=[6, 11], mode="sync", staleness=0, level=1)
    assert tell(loop, wire, from_coordinator(commit)) == [
        (worker_id(worker), BeginCodecs(number=1, round=start, level=1), index)
        for index, start in enumerate((6, 11))
        for worker in (0, 1)
    ]
    turns = [each._wire.turns for each in loop.sets]
    assert [(each.at(5), each.at(6), each.at(11)) for each in turns if each is not None] == [
        (0, 1, 1),
        (0, 0, 1),
    ]


@pytest.mark.parametrize("level", [-2, 2, 9])
def test_codecs_that_the_run_does_not_have_are_refused(level: int) -> None:
    loop, _ = changing_loop(LADDER)
    each = loop.sets[0]
    with pytest.raises(ProtocolError, match=rf"server 1: a change to codec level {level} "):
        each.execute(ChangeCodecs(number=1, round=6, level=level))
    each.execute(ChangeCodecs(number=1, round=6, level=0))
    with pytest.raises(ProtocolError, match="the change before it is for a later"):
        each.execute(ChangeCodecs(number=2, round=5, level=1))
    without, _ = changing_loop()
    with pytest.raises(ProtocolError, match="this run does not have the level"):
        without.sets[0].execute(ChangeCodecs(number=1, round=6, level=0))


@pytest.mark.parametrize("rounds", [[], [6]])
def test_a_change_that_leaves_out_a_set_is_refused(rounds: list[int]) -> None:
    loop, wire = changing_loop()
    commit = CommitMode(number=1, rounds=rounds, mode="ssp", staleness=2)
    match = f"server 1: server 0 sent CommitMode for {len(rounds)} parameter sets; .* there are 2"
    with pytest.raises(ProtocolError, match=match):
        tell(loop, wire, from_coordinator(commit))


@pytest.mark.parametrize(
    "message", [ProposeMode(number=1), CommitMode(number=1, rounds=[6, 6], mode="ssp", staleness=2)]
)
def test_only_the_coordinator_changes_the_mode(message: Control) -> None:
    loop, wire = changing_loop()
    with pytest.raises(ProtocolError, match=r"server 1: worker 0 sent .*; server 0 sends it"):
        tell(loop, wire, ControlArrived(worker_id(0), message))


def test_only_the_coordinator_says_that_the_job_is_complete() -> None:
    loop, wire = make_loop()
    with pytest.raises(ProtocolError, match=r"server 1: worker 0 sent Finish; server 0 says"):
        tell(loop, wire, ControlArrived(worker_id(0), Finish()))


def test_a_message_to_the_coordinator_is_refused_by_a_server_that_is_not_it() -> None:
    loop, wire = make_loop()
    enter = Enter(worker=0, seq=1, name="barrier", payload=b"")
    with pytest.raises(ProtocolError, match="sent Enter, which this set does not take"):
        tell(loop, wire, ControlArrived(worker_id(0), enter))


def test_a_death_ends_the_server_once() -> None:
    loop, wire = make_loop()
    tell(loop, wire, registers(0, 1))
    with pytest.raises(Exception, match="worker 0 has failed"):
        tell(loop, wire, PeerLost(worker_id(0), "worker 0"))


def test_a_reply_of_a_server_before_this_one_is_none_of_its_own() -> None:
    (before, _), (loop, wire) = make_loop(), make_loop()
    frame = ReplyFrame(None, capacity=0, dtype=1, free_list=[], set_loop=before.sets[0])
    assert tell(loop, wire, Sent(frame)) == []  # it is under way no more
    frame.token = object()  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="of a server before this one"):
        tell(loop, wire, Sent(frame))


def test_a_reply_without_payload_is_under_way_until_the_network_gives_it_back() -> None:
    loop, wire = make_loop()
    piece = Piece(name="p", shape=(64,), stride=(1,), dtype="float32", optimizer_group=0)
    setup = Setup(
        partition=Partition.cut([piece], chunk_bytes=None).encode(),
        optimizer="torch.optim.SGD",
        hyper=pack_hyperparameters([{"lr": 0.1}]),
    )
    tell(loop, wire, control(setup, 0))
    (each,) = loop.sets
    frames: list[Frame] = []
    wire.send = lambda _peer, frame: frames.append(frame)  # type: ignore[attr-defined] # a double's
    for clock in (3, 4):
        each.execute(
            Unchanged(worker_id(0), 0, 1, clock, 2, Flag.FOR_PULL, pull_number=5, version=7)
        )
        assert Header.unpack(frames[-1].header) == Header(
            kind=Kind.REPLY, sender=server_id(1), chunk=0, clock=clock, min_done=2, pull_number=5,
            flags=Flag.FOR_PULL | Flag.UNCHANGED, chunk_version=7,
        )  # fmt: skip
        assert each.has_open_replies
        assert tell(loop, wire, Sent(frames[-1])) == []
        assert not each.has_open_replies
    assert frames[0] is frames[1]


def test_memory_for_a_checkpoint_is_made_between_messages_chunk_by_chunk() -> None:
    keeper = Reserving()
    loop, wire = make_loop(keeper)
    piece = Piece(name="p", shape=(2048 * 4,), stride=(1,), dtype="float32", optimizer_group=0)
    partition = Partition.cut([piece], chunk_bytes=8192)
    hyper = pack_hyperparameters([{"lr": 0.1, "momentum": 0.9}])
    setup = Setup(partition=partition.encode(), optimizer="torch.optim.SGD", hyper=hyper)
    tell(loop, wire, control(setup, 0))
    shard = loop.sets[0].executor
    assert shard is not None
    mine = [chunk for chunk in range(4) if partition.shard((1.0, 1.0))[chunk] == 1]
    assert len(mine) == 2
    (slot,) = shard.make_slots(1)

    def change(chunk: int) -> None:
        shard.load(Load(chunk, slot))
        shard.step(
            Step(
                chunk=chunk, gradient=slot, content=SlotContent.GRADIENT, gradient_scale=1.0,
                lr_scale=1.0, hyper=hyper, absent=frozenset(), source=0, target=0,
                contributions=(Contribution(0, 0, 1.0, False),),
            )
        )  # fmt: skip

    held = []
    for group, chunk in enumerate(mine):
        tell(loop, wire)
        held.append(keeper.memory.num_bytes(0))  # nothing was stepped that has none
        change(chunk)
        tell(loop, wire, registers(group, 0))  # it takes what has come, and no time beside
        held.append(keeper.memory.num_bytes(0))
        tell(loop, wire)
    assert held == [0, 0, 2 * 8192, 2 * 8192]
    assert keeper.memory.num_bytes(0) == 2 * 2 * 8192  # values and momentum of two chunks
    tell(loop, wire)
    assert keeper.memory.num_bytes(0) == 2 * 2 * 8192
