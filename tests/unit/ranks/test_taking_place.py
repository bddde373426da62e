"""A rank that waits to take a dead worker's place: its role, its wait, what begins without it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from psdist.config.settings import RunConfig
from psdist.errors import PeerLostError, PlacementError, ProtocolError, UsageError
from psdist.protocol.control import (
    Begun,
    Collected,
    Control,
    End,
    Failure,
    Gone,
    Stop,
    TakePlace,
)
from psdist.protocol.events import ControlArrived, Event, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.connecting import _core_share
from psdist.ranks.failure import interruption
from psdist.ranks.lobby import join_job, leave, take_place
from psdist.ranks.rank import Rank
from psdist.ranks.run_files import _rank_table
from psdist.ranks.seats.placing import refusal_of_substitutes, roles_of_plan
from tests.support.ranks import make_rank
from tests.unit.ranks.test_spares import _make_plan, five_ranks

PLACES = tuple(Place(rank=rank, host="n1", pid=rank, cores=(0, 1)) for rank in range(4))
ROLES = Roles(
    places=PLACES,
    server_ranks=(0,),
    worker_ranks=(1, 2, 3),
    groups=((0,), (1,), (2,)),
    num_substitutes=1,
)
SPARE = worker_id(2)


class Network:
    """Messages that arrive at a rank, in order, and those that it sends."""

    def __init__(self, *events: Control | Event, me: int = SPARE) -> None:
        self.me = me
        self.lost: dict[int, str] = {}
        self.moved: dict[int, str] = {}
        self.events = deque(
            ControlArrived(COORDINATOR, each) if isinstance(each, Control) else each
            for each in events
        )
        self.sent: list[tuple[int, Control]] = []

    def poll(self) -> Event | None:
        return self.events.popleft()

    def send_control(self, peer: int, message: Control, _set_index: int = 0) -> None:
        self.sent.append((peer, message))

    def drain(self, _timeout_s: float) -> None: ...


def rank_of(network: Network, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Rank:
    monkeypatch.setattr("psdist.ranks.lobby._resolved", lambda rank, _begun: rank.bootstrap)
    monkeypatch.setattr("psdist.ranks.exit.stop_logs", lambda: None)
    monkeypatch.setattr("psdist.ranks.session.stop_logs", lambda: None)
    return make_rank(ROLES, network, path, comm=object(), max_deaths=1, spares=1, **settings)


BEGUN = Begun(job=1, settings={})


def test_a_spare_takes_the_place_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(BEGUN, PeerLost(worker_id(1), "worker 1"), TakePlace(worker=1))
    rank = rank_of(network, tmp_path, monkeypatch, spin="on")
    assert not rank.waiting().is_spinning  # its cores are others'
    assert take_place(rank)
    assert rank.session.replace == TakePlace(worker=1)
    assert rank.session.is_open
    assert rank.waiting().is_spinning
    join_job(rank, {})  # the job has begun
    assert network.sent == []


def test_a_spare_that_is_not_needed_waits_for_the_next_job_and_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(BEGUN, Stop(), End())
    rank = rank_of(network, tmp_path, monkeypatch)
    assert not take_place(rank)
    assert not rank.session.is_open
    left_out: list[bool] = []
    monkeypatch.setattr("psdist.ranks.exit.leave_out", lambda: left_out.append(True))
    rank.exit.end_process()
    assert left_out == [True]
    leave(rank)
    assert network.sent == []  # it was not counted


@pytest.mark.parametrize("joined", [True, False])
def test_a_spare_says_that_it_is_gone_where_it_has_joined(
    joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(network := Network(), tmp_path, monkeypatch)
    rank.session.joined.update({2: 1} if joined else {})
    leave(rank)
    assert network.sent == [(COORDINATOR, Gone(worker=2))] * joined


def test_no_other_job_begins_in_a_spare_that_has_taken_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(Network(), tmp_path, monkeypatch)
    rank.session.take_place(TakePlace(worker=1))
    with pytest.raises(PeerLostError, match="worker 1"):
        join_job(rank, {})


def test_a_second_job_with_spares_for_workers_places_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare's script would begin with the first one's part, and train the second with it."""
    rank = rank_of(Network(me=worker_id(0)), tmp_path, monkeypatch)
    rank.begin_job(1, rank.bootstrap.config)
    with pytest.raises(UsageError, match="for a second job, with spares for workers' places"):
        join_job(rank, {})


def test_the_death_of_a_server_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(BEGUN, PeerLost(server_id(0), "server 0"))
    with pytest.raises(PeerLostError, match="server 0"):
        take_place(rank_of(network, tmp_path, monkeypatch))


def test_a_spare_hears_nothing_else_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected = Collected(seq=1, payloads=[], runs=[], values=b"", error="")
    for event in (collected, ControlArrived(worker_id(0), Stop())):
        network = Network(BEGUN, event)
        with pytest.raises(ProtocolError, match="to a rank that waits for a worker's place"):
            take_place(rank_of(network, tmp_path, monkeypatch))


def test_spares_for_workers_are_the_last_ones_with_groups_of_their_own() -> None:
    cluster, places = five_ranks()
    config = RunConfig(max_deaths=1, servers=1, spares=1, group="rank")
    plan = _make_plan(cluster, places, config)
    roles = roles_of_plan(places, plan, has_spares=False, has_substitutes=True)
    assert (roles.num_workers, roles.num_beginning, roles.num_substitutes) == (4, 3, 1)
    assert roles.worker_ranks[3] == 4
    assert roles.groups == ((0,), (1,), (2,), (3,))
    assert roles.num_groups_beginning == 3
    assert (roles.num_spares, roles.waiting_ranks) == (0, {4})
    assert [roles.is_substitute(worker_id(worker)) for worker in (2, 3)] == [False, True]
    assert not roles.is_substitute(server_id(3))
    assert roles.describe_rank(4) == "worker 3, a spare (rank 4 on n3)"
    assert roles_of_plan(places, plan).spare_ranks == (4,)


def test_who_waits_for_a_workers_place_takes_no_share_of_a_core() -> None:
    assert [_core_share(ROLES, rank) for rank in range(4)] == [2 / 3, 2 / 3, 2 / 3, 0.5]


def test_ranks_json_calls_it_a_spare() -> None:
    table = _rank_table(ROLES)
    assert [each["role"] for each in table] == ["server", "worker", "worker", "spare"]
    assert [each["worker"] for each in table] == [None, 0, 1, 2]


def test_spares_cannot_take_the_place_of_a_group_of_several() -> None:
    assert refusal_of_substitutes(ROLES, sees_run_dir=True) is None
    groups = ((0, 1), (2,))
    of_two = Roles(
        places=PLACES,
        server_ranks=(0,),
        worker_ranks=(1, 2, 3),
        groups=groups,
        num_substitutes=1,
    )
    error = refusal_of_substitutes(of_two, sees_run_dir=True)
    assert isinstance(error, PlacementError)
    assert "group 0 (workers 0, 1 on n1) has 2 workers: a group fails as a whole" in str(error)
    assert "set group = rank" in str(error)


def test_spares_must_see_the_run_directory_and_others_need_not() -> None:
    error = refusal_of_substitutes(ROLES, sees_run_dir=False)
    assert isinstance(error, PlacementError)
    assert "which must lie on a file system that all hosts of the job share" in str(error)
    without = Roles(places=PLACES, server_ranks=(0,), worker_ranks=(1,), groups=((0,),))
    assert refusal_of_substitutes(without, sees_run_dir=False) is None


class EndedError(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_spare_that_fails_before_it_has_trained_ends_alone(
    has_joined: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr("os._exit", end)
    network = Network()
    rank = rank_of(network, tmp_path, monkeypatch)
    rank.session.take_place(TakePlace(worker=1))
    if has_joined:
        rank.session.joined[2] = 1
    with pytest.raises(EndedError) as ended:
        rank.exit.fail("error: no such file", 1)
    assert ended.value.args == (0,)
    assert network.sent == []
    told = capfd.readouterr().err
    assert "worker 2, a spare (rank 3 on n1): error: no such file\n" in told
    how = ", as after the failure of a worker" * has_joined
    assert f"psdist: this spare ends, and the job continues without it{how}\n" in told


@pytest.mark.parametrize("why", ["trained", "server", "signal"])
def test_a_spare_that_fails_otherwise_ends_the_job(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(_peer: int, message: Control, _set_index: int = 0) -> None:
        raise EndedError(message)

    network = Network()
    rank = rank_of(network, tmp_path, monkeypatch)
    monkeypatch.setattr("os._exit", lambda status: pytest.fail(f"it ended alone with {status}"))
    rank.session.joined[2] = 1
    if why == "trained":
        rank.exit.note_iteration()
    network.lost = {server_id(0): "server 0"} if why == "server" else {worker_id(1): "worker 1"}
    text, status = interruption(15) if why == "signal" else ("error: no such file", 1)
    monkeypatch.setattr(network, "send_control", told)
    with pytest.raises(EndedError) as ended:
        rank.exit.fail(text, status)
    assert isinstance(ended.value.args[0], Failure)
