"""When a job begins: every worker has called psdist.init, with the same settings; and when servers
end: every worker is gone."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Absent, Begin, Begun, Control, End, Gone, Stop, WhoIsAbsent
from psdist.protocol.ids import server_id, spare_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.lobby import AllGone, Lobby, LobbyAction, Open


def call(lobby: Lobby, worker: int, job: int = 1, **settings: Any) -> list[LobbyAction]:
    return lobby.handle(worker_id(worker), Begin(worker=worker, job=job, settings=settings))


def told(actions: list[LobbyAction]) -> dict[int, str]:
    """Peer -> the error that it is told."""
    sent = [each for each in actions if isinstance(each, SendControl)]
    errors = {each.peer: each.message for each in sent}
    assert len(errors) == len(actions)
    return {peer: each.error for peer, each in errors.items() if isinstance(each, Begun)}


def test_a_job_begins_when_the_last_worker_has_called() -> None:
    lobby = Lobby(num_workers=3, num_servers=2)
    assert call(lobby, 2, mode="ssp") == []
    assert call(lobby, 0, mode="ssp") == []
    assert lobby.called == [0, 2]
    begun = Begun(job=1, settings={"mode": "ssp"})
    peers = [server_id(1), worker_id(0), worker_id(1), worker_id(2)]
    # The coordinator's own part comes first, and nobody has to tell it.
    assert call(lobby, 1, mode="ssp") == [
        Open(begun),
        *(SendControl(each, begun) for each in peers),
    ]


def test_the_next_job_has_settings_of_its_own() -> None:
    lobby = Lobby(num_workers=1, num_servers=1)
    assert lobby.job == 1
    call(lobby, 0, mode="ssp")
    assert lobby.job == 2
    assert call(lobby, 0, job=2)[0] == Open(Begun(job=2, settings={}))


def test_other_settings_are_told_to_everybody_who_has_called_and_who_calls_later() -> None:
    lobby = Lobby(num_workers=4, num_servers=1)
    call(lobby, 0, mode="ssp", seed=1)
    call(lobby, 3, mode="ssp", seed=1)
    error = (
        "psdist.init was given mode='ssp' by workers 0, 3, mode='async' by worker 1; every worker "
        "must pass the same settings"
    )
    both = {worker_id(worker): error for worker in (0, 1, 3)}
    assert told(call(lobby, 1, mode="async", seed=1)) == both
    assert told(call(lobby, 2, mode="ssp", seed=1)) == {worker_id(2): error}
    # Whoever has caught it and calls again.
    assert told(call(lobby, 1, mode="ssp", seed=1)) == {worker_id(1): error}


def test_a_setting_that_only_some_pass_is_a_difference() -> None:
    lobby = Lobby(num_workers=3, num_servers=1)
    call(lobby, 0, seed=1)
    assert told(call(lobby, 1, seed=1, staleness=4)) == {
        worker_id(worker): "psdist.init was given no staleness by worker 0, staleness=4 by worker "
        "1; every worker must pass the same settings"
        for worker in (0, 1)
    }


def test_who_has_waited_long_is_told_who_is_absent() -> None:
    lobby = Lobby(num_workers=30, num_servers=1)
    call(lobby, 1)
    (answer,) = lobby.handle(worker_id(1), WhoIsAbsent(worker=1, seq=1))
    assert isinstance(answer, SendControl)
    assert isinstance(answer.message, Absent)
    assert (answer.peer, answer.message.workers[:3]) == (worker_id(1), [0, 2, 3])
    assert answer.message.num_absent == 29
    # The question has crossed the answer.
    assert lobby.handle(worker_id(1), WhoIsAbsent(worker=1, seq=0)) == []
    call(lobby, 0, seed=3)
    assert lobby.handle(worker_id(1), WhoIsAbsent(worker=1, seq=1)) == []


def leave(lobby: Lobby, worker: int) -> list[LobbyAction]:
    return lobby.handle(worker_id(worker), Gone(worker=worker))


def test_servers_end_after_the_last_worker() -> None:
    lobby = Lobby(num_workers=2, num_servers=3)
    call(lobby, 0)
    call(lobby, 1)
    assert leave(lobby, 1) == []
    assert leave(lobby, 0) == [
        SendControl(server_id(1), End()),
        SendControl(server_id(2), End()),
        AllGone(),
    ]


def absent(job: int, called: str, gone: str, scripts: str = "whose script has finished") -> str:
    return (
        f"psdist.init was called for job {job} by {called}; absent: {gone}, {scripts}; psdist.init "
        "must be called by every worker"
    )


def test_no_job_begins_when_a_worker_is_gone() -> None:
    lobby = Lobby(num_workers=4, num_servers=1)
    for worker in range(4):
        call(lobby, worker)
    leave(lobby, 3)
    leave(lobby, 1)
    error = absent(2, "worker 2", "workers 1, 3", "whose scripts have finished")
    assert told(call(lobby, 2, job=2)) == {worker_id(2): error}
    assert told(call(lobby, 0, job=2)) == {worker_id(0): error}
    # They have caught it, and end.
    assert leave(lobby, 2) == []
    assert leave(lobby, 0) == [AllGone()]


def test_who_waits_already_is_told_when_another_leaves() -> None:
    lobby = Lobby(num_workers=3, num_servers=1)
    call(lobby, 0)
    call(lobby, 1)
    error = absent(1, "workers 0, 1", "worker 2")
    assert told(leave(lobby, 2)) == {worker_id(0): error, worker_id(1): error}


def test_who_has_called_and_leaves_is_absent_as_well() -> None:
    lobby = Lobby(num_workers=2, num_servers=1)
    call(lobby, 1)
    assert leave(lobby, 1) == []  # its own wait was too long
    assert told(call(lobby, 0)) == {worker_id(0): absent(1, "worker 0", "worker 1")}


@pytest.mark.parametrize("message", [Gone(worker=0), Begin(worker=0, job=1, settings={})])
def test_whoever_is_gone_says_nothing_more(message: Control) -> None:
    lobby = Lobby(num_workers=2, num_servers=1)
    leave(lobby, 0)
    with pytest.raises(ProtocolError, match="coordinator: worker 0 "):
        lobby.handle(worker_id(0), message)


@pytest.mark.parametrize(
    ("peer", "message", "told"),
    [
        (worker_id(1), Begin(worker=0, job=1, settings={}), "worker 1 sent Begin of worker 0"),
        (worker_id(9), Begin(worker=9, job=1, settings={}), "worker 9 sent Begin of worker 9"),
        (worker_id(1), Gone(worker=2), "worker 1 sent Gone of worker 2"),
        (server_id(1), WhoIsAbsent(worker=0, seq=1), "server 1 sent WhoIsAbsent of worker 0"),
        (worker_id(1), Begin(worker=1, job=2, settings={}), "worker 1 began job 2, where job 1 is"),
        (worker_id(0), Begin(worker=0, job=1, settings={}), "worker 0 began job 1, where .* twice"),
    ],
)
def test_what_cannot_be_names_who_sent_it(peer: int, message: Any, told: str) -> None:
    lobby = Lobby(num_workers=3, num_servers=2)
    call(lobby, 0)
    with pytest.raises(ProtocolError, match=told):
        lobby.handle(peer, message)


def test_another_message_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="was given Stop"):
        Lobby(num_workers=1, num_servers=1).handle(worker_id(0), Stop())


def test_who_has_died_is_waited_for_neither_by_the_next_job_nor_by_the_end() -> None:
    lobby = Lobby(num_workers=3, num_servers=2)
    call(lobby, 0)
    words = told(lobby.lose(1))
    assert [*words] == [worker_id(0)]
    assert words[worker_id(0)].startswith(
        "psdist.init was called for job 1 by worker 0; absent: worker 1, whose script has finished "
        "or which has failed; "
    )
    assert lobby.lose(1) == []
    for worker in (0, 2):
        actions = lobby.handle(worker_id(worker), Gone(worker=worker))
    assert actions == [SendControl(server_id(1), End()), AllGone()]
    lobby = Lobby(num_workers=1, num_servers=1)
    assert lobby.lose(0) == [AllGone()]


def test_spares_are_told_of_a_job_and_of_the_end_as_servers_are() -> None:
    lobby = Lobby(num_workers=1, num_servers=2, spares=[spare_id(0), spare_id(1)])
    others = [server_id(1), spare_id(0), spare_id(1)]
    begun = Begun(job=1, settings={})
    peers = [*others, worker_id(0)]
    assert call(lobby, 0) == [Open(begun), *(SendControl(each, begun) for each in peers)]
    gone = lobby.handle(worker_id(0), Gone(worker=0))
    assert gone == [*(SendControl(each, End()) for each in others), AllGone()]


def test_spares_for_workers_are_told_as_servers_are_until_one_has_joined() -> None:
    lobby = Lobby(num_workers=2, num_servers=1, joining={2: worker_id(2), 3: worker_id(3)})
    call(lobby, 0)
    begun = call(lobby, 1)[1:]
    assert [each.peer for each in begun if isinstance(each, SendControl)] == [
        worker_id(worker) for worker in (2, 3, 0, 1)
    ]
    assert lobby.lose(3) == []  # nobody waits for it
    lobby.admit([2])
    assert lobby.lose(1) == []
    assert lobby.handle(worker_id(0), Gone(worker=0)) == []
    gone = lobby.handle(worker_id(2), Gone(worker=2))
    assert gone == [SendControl(worker_id(3), End()), AllGone()]


def test_a_spare_that_has_joined_and_died_is_gone() -> None:
    lobby = Lobby(num_workers=1, num_servers=1, joining={1: worker_id(1)})
    lobby.admit([1])
    assert lobby.handle(worker_id(0), Gone(worker=0)) == []
    assert lobby.lose(1) == [AllGone()]


def test_a_spare_that_has_not_joined_begins_no_job_and_is_not_gone() -> None:
    lobby = Lobby(num_workers=1, num_servers=1, joining={1: worker_id(1)})
    with pytest.raises(ProtocolError, match="sent Gone of worker 1"):
        lobby.handle(worker_id(1), Gone(worker=1))
    lobby.admit([1])
    with pytest.raises(ProtocolError, match="sent Begin of worker 1"):
        lobby.handle(worker_id(1), Begin(worker=1, job=1, settings={}))
