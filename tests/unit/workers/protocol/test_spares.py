"""A worker and spares: where it may be moved to, and whose death means nothing to it."""

from __future__ import annotations

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Moved
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id, spare_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import MovePeer
from psdist.workers.protocol.core import WorkerCore
from tests.unit.workers.protocol.test_resending import made


def with_a_spare() -> WorkerCore:
    core, _transfers = made(credits=2)
    core.seat = Seat(
        worker=0,
        group=7,
        members=(0,),
        num_servers=2,
        servers_have_buddies=True,
        num_spares=1,
    )
    return core


def test_what_is_a_dead_server_s_goes_to_the_spare_in_its_place() -> None:
    core = with_a_spare()
    core.handle(PeerLost(server_id(1), "server 1"))
    actions = core.handle(ControlArrived(COORDINATOR, Moved(server=1, host=spare_id(0))))
    assert MovePeer(server_id(1), spare_id(0)) in actions
    core.handle(PeerLost(spare_id(0), "spare 0"))
    actions = core.handle(ControlArrived(COORDINATOR, Moved(server=1, host=0)))
    assert MovePeer(server_id(1), server_id(0)) in actions


@pytest.mark.parametrize("host", [spare_id(1), 2, -1])
def test_nobody_is_moved_to_who_is_not_of_the_job(host: int) -> None:
    core = with_a_spare()
    with pytest.raises(ProtocolError, match=r"sent Moved of server 1 to .* 2 servers and 1 spares"):
        core.handle(ControlArrived(COORDINATOR, Moved(server=1, host=host)))


def test_a_spare_dies_while_a_model_is_set_up() -> None:
    def core() -> WorkerCore:
        seat = Seat(
            worker=0,
            group=7,
            members=(0,),
            num_servers=2,
            servers_have_buddies=True,
            num_spares=1,
        )
        found = WorkerCore(seat, describe_group=str)
        found.begin_register()
        assert found.membership.is_joining
        return found

    assert core().handle(PeerLost(spare_id(0), "spare 0")) == []
    with pytest.raises(PeerLostError, match="while a model was being set up"):
        core().handle(PeerLost(server_id(1), "server 1"))
