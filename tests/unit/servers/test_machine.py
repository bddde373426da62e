"""A server's machine as a whole, with numbers for memory: every step's value, every reply, in time.

Groups of one worker push, pull, pause, leave; payloads arrive, replies are given back and messages
come twice in any order. A model of plain lists says what each chunk must contain, whom a step is
made of, and which replies the mode allows. At the end everybody who waits must have been answered.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from psdist.protocol.control import (
    Leave,
    Missing,
    Register,
    Registered,
    Resume,
    Resumed,
    Settings,
    Setup,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import NEVER, CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import REGISTRAR, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Action,
    Build,
    Built,
    Contribution,
    EmptyStep,
    Fold,
    Load,
    MembershipEvent,
    Reply,
    ReplySent,
    ReplyToken,
    SendControl,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.protocol.policy import policy_for
from psdist.servers.protocol.state import ServerCore

HYPER = pack_hyperparameters([{"lr": 1.0}])
INITIAL = 100.0
BOUND = 1
WEIGHTS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Message:
    """What a worker has under way."""

    header: Header
    value: float


@dataclass
class Worker:
    group: int
    clock: int = 0
    """Iterations whose push has begun."""
    to_push: list[Message] = field(default_factory=list)
    awaits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Chunk -> clock and number of the pull of the reply that must come."""
    num_pulls: int = 0
    version: int = 0
    absent: frozenset[int] = frozenset()
    standing: str = "active"

    @property
    def is_free(self) -> bool:
        return not self.to_push and not self.awaits and self.standing == "active"


class Server:
    def __init__(self, mode: str, seed: int) -> None:
        self.pick = Random(seed)
        num_groups, num_chunks = self.pick.randint(1, 4), self.pick.randint(1, 3)
        num_slots = self.pick.randint(2, 4)
        self.mode = mode
        self.policy = policy_for(mode, staleness=BOUND)
        self.workers = [Worker(group) for group in range(num_groups)]
        self.chunks = range(num_chunks)
        groups = [(group,) for group in range(num_groups)]
        self.core = ServerCore(server=0, policy=self.policy, groups=groups)
        self.content: dict[int, tuple[SlotContent, float]] = {}
        self.memory = [[INITIAL, INITIAL] for _ in self.chunks]
        self.in_transit: list[tuple[Accept, Message]] = []
        self.open: list[tuple[ReplyToken, float]] = []
        self.sent: list[Message] = []
        self.done = [[0] * num_groups for _ in self.chunks]
        self.arrived: dict[tuple[int, int], list[Message]] = defaultdict(list)
        """(chunk, group) -> pushes that are here and in no step yet."""
        self.absent_of: dict[tuple[int, int], frozenset[int]] = {}
        """(group, version) -> pieces."""
        self.control: list[SendControl] = []
        self.events: list[MembershipEvent] = []
        self.seq = 0
        self.counts = {"pushes": 0, "steps": 0, "replies": 0, "duplicates": 0, "copies": 0}
        setup = Setup(partition=b"", optimizer="", hyper=b"")
        assert self.core.handle(ControlArrived(worker_id(0), setup)) == [Build(setup)]
        sizes = (4,) * num_chunks
        rule = PayloadRule(
            codec=CodecCode.RAW,
            name="raw",
            dtypes=(Dtype.FLOAT32,) * num_chunks,
            smallest=sizes,
            largest=sizes,
        )
        slots = [Frame(capacity=4) for _ in range(num_slots)]
        self.do(
            Built(
                list(reversed(self.chunks)),
                slots,
                initials=rule,
                pushes=rule,
                num_pieces=4,
                num_optimizer_groups=1,
            )
        )
        for chunk in self.chunks:
            header = self.header(Kind.INIT, 0, chunk, length=4)
            self.do(Offered(worker_id(0), Kind.INIT, chunk, 4, Message(header, INITIAL)))
            self.deliver(0)
        for group in range(num_groups):
            self.tell(group, Register(group=group, workers=[group], clock=0))
            assert self.control == [
                SendControl(worker_id(group), Registered(group=group, server=0))
            ]
            assert self.events == [MembershipEvent("join", group, 0, 1)]
            self.control.clear()
            self.events.clear()

    def header(self, kind: int, group: int, chunk: int, **fields: Any) -> Header:
        return Header(
            kind=kind,
            sender=worker_id(group),
            group=group,
            chunk=chunk,
            dtype=Dtype.FLOAT32 if kind != Kind.PULL else 0,
            **fields,
        )

    # -- the plain model -----------------------------------------------------------------------

    @property
    def counting(self) -> list[int]:
        return [each.group for each in self.workers if each.standing == "active"]

    def min_done(self, chunk: int) -> int:
        return min((self.done[chunk][group] for group in self.counting), default=NEVER)

    def is_allowed(self, chunk: int, round_number: int) -> bool:
        return self.min_done(chunk) >= self.policy.required_min_done(round_number)

    # -- executing -----------------------------------------------------------------------------

    def tell(self, group: int, message: Any) -> None:
        self.do(ControlArrived(worker_id(group), message))

    def do(self, event: Any) -> None:
        for action in self.core.handle(event):
            self.execute(action)
        self.core.check_invariants()
        for worker in self.workers:
            for chunk, (clock, pull) in worker.awaits.items():
                is_in = self.done[chunk][worker.group] > clock
                assert pull or not is_in or not self.is_allowed(chunk, clock + 1), "withheld"

    def execute(self, action: Action) -> None:
        if isinstance(action, Accept):
            taken = {id(accept.slot) for accept, _ in self.in_transit}
            assert id(action.slot) not in taken | self.content.keys()
            self.in_transit.append((action, action.ticket))
        elif isinstance(action, Load):
            self.memory[action.chunk][0] = self.content.pop(id(action.slot))[1]
        elif isinstance(action, StartSum):
            value = self.gradient(action.slot)
            self.content[id(action.slot)] = (SlotContent.SUM, value * action.weight)
        elif isinstance(action, Fold):
            value = self.gradient(action.slot) * action.weight
            kind, total = self.content[id(action.accumulator)]
            assert kind is SlotContent.SUM
            self.content[id(action.accumulator)] = (kind, total + value)
        elif isinstance(action, Step | EmptyStep):
            self.step(action)
        elif isinstance(action, Reply):
            self.reply(action)
        elif isinstance(action, SendControl):
            self.control.append(action)
        else:
            assert isinstance(action, MembershipEvent), action
            self.events.append(action)

    def gradient(self, slot: Frame) -> float:
        kind, value = self.content.pop(id(slot))
        assert kind is SlotContent.GRADIENT
        return value

    def step(self, action: Step | EmptyStep) -> None:
        chunk = action.chunk
        groups = [each.group for each in action.contributions]
        due = [each for each in self.counting if self.done[chunk][each] == self.min_done(chunk)]
        if self.mode == "sync":
            assert groups == due
        else:
            assert len(groups) == 1
        pushes = [self.arrived[chunk, group].pop(0) for group in groups]
        assert action.contributions == tuple(
            Contribution(each.header.group, each.header.clock, each.header.weight,
                         not each.header.length)
            for each in pushes
        )  # fmt: skip
        assert all(push.header.clock == self.done[chunk][push.header.group] for push in pushes)
        for group in groups:
            self.done[chunk][group] += 1
        full = [push for push in pushes if push.header.length]
        assert isinstance(action, Step) == bool(full)
        if not isinstance(action, Step):
            return
        kind, value = self.content.pop(id(action.gradient))
        assert kind is action.content
        weights = [push.header.weight for push in pushes]
        if self.mode == "sync":
            total = sum(push.value * push.header.weight for push in full) / sum(weights)
            lr_scale = 1.0
        else:
            (total,) = (push.value for push in full)
            num_active = sum(each.standing != "left" for each in self.workers)
            lr_scale = weights[0] / num_active
        assert math.isclose(value * action.gradient_scale, total)
        assert math.isclose(action.lr_scale, lr_scale)
        assert action.hyper == HYPER
        absent = [self.absent_of[push.header.group, push.header.settings] for push in full]
        assert action.absent == frozenset.intersection(*absent)
        memory = self.memory[chunk]
        before = memory[action.source]
        memory[action.target] = before - lr_scale * total
        self.counts["steps"] += 1
        self.counts["copies"] += action.source != action.target
        for token, seen in self.open:
            assert token.is_sent or memory_of(self.memory, token) == seen, "changed while open"

    def reply(self, action: Reply) -> None:
        token = action.token
        worker = self.workers[token.peer - worker_id(0)]
        clock, pull = worker.awaits.pop(token.chunk)
        assert (action.clock, action.pull_number) == (clock, pull)
        assert action.flags == (Flag.FOR_PULL if pull else Flag.NONE)
        assert action.min_done == self.min_done(token.chunk)
        if not pull:
            assert self.done[token.chunk][worker.group] == clock + 1
            assert self.is_allowed(token.chunk, clock + 1)
        self.counts["replies"] += 1
        self.open.append((token, memory_of(self.memory, token)))

    def deliver(self, index: int) -> None:
        accept, message = self.in_transit.pop(index)
        header = message.header
        if self.note_arrival(message):  # a duplicate's slot is free again at once
            self.content[id(accept.slot)] = (SlotContent.GRADIENT, message.value)
        self.do(Arrived(header.sender, header, accept.slot))

    def note_arrival(self, message: Message) -> bool:
        header = message.header
        if header.kind == Kind.INIT:
            return True
        waiting = self.arrived[header.chunk, header.group]
        newest = self.done[header.chunk][header.group] + len(waiting) - 1
        is_new = header.clock == newest + 1
        if is_new:
            waiting.append(message)
        self.counts["pushes" if is_new else "duplicates"] += 1
        return is_new

    # -- what happens --------------------------------------------------------------------------

    def free(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_free]

    def begin(self) -> None:
        worker = self.pick.choice(self.free())
        weight = self.pick.choice(WEIGHTS)
        empty = [chunk for chunk in self.chunks if self.pick.random() < 0.2]
        absent = self.pick.choice([None, None, frozenset(), frozenset({0, 2}), frozenset({2})])
        if not worker.version or absent not in (None, worker.absent):
            worker.version += 1
            worker.absent = absent or frozenset()
            self.absent_of[worker.group, worker.version] = worker.absent
            self.tell(
                worker.group,
                Settings(version=worker.version, hyper=HYPER, absent=sorted(worker.absent)),
            )
        for chunk in self.chunks:
            header = self.header(
                Kind.PUSH,
                worker.group,
                chunk,
                clock=worker.clock,
                length=0 if chunk in empty else 4,
                weight=weight,
                settings=worker.version,
            )
            value = 1.0 + worker.group + 10 * worker.clock + 0.5 * chunk
            worker.to_push.append(Message(header, value))
            worker.awaits[chunk] = (worker.clock, 0)
        worker.clock += 1

    def pushing(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.to_push]

    def push(self) -> None:
        self.push_next(self.pick.choice(self.pushing()))

    def push_next(self, worker: Worker) -> None:
        message = worker.to_push.pop(0)
        self.sent.append(message)
        self.offer(message)

    def offer(self, message: Message) -> None:
        header = message.header
        if header.length:
            self.do(Offered(header.sender, Kind.PUSH, header.chunk, header.length, message))
        else:
            self.note_arrival(message)
            self.do(Arrived(header.sender, header, None))

    def arrive(self) -> None:
        self.deliver(self.pick.randrange(len(self.in_transit)))

    def sent_before(self) -> list[Message]:
        """Pushes that are applied: each may come a second time, one at a time."""
        under_way = {(m.header.chunk, m.header.group) for _, m in self.in_transit}
        return [
            message
            for message in self.sent
            if message.header.clock < self.done[message.header.chunk][message.header.group]
            and self.workers[message.header.group].is_free
            and (message.header.chunk, message.header.group) not in under_way
        ]

    def push_again(self) -> None:
        self.offer(self.pick.choice(self.sent_before()))

    def give_back(self) -> None:
        token, _ = self.open.pop(self.pick.randrange(len(self.open)))
        self.do(ReplySent(token))

    def pull(self) -> None:
        worker = self.pick.choice(self.free())
        chunk, is_fresh = self.pick.choice(self.chunks), self.pick.random() < 0.5
        worker.num_pulls += 1
        worker.awaits[chunk] = (worker.clock, worker.num_pulls)
        header = self.header(
            Kind.PULL,
            worker.group,
            chunk,
            clock=worker.clock,
            pull_number=worker.num_pulls,
            flags=Flag.FRESH if is_fresh else Flag.NONE,
        )
        self.do(Arrived(worker_id(worker.group), header, None))
        assert (chunk in worker.awaits) == (
            not is_fresh and not self.is_allowed(chunk, worker.clock)
        )

    def ask(self) -> None:
        chunk = self.pick.choice([*self.chunks, 7])
        self.control.clear()
        self.tell(0, WhoIsMissing(chunk=chunk))
        missing = [] if chunk == 7 else [
            each for each in self.counting if self.done[chunk][each] == self.min_done(chunk)
        ]  # fmt: skip
        clocks = [self.done[chunk][each] for each in missing]
        answer = Missing(chunk=chunk, groups=missing, clocks=clocks)
        assert self.control == [SendControl(worker_id(0), answer)]

    def stop(self) -> None:
        worker = self.pick.choice(self.free())
        is_leave = self.pick.random() < 0.2
        worker.standing = "left" if is_leave else "inside"
        self.events.clear()
        if is_leave:
            self.tell(worker.group, Leave(group=worker.group, clock=worker.clock))
        else:
            self.tell(
                worker.group, Suspend(group=worker.group, clock=worker.clock, seq=self.seq + 1)
            )
        kind = "leave" if is_leave else "suspend"
        assert self.events == [MembershipEvent(kind, worker.group, worker.clock, 1)]
        assert self.core.has_members == any(each.standing != "left" for each in self.workers)

    def inside(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.standing == "inside"]

    def resume(self) -> None:
        self.seq += 1
        inside = self.inside()
        for worker in inside:
            worker.standing = "active"
        self.events.clear()
        self.control.clear()
        self.do(ControlArrived(REGISTRAR, Resume(seq=self.seq)))
        assert self.events == [MembershipEvent("resume", each.group, 0, 1) for each in inside]
        assert self.control == [SendControl(REGISTRAR, Resumed(seq=self.seq, server=0))]

    def play(self, num_events: int) -> None:
        for _ in range(num_events):
            may = {
                self.begin: 6 * len(self.free()),
                self.push: 8 * len(self.pushing()),
                self.arrive: 8 * len(self.in_transit),
                self.push_again: 0.5 * bool(self.sent_before()),
                self.give_back: 2 * len(self.open),
                self.pull: len(self.free()),
                self.ask: 0.5,
                self.stop: 0.7 * len(self.free()),
                self.resume: 9 * (bool(self.inside()) and not self.counting),
            }
            (what,) = self.pick.choices([*may], [*may.values()])
            what()
        self.finish()

    def finish(self) -> None:
        """All who count go on to one clock: nobody is left waiting."""
        last = max(worker.clock for worker in self.workers) + 1
        while True:
            behind = [each for each in self.free() if each.clock < last]
            if self.in_transit:
                self.deliver(0)
            elif self.open:
                self.do(ReplySent(self.open.pop()[0]))
            elif self.pushing():
                self.push_next(min(self.pushing(), key=lambda each: -each.group))
            elif behind:
                self.begin_last(min(behind, key=lambda each: each.clock))
            else:
                break
        assert not any(worker.awaits for worker in self.workers)
        assert self.content == {}
        counted = self.core.statistics()
        assert counted.num_chunks == len(self.chunks)
        assert counted.updates == sum(
            min(done[group] for done in self.done) for group in range(len(self.workers))
        )
        assert self.counts == {
            "pushes": counted.pushes,
            "steps": counted.steps,
            "replies": counted.replies,
            "duplicates": counted.duplicates,
            "copies": counted.copies_on_write,
        }

    def begin_last(self, worker: Worker) -> None:
        if not worker.version:
            worker.version = 1
            self.absent_of[worker.group, 1] = frozenset()
            self.tell(worker.group, Settings(version=1, hyper=HYPER, absent=[]))
        for chunk in self.chunks:
            header = self.header(
                Kind.PUSH,
                worker.group,
                chunk,
                clock=worker.clock,
                length=4,
                weight=1.0,
                settings=worker.version,
            )
            worker.to_push.append(Message(header, 3.0))
            worker.awaits[chunk] = (worker.clock, 0)
        worker.clock += 1


def memory_of(memory: list[list[float]], token: ReplyToken) -> float:
    return memory[token.chunk][token.buffer]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.parametrize("seed", range(25))
def test_every_step_and_reply_is_right_whatever_the_order_of_events(mode: str, seed: int) -> None:
    Server(mode, seed).play(150)
