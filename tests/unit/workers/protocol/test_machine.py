"""A worker's machine as a whole: whatever it begins and whatever comes, in any order that may be.

A model of a few lists says what must be sent next; after every event the machine's own invariants
are checked as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psdist.protocol.collected import Brought
from psdist.protocol.control import (
    Collected,
    Done,
    Enter,
    Leave,
    Register,
    Registered,
    Settings,
    Stop,
    Suspend,
    WhoIsAbsent,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.workers.protocol.actions import (
    AcceptReply,
    Action,
    DiscardReply,
    InitialSent,
    SendControl,
    SendInitial,
    SendPull,
    SendPush,
    Warn,
)
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    SETUP,
    make_core,
    messages,
    offer,
    receipt_of,
    reply_to,
    unchanged,
)

CHUNKS = range(len(OWNERS))


class Worker(RuleBasedStateMachine):
    """Worker 0, the chief and leader of group 7, alone in it, over two servers."""

    @initialize(credits=st.integers(1, 4), order=st.permutations(CHUNKS))
    def start(self, credits: int, order: list[int]) -> None:
        self.core = make_core(credits=credits, order=order)
        self.credits = credits
        self.order = order
        self.is_pushing = False
        self.unpushed: list[int] = []
        """Chunks of the iteration that is half pushed."""
        self.weight = 1.0
        self.awaited: list[Header] = []
        """What no reply has come to, in the order in which it was begun."""
        self.initial: list[int] = []
        self.has_set_up = self.has_asked = self.has_left = self.is_done = False
        self.registered: set[int] = set()
        self.clock = 0
        self.settings: tuple[bytes, tuple[int, ...]] | None = None
        self.version = 0
        self.pulls = 0
        self.waiting: dict[int, list[Header]] = {0: [], 1: []}
        """By server: headers that must be sent, in order, as soon as credits allow."""
        self.outstanding: list[Header] = []
        self.received: list[Header] = []
        """Of those, the pushes whose credit has come back by a receipt."""
        self.offered: list[Header] = []
        """Replies that were accepted and have not arrived."""
        self.answered: list[Header] = []
        """Replies that may come a second time."""
        self.is_copying = False
        self.versions: dict[int, tuple[int, int, int]] = {}
        self.held: dict[int, int] = {}
        """By chunk the version of a server that lies in place."""
        self.seq = 0
        self.is_inside = self.is_answered = False
        self.duplicates = 0
        self.bytes_pulled = 0

    # -- what must follow ----------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.awaited and not self.is_pushing

    @property
    def is_free(self) -> bool:
        return self.is_idle and not self.is_inside and not self.is_answered and not self.is_done

    @property
    def may_begin(self) -> bool:
        """Whether an iteration may: replies to the one before may still be awaited."""
        is_bringing = any(each.kind != Kind.PUSH for each in self.awaited)
        is_at_work = not self.is_inside and not self.is_answered and not self.is_done
        return is_at_work and not is_bringing and not self.is_pushing

    def is_awaited(self, chunk: int) -> bool:
        return any(each.chunk == chunk for each in self.awaited)

    @property
    def is_registered(self) -> bool:
        return self.registered == {0, 1}

    def send_next(self, *servers: int) -> list[Action]:
        """Let go as much as credits allow, in order; how the machine must say it."""
        actions: list[Action] = []
        for server in servers:
            queue = self.waiting[server]
            num_out = sum(
                OWNERS[each.chunk] == server and each not in self.received
                for each in self.outstanding
            )
            while queue and num_out < self.credits:
                header = queue.pop(0)
                self.outstanding.append(header)
                num_out += 1
                is_push = header.kind == Kind.PUSH
                actions.append((SendPush if is_push else SendPull)(server_id(server), header))
        return actions

    def asks_receipts(self, chunk: int) -> bool:
        """Its server has more chunks than there are credits."""
        return OWNERS.count(OWNERS[chunk]) > self.credits

    def begin(self, headers: list[Header]) -> list[Action]:
        self.enqueue(headers)
        return self.send_next(0, 1)

    def enqueue(self, headers: Sequence[Header]) -> None:
        for header in headers:
            self.waiting[OWNERS[header.chunk]].append(header)
            self.awaited.append(header)

    def answer(self, sent: Header) -> None:
        """The reply has come."""
        self.outstanding.remove(sent)
        self.awaited.remove(sent)
        if sent in self.received:
            self.received.remove(sent)

    # -- coming --------------------------------------------------------------------------------

    @precondition(lambda self: not self.has_set_up)
    @rule()
    def set_up(self) -> None:
        self.has_set_up = True
        self.initial = list(CHUNKS)
        actions = self.core.begin_setup(SETUP)
        setup = replace(SETUP, order=[] if self.order == [*CHUNKS] else self.order)
        assert actions[:2] == [SendControl(server_id(server), setup) for server in (0, 1)]
        assert actions[2:] == [
            SendInitial(
                server_id(OWNERS[chunk]),
                Header(
                    kind=Kind.INIT,
                    sender=worker_id(0),
                    chunk=chunk,
                    length=BYTES,
                    dtype=Dtype.FLOAT32,
                ),
            )
            for chunk in CHUNKS
        ]

    @precondition(lambda self: self.initial)
    @rule(data=st.data())
    def give_back_initial_values(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.initial))
        self.initial.remove(chunk)
        assert self.core.handle(InitialSent(chunk)) == []

    @precondition(lambda self: not self.has_asked)
    @rule()
    def register(self) -> None:
        self.has_asked = True
        wanted = Register(group=7, workers=[0], clock=0)
        assert self.core.begin_register() == [
            SendControl(server_id(server), wanted) for server in (0, 1)
        ]

    @precondition(lambda self: self.has_asked)
    @rule(server=st.sampled_from([0, 1]))
    def answer_registration(self, server: int) -> None:
        self.duplicates += server in self.registered
        self.registered.add(server)
        message = Registered(group=7, server=server)
        assert self.core.handle(ControlArrived(server_id(server), message)) == []

    # -- push and pull -------------------------------------------------------------------------

    @precondition(lambda self: self.may_begin)
    @rule(
        hyper=st.sampled_from([b"a", b"b"]),
        absent=st.sampled_from([(), (0,)]),
        weight=st.sampled_from([1.0, 0.25]),
    )
    def begin_to_push(self, hyper: bytes, absent: tuple[int, ...], weight: float) -> None:
        is_new = self.settings != (hyper, absent)
        self.version += is_new
        self.settings = (hyper, absent)
        self.weight, self.is_pushing, self.is_copying = weight, True, False
        self.unpushed = [*self.order]
        settings = Settings(version=self.version, hyper=hyper, absent=list(absent))
        expected: list[Action] = [SendControl(server_id(each), settings) for each in (0, 1)]
        actions = self.core.begin_iteration(
            clock=self.clock, hyper=hyper, absent=absent, weight=weight
        )
        assert actions == expected * is_new
        self.clock += 1

    @precondition(lambda self: self.unpushed and not self.is_awaited(self.unpushed[0]))
    @rule(is_empty=st.booleans())
    def push_one(self, is_empty: bool) -> None:
        chunk = self.unpushed.pop(0)
        self.enqueue(self.pushes([chunk], empty=[chunk] * is_empty))
        actions = self.core.transfers.push_chunk(chunk, is_empty=is_empty)
        assert actions == self.send_next(OWNERS[chunk])

    @precondition(lambda self: self.is_pushing and not any(map(self.is_awaited, self.unpushed)))
    @rule(empty=st.sets(st.sampled_from(CHUNKS), max_size=2))
    def push_the_rest(self, empty: set[int]) -> None:
        chunks, self.unpushed, self.is_pushing = self.unpushed, [], False
        expected = self.begin(self.pushes(chunks, empty=empty))
        assert self.core.finish_push(empty=empty) == expected
        if chunks:
            assert self.core.awaits() == f"the replies to iteration {self.clock - 1}"

    @precondition(lambda self: self.is_free)
    @rule(empty=st.sets(st.sampled_from(CHUNKS), max_size=2))
    def push(self, empty: set[int]) -> None:
        self.begin_to_push(b"a", (), 1.0)
        self.push_the_rest(empty)

    def pushes(self, chunks: Sequence[int], *, empty: Collection[int]) -> list[Header]:
        return [
            Header(
                kind=Kind.PUSH,
                sender=worker_id(0),
                group=7,
                chunk=chunk,
                clock=self.clock - 1,
                settings=self.version,
                weight=self.weight,
                length=0 if chunk in empty else BYTES,
                dtype=Dtype.FLOAT32,
                chunk_version=self.held.get(chunk, 0),
                flags=Flag.RECEIPT if self.asks_receipts(chunk) else Flag.NONE,
            )
            for chunk in chunks
        ]

    @precondition(lambda self: self.is_free)
    @rule(
        chunks=st.sets(st.sampled_from(CHUNKS)),
        kind=st.sampled_from(["allowed", "fresh", "copy"]),
    )
    def pull(self, chunks: set[int], kind: str) -> None:
        self.pulls += 1
        headers = [
            Header(
                kind=Kind.PULL,
                sender=worker_id(0),
                group=7,
                chunk=chunk,
                clock=self.clock,
                pull_number=self.pulls,
                flags=Flag.NONE if kind == "allowed" else Flag.FRESH,
                chunk_version=0 if kind == "copy" else self.held.get(chunk, 0),
            )
            for chunk in sorted(chunks, key=self.order.index)
        ]
        self.is_copying = kind == "copy"
        if self.is_copying:
            actions = self.core.transfers.begin_copy(clock=self.clock, chunks=chunks)
        else:
            is_fresh = kind == "fresh"
            actions = self.core.transfers.begin_pull(
                clock=self.clock, chunks=chunks, is_fresh=is_fresh
            )
        assert actions == self.begin(headers)
        assert not chunks or self.core.awaits() == "parameters"

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def offer_a_reply(self, data: st.DataObject) -> None:
        header = reply_to(data.draw(st.sampled_from(self.outstanding)))
        is_first = not any(each.chunk == header.chunk for each in self.offered)
        if is_first:
            self.offered.append(header)
            assert self.core.handle(offer(header, header)) == [AcceptReply(header, header.chunk)]
        else:
            assert self.core.handle(offer(header, header)) == [DiscardReply(header, BYTES)]
            self.duplicates += 1

    @precondition(lambda self: any(each.chunk_version for each in self.outstanding))
    @rule(data=st.data(), position=st.integers(0, 99), is_checked=st.booleans())
    def bring_word_that_nothing_has_changed(
        self, data: st.DataObject, position: int, is_checked: bool
    ) -> None:
        known = [each for each in self.outstanding if each.chunk_version]
        sent = data.draw(st.sampled_from(known))
        if any(each.chunk == sent.chunk for each in self.offered):
            return  # it has been answered otherwise
        header = unchanged(sent, position=position, min_done=position + 1)
        flags = header.flags | (Flag.RECORDED if is_checked else 0)
        self.answer(sent)
        self.answered.append(header)
        self.versions[header.chunk] = (position, position + 1, header.clock)
        actions = self.core.handle(Arrived(header.sender, header._replace(flags=flags), None))
        assert actions == self.send_next(OWNERS[header.chunk])
        assert bool(self.core.versions[header.chunk].flags & Flag.RECORDED) == is_checked

    @precondition(lambda self: self.is_free)
    @rule(chunks=st.sets(st.sampled_from(CHUNKS)))
    def write(self, chunks: set[int]) -> None:
        self.core.transfers.held.forget(chunks)
        self.held.update(dict.fromkeys(chunks, 0))

    @precondition(lambda self: self.offered)
    @rule(
        data=st.data(),
        position=st.integers(0, 99),
        is_checked=st.booleans(),
        number=st.integers(1, 3),
    )
    def bring_a_reply(
        self, data: st.DataObject, position: int, is_checked: bool, number: int
    ) -> None:
        header = data.draw(st.sampled_from(self.offered))
        self.offered.remove(header)
        flags = header.flags | (Flag.RECORDED if is_checked else 0)
        header = header._replace(position=position, min_done=position + 1, flags=flags)
        header = header._replace(chunk_version=number)
        self.answer(next(each for each in self.outstanding if each.chunk == header.chunk))
        self.answered.append(header)
        self.bytes_pulled += BYTES
        if not self.is_copying:
            self.versions[header.chunk] = (position, position + 1, header.clock)
            self.held[header.chunk] = number
        actions = self.core.handle(Arrived(header.sender, header, None))
        assert actions == self.send_next(OWNERS[header.chunk])
        if not self.is_copying:
            assert bool(self.core.versions[header.chunk].flags & Flag.RECORDED) == is_checked

    @precondition(lambda self: any(each.flags == Flag.RECEIPT for each in self.outstanding))
    @rule(data=st.data())
    def bring_a_receipt(self, data: st.DataObject) -> None:
        asked = [each for each in self.outstanding if each.flags == Flag.RECEIPT]
        push = data.draw(st.sampled_from(asked))
        is_first = push not in self.received
        self.duplicates += not is_first
        if is_first:
            self.received.append(push)
        header = receipt_of(push)
        expected = self.send_next(OWNERS[push.chunk]) if is_first else []
        assert self.core.handle(Arrived(header.sender, header, None)) == expected

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def bring_a_reply_again(self, data: st.DataObject) -> None:
        header = data.draw(st.sampled_from(self.answered))
        if header.length:
            assert self.core.handle(offer(header, "again")) == [DiscardReply("again", BYTES)]
            self.duplicates += 1
        assert self.core.handle(Arrived(header.sender, header, None)) == []
        self.duplicates += 1

    @precondition(lambda self: self.awaited)
    @rule()
    def wait_long(self) -> None:
        chunk = self.awaited[0].chunk
        server = OWNERS[chunk]
        assert self.core.ask_who_is_missing() == [
            Warn(f"waiting for chunk {chunk} from server {server}"),
            SendControl(server_id(server), WhoIsMissing(chunk=chunk)),
        ]

    # -- collectives and the end ---------------------------------------------------------------

    @property
    def speaks(self) -> bool:
        return self.is_registered and not self.has_left

    @precondition(lambda self: self.is_free)
    @rule(payload=st.binary(max_size=2), values=st.sampled_from([b"", bytes(8)]))
    def enter(self, payload: bytes, values: bytes) -> None:
        self.seq += 1
        self.is_inside = True
        expected: list[Any] = []
        if self.speaks:
            suspend = Suspend(group=7, clock=self.clock, seq=self.seq)
            expected = [(server_id(server), suspend) for server in (0, 1)]
        enter = Enter(worker=0, seq=self.seq, name="mean", payload=payload, values=values)
        actions = self.core.begin_collective("mean", payload, values=values)
        assert messages(actions) == [*expected, (COORDINATOR, enter)]
        assert self.core.awaits() == "the other workers in mean"
        assert self.core.ask_who_is_missing() == [
            SendControl(COORDINATOR, WhoIsAbsent(worker=0, seq=self.seq))
        ]

    @precondition(lambda self: self.seq)
    @rule()
    def collect(self) -> None:
        if self.is_inside:
            self.is_inside, self.is_answered = False, True
        else:
            self.duplicates += 1
        answer = Collected(
            seq=self.seq, payloads=[b"%d" % self.seq], runs=[0, 1], values=b"sum", error=""
        )
        assert self.core.handle(ControlArrived(COORDINATOR, answer)) == []

    @precondition(lambda self: self.is_answered)
    @rule()
    def take(self) -> None:
        self.is_answered = False
        assert self.core.collectives.take() == Brought((b"%d" % self.seq,), ((0, 1),), b"sum")

    @precondition(lambda self: self.is_free and not self.has_left)
    @rule()
    def leave(self) -> None:
        expected = [(server_id(each), Leave(group=7, clock=self.clock)) for each in (0, 1)]
        assert messages(self.core.begin_leave()) == (expected if self.speaks else [])
        self.has_left = self.is_registered

    @precondition(lambda self: self.is_free)
    @rule()
    def be_done(self) -> None:
        self.is_done = True
        done = Done(worker=0, statistics={"clock": self.clock})
        assert messages(self.core.begin_done({"clock": self.clock})) == [(COORDINATOR, done)]

    @precondition(lambda self: self.is_done)
    @rule()
    def stop(self) -> None:
        self.duplicates += self.core.membership.is_stopped
        assert self.core.handle(ControlArrived(COORDINATOR, Stop())) == []
        assert self.core.membership.is_stopped

    # -- what it says of itself ----------------------------------------------------------------

    @invariant()
    def it_says_what_is_so(self) -> None:
        core = self.core
        core.check_invariants()
        assert (core.is_idle, core.is_pushing) == (self.is_idle, self.is_pushing)
        assert [core.transfers.is_done(each) for each in CHUNKS] == [
            not self.is_awaited(each) for each in CHUNKS
        ]
        assert core.clock == self.clock
        is_joining = bool(self.initial) or (self.has_asked and not self.is_registered)
        assert core.membership.is_joining == is_joining
        assert core.collectives.is_answered == self.is_answered
        counts = core.counts()
        assert (counts.duplicates, counts.bytes_pulled) == (self.duplicates, self.bytes_pulled)
        assert {
            chunk: (each.position, each.min_done, each.clock)
            for chunk, each in core.versions.items()
        } == self.versions
        if self.is_idle and not self.is_inside:
            expected = "the servers" if is_joining else "nothing"
            if not is_joining and self.is_done and not core.membership.is_stopped:
                expected = "the other workers to finish"
            assert core.awaits() == expected


TestWorker = Worker.TestCase
