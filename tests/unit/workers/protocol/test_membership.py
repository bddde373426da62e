"""How a worker and its group come into the job and leave it, as the machine decides it."""

from __future__ import annotations

import itertools

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import (
    Done,
    Finish,
    Leave,
    Register,
    Registered,
    Stop,
    Suspend,
)
from psdist.protocol.header import Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.workers.protocol.actions import (
    InitialSent,
    SendInitial,
)
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    SETUP,
    Network,
    control,
    make_core,
    messages,
    push,
    register,
)

# -- coming -------------------------------------------------------------------------------------


def test_the_chief_describes_the_model_and_sends_every_chunk_to_its_owner() -> None:
    core = make_core(members=(0, 1))
    actions = core.begin_setup(SETUP)
    assert messages(actions) == [(server_id(0), SETUP), (server_id(1), SETUP)]
    initial = [action for action in actions if isinstance(action, SendInitial)]
    assert [each.header.chunk for each in initial] == list(range(6)), "all, not its slice only"
    assert [each.peer for each in initial] == [server_id(owner) for owner in OWNERS]
    assert {(each.header.kind, each.header.length) for each in initial} == {(Kind.INIT, BYTES)}
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 60):
        core = make_core()
        core.begin_setup(SETUP)
        for chunk in order:
            assert core.membership.is_joining
            core.handle(InitialSent(chunk))
            core.check_invariants()
        assert not core.membership.is_joining


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 1, 2, 2]))))
def test_a_group_is_registered_when_every_server_has_said_so(order: tuple[int, ...]) -> None:
    core = make_core(num_servers=3)
    wanted = Register(group=7, workers=[0], clock=0)
    assert messages(core.begin_register()) == [(server_id(server), wanted) for server in range(3)]
    answered: set[int] = set()
    for server in order:
        control(core, server_id(server), Registered(group=7, server=server))
        answered.add(server)
        assert core.membership.is_joining == (answered != {0, 1, 2})
    assert core.counts().duplicates == 1


WRONG_REGISTERED = {
    "another group": (server_id(1), Registered(group=8, server=1)),
    "in another's name": (server_id(1), Registered(group=7, server=0)),
    "a server that is not": (server_id(2), Registered(group=7, server=2)),
    "a worker": (worker_id(1), Registered(group=7, server=1)),
}


@pytest.mark.parametrize("what", WRONG_REGISTERED)
def test_a_registration_that_was_not_asked_for_is_an_error_that_names_the_peer(what: str) -> None:
    peer, message = WRONG_REGISTERED[what]
    name = "worker 1" if peer == worker_id(1) else f"server {peer}"
    core = make_core()
    core.begin_register()
    with pytest.raises(ProtocolError, match=f"worker 0: {name} sent Registered .*group 7"):
        control(core, peer, message)
    with pytest.raises(ProtocolError, match="this worker has requested none"):
        control(make_core(), server_id(0), Registered(group=7, server=0))


# -- the end ------------------------------------------------------------------------------------


def test_a_registered_leader_takes_its_groups_leave_at_its_clock_and_nobody_else_does() -> None:
    core = make_core()
    register(core)
    network = Network(core, seed=0)
    network.do(push(core))
    network.run()
    assert messages(core.begin_leave()) == [
        (server_id(server), Leave(group=7, clock=1)) for server in (0, 1)
    ]
    assert make_core(1, members=(0, 1)).begin_leave() == []
    assert make_core().begin_leave() == [], "it was never registered"


def test_a_worker_is_stopped_once_it_is_done_and_the_coordinator_says_so() -> None:
    core = make_core()
    with pytest.raises(ProtocolError, match="server 0 sent Stop before this worker's script"):
        control(core, COORDINATOR, Stop())
    assert messages(core.begin_done({"clock": 3})) == [
        (COORDINATOR, Done(worker=0, statistics={"clock": 3}))
    ]
    with pytest.raises(ProtocolError, match="worker 0: server 1 sent Stop; server 0 says"):
        control(core, server_id(1), Stop())
    assert not core.membership.is_stopped
    control(core, COORDINATOR, Stop())
    control(core, COORDINATOR, Stop())
    assert core.membership.is_stopped
    assert core.counts().duplicates == 1


def test_a_message_that_no_worker_takes_is_an_error_that_names_it_and_the_peer() -> None:
    for message in (Finish(), SETUP, Suspend(group=7, clock=0, seq=1)):
        with pytest.raises(ProtocolError, match=f"server 1 sent {type(message).__name__}, which"):
            control(make_core(), server_id(1), message)
