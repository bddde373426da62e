"""Where MPI's Abort ends only its caller: that rank notifies all others, and they end."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from psdist.errors import JobEndedError, TransportError
from psdist.protocol.control import Control, Ended, Failure
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks import exit as exit_module
from psdist.ranks import failure
from psdist.ranks.exit import Exit
from tests.support.ranks import make_rank

COORDINATOR, OTHER, WORKER = server_id(0), server_id(1), worker_id(0)
SETTINGS = [{"max_deaths": 1}, {"replication": "buddy"}, {}]


class Exited(BaseException):
    pass


class Network:
    """Network of one rank: the messages it sends, and the results of polls."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.moved: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.sent: list[tuple[int, Control]] = []
        self.errors: list[Exception] = []

    def send_control(self, peer: int, message: Control) -> None:
        self.sent.append((peer, message))

    def drain(self, _timeout_s: float) -> None:
        self.sent.append((self.me, Ended(exit_status=0)))  # marks the place

    def poll(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


class Comm:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.told: list[tuple[int, Control]] = []

    def Abort(self, status: int) -> NoReturn:
        self.told = list(self.network.sent)
        raise Exited(status)


def exit_of(
    tmp_path: Path, me: int, *, parent: Any = None, **settings: Any
) -> tuple[Exit, Network, Comm]:
    """A job of two servers and a worker."""
    network = Network(me)
    comm = Comm(network)
    places = [Place(rank=rank, host="h1", pid=os.getpid(), cores=(0,)) for rank in range(3)]
    roles = Roles(places=tuple(places), server_ranks=(0, 1), worker_ranks=(2,), groups=((0,),))
    bootstrap = {"buddies": (1, 0)} if "replication" in settings else {}
    made = make_rank(
        roles,
        network,
        tmp_path,
        comm=comm,
        parent=parent,
        bootstrap=bootstrap,
        servers=2,
        **settings,
    )
    return made.exit, network, comm


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> NoReturn:
        raise Exited(status)

    monkeypatch.setattr(exit_module.os, "_exit", leave)
    for module in (exit_module, failure):
        monkeypatch.setattr(module, "wait_until_read", lambda: None)
    monkeypatch.setattr(failure, "_close_standard_error", lambda: None)
    monkeypatch.setattr(exit_module, "ignore_interrupts", lambda: None)


@pytest.mark.parametrize("survives", [True, False])
def test_under_ulfm_everybody_that_lives_is_told_in_front_of_abort(
    survives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_module, "survives_deaths", lambda _: survives)
    ending, network, comm = exit_of(tmp_path, COORDINATOR)
    with pytest.raises(Exited) as caught:
        ending.abort("psdist: server 0", "error: no", 3)
    assert caught.value.args == (3,)
    drained = (COORDINATOR, Ended(exit_status=0))
    told = [(OTHER, Ended(exit_status=3)), (WORKER, Ended(exit_status=3)), drained]
    assert comm.told == (told if survives else [])
    network.sent.clear()
    network.lost = {WORKER: "worker 0"}
    with pytest.raises(Exited):
        ending.abort("psdist: server 0", "error: no", 2)
    assert comm.told == ([(OTHER, Ended(exit_status=2)), drained] if survives else [])


def test_a_network_that_fails_keeps_nobody_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_peer: int, _message: Control) -> NoReturn:
        raise TransportError("MPI failed while sending")

    monkeypatch.setattr(exit_module, "survives_deaths", lambda _: True)
    ending, network, _ = exit_of(tmp_path, COORDINATOR)
    monkeypatch.setattr(network, "send_control", fail)
    with pytest.raises(Exited) as caught:
        ending.abort("psdist: server 0", "error: no", 3)
    assert caught.value.args == (3,)


def test_who_is_told_ends_with_the_jobs_status_and_no_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, failed, flushed = list[bool](), list[int](), list[bool]()
    parent = SimpleNamespace(failed=failed.append, ignore_signals=lambda: None)
    ending, network, _ = exit_of(tmp_path, WORKER, parent=parent)
    ending.hosts = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    ending.flushes.append(lambda: flushed.append(True))

    def train() -> int:
        raise JobEndedError(3)

    with pytest.raises(Exited) as caught:
        ending.run(train)
    assert caught.value.args == (3,)
    assert (closed, failed, flushed) == ([True], [3], [True])
    assert network.sent == []
    assert capsys.readouterr().err == ""


def test_who_has_failed_and_waits_for_the_coordinators_end_is_told_as_well(tmp_path: Path) -> None:
    ending, network, comm = exit_of(tmp_path, WORKER)
    network.errors = [TransportError("more of the same"), JobEndedError(2)]
    with pytest.raises(Exited) as caught:
        ending.fail("error: gone", 1)
    assert caught.value.args == (2,)
    assert [(peer, type(message)) for peer, message in network.sent] == [(COORDINATOR, Failure)]
    assert comm.told == []


@pytest.mark.parametrize("settings", SETTINGS)
def test_where_ranks_may_die_mpis_end_is_left_out_also_if_none_is_known_to_have(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[bool] = []
    monkeypatch.setattr(exit_module, "leave_out", lambda: left_out.append(True))
    ending, _, _ = exit_of(tmp_path, WORKER, **settings)
    ending.end_process()
    assert left_out == []
    ending.close()
    ending.end_process()
    assert left_out == [True] * bool(settings)
