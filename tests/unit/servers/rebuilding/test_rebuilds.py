"""What the registrar does about a server's death of whose shard nobody has a copy."""

from __future__ import annotations

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.collected import PREPARED
from psdist.protocol.control import (
    Done,
    Enter,
    Finish,
    Finished,
    Moved,
    Rebuild,
    Rebuilt,
    Resume,
    Resumed,
    Stop,
    TellHeld,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.rebuilding.rebuilds import Rebuilds, ServerRebuilt
from psdist.servers.protocol.registrar import Complete, Registrar, RegistrarAction
from psdist.servers.protocol.replication.takeovers import Move

WHO = "server 1 (rank 1 on n1)"
WORKERS = [worker_id(0), worker_id(1)]


def make() -> Rebuilds:
    return Rebuilds(num_workers=2, num_servers=3)


def lose(rebuilds: Rebuilds, server: int, *, resumed_up_to: int = 4) -> list[RegistrarAction]:
    who = f"server {server} (rank {server} on n{server})"
    actions = rebuilds.on_server_lost(
        server_id(server), who, resumed_up_to=lambda _server: resumed_up_to
    )
    return [*actions]


def rebuilt(server: int, **changed: object) -> Rebuilt:
    return Rebuilt(**{"server": server, "num_lost": 0, "checkpoint": "", **changed})  # type: ignore[arg-type]


def test_one_that_lives_is_told_to_make_it_and_workers_to_tell_what_they_hold() -> None:
    rebuilds = make()
    rebuilds.on_resumed(Resumed(seq=4, server=1, positions=[17]))
    rebuild = Rebuild(server=1, number=1, resumed_up_to=4, positions=[17])
    tell = TellHeld(server=1, host=0)
    assert lose(rebuilds, 1) == [
        SendControl(server_id(0), rebuild),
        *(SendControl(each, tell) for each in WORKERS),
    ]
    assert rebuilds.alive == [0, 2]


def test_when_it_is_made_everybody_is_told_where_it_is() -> None:
    rebuilds = make()
    lose(rebuilds, 1)
    message = rebuilt(1, num_lost=3, checkpoint="step-00000040")
    moved = Moved(server=1, host=0)
    assert rebuilds.on_rebuilt(server_id(0), message) == [
        Move(1, 0),
        *(SendControl(each, moved) for each in (0, 2, *WORKERS)),
        ServerRebuilt(server=1, process=1, who=WHO, host=0, num_lost=3, checkpoint="step-00000040"),
    ]


def test_who_had_made_one_dies_with_both() -> None:
    """The next is made by who has the fewest."""
    rebuilds = Rebuilds(num_workers=0, num_servers=4)
    lose(rebuilds, 3)
    rebuilds.on_rebuilt(server_id(0), rebuilt(3))
    assert lose(rebuilds, 2) == [
        SendControl(server_id(1), Rebuild(server=2, number=1, resumed_up_to=4, positions=[]))
    ]
    rebuilds.on_rebuilt(server_id(1), rebuilt(2))
    made = [each.message for each in lose(rebuilds, 1) if isinstance(each, SendControl)]
    assert [(each.server, each.number) for each in made if isinstance(each, Rebuild)] == [
        (1, 1),
        (2, 2),
    ]
    rebuilds.on_rebuilt(server_id(0), rebuilt(1))
    (_, *_, people) = rebuilds.on_rebuilt(server_id(0), rebuilt(2))
    assert isinstance(people, ServerRebuilt)
    assert (people.server, people.process, people.who) == (2, 1, WHO)


def test_a_death_while_a_shard_is_made_ends_the_job() -> None:
    rebuilds = make()
    lose(rebuilds, 1)
    with pytest.raises(PeerLostError, match=r"server 2 \(rank 2 on n2\) has died; while the shard"):
        lose(rebuilds, 2)


@pytest.mark.parametrize(("peer", "server"), [(2, 1), (0, 2), (0, 7)])
def test_nobody_says_that_another_ones_is_made(peer: int, server: int) -> None:
    rebuilds = make()
    lose(rebuilds, 1)
    words = f"server {peer} says that it has made the shard of server {server} anew"
    with pytest.raises(ProtocolError, match=words):
        rebuilds.on_rebuilt(server_id(peer), rebuilt(server))
    rebuilds.on_rebuilt(server_id(0), rebuilt(1))
    with pytest.raises(ProtocolError, match="server 0 says that it has made the shard of server 1"):
        rebuilds.on_rebuilt(server_id(0), rebuilt(1))


# -- the registrar ---------------------------------------------------------------------------------


def registrar_of(*, is_ready: bool = True) -> Registrar:
    registrar = Registrar(num_workers=2, num_servers=3, rebuilds=True)
    if is_ready:
        meet(registrar, 1, "prepare", PREPARED)
    return registrar


def meet(
    registrar: Registrar, seq: int, name: str, payload: bytes = b"", *, silent: int | None = None
) -> None:
    for worker in (0, 1):
        enter = Enter(worker=worker, seq=seq, name=name, payload=payload)
        registrar.handle(worker_id(worker), enter)
    for server in {0, 1, 2} - {silent}:
        registrar.handle(server_id(server), Resumed(seq=seq, server=server, positions=[seq]))


def rebuild_of(actions: list[RegistrarAction]) -> Rebuild:
    messages = [each.message for each in actions if isinstance(each, SendControl)]
    (found,) = [each for each in messages if isinstance(each, Rebuild)]
    return found


def test_before_training_has_begun_the_job_ends() -> None:
    with pytest.raises(PeerLostError, match=r"before training had begun, for which every server"):
        registrar_of(is_ready=False).on_server_lost(server_id(1), WHO)


def test_who_makes_it_hears_of_collectives_that_were_over_there() -> None:
    registrar = registrar_of()
    found = rebuild_of(registrar.on_server_lost(server_id(1), WHO))
    assert (found.resumed_up_to, found.positions) == (1, [1])
    registrar = registrar_of()
    meet(registrar, 2, "barrier", silent=2)
    assert rebuild_of(registrar.on_server_lost(server_id(1), WHO)).resumed_up_to == 2
    registrar = registrar_of()
    meet(registrar, 2, "barrier", silent=1)
    found = rebuild_of(registrar.on_server_lost(server_id(1), WHO))
    assert (found.resumed_up_to, found.positions) == (1, [1])
    actions = registrar.handle(server_id(0), rebuilt(1))
    assert SendControl(server_id(1), Resume(seq=2)) in actions
    assert not [each for each in actions if isinstance(each, SendControl) and each.peer == 1][1:]


def test_one_that_still_waits_for_somebody_is_not_over() -> None:
    registrar = registrar_of()
    registrar.handle(worker_id(0), Enter(worker=0, seq=2, name="barrier", payload=b""))
    assert rebuild_of(registrar.on_server_lost(server_id(1), WHO)).resumed_up_to == 1


def test_the_end_waits_for_who_has_made_it_and_stops_those_that_live() -> None:
    registrar = registrar_of()
    registrar.on_server_lost(server_id(1), WHO)
    for worker in (0, 1):
        registrar.handle(worker_id(worker), Done(worker=worker, statistics={}, left=[]))
    actions = registrar.handle(server_id(0), rebuilt(1))
    assert SendControl(server_id(1), Finish()) in actions
    for server in (0, 1):
        assert not registrar.handle(server_id(server), Finished(server=server, statistics={}))
    last = registrar.handle(server_id(2), Finished(server=2, statistics={}))
    stopped = [each.peer for each in last if isinstance(each, SendControl)]
    assert stopped == [*WORKERS, server_id(2)]
    assert {type(each.message) for each in last if isinstance(each, SendControl)} == {Stop}
    assert isinstance(last[-1], Complete)


def test_elsewhere_nobody_makes_a_shard_anew() -> None:
    registrar = Registrar(num_workers=2, num_servers=3)
    with pytest.raises(ProtocolError, match="server 0 has made a shard anew, unasked"):
        registrar.handle(server_id(0), rebuilt(1))
