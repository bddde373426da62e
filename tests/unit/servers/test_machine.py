"""A server's machine as a whole, with numbers for memory: every step's value, every reply, in time.

Groups of one or two workers register, push, pull, pause, leave; payloads arrive, replies are given
back and messages come twice in any order. A model of plain lists says what each chunk must contain,
whom a step is made of, which buffer it writes, which offers are received and which replies the mode
allows; and that nothing that may be done is left undone. At the end everybody who waits must have
been answered.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
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
    Settings,
    Setup,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import NEVER, CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, worker_id
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
from psdist.servers.protocol.assembly import assemble_core, rule_for

HYPER = pack_hyperparameters([{"lr": 1.0}])
INITIAL = 100.0
BOUND = 1
WEIGHTS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Message:
    """What a worker has under way."""

    header: Header
    value: float

    @property
    def key(self) -> tuple[int, int]:
        """(chunk, group)"""
        return self.header.chunk, self.header.group


@dataclass
class Worker:
    number: int
    group: int
    chunks: list[int]
    """That it pushes for its group."""
    to_push: list[Message] = field(default_factory=list)
    awaits: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Chunk -> iterations whose replies must come."""
    pulls: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    """Chunk -> clock and number of the pull whose reply must come; whether it is a fresh one."""
    num_pulls: int = 0
    version: int = 0
    absent: frozenset[int] = frozenset()

    @property
    def peer(self) -> int:
        return worker_id(self.number)

    @property
    def is_free(self) -> bool:
        return not self.to_push and not any(self.awaits.values()) and not self.pulls


@dataclass
class Group:
    number: int
    workers: list[Worker]
    clock: int = 0
    """Iterations whose pushes have begun."""
    standing: str = "away"
    is_late: bool = False
    """Its workers are in a collective; that they are has not reached the server."""

    @property
    def leader(self) -> int:
        return self.workers[0].peer

    @property
    def is_free(self) -> bool:
        is_at_work = self.standing == "active" and not self.is_late
        return is_at_work and all(worker.is_free for worker in self.workers)

    def may_begin(self) -> bool:
        """Whether all chunks of the one before were pushed; each is pushed again when its reply
        has come."""
        return (
            self.standing == "active"
            and not self.is_late
            and not any(worker.to_push or worker.pulls for worker in self.workers)
        )


class Server:
    def __init__(self, mode: str, seed: int) -> None:
        self.pick = Random(seed)
        sizes = [self.pick.choice([1, 1, 2]) for _ in range(self.pick.randint(1, 4))]
        num_chunks = self.pick.randint(1, 3)
        self.num_slots = self.pick.randint(2, 4)
        self.pipeline = 0 if mode == "sync" else self.pick.randint(0, BOUND)
        self.mode = mode
        self.chunks = range(num_chunks)
        self.order = [*self.chunks]
        """In which all groups push."""
        Random(f"{seed} order").shuffle(self.order)
        self.groups = [self.group_of(number, sizes) for number in range(len(sizes))]
        self.workers = [worker for group in self.groups for worker in group.workers]
        self.core = assemble_core(
            server=0,
            make_rule=rule_for(mode, staleness=BOUND),
            groups=[tuple(each.number for each in group.workers) for group in self.groups],
            pipeline=self.pipeline,
        )
        self.is_loaded = [False] * num_chunks
        self.to_load = list(self.chunks)
        self.content: dict[int, tuple[SlotContent, float, int]] = {}
        """By slot: what lies in it, its value and its chunk."""
        self.memory = [[INITIAL, INITIAL] for _ in self.chunks]
        self.current = [0] * num_chunks
        self.held: dict[tuple[int, int | None], deque[Message]] = defaultdict(deque)
        self.in_transit: list[tuple[Accept, Message]] = []
        self.reading: list[tuple[ReplyToken, float, int]] = []
        """Replies whose bytes must not change, what they are, and the iteration whose push proves
        that the reply has arrived."""
        self.unsent: list[ReplyToken] = []
        self.sent: list[Message] = []
        self.done = [[0] * len(sizes) for _ in self.chunks]
        self.arrived: dict[tuple[int, int], list[Message]] = defaultdict(list)
        """(chunk, group) -> pushes that are here and in no step yet."""
        self.absent_of: dict[tuple[int, int], frozenset[int]] = {}
        """(peer, version) -> pieces."""
        self.control: list[SendControl] = []
        self.events: list[MembershipEvent] = []
        self.seq = 0
        self.most_used = 0
        self.counts = {"pushes": 0, "steps": 0, "replies": 0, "duplicates": 0, "copies": 0}
        setup = Setup(partition=b"", optimizer="", hyper=b"", order=self.order)
        assert self.core.handle(ControlArrived(worker_id(0), setup)) == [Build(setup)]
        payloads = (4,) * num_chunks
        rule = PayloadRule(
            codec=CodecCode.RAW,
            name="raw",
            dtypes=(Dtype.FLOAT32,) * num_chunks,
            smallest=payloads,
            largest=payloads,
        )
        slots = [Frame(capacity=4) for _ in range(self.num_slots)]
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

    def group_of(self, number: int, sizes: list[int]) -> Group:
        """Its workers have every second chunk each, if there are two, in the order of all."""
        size, first = sizes[number], sum(sizes[:number])
        return Group(
            number,
            [
                Worker(first + place, number, [c for c in self.order if c % size == place])
                for place in range(size)
            ],
        )

    def header(self, kind: int, worker: Worker, chunk: int, **fields: Any) -> Header:
        return Header(
            kind=kind,
            sender=worker.peer,
            group=worker.group,
            chunk=chunk,
            dtype=Dtype.FLOAT32 if kind != Kind.PULL else 0,
            **fields,
        )

    # -- the plain model -----------------------------------------------------------------------

    @property
    def counting(self) -> list[int]:
        return [each.number for each in self.groups if each.standing == "active"]

    def min_done(self, chunk: int) -> int:
        return min((self.done[chunk][group] for group in self.counting), default=NEVER)

    def is_allowed(self, chunk: int, round_number: int) -> bool:
        required = {"sync": round_number, "ssp": round_number - BOUND, "async": 0}
        return self.min_done(chunk) >= required[self.mode]

    def due(self, chunk: int) -> list[int]:
        """Whose updates the chunk needs next."""
        return [each for each in self.counting if self.done[chunk][each] == self.min_done(chunk)]

    def gathered(self, chunk: int) -> list[int]:
        """Of these, in sync, whose are summed: as many as have come without a gap."""
        due = self.due(chunk)
        late = [place for place, group in enumerate(due) if not self.arrived[chunk, group]]
        return due[: late[0]] if late else due

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.in_transit) - len(self.content)

    def slots_needed(self, chunk: int, group: int | None) -> int:
        """As many as must be free for the group's next payload to be received: with 1 it is added
        to a sum that exists, with 2 it starts the sum that all will come to, with 3 another one;
        with 4 it waits for its turn. What is further ahead of all groups' slowest chunk than the
        slots would do for gets none."""
        if self.mode != "sync" or group is None:
            return 1
        gathered = self.gathered(chunk)
        is_in_turn = self.due(chunk)[len(gathered) :][:1] == [group]
        if is_in_turn and any(self.arrived[chunk, each][0].header.length for each in gathered):
            return 1
        first = self.order.index(min(self.order, key=self.min_done))
        ahead = (self.order.index(chunk) - first) % len(self.order)
        if is_in_turn and not ahead:
            return 2
        if ahead >= max(2, (self.num_slots - 3) // len(self.groups)):
            return 2**31
        return 3 if is_in_turn else 4

    def is_read(self, chunk: int, buffer: int) -> bool:
        return any((each.chunk, each.buffer) == (chunk, buffer) for each, _, _ in self.reading)

    def check(self) -> None:
        """Nothing that could be done is left undone."""
        in_transit = {self.key_of(message) for _, message in self.in_transit}
        for key, held in self.held.items():  # what follows one that is on its way waits for it
            is_next = bool(held) and key not in in_transit
            assert not is_next or self.num_free < self.slots_needed(*key), "held without success"
        num_used = 0
        for chunk in self.chunks:
            is_blocked = self.is_read(chunk, 0) and self.is_read(chunk, 1)
            gathered = self.gathered(chunk) if self.mode == "sync" else []
            assert not gathered or gathered != self.due(chunk) or is_blocked, "no step"
            num_used += any(self.arrived[chunk, each][0].header.length for each in gathered)
            for group in self.groups:
                pushes = self.arrived[chunk, group.number]
                waiting = pushes[group.number in gathered :]
                num_used += sum(bool(each.header.length) for each in waiting)
                if pushes and self.mode != "sync":
                    assert is_blocked
                    assert pushes[0].header.length, "no step"
        assert num_used == len(self.content), "a slot holds what was used"
        for worker in self.workers:
            for chunk, clocks in worker.awaits.items():
                for clock in clocks:
                    is_in = self.done[chunk][worker.group] > clock
                    assert not is_in or not self.is_allowed(chunk, self.used_in(clock)), "withheld"
            for chunk, (clock, _, is_fresh) in worker.pulls.items():
                may_leave = is_fresh or self.is_allowed(chunk, clock)
                assert not self.is_loaded[chunk] or not may_leave, "withheld"
        assert self.core.has_members == bool(self.members())
        self.check_counts()

    def check_counts(self) -> None:
        counted = self.core.statistics()
        assert counted.num_chunks in (0, len(self.chunks))
        assert counted.updates == sum(
            min(done[group.number] for done in self.done) for group in self.groups
        )
        assert counted.most_slots_used == self.most_used
        assert self.counts == {
            "pushes": counted.pushes,
            "steps": counted.steps,
            "replies": counted.replies,
            "duplicates": counted.duplicates,
            "copies": counted.copies_on_write,
        }

    def used_in(self, clock: int) -> int:
        """The iteration that uses the reply to a push of iteration ``clock``."""
        return clock + 1 + self.pipeline

    def members(self) -> list[Worker]:
        here = [each for each in self.groups if each.standing in ("active", "inside")]
        return [worker for group in here for worker in group.workers]

    # -- executing -----------------------------------------------------------------------------

    def tell(self, peer: int, message: Any) -> None:
        self.do(ControlArrived(peer, message))

    def do(self, event: Any) -> None:
        for action in self.core.handle(event):
            self.execute(action)
        self.core.check_invariants()
        self.check()

    def execute(self, action: Action) -> None:
        if isinstance(action, Accept):
            self.accept(action)
        elif isinstance(action, Load):
            self.memory[action.chunk][0] = self.gradient(action.slot, action.chunk)
            self.is_loaded[action.chunk] = True
        elif isinstance(action, StartSum):
            value = self.gradient(action.slot, action.chunk) * action.weight
            self.content[id(action.slot)] = (SlotContent.SUM, value, action.chunk)
        elif isinstance(action, Fold):
            value = self.gradient(action.slot, action.chunk) * action.weight
            kind, total, chunk = self.content[id(action.accumulator)]
            assert (kind, chunk) == (SlotContent.SUM, action.chunk)
            self.content[id(action.accumulator)] = (kind, total + value, chunk)
        elif isinstance(action, Step | EmptyStep):
            self.step(action)
        elif isinstance(action, Reply):
            self.reply(action)
        elif isinstance(action, SendControl):
            self.control.append(action)
        else:
            assert isinstance(action, MembershipEvent), action
            self.events.append(action)

    def accept(self, action: Accept) -> None:
        message = action.ticket
        taken = {id(accept.slot) for accept, _ in self.in_transit}
        assert id(action.slot) not in taken | self.content.keys()
        key = self.key_of(message)
        assert self.held[key].popleft() is message
        assert self.num_free >= self.slots_needed(*key), "a slot was kept for others"
        self.in_transit.append((action, message))
        self.most_used = max(self.most_used, self.num_slots - self.num_free)

    def gradient(self, slot: Frame, of: int) -> float:
        kind, value, chunk = self.content.pop(id(slot))
        assert (kind, chunk) == (SlotContent.GRADIENT, of)
        return value

    def step(self, action: Step | EmptyStep) -> None:
        chunk = action.chunk
        groups = [each.group for each in action.contributions]
        if self.mode == "sync":
            assert groups == self.due(chunk)
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
        kind, value, of = self.content.pop(id(action.gradient))
        assert (kind, of) == (action.content, chunk)
        weights = [push.header.weight for push in pushes]
        if self.mode == "sync":
            total = sum(push.value * push.header.weight for push in full) / sum(weights)
            lr_scale = 1.0
        else:
            (total,) = (push.value for push in full)
            lr_scale = weights[0] / len(self.members())
        assert math.isclose(value * action.gradient_scale, total)
        assert math.isclose(action.lr_scale, lr_scale)
        assert action.hyper == HYPER
        absent = [self.absent_of[push.header.sender, push.header.settings] for push in full]
        assert action.absent == frozenset.intersection(*absent)
        source = self.current[chunk]
        target = 1 - source if self.is_read(chunk, source) else source
        assert (action.source, action.target) == (source, target)
        self.current[chunk] = target
        self.memory[chunk][target] = self.memory[chunk][source] - lr_scale * total
        self.counts["steps"] += 1
        self.counts["copies"] += source != target
        for token, seen, _ in self.reading:
            assert memory_of(self.memory, token) == seen, "changed while open"

    def reply(self, action: Reply) -> None:
        token = action.token
        chunk = token.chunk
        assert token.buffer == self.current[chunk]
        worker = self.workers[token.peer - worker_id(0)]
        assert action.min_done == self.min_done(chunk)
        if action.flags & Flag.FOR_PULL:
            clock, number, is_fresh = worker.pulls.pop(chunk)
            assert action.flags == Flag.FOR_PULL | (Flag.FRESH if is_fresh else Flag.NONE)
            assert (action.clock, action.pull_number) == (clock, number)
            proof = clock
        else:
            assert (action.flags, action.pull_number) == (Flag.NONE, 0)
            clock = worker.awaits[chunk].pop(0)
            assert action.clock == clock
            assert self.done[chunk][worker.group] > clock
            proof = self.used_in(clock)
            assert self.is_allowed(chunk, proof)
        self.counts["replies"] += 1
        self.reading.append((token, memory_of(self.memory, token), proof))
        self.unsent.append(token)

    def stop_reading(self, peer: int, chunk: int, clock: int) -> None:
        """A message of this iteration has come: what it was made from has arrived there."""
        self.reading = [
            each
            for each in self.reading
            if (each[0].peer, each[0].chunk) != (peer, chunk) or each[2] > clock
        ]

    def deliverable(self) -> list[int]:
        """Payloads of one sender about one chunk arrive in their order."""
        keys = [self.key_of(message) for _, message in self.in_transit]
        return [place for place, key in enumerate(keys) if key not in keys[:place]]

    def deliver(self, index: int) -> None:
        accept, message = self.in_transit.pop(index)
        header = message.header
        if self.note_arrival(message):  # a duplicate's slot is free again at once
            self.content[id(accept.slot)] = (SlotContent.GRADIENT, message.value, header.chunk)
        self.do(Arrived(header.sender, header, accept.slot))

    def note_arrival(self, message: Message) -> bool:
        header = message.header
        if header.kind == Kind.INIT:
            return True
        self.stop_reading(header.sender, header.chunk, header.clock)
        waiting = self.arrived[message.key]
        newest = self.done[header.chunk][header.group] + len(waiting) - 1
        is_new = header.clock == newest + 1
        if is_new:
            waiting.append(message)
        self.counts["pushes" if is_new else "duplicates"] += 1
        return is_new

    # -- what happens --------------------------------------------------------------------------

    def load(self) -> None:
        chunk = self.to_load.pop(self.pick.randrange(len(self.to_load)))
        self.offer(Message(self.header(Kind.INIT, self.workers[0], chunk, length=4), INITIAL))

    def may_register(self) -> list[Group]:
        return [each for each in self.groups if each.standing == "away"]

    def register(self) -> None:
        group = self.pick.choice(self.may_register())
        group.standing = "active"
        self.control.clear()
        self.events.clear()
        workers = [each.number for each in group.workers]
        self.tell(group.leader, Register(group=group.number, workers=workers, clock=0))
        answer = Registered(group=group.number, server=0)
        assert self.control == [SendControl(group.leader, answer)]
        assert self.events == [MembershipEvent("join", group.number, 0, len(workers))]

    def may_begin(self) -> list[Group]:
        """Nobody before everybody has registered: they meet in a collective then."""
        if self.may_register() or not all(self.is_loaded):
            return []
        return [each for each in self.groups if each.may_begin()]

    def begin(self) -> None:
        group = self.pick.choice(self.may_begin())
        weight = self.pick.choice(WEIGHTS)
        empty = [chunk for chunk in self.chunks if self.pick.random() < 0.2]
        for worker in group.workers:
            absent = self.pick.choice([None, None, frozenset(), frozenset({0, 2}), frozenset({2})])
            self.begin_to_push(worker, group.clock, weight, empty, absent)
        group.clock += 1

    def begin_to_push(
        self,
        worker: Worker,
        clock: int,
        weight: float,
        empty: list[int],
        absent: frozenset[int] | None,
    ) -> None:
        if not worker.version or absent not in (None, worker.absent):
            worker.version += 1
            worker.absent = absent or frozenset()
            self.absent_of[worker.peer, worker.version] = worker.absent
            self.tell(
                worker.peer,
                Settings(version=worker.version, hyper=HYPER, absent=sorted(worker.absent)),
            )
        for chunk in worker.chunks:
            header = self.header(
                Kind.PUSH,
                worker,
                chunk,
                clock=clock,
                length=0 if chunk in empty else 4,
                weight=weight,
                settings=worker.version,
            )
            value = 1.0 + worker.group + 10 * clock + 0.5 * chunk
            worker.to_push.append(Message(header, value))
            worker.awaits[chunk].append(clock)

    def pushing(self) -> list[Worker]:
        """An empty push waits until the payload of the one before has come, and every one until
        no more replies about its chunk are outstanding than may be."""
        under_way = self.under_way()
        may_push = []
        for worker in self.workers:
            if worker.to_push:
                header, key = worker.to_push[0].header, worker.to_push[0].key
                is_answered = worker.awaits[header.chunk][0] >= header.clock - self.pipeline
                if is_answered and (header.length or key not in under_way):
                    may_push.append(worker)
        return may_push

    def push(self) -> None:
        self.push_next(self.pick.choice(self.pushing()))

    def push_next(self, worker: Worker) -> None:
        message = worker.to_push.pop(0)
        self.sent.append(message)
        self.offer(message)

    def key_of(self, message: Message) -> tuple[int, int | None]:
        """Whose offer it is."""
        chunk, group = message.key
        return chunk, None if message.header.kind == Kind.INIT else group

    def offer(self, message: Message) -> None:
        header = message.header
        if header.length:
            self.held[self.key_of(message)].append(message)
            what = header.kind, header.chunk, header.length, message
            self.do(Offered(header.sender, *what, clock=header.clock))
        else:
            self.note_arrival(message)
            self.do(Arrived(header.sender, header, None))

    def under_way(self) -> set[tuple[int, int | None]]:
        held = {key for key, messages in self.held.items() if messages}
        return held | {self.key_of(message) for _, message in self.in_transit}

    def arrive(self) -> None:
        self.deliver(self.pick.choice(self.deliverable()))

    def sent_before(self) -> list[Message]:
        """Pushes that are applied: each may come a second time, one at a time."""
        under_way = self.under_way()
        return [
            message
            for message in self.sent
            if message.header.clock < self.done[message.header.chunk][message.header.group]
            and self.groups[message.header.group].is_free
            and message.key not in under_way
        ]

    def push_again(self) -> None:
        self.offer(self.pick.choice(self.sent_before()))

    def give_back(self) -> None:
        self.give_back_next(self.pick.randrange(len(self.unsent)))

    def give_back_next(self, index: int) -> None:
        token = self.unsent.pop(index)
        self.reading = [each for each in self.reading if each[0] is not token]
        self.do(ReplySent(token))

    def may_pull(self) -> list[Worker]:
        """Nobody is further ahead of its group than by the iterations that may be outstanding."""
        return [
            worker
            for worker in self.workers
            if worker.is_free
            and all(
                clock >= self.groups[worker.group].clock - 1 - self.pipeline
                for other in self.groups[worker.group].workers
                for clocks in other.awaits.values()
                for clock in clocks
            )
        ]

    def pull(self) -> None:
        worker = self.pick.choice(self.may_pull())
        group = self.groups[worker.group]
        chunk, is_fresh = self.pick.choice(self.chunks), self.pick.random() < 0.5
        worker.num_pulls += 1
        worker.pulls[chunk] = (group.clock, worker.num_pulls, is_fresh)
        header = self.header(
            Kind.PULL,
            worker,
            chunk,
            clock=group.clock,
            pull_number=worker.num_pulls,
            flags=Flag.FRESH if is_fresh else Flag.NONE,
        )
        self.stop_reading(worker.peer, chunk, NEVER)
        self.do(Arrived(worker.peer, header, None))
        # Once more, as from a network that gives twice: nothing would prove a second answer.
        before = self.counts["replies"]
        if self.pick.random() < 0.3:
            self.do(Arrived(worker.peer, header, None))
        assert self.counts["replies"] == before

    def ask(self) -> None:
        chunk = self.pick.choice([*self.chunks, 7])
        peer = self.pick.choice(self.workers).peer
        self.control.clear()
        self.tell(peer, WhoIsMissing(chunk=chunk))
        missing = [] if chunk == 7 else self.due(chunk)
        clocks = [self.done[chunk][each] for each in missing]
        answer = Missing(chunk=chunk, groups=missing, clocks=clocks)
        assert self.control == [SendControl(peer, answer)]

    def may_stop(self) -> list[Group]:
        """A second delivery of theirs may still be on its way."""
        return [] if self.may_register() else [each for each in self.groups if each.is_free]

    def stop(self) -> None:
        group = self.pick.choice(self.may_stop())
        if self.pick.random() < 0.2:
            self.note_stop(group, "leave", "left")
        elif self.pick.random() < 0.3:
            group.is_late = True
        else:
            self.note_stop(group, "suspend", "inside")

    def note_stop(self, group: Group, kind: str, standing: str) -> None:
        group.standing = standing
        self.events.clear()
        message = (
            Leave(group=group.number, clock=group.clock)
            if kind == "leave"
            else Suspend(group=group.number, clock=group.clock, seq=self.seq + 1)
        )
        self.tell(group.leader, message)
        size = len(group.workers)
        assert self.events == [MembershipEvent(kind, group.number, group.clock, size)]

    def late(self) -> list[Group]:
        return [each for each in self.groups if each.is_late]

    def come_late(self) -> None:
        group = self.pick.choice(self.late())
        group.is_late = False
        self.note_stop(group, "suspend", "inside")

    def inside(self) -> list[Group]:
        return [each for each in self.groups if each.standing == "inside"]

    def may_resume(self) -> bool:
        """All who have not left are inside; the server may not know of all."""
        outside = [each for each in self.groups if each.standing == "active" and not each.is_late]
        return not outside and bool(self.inside() or self.late())

    def resume(self) -> None:
        self.seq += 1
        inside, late = self.inside(), self.late()
        for group in inside:
            group.standing = "active"
        self.events.clear()
        self.control.clear()
        self.do(ControlArrived(COORDINATOR, Resume(seq=self.seq)))
        assert self.events == [
            MembershipEvent("resume", each.number, 0, len(each.workers)) for each in inside
        ]
        assert self.control == []  # psdist.servers.loop answers, for all sets
        self.events.clear()
        for group in late:
            message = Suspend(group=group.number, clock=group.clock, seq=self.seq)
            self.tell(group.leader, message)
            group.is_late = False
        assert self.events == []

    def play(self, num_events: int) -> None:
        for _ in range(num_events):
            may = {
                self.load: 8 * len(self.to_load),
                self.register: 3 * len(self.may_register()),
                self.begin: 6 * len(self.may_begin()),
                self.push: 8 * len(self.pushing()),
                self.arrive: 8 * len(self.in_transit),
                self.push_again: 0.5 * bool(self.sent_before()),
                self.give_back: 2 * len(self.unsent),
                self.pull: len(self.may_pull()),
                self.ask: 0.5,
                self.stop: 0.7 * len(self.may_stop()),
                self.come_late: len(self.late()),
                self.resume: 9 * self.may_resume(),
            }
            (what,) = self.pick.choices([*may], [*may.values()])
            what()
        self.finish()

    def finish(self) -> None:
        """All who count continue to one clock: nobody is left waiting."""
        while self.to_load:
            self.load()
        while self.may_register():
            self.register()
        while self.late():
            self.come_late()
        last = max(group.clock for group in self.groups) + 1
        while True:
            behind = [each for each in self.may_begin() if each.clock < last]
            if self.in_transit:
                self.deliver(self.deliverable()[0])
            elif self.unsent:
                self.give_back_next(-1)
            elif self.pushing():
                self.push_next(max(self.pushing(), key=lambda each: each.group))
            elif behind:
                group = min(behind, key=lambda each: each.clock)
                for worker in group.workers:
                    self.begin_to_push(worker, group.clock, 1.0, [], None)
                group.clock += 1
            else:
                break
        assert all(worker.is_free for worker in self.workers if self.is_active(worker))
        assert self.content == {}
        assert self.core.statistics().num_chunks == len(self.chunks)

    def is_active(self, worker: Worker) -> bool:
        return self.groups[worker.group].standing == "active"


def memory_of(memory: list[list[float]], token: ReplyToken) -> float:
    return memory[token.chunk][token.buffer]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.parametrize("seed", range(25))
def test_every_step_and_reply_is_right_whatever_the_order_of_events(mode: str, seed: int) -> None:
    Server(mode, seed).play(150)
