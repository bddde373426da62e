"""Messages that are well-formed and wrong: what a server, the registrar and a worker do.

Each is an error that names who sent it, or dropped, or taken because it could have been honest;
never another exception, never a state that contradicts itself, and nothing that only grows.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from psdist.errors import CollectiveError, ProtocolError
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Done,
    Enter,
    Failure,
    Finish,
    Finished,
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
    Stop,
    Suspend,
    WhoIsAbsent,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import REGISTRAR, describe_peer, server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import Accept, Built, Fail
from psdist.servers.protocol.policy import policy_for
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.state import ServerCore
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import SETUP, make_core, push, register

GROUPS = ((0, 1), (2,), (3,))
CHUNKS = (0, 2)
HYPER = pack_hyperparameters([{"lr": 0.1}])
MIB = 2**20
MOST_GROWTH = 10 * MIB

NUMBERS = (-(2**63), -(2**31), -2, -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 7, 2**31, 2**62, 2**63 - 1)
SMALL = (0, 0, 0, 1, 1, 1, 2, 3, 4, 7, 255, 2**31, 2**32 - 1)
WEIGHTS = (1.0, 1.0, 0.5, 0.0, -1.0, 1e308, float("inf"), float("nan"))
PEERS = (*map(server_id, range(4)), *map(worker_id, (0, 0, 1, 2, 2, 3, 4, 2**20)))


class Hostile:
    """Draws messages: any field may be anything that its place on the wire can hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def numbers(self) -> list[int]:
        return [self.pick(NUMBERS) for _ in range(self.pick((0, 0, 1, 1, 2, 5)))]

    def data(self) -> bytes:
        return bytes(self.pick((HYPER, HYPER, b"", b"x", bytes(8), pack_hyperparameters([{}, {}]))))

    def plain(self) -> dict[str, Any]:
        values = (0, 1.5, "text", None, True, b"bytes", [1, [b"x"]], {"a": {"b": 1}})
        return {key: self.pick(values) for key in ("a", "worker", "values")[: self.pick((0, 1, 3))]}

    def header(self) -> Header:
        return Header(
            kind=self.pick((Kind.PUSH, Kind.PUSH, Kind.PUSH, Kind.PULL, Kind.INIT, Kind.REPLY)),
            sender=self.pick(PEERS),
            chunk=self.pick(SMALL),
            clock=self.pick(NUMBERS),
            length=self.pick((0, 4, 4, 3, 256, 2**40)),
            group=self.pick(SMALL),
            settings=self.pick(SMALL),
            weight=self.pick(WEIGHTS),
            position=self.pick(SMALL),
            min_done=self.pick(NUMBERS),
            flags=self.pick((0, 0, Flag.FRESH, Flag.CHECKSUMMED, Flag.FOR_PULL, Flag.RECORDED, 15)),
            dtype=self.pick((Dtype.FLOAT32, Dtype.FLOAT32, *Dtype)),
            codec=self.pick((0, 0, 0, 1, 255)),
            generation=self.pick(SMALL),
            map_version=self.pick(SMALL),
            checksum=self.pick(SMALL),
            pull_number=self.pick(SMALL),
        )

    def control(self) -> Control:
        number, numbers = lambda: self.pick(NUMBERS), self.numbers
        makers: tuple[Callable[[], Control], ...] = (
            lambda: Setup(partition=self.data(), optimizer="x", hyper=self.data()),
            lambda: Register(
                group=self.pick((0, 1, 2, number())),
                workers=self.pick(([0, 1], [2], [3], numbers())),
                clock=self.pick((0, number())),
            ),
            lambda: Registered(group=number(), server=number()),
            lambda: Settings(version=number(), hyper=self.data(), absent=numbers()),
            lambda: Suspend(group=number(), clock=number(), seq=number()),
            lambda: Resume(seq=number()),
            lambda: Resumed(seq=number(), server=number()),
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
        )
        return makers[self.random.randrange(len(makers))]()

    def event(self) -> Any:
        peer = self.pick(PEERS)
        if self.random.random() < 0.5:
            return ControlArrived(peer, self.control())
        header = self.header()
        if self.random.random() < 0.4:
            return Offered(peer, header.kind, header.chunk, header.length, header)
        frame = Frame(capacity=256) if header.length else None
        return Arrived(peer, header, frame)


def server(mode: str) -> ServerCore:
    """In the middle of a run: one group has pushed twice, one once, one has not registered."""
    core = ServerCore(server=1, policy=policy_for(mode, staleness=1), groups=GROUPS)
    sizes = (4,) * (CHUNKS[-1] + 1)
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * len(sizes),
        smallest=sizes,
        largest=sizes,
    )
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    slots = [Frame(capacity=4) for _ in range(4)]
    built = Built(CHUNKS, slots, initials=rule, pushes=rule, num_pieces=2, num_optimizer_groups=1)
    core.handle(built)
    for group in (0, 1):
        leader, workers = worker_id(GROUPS[group][0]), list(GROUPS[group])
        core.handle(ControlArrived(leader, Register(group=group, workers=workers, clock=0)))
        core.handle(ControlArrived(leader, Settings(version=1, hyper=HYPER, absent=[])))
        for clock, chunk in ((0, 0), (0, 2), (1, 0))[: 3 - group]:
            header = Header(
                kind=Kind.PUSH, sender=leader, group=group, chunk=chunk, clock=clock, settings=1
            )
            assert not any(isinstance(e, Fail) for e in core.handle(Arrived(leader, header, None)))
    core.check_invariants()
    return core


class HostileServer:
    """A server that gets hostile messages; what it accepts arrives as it was announced, or not."""

    def __init__(self, mode: str, hostile: Hostile) -> None:
        self.hostile, self.mode = hostile, mode
        self.core = server(mode)
        self.accepted: list[tuple[int, Header, Frame]] = []
        self.errors = 0

    def step(self) -> None:
        if self.accepted and self.hostile.random.random() < 0.5:
            peer, header, slot = self.accepted.pop()
            event: Any = Arrived(peer, header, slot)
        else:
            event = self.hostile.event()
            if isinstance(event, Arrived) and event.frame is not None:
                return  # a frame comes from accept alone
        actions = self.core.handle(event)
        for action in actions:
            if isinstance(action, Fail):
                assert isinstance(action.error, ProtocolError), action.error
                assert f"server 1: {describe_peer(event.peer)} " in str(action.error)
                self.errors += 1
                self.core, self.accepted = server(self.mode), []  # such an error ends a job
                return
            if isinstance(action, Accept):
                header = action.ticket
                peer = event.peer if isinstance(event, Offered) else header.sender
                self.accepted.append((peer, header, action.slot))
        self.core.check_invariants()


class HostileRegistrar:
    def __init__(self, hostile: Hostile) -> None:
        self.hostile = hostile
        self.errors = 0
        self.start()

    def start(self) -> None:
        self.registrar = Registrar(num_workers=4, num_servers=2)
        self.registrar.handle(worker_id(0), Enter(worker=0, seq=1, name="mean", payload=b""))

    def step(self) -> None:
        peer, message = self.hostile.pick(PEERS), self.hostile.control()
        if not isinstance(message, Registrar.TAKES):
            return
        try:
            self.registrar.handle(peer, message)
        except ProtocolError as error:
            text = str(error)
        else:
            return
        assert describe_peer(peer) in text
        self.errors += 1
        self.start()


class HostileWorker:
    def __init__(self, hostile: Hostile) -> None:
        self.hostile = hostile
        self.errors = 0
        self.start()

    def start(self) -> None:
        self.core: WorkerCore = make_core()
        stage = self.hostile.random.random()
        if stage < 0.2:
            self.core.begin_setup(SETUP)
        elif stage < 0.4:
            register(self.core)
            self.core.begin_collective("mean")
        elif stage < 0.6:
            self.core.begin_done({})
        else:
            push(self.core)

    def step(self) -> None:
        event = self.hostile.event()
        try:
            self.core.handle(event)
            if self.core.is_collected:
                self.core.take_collected()
        except (ProtocolError, CollectiveError):
            self.errors += 1
            self.start()
            return
        self.core.check_invariants()


def victims(seed: int) -> Iterator[HostileServer | HostileRegistrar | HostileWorker]:
    for mode in ("sync", "ssp", "async"):
        yield HostileServer(mode, Hostile(seed))
    yield HostileRegistrar(Hostile(seed))
    yield HostileWorker(Hostile(seed))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_wrong_is_an_error_or_dropped_and_nothing_grows(seed: int) -> None:
    """By hand 100,000 messages to each, in the suite 2,000."""
    count = 100_000 if seed else 2_000
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
    "a resumption": ControlArrived(REGISTRAR, Resume(seq=1)),
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
        core._chunks[chunk].is_loaded = True
    for number in range(1, 5_000):
        header = Header(kind=Kind.PULL, sender=worker_id(0), flags=Flag.FRESH, pull_number=number)
        assert not any(
            isinstance(e, Fail) for e in core.handle(Arrived(worker_id(0), header, None))
        )
    assert sum(core._chunks[0].open_replies) <= 3
