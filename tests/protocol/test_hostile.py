"""Messages that are well-formed and wrong: what a server, the coordinator and a worker do.

A third of them is drawn freely, a third is what an honest peer might say, and a third the same but
for one field: these get past the first look. Each is an error that names who sent it, or dropped,
or taken because it could have been honest; never another exception, never a state that contradicts
itself, and nothing that only grows.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import random
import struct
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from psdist.errors import CollectiveError, HyperparameterError, ProtocolError
from psdist.protocol.control import (
    Absent,
    Begin,
    Begun,
    Collected,
    Control,
    Done,
    End,
    Enter,
    Failure,
    Finish,
    Finished,
    ForCoordinator,
    Gone,
    Leave,
    Metrics,
    Missing,
    Progress,
    Register,
    Registered,
    Resume,
    Resumed,
    Settings,
    Setup,
    StateHeld,
    StateTaken,
    StateValues,
    StateWanted,
    Stop,
    SumsOfSquares,
    Suspend,
    WhoIsAbsent,
    WhoIsMissing,
    WriteFailed,
    Written,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import MOST_CREDITS, CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, describe_peer, server_id, worker_id
from psdist.protocol.optimizer_state import StatePart
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Built,
    Fail,
    HeldBlocks,
    Hold,
    SendControl,
    SumMoved,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.lobby import AllGone, Lobby, LobbyAction
from psdist.servers.protocol.state import ServerCore
from psdist.workers.protocol import Seat
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    SETUP,
    make_core,
    push,
    register,
    reply_to,
)

GROUPS = ((0, 1), (2,), (3,))
CHUNKS = (0, 2)
STATE = (StatePart(0, 0, 8), StatePart(2, 0, 8))
HYPER = pack_hyperparameters([{"lr": 0.1}])
STEP = "step-00000007"
MIB = 2**20
MOST_GROWTH = 10 * MIB

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 7, 2**31, 2**62, 2**63 - 1)
SMALL = (0, 0, 0, 1, 1, 1, 2, 3, 4, 7, 255, 2**31, 2**32 - 1)
WEIGHTS = (1.0, 1.0, 0.5, 0.0, -1.0, 1e308, float("inf"), float("nan"))
PEERS = (*map(server_id, range(4)), *map(worker_id, (0, 0, 1, 2, 2, 3, 4, 2**20)))
LOOKED_AT = (
    *("kind", "chunk", "clock", "length", "group", "settings", "weight", "flags"),
    *("dtype", "codec", "pull_number", "chunk_version"),
)
"""Fields of a header that say something to a receiver."""
AGAIN = 40
"""How often one message may come on end."""
DEEP: list[Any] = [[[[[[[[[0]]]]]]]]]

Said = tuple[int, Header | Control]
"""(who, what)"""


class Hostile:
    """Draws messages: any field may be anything that its place on the wire can hold."""

    def __init__(self, seed: int, honest: Sequence[Said]) -> None:
        """``honest``: what honest peers might say."""
        self.random = random.Random(seed)
        self.honest = honest

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def numbers(self) -> list[int]:
        return [self.pick(NUMBERS) for _ in range(self.pick((0, 0, 1, 1, 2, 5)))]

    def data(self) -> bytes:
        return bytes(self.pick((HYPER, HYPER, b"", b"x", bytes(8), pack_hyperparameters([{}, {}]))))

    def plain(self) -> dict[str, Any]:
        values = (0, 1.5, "text", None, True, b"bytes", [1, [b"x"]], {"a": {"b": 1}}, DEEP)
        return {key: self.pick(values) for key in ("a", "worker", "values")[: self.pick((0, 1, 3))]}

    def header(self) -> Header:
        return Header(
            kind=self.pick((*[Kind.PUSH] * 3, Kind.PULL, Kind.INIT, Kind.REPLY, Kind.RECEIPT)),
            sender=self.pick(PEERS),
            chunk=self.pick(SMALL),
            clock=self.pick(NUMBERS),
            length=self.pick((0, 4, 4, 3, 256, 2**40)),
            group=self.pick(SMALL),
            settings=self.pick(SMALL),
            weight=self.pick(WEIGHTS),
            position=self.pick(SMALL),
            min_done=self.pick(NUMBERS),
            flags=self.pick((0, 0, 0, 95, *(2**bit for bit in range(7)), Flag.UNCHANGED)),
            dtype=self.pick((Dtype.FLOAT32, Dtype.FLOAT32, *Dtype)),
            codec=self.pick((0, 0, 0, 1, 255)),
            generation=self.pick(SMALL),
            map_version=self.pick(SMALL),
            checksum=self.pick(SMALL),
            pull_number=self.pick(SMALL),
            chunk_version=self.pick((0, 0, 1, 1, 2, 3, 2**64 - 1)),
        )

    def control(self) -> Control:
        number, numbers = lambda: self.pick(NUMBERS), self.numbers
        makers: tuple[Callable[[], Control], ...] = (
            lambda: Setup(
                partition=self.data(),
                optimizer="x",
                hyper=self.data(),
                order=self.pick(([], [0, 2, 1], numbers())),
                restore=self.pick(("", "", STEP)),
            ),
            lambda: Register(
                group=self.pick((0, 1, 2, number())),
                workers=self.pick(([0, 1], [2], [3], numbers())),
                clock=self.pick((0, number())),
            ),
            lambda: Registered(group=number(), server=number()),
            lambda: Settings(version=number(), hyper=self.data(), absent=numbers()),
            lambda: Suspend(group=number(), clock=number(), seq=number()),
            lambda: Resume(seq=number(), checkpoint=self.pick(("", "", STEP, "step-1", "../x"))),
            lambda: Written(
                checkpoint=self.pick((STEP, "x")), num_bytes=number(), crc32=self.pick(SMALL)
            ),
            lambda: WriteFailed(
                checkpoint=self.pick((STEP, "x")), problem="\n" * self.pick((0, 1))
            ),
            lambda: Resumed(seq=number(), server=number()),
            lambda: SumsOfSquares(round=number(), values=self.data()),
            lambda: StateValues(chunk=number(), start=number(), values=self.data()),
            lambda: StateTaken(chunk=number(), start=number()),
            lambda: StateWanted(number=number(), chunk=number(), start=number()),
            lambda: StateHeld(
                number=number(), chunk=number(), start=number(), described=b"", values=self.data()
            ),
            lambda: Leave(group=number(), clock=number()),
            lambda: Enter(
                worker=number(), seq=number(), name="mean", payload=self.data(), values=self.data()
            ),
            lambda: Collected(
                seq=number(), payloads=[b""], runs=numbers(), values=b"", error=self.pick(("", "e"))
            ),
            lambda: Done(worker=number(), statistics=self.plain()),
            lambda: Metrics(line=self.plain()),
            lambda: Progress(worker=number(), clock=number(), samples=number()),
            lambda: Finish(),
            lambda: Finished(server=number(), statistics=self.plain()),
            lambda: Stop(),
            lambda: Failure(heading="", text="", exit_status=1),
            lambda: WhoIsMissing(chunk=number()),
            lambda: Missing(chunk=number(), groups=numbers(), clocks=numbers()),
            lambda: WhoIsAbsent(worker=number(), seq=number()),
            lambda: Absent(seq=number(), workers=numbers(), num_absent=number()),
            lambda: Begin(worker=number(), job=number(), settings=self.plain()),
            lambda: Begun(job=number(), settings=self.plain()),
            lambda: Gone(worker=number()),
            lambda: End(),
        )
        return makers[self.random.randrange(len(makers))]()

    def nearly(self, said: Header | Control) -> Header | Control:
        """The same except for one field, which may happen to be the same, too."""
        if isinstance(said, Header):
            name = self.pick(LOOKED_AT)
            return said._replace(**{name: getattr(self.header(), name)})
        names = [field.name for field in dataclasses.fields(said)]
        if not names:
            return said
        name = self.pick(names)
        wrong: dict[type, Callable[[], Any]] = {
            int: lambda: self.pick(NUMBERS),
            float: lambda: self.pick(WEIGHTS),
            str: lambda: "other",
            bytes: self.data,
            list: self.numbers if name != "payloads" else lambda: [self.data()],
            dict: self.plain,
        }
        return dataclasses.replace(said, **{name: wrong[type(getattr(said, name))]()})

    def says(self) -> Said:
        peer = self.pick(PEERS)
        kind = self.pick(("free", "honest", "nearly"))
        if kind == "free":
            return peer, self.control() if self.random.random() < 0.5 else self.header()
        honest_peer, said = self.pick(self.honest)
        if kind == "honest":
            return honest_peer, said
        return peer if self.random.random() < 0.1 else honest_peer, self.nearly(said)

    def event(self) -> Any:
        peer, said = self.says()
        if isinstance(said, Control):
            return ControlArrived(peer, said)
        if self.random.random() < 0.4:
            what = peer, said.kind, said.chunk, said.length, said
            return Offered(*what, clock=said.clock, pull_number=said.pull_number)
        frame = Frame(capacity=256) if said.length else None
        return Arrived(peer, said, frame)


def data_to_server() -> Iterator[Said]:
    kinds, workers = (Kind.PUSH, Kind.PULL, Kind.INIT), ((0, 0), (1, 0), (2, 1), (3, 2))
    for kind, (worker, group), chunk, clock in itertools.product(kinds, workers, CHUNKS, range(3)):
        peer = worker_id(worker)
        for number, length in itertools.product((0, 1, 2), (0, 4)):
            yield peer, Header(
                kind=kind, sender=peer, group=group, chunk=chunk, clock=clock, settings=1,
                weight=1.0, length=length, dtype=Dtype.FLOAT32, pull_number=number,
            )  # fmt: skip


TO_SERVER: tuple[Said, ...] = (
    *data_to_server(),
    *(
        (worker_id(worker), Settings(version=version, hyper=HYPER, absent=[1]))
        for worker in (0, 1, 2)
        for version in (1, 2)
    ),
    (worker_id(3), Register(group=2, workers=[3], clock=0)),
    (worker_id(2), Suspend(group=1, clock=1, seq=1)),
    (worker_id(2), Leave(group=1, clock=1)),
    (COORDINATOR, Resume(seq=1)),
    (COORDINATOR, Resume(seq=1, checkpoint=STEP)),
    *(
        (server_id(0), SumsOfSquares(round=number, values=struct.pack("<3d", *values)))
        for number in (0, 0, 1)
        for values in ((1.0, 0.0, 2.0), (4.0, -1.0, 4.0), (math.inf, 1.0, 1.0))
    ),
    (worker_id(1), WhoIsMissing(chunk=0)),
    *(
        (worker_id(0), StateValues(chunk=part.chunk, start=part.start, values=bytes(8)))
        for part in STATE
    ),
    *((worker_id(0), StateWanted(number=1, chunk=chunk, start=0)) for chunk in CHUNKS),
)
TO_LOBBY: tuple[Said, ...] = (
    *((worker_id(w), Begin(worker=w, job=job, settings={})) for w in range(4) for job in (1, 2)),
    *((worker_id(w), Gone(worker=w)) for w in range(4)),
    (worker_id(0), WhoIsAbsent(worker=0, seq=1)),
)
TO_COORDINATOR: tuple[Said, ...] = (
    *(
        (worker_id(worker), said)
        for worker in range(4)
        for said in (
            Enter(worker=worker, seq=1, name="mean", payload=b""),
            Enter(worker=worker, seq=2, name="mean", payload=b""),
            Progress(worker=worker, clock=worker, samples=1, loader_batches=5, loader_until=worker),
            WhoIsAbsent(worker=worker, seq=1),
            Metrics(line={"worker": worker, "values": {"a": 1.0}}),
            Done(worker=worker, statistics={}),
        )
    ),
    *(
        (worker_id(worker), Enter(worker=worker, seq=seq, name="checkpoint", payload=clocks))
        for worker in range(4)
        for seq in (1, 2)
        for clocks in (b"7", b"7 1", b"-1")
    ),
    *(
        (peer, said)
        for peer in (*map(server_id, range(2)), *map(worker_id, range(4)))
        for said in (
            Written(checkpoint=STEP, num_bytes=1, crc32=1),
            WriteFailed(checkpoint=STEP, problem="no space"),
        )
    ),
    *((server_id(server), Resumed(seq=1, server=server)) for server in (0, 1)),
    *((server_id(server), Finished(server=server, statistics={})) for server in (0, 1)),
)
TO_WORKER: tuple[Said, ...] = (
    *(
        (
            server_id(owner),
            Header(
                kind=Kind.REPLY, sender=server_id(owner), chunk=chunk, clock=clock, length=BYTES,
                dtype=Dtype.FLOAT32, pull_number=number, chunk_version=2,
            ),
        )
        for chunk, owner in enumerate(OWNERS)
        for clock, number in ((0, 0), (0, 1), (1, 0))
    ),
    *(
        (
            server_id(owner),
            Header(
                kind=Kind.REPLY, sender=server_id(owner), chunk=chunk, clock=clock,
                flags=Flag.UNCHANGED, chunk_version=1,
            ),
        )
        for chunk, owner in enumerate(OWNERS)
        for clock in (0, 1)
    ),
    *(
        (
            server_id(owner),
            Header(
                kind=Kind.RECEIPT, sender=server_id(owner), chunk=chunk, clock=clock,
                pull_number=number,
            ),
        )
        for chunk, owner in enumerate(OWNERS)
        for clock, number in ((0, 0), (1, 0), (0, 1), (0, 2))
    ),
    *((server_id(server), Registered(group=7, server=server)) for server in (0, 1)),
    *((server_id(owner), Missing(chunk=chunk, groups=[1], clocks=[0]))
      for chunk, owner in enumerate(OWNERS)),
    *(
        (server_id(owner), said)
        for chunk, owner in enumerate(OWNERS)
        for said in (
            StateTaken(chunk=chunk, start=0),
            StateHeld(number=1, chunk=chunk, start=0, described=b"", values=b""),
        )
    ),
    (COORDINATOR, Collected(seq=1, payloads=[b""], runs=[0, 1], values=b"", error="")),
    (COORDINATOR, Absent(seq=1, workers=[2], num_absent=1)),
    (COORDINATOR, Stop()),
)  # fmt: skip


def unbuilt_server(mode: str) -> ServerCore:
    """There is no model yet."""
    rule = rule_for("sync" if mode == "clipped" else mode, staleness=1)
    return assemble_core(server=1, make_rule=rule, groups=GROUPS)


def server(mode: str, *, has_pushed: bool = True) -> ServerCore:
    """In the middle of a run: one group has pushed twice, one once, one has not registered. Or
    before the first push, when the optimizer's state is to come."""
    core = unbuilt_server(mode)
    sizes = (4,) * (CHUNKS[-1] + 1)
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * len(sizes),
        smallest=sizes,
        largest=sizes,
    )
    max_norm = 1.0 if mode == "clipped" else 0.0
    setup = Setup(partition=b"", optimizer="", hyper=b"", max_norm=max_norm)
    core.handle(ControlArrived(worker_id(0), setup))
    slots = [Frame(capacity=4) for _ in range(4)]
    built = Built(
        CHUNKS,
        slots,
        initials=rule,
        pushes=rule,
        num_pieces=2,
        num_optimizer_groups=1,
        blocks=HeldBlocks(owners=[1, 0, 1, 0], numbers=[1, 2, 1, 1]),
        lengths=[64] * 4,
        state=() if has_pushed else STATE,
    )
    core.handle(built)
    for group in (0, 1):
        leader, workers = worker_id(GROUPS[group][0]), list(GROUPS[group])
        core.handle(ControlArrived(leader, Register(group=group, workers=workers, clock=0)))
        core.handle(ControlArrived(leader, Settings(version=1, hyper=HYPER, absent=[])))
        for clock, chunk in ((0, 0), (0, 2), (1, 0))[: (3 - group) * has_pushed]:
            header = Header(
                kind=Kind.PUSH, sender=leader, group=group, chunk=chunk, clock=clock, settings=1
            )
            assert not any(isinstance(e, Fail) for e in core.handle(Arrived(leader, header, None)))
    core.check_invariants()
    return core


class HostileServer:
    """A server that gets hostile messages; what it accepts arrives as it was announced, or not."""

    def __init__(self, mode: str, seed: int) -> None:
        self.hostile, self.mode = Hostile(seed, TO_SERVER), mode
        self.errors = 0
        self.start()

    def start(self) -> None:
        is_built = self.hostile.random.random() < 0.99
        if is_built:
            self.core = server(self.mode, has_pushed=self.hostile.random.random() < 0.9)
        else:
            self.core = unbuilt_server(self.mode)
        self.accepted: list[tuple[int, Header, Frame]] = []
        self.again: list[Any] = []
        if not is_built:  # and a worker has sent the most that a server keeps until there is
            push = Arrived(worker_id(0), Header(kind=Kind.PUSH, sender=worker_id(0)), None)
            for _ in range(self.hostile.pick((0, 0, 0, MOST_CREDITS))):
                assert not self.core.handle(push)

    def next_event(self) -> Any:
        if self.accepted and self.hostile.random.random() < 0.5:
            peer, header, slot = self.accepted.pop()
            return Arrived(peer, header, slot)
        event = self.hostile.event()
        while isinstance(event, Arrived) and event.frame is not None:
            event = self.hostile.event()  # a frame comes from accept alone
        return event

    def step(self) -> None:
        event = self.again.pop() if self.again else self.next_event()
        is_of_network = isinstance(event, Arrived) and event.frame is not None
        if not is_of_network and not self.again and self.hostile.random.random() < 0.02:
            self.again = [event] * AGAIN
        actions = deque(self.core.handle(event))
        while actions:
            action = actions.popleft()
            if isinstance(action, Hold):
                actions.extend(self.core.handle(SumMoved(action.chunk, (1.0,))))
            if isinstance(action, Fail):
                if not isinstance(action.error, HyperparameterError):
                    assert isinstance(action.error, ProtocolError), action.error
                    assert f"server 1: {describe_peer(event.peer)} " in str(action.error)
                self.errors += 1
                self.start()  # such an error ends a job
                return
            if isinstance(action, Accept):
                header = action.ticket
                peer = event.peer if isinstance(event, Offered) else header.sender
                self.accepted.append((peer, header, action.slot))
        self.core.check_invariants()


class HostileCoordinator:
    def __init__(self, seed: int) -> None:
        self.hostile = Hostile(seed, TO_COORDINATOR)
        self.errors = 0
        self.start()

    def start(self) -> None:
        self.coordinator = assemble(num_workers=4, num_servers=2)
        stage = self.hostile.random.random()
        come, done = (
            (range(4), ()) if stage < 0.2 else ((), range(4)) if stage < 0.4 else ((0,), ())
        )
        name, payload = self.hostile.pick((("mean", b""), ("checkpoint", b"7")))
        for worker in come:
            enter = Enter(worker=worker, seq=1, name=name, payload=payload)
            self.coordinator.handle(worker_id(worker), enter)
        for worker in done:
            self.coordinator.handle(worker_id(worker), Done(worker=worker, statistics={}))

    def step(self) -> None:
        peer, message = self.hostile.says()
        if not isinstance(message, ForCoordinator):
            return
        try:
            self.coordinator.handle(peer, message)
        except ProtocolError as error:
            text = str(error)
        else:
            return
        assert describe_peer(peer) in text
        self.errors += 1
        self.start()


class HostileLobby:
    def __init__(self, seed: int) -> None:
        self.hostile = Hostile(seed, TO_LOBBY)
        self.errors = 0
        self.start()

    def start(self) -> None:
        self.lobby = Lobby(num_workers=4, num_servers=2)
        for job in range(1, self.hostile.pick((1, 2, 4))):
            for worker in range(4):
                begin = Begin(worker=worker, job=job, settings={})
                self.lobby.handle(worker_id(worker), begin)

    def step(self) -> None:
        peer, message = self.hostile.says()
        if not isinstance(message, Lobby.TAKES):
            return
        try:
            actions = self.lobby.handle(peer, message)
        except ProtocolError as error:
            text = str(error)
        else:
            self.start_again_after_the_end(actions)
            return
        assert describe_peer(peer) in text
        self.errors += 1
        self.start()

    def start_again_after_the_end(self, actions: Sequence[LobbyAction]) -> None:
        sent = [action.message for action in actions if isinstance(action, SendControl)]
        if AllGone() in actions or any(isinstance(each, Begun) and each.error for each in sent):
            self.start()


class HostileWorker:
    def __init__(self, seed: int) -> None:
        self.hostile = Hostile(seed, TO_WORKER)
        self.errors = 0
        self.start()

    def start(self) -> None:
        self.core: WorkerCore = make_core()
        stage = self.hostile.random.random()
        if stage < 0.1:
            self.core = WorkerCore(Seat(worker=0, group=7, members=(0,), num_servers=2))
            self.core.begin_register()
        elif stage < 0.2:
            self.core.begin_setup(SETUP)
        elif stage < 0.4:
            register(self.core)
            self.core.begin_collective("mean")
        elif stage < 0.5:
            self.core.begin_done({})
        elif stage < 0.55:
            self.core.begin_load(clock=0)
        elif stage < 0.6:
            move = self.hostile.pick((WorkerCore.begin_sending_state,
                                      WorkerCore.begin_fetching_state))  # fmt: skip
            move(self.core, [(chunk, 0) for chunk in range(len(OWNERS))])
        else:
            push(self.core)
            if stage < 0.8:  # it holds version 1 of every chunk, and asks again
                for chunk in range(len(OWNERS)):
                    answer = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=chunk))
                    self.core.handle(Arrived(answer.sender, answer, None))
                push(self.core)

    def step(self) -> None:
        event = self.hostile.event()
        try:
            self.core.handle(event)
            if self.core.collectives.is_answered:
                self.core.collectives.take()
        except (ProtocolError, CollectiveError):
            self.errors += 1
            self.start()
            return
        self.core.check_invariants()


def victims(
    seed: int,
) -> Iterator[HostileServer | HostileCoordinator | HostileLobby | HostileWorker]:
    for mode in ("sync", "clipped", "ssp", "async"):
        yield HostileServer(mode, seed)
    yield HostileCoordinator(seed)
    yield HostileLobby(seed)
    yield HostileWorker(seed)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_wrong_is_an_error_or_dropped_and_nothing_grows(seed: int) -> None:
    """By hand 100,000 messages to each, in the suite 1,000."""
    count = 100_000 if seed else 1_000
    for victim in victims(seed):
        tracemalloc.start()
        try:
            for number in range(count):
                victim.step()
                if number == count // 10:
                    gc.collect()
                    before, _ = tracemalloc.get_traced_memory()
            gc.collect()
            growth = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert victim.errors > count // 50, "the messages were meant to be wrong"
        assert growth < MOST_GROWTH


REPEATED: dict[str, Any] = {
    "an update without a gradient": Arrived(
        worker_id(0), Header(kind=Kind.PUSH, sender=worker_id(0), clock=1, settings=1), None
    ),
    "a pull that waits": Arrived(
        worker_id(0), Header(kind=Kind.PULL, sender=worker_id(0), clock=2, pull_number=1), None
    ),
    "a pull of what is newest": Arrived(
        worker_id(0),
        Header(kind=Kind.PULL, sender=worker_id(0), flags=Flag.FRESH, pull_number=1),
        None,
    ),
    "an offer": Offered(worker_id(0), Kind.PUSH, 2, 4, "ticket"),
    "settings": ControlArrived(worker_id(0), Settings(version=1, hyper=HYPER, absent=[])),
    "a question": ControlArrived(worker_id(0), WhoIsMissing(chunk=0)),
    "a resumption": ControlArrived(COORDINATOR, Resume(seq=1)),
    "a suspension": ControlArrived(worker_id(2), Suspend(group=1, clock=1, seq=0)),
}


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.parametrize("what", REPEATED)
def test_what_is_sent_again_and_again_does_not_pile_up(mode: str, what: str) -> None:
    core = server(mode)
    tracemalloc.start()
    try:
        for number in range(20_000):
            actions = core.handle(REPEATED[what])
            if number == 1_000:
                before, _ = tracemalloc.get_traced_memory()
            if any(isinstance(action, Fail) for action in actions):
                break
        else:
            assert tracemalloc.get_traced_memory()[0] - before < MIB
    finally:
        tracemalloc.stop()


def test_pulls_that_are_never_received_do_not_keep_replies_open() -> None:
    core = server("async")
    for chunk in CHUNKS:
        core.chunk_states[chunk].is_loaded = True
    for number in range(1, 5_000):
        header = Header(kind=Kind.PULL, sender=worker_id(0), flags=Flag.FRESH, pull_number=number)
        assert not any(
            isinstance(e, Fail) for e in core.handle(Arrived(worker_id(0), header, None))
        )
    assert sum(core.chunk_states[0].open_replies) <= 3
