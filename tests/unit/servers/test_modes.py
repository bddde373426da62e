"""The coordinator changes the mode: two phases, and what waits for them."""

from __future__ import annotations

import pytest

from psdist.controller import Decision
from psdist.errors import ProtocolError
from psdist.protocol.collected import PREPARED, SET_MODE, pack_mode, unpack_mode
from psdist.protocol.control import (
    Collected,
    CommitMode,
    Control,
    Done,
    Enter,
    Finish,
    ModeProposed,
    ProposeMode,
    Resume,
    Resumed,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import CoordinatorAction
from psdist.servers.protocol.modes import ModeChanged, ModeChanges
from tests.support.coordinators import assemble, part_of


def answer(number: int, server: int, *rounds: int) -> ModeProposed:
    return ModeProposed(number=number, server=server, rounds=list(rounds))


def test_a_mode_rules_from_the_round_behind_the_last_one_that_any_server_has_sent() -> None:
    modes = ModeChanges(num_servers=2)
    assert modes.propose(Decision("ssp", 3, "a test")) == [
        SendControl(server_id(0), ProposeMode(number=1)),
        SendControl(server_id(1), ProposeMode(number=1)),
    ]
    assert modes.on_proposed(1, answer(1, 1, 9, -1)) == []
    assert modes.is_settling
    commit = CommitMode(number=1, rounds=[10, 0], mode="ssp", staleness=3)
    assert modes.on_proposed(0, answer(1, 0, 7, -1)) == [
        SendControl(server_id(0), commit),
        SendControl(server_id(1), commit),
        ModeChanged((10, 0), "ssp", 3, "a test"),
    ]
    assert not modes.is_settling


def test_a_set_of_which_not_all_servers_know_yet_has_a_round_too() -> None:
    modes = ModeChanges(num_servers=2)
    modes.propose(Decision("ssp", 3, "a test"))
    modes.on_proposed(1, answer(1, 1, 9, 4))
    *_, changed = modes.on_proposed(0, answer(1, 0, 7))
    assert changed == ModeChanged((10, 5), "ssp", 3, "a test")


@pytest.mark.parametrize(
    "wrong", [answer(2, 0, 1), answer(0, 0, 1), answer(1, 0), answer(1, 0, 3, -2), answer(1, 1, 1)]
)
def test_an_answer_that_nobody_has_asked_for_names_the_server(wrong: ModeProposed) -> None:
    modes = ModeChanges(num_servers=2)
    with pytest.raises(ProtocolError, match="server 1 sent ModeProposed 1"):
        modes.on_proposed(1, answer(1, 1, 1))
    modes.propose(Decision("sync", 0, "a test"))
    modes.on_proposed(1, answer(1, 1, 1))
    with pytest.raises(ProtocolError, match=f"server {wrong.server} sent ModeProposed"):
        modes.on_proposed(wrong.server, wrong)


@pytest.mark.parametrize("mode", [("sync", 0), ("async", 0), ("ssp", 0), ("ssp", 17)])
def test_a_mode_travels_as_bytes(mode: tuple[str, int]) -> None:
    assert unpack_mode(pack_mode(*mode)) == mode


@pytest.mark.parametrize(
    "payload", [b"", b"ssp", b"ssp:", b"ssp:-1", b"ssp:99999999999", b"turbo", b"ssp:\xb2", b"5"]
)
def test_what_is_no_mode_is_none(payload: bytes) -> None:
    assert unpack_mode(payload) is None


class Job:
    """Two workers that have prepared, and two servers."""

    def __init__(self, *, takes_set_mode: bool = True) -> None:
        self.coordinator = assemble(num_workers=2, num_servers=2, takes_set_mode=takes_set_mode)
        self.seq = 0
        self.meet("prepare", PREPARED)

    @property
    def may_change(self) -> bool:
        return part_of(self.coordinator, ModeChanges).may_change(self.coordinator)

    def enter(self, name: str, *payloads: bytes) -> list[CoordinatorAction]:
        self.seq += 1
        actions: list[CoordinatorAction] = []
        for worker, payload in enumerate(payloads):
            message = Enter(worker=worker, seq=self.seq, name=name, payload=payload)
            actions += self.coordinator.handle(worker_id(worker), message)
        return actions

    def meet(self, name: str, payload: bytes) -> None:
        self.enter(name, payload, payload)
        for server in (0, 1):
            self.coordinator.handle(server_id(server), Resumed(seq=self.seq, server=server))

    def answer(self, number: int, *rounds: int) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for server in (0, 1):
            actions += self.coordinator.handle(server_id(server), answer(number, server, *rounds))
        return actions


def told(actions: list[CoordinatorAction]) -> list[Control]:
    return [each.message for each in actions if isinstance(each, SendControl)]


def test_set_mode_is_over_when_every_server_has_heard_of_the_mode() -> None:
    job = Job()
    asked = job.enter(SET_MODE, b"ssp:2", b"ssp:2")
    assert told(asked) == [ProposeMode(number=1)] * 2
    commit = CommitMode(number=1, rounds=[6], mode="ssp", staleness=2)
    resume = Resume(seq=job.seq)
    assert told(job.answer(1, 5)) == [commit, commit, resume, resume]


def test_workers_that_ask_for_different_modes_are_all_told_which() -> None:
    job = Job()
    first, second = told(job.enter(SET_MODE, b"ssp:2", b"sync"))
    assert isinstance(first, Collected)
    assert first == second
    assert first.error.startswith("workers called set_mode with different modes: ssp:2, sync;")


@pytest.mark.parametrize(("takes", "payload"), [(False, b"sync"), (True, b"turbo")])
def test_a_change_that_may_not_be_is_refused(takes: bool, payload: bytes) -> None:
    with pytest.raises(
        ProtocolError,
        match=r"worker 0 (asked for a mode that there is not|entered set_mode, which no part)",
    ):
        Job(takes_set_mode=takes).enter(SET_MODE, payload, payload)


def test_a_collective_waits_until_a_change_of_the_mode_is_settled() -> None:
    job = Job()
    part_of(job.coordinator, ModeChanges).propose(Decision("sync", 0, "a test"))
    assert told(job.enter("barrier", b"", b"")) == []
    *commits, one, other = told(job.answer(1, 5))
    assert [type(each) for each in commits] == [CommitMode, CommitMode]
    assert one == other == Resume(seq=job.seq)


def test_the_jobs_end_waits_until_a_change_of_the_mode_is_settled() -> None:
    job = Job()
    assert job.may_change
    part_of(job.coordinator, ModeChanges).propose(Decision("sync", 0, "a test"))
    assert not job.may_change
    for worker in (0, 1):
        done = Done(worker=worker, statistics={})
        assert job.coordinator.handle(worker_id(worker), done) == []
    *_, one, other = told(job.answer(1, 5))
    assert one == other == Finish()
    assert not job.may_change


def test_the_coordinator_changes_no_mode_before_all_have_prepared() -> None:
    job = Job()
    job.enter("prepare", b"", b"")
    assert not job.may_change
