"""Modes and codecs that change within a run, and the workers' copies, in a replica that takes over
from its server."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.controller import Decision
from psdist.errors import ProtocolError
from psdist.protocol.control import BeginCodecs, CommitMode, ModeProposed, ProposeMode, Setup
from psdist.protocol.events import Arrived, ControlArrived, Frame
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Action,
    Built,
    ChangeCodecs,
    ChangeMode,
    HoldRounds,
    Reply,
    SendControl,
    Unchanged,
)
from psdist.servers.protocol.assembly import assemble_core
from psdist.servers.protocol.chunks.replies import BARRED
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.modes import ModeChanges
from psdist.servers.protocol.replication.records import (
    HeldRoundsRecord,
    LevelRecord,
    MemberRecord,
    ModeRecord,
    Record,
    ResumedRecord,
    ValuesRecord,
)
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.rules.clipping import Sync
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.successor import Successor
from tests.support.rules import switching
from tests.unit.servers.replication.test_machines import step

SWITCHING = switching((0, "sync", 0), (9, "async", 0))
TO_SSP = ModeRecord(round=5, mode="ssp", staleness=2, number=1)


def picture(*records: Record) -> ShardState:
    """State of one chunk with four rounds of two groups, then these records."""
    known = ShardState(chunks=(0,), num_groups=2, num_state_parts=0)
    known.apply(ResumedRecord(seq=1))
    for group in (0, 1):
        known.apply(MemberRecord(kind="join", group=group, clock=0, workers=1))
    known.apply(ValuesRecord(chunk=0, group=0, clock=-1, number=0))
    for clock in range(4):
        known.apply(step(0, groups=[0, 1], clocks=[clock] * 2))
    for each in records:
        known.apply(each)
    return known


def built(**changed: Any) -> Built:
    rule = PayloadRule(
        codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,), smallest=(4,), largest=(4,)
    )
    slots = [Frame(capacity=4) for _ in range(4)]
    return Built(
        [0], slots, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1, **changed
    )


def going_on(
    known: ShardState, *, rule: MakeRule = SWITCHING, **changed: Any
) -> tuple[ServerCore, list[Action]]:
    """And what it does first."""
    core = assemble_core(
        server=1, make_rule=rule, groups=[(0,), (1,)], start=Successor(known),
    )  # fmt: skip
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    return core, core.handle(built(**changed))


def test_it_judges_each_round_by_the_mode_that_its_server_was_told() -> None:
    core, begun = going_on(picture(TO_SSP))
    required = core.rule.required_min_done
    assert [required(4), required(5), required(10)] == [4, 3, 8]
    assert begun == [], "its log has the modes already"
    assert core.changes.modes == [ChangeMode(5, "ssp", 2, 1)]
    assert core.handle(ChangeMode(5, "ssp", 2, 1)) == [], "told again"
    assert core.handle(ChangeMode(8, "async", 0, 2)) == [ChangeMode(8, "async", 0, 2)]


def test_a_mode_that_is_set_before_the_model_is_known_is_recorded_once() -> None:
    core = assemble_core(server=1, make_rule=SWITCHING, groups=[(0,), (1,)])
    change = ChangeMode(4, "ssp", 2, 0)
    assert core.handle(change) == []
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    begun = core.handle(built())
    assert [each for each in begun if isinstance(each, ChangeMode)] == [change]
    assert core.changes.modes == [change]


def test_what_its_server_has_answered_to_a_proposal_holds_for_it() -> None:
    core, _ = going_on(picture(HeldRoundsRecord(highest=3)))
    assert (core.highest_sent, core.held_above) == (3, 3)
    assert core.rule.replies.required_min_done(4) == BARRED
    core.handle(HoldRounds())
    assert core.highest_sent == 3
    assert going_on(picture(HeldRoundsRecord(highest=3), TO_SSP))[0].held_above is None


def test_where_that_had_answered_nothing_it_may_have_sent_what_its_copy_allows() -> None:
    core, _ = going_on(picture())
    assert (core.highest_sent, core.held_above) == (4, None)
    pipelined = assemble_core(
        server=1, make_rule=switching((0, "ssp", 2)), groups=[(0,), (1,)], pipeline=1,
        start=Successor(picture()),
    )  # fmt: skip
    assert pipelined.highest_sent == 5
    nothing = assemble_core(
        server=1, make_rule=SWITCHING, groups=[(0,), (1,)],
        start=Successor(ShardState(chunks=(), num_groups=2, num_state_parts=0)),
    )  # fmt: skip
    assert nothing.highest_sent == -1


def test_it_tells_every_worker_of_the_codecs_once_more_and_takes_a_change_once() -> None:
    changes = [LevelRecord(number=1, round=2, level=3), LevelRecord(number=2, round=7, level=1)]
    core, begun = going_on(picture(*changes), rule=Sync)
    told = [BeginCodecs(number=n, round=at, level=level) for n, at, level in ((1, 2, 3), (2, 7, 1))]
    workers = sorted(map(worker_id, (0, 1)))
    assert begun == [SendControl(worker, message) for message in told for worker in workers]
    assert core.handle(ChangeCodecs(2, 7, 1)) == []
    assert core.handle(ChangeCodecs(3, 9, 0))[0] == ChangeCodecs(3, 9, 0)


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_a_group_was_sent_by_a_dead_server_it_is_sent_in_full(is_apart: bool) -> None:
    core, _ = going_on(picture(), are_replies_apart=is_apart)

    def pull(number: int, flags: int = 0) -> Any:
        header = Header(
            kind=Kind.PULL, sender=worker_id(0), clock=4, pull_number=number, flags=flags,
            chunk_version=5,
        )  # fmt: skip
        (reply,) = core.handle(Arrived(worker_id(0), header, None))
        return reply

    if not is_apart:
        assert isinstance(pull(1), Unchanged)
        return
    for number, flags in ((1, Flag.FRESH), (2, Flag.NONE)):
        reply = pull(number, flags)
        assert isinstance(reply, Reply)
        assert reply.held == 0
    assert isinstance(pull(3), Unchanged)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([TO_SSP, TO_SSP], "the mode of round 5 in change 1"),
        ([HeldRoundsRecord(highest=3)] * 2, "a second hold"),
        ([HeldRoundsRecord(highest=-2)], "rounds above -2"),
        ([LevelRecord(number=2, round=1, level=1)], "change 2 of the codecs after 0"),
    ],
)
def test_what_cannot_have_been_is_refused(records: list[Record], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        picture(*records)


JOB = assemble(num_workers=1, num_servers=2)


def test_who_has_taken_a_place_is_told_the_last_change_and_asked_what_is_owed() -> None:
    modes = ModeChanges(num_servers=2)
    assert modes.ask_again(1, JOB) == []
    modes.propose(Decision("ssp", 3, "a test"))
    assert modes.ask_again(1, JOB) == [SendControl(server_id(1), ProposeMode(number=1))]
    for server in (0, 1):
        modes.on_proposed(server, ModeProposed(number=1, server=server, rounds=[6]))
    commit = CommitMode(number=1, rounds=[7], mode="ssp", staleness=3)
    assert modes.ask_again(1, JOB) == [SendControl(server_id(1), commit)]
    modes.propose(Decision("sync", 0, "a test"))
    modes.on_proposed(1, ModeProposed(number=2, server=1, rounds=[9]))
    assert modes.ask_again(1, JOB) == [SendControl(server_id(1), commit)]
    assert modes.ask_again(0, JOB) == [
        SendControl(server_id(0), commit),
        SendControl(server_id(0), ProposeMode(number=2)),
    ]
