"""A rank's reaction to a host that is cut off, its own or another one's."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from psdist.errors import HostLostError
from psdist.protocol.ids import server_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks import exit as exit_module
from psdist.ranks import server
from psdist.ranks.exit import Exit
from tests.support.ranks import make_rank

TEXT = "h3 (worker 1 (rank 2 on h3)) has not answered for 60 s"


class Exited(BaseException):
    pass


class Hosts:
    verdict: str | None = None
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def exit_of(tmp_path: Path, hosts: Any = None, parent: Any = None) -> Exit:
    place = Place(rank=0, host="h1", pid=os.getpid(), cores=(0,))
    roles = Roles(places=(place,), server_ranks=(0,), worker_ranks=(), groups=())
    transport = SimpleNamespace(me=server_id(0), drain=lambda _: None, lost={}, moved={})
    made = make_rank(roles, transport, tmp_path, comm=SimpleNamespace(), parent=parent).exit
    made.hosts = hosts
    return made


def test_the_coordinator_heeds_a_verdict_and_nothing_else(tmp_path: Path) -> None:
    hosts = Hosts()
    for watched in (None, hosts):
        exit_of(tmp_path, watched).check()
    hosts.verdict = TEXT
    with pytest.raises(HostLostError, match="has not answered for 60 s") as caught:
        exit_of(tmp_path, hosts).check()
    assert caught.value.exit_status == 1


def test_it_looks_whenever_nothing_comes_in_a_job() -> None:
    looked: list[str] = []

    def check() -> None:
        looked.append("exit")
        raise HostLostError(TEXT)

    context = SimpleNamespace(exit=SimpleNamespace(check=check))
    reporter: Any = SimpleNamespace(_is_active=True, _context=context)
    with pytest.raises(HostLostError):
        server.Reporter.on_idle(reporter)
    assert looked == ["exit"]
    reporter._is_active = False
    server.Reporter.on_idle(reporter)
    assert looked == ["exit"]


def test_a_lost_host_is_told_as_it_is_and_no_death_is_waited_for() -> None:
    class Failing(Exit):
        def __init__(self) -> None: ...

        def cause_of(self, _error: Exception) -> Exception:
            raise AssertionError("a lost host is no consequence of another rank's death")

        def fail(self, text: str, status: int) -> NoReturn:
            raise Exited(text, status)

    def lose() -> int:
        raise HostLostError(TEXT)

    with pytest.raises(Exited) as caught:
        Failing().run(lose)
    text, status = caught.value.args
    assert text.startswith("error")
    assert text.endswith(TEXT)
    assert status == 1


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_is_cut_off_ends_with_status_1_and_one_of_its_host_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    is_told: bool,
) -> None:
    def leave(status: int) -> NoReturn:
        raise Exited(status)

    told: list[int] = []
    monkeypatch.setattr(exit_module.os, "_exit", leave)
    monkeypatch.setattr(exit_module, "wait_until_read", lambda: None)
    ending = exit_of(tmp_path, parent=SimpleNamespace(failed=told.append))
    with caplog.at_level(logging.ERROR, logger="psdist"), pytest.raises(Exited) as caught:
        ending.end_cut_off("h1 has been cut off", is_told=is_told)
    assert (caught.value.args, told) == ((1,), [1])
    assert "this rank ends: h1 has been cut off" in caplog.text
    said = capsys.readouterr().err
    line = "psdist: server 0 (rank 0 on h1): error: h1 has been cut off\n"
    assert said == (line if is_told else "")


def test_who_ends_on_purpose_says_goodbye(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> NoReturn:
        raise Exited(status)

    hosts = Hosts()
    exit_of(tmp_path, hosts).close()
    assert hosts.is_closed
    hosts = Hosts()
    monkeypatch.setattr(exit_module.os, "_exit", leave)
    monkeypatch.setattr(exit_module, "wait_until_read", lambda: None)
    with pytest.raises(Exited):
        exit_of(tmp_path, hosts).end_evicted("its group is out")
    assert hosts.is_closed
