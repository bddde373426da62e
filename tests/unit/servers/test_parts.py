"""The parts of a server's loop: which of them takes a message, and when the loop ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.codecs.wire import RAW_WIRE
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Departed, Finish, Finished, Resume, Setup, Stop
from psdist.protocol.events import ControlArrived, Event, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.loop import Decided, ServerLoop, ServerPart
from psdist.servers.parts import Departures
from psdist.servers.replication.outbox import RecordFrame
from psdist.servers.set_store import BuiltSet, ServerOptions, SetStore, ShardStore
from psdist.servers.shard.regions import Keeper
from psdist.servers.shard.tensors import TensorShard
from tests.support.virtual.schedule import small_partition
from tests.unit.servers.test_sets import from_coordinator, make_loop, registers, tell


class Taking(ServerPart):
    """Takes Stop, and notes what it is told."""

    TAKES = (Stop,)
    outlasts_shard = True

    def __init__(self, *, takes_losses: bool = False) -> None:
        self.seen: list[Any] = []
        self._takes_losses = takes_losses

    def handle(self, event: Event) -> Decided:
        self.seen.append(event)
        return ()

    def takes_loss(self, peer: int) -> bool:  # noqa: ARG002 - all alike
        return self._takes_losses

    def on_lost(self, event: PeerLost) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")


def with_parts(*parts: ServerPart) -> ServerLoop:
    loop, _ = make_loop(seats=parts)
    return loop


def test_of_two_parts_that_take_a_message_the_later_one_gets_it() -> None:
    first, second = Taking(), Taking()
    stop = from_coordinator(Stop())
    assert with_parts(first, second).decide(stop) == ()
    assert (first.seen, second.seen) == ([], [stop])


def test_a_message_for_a_part_is_about_no_set() -> None:
    loop = with_parts(Taking())
    with pytest.raises(ProtocolError, match="server 0 sent Stop of set 2; it concerns the whole"):
        loop.decide(from_coordinator(Stop(), set_index=2))


def test_a_part_without_messages_refuses_one_as_an_error_of_psdist() -> None:
    with pytest.raises(InvariantError, match="ServerPart takes no ControlArrived"):
        ServerPart().handle(from_coordinator(Stop()))


def test_a_frame_that_no_part_sent_is_no_event() -> None:
    frame = object.__new__(RecordFrame)
    assert with_parts().decide(Sent(frame)) == ()


def test_sets_are_not_told_of_a_failure_that_a_part_takes() -> None:
    lost = PeerLost(server_id(2), "server 2")
    taking, other = Taking(takes_losses=True), Taking()
    assert with_parts(taking, other).decide(lost) == ()
    assert taking.seen == other.seen == [lost]


def test_parts_are_not_told_of_a_failure_that_the_sets_do_not_survive() -> None:
    part = Taking()
    ((_, (action,)),) = with_parts(part).decide(PeerLost(worker_id(0), "worker 0"))
    assert "worker 0" in str(action.error)  # type: ignore[union-attr]
    assert part.seen == []


def test_a_loop_outlasts_its_shard_where_a_part_does() -> None:
    part = Taking()
    loop, wire = make_loop(seats=[part])
    ((peer, answer, _),) = tell(loop, wire, from_coordinator(Finish()))
    assert peer == COORDINATOR
    assert isinstance(answer, Finished)
    assert not loop.is_finished
    loop.finish()
    loop.finish()
    assert loop.is_finished
    assert part.seen == ["closed"], "once"


def test_a_loop_waits_for_each_of_its_parts() -> None:
    class Busy(ServerPart):
        is_over = False  # type: ignore[assignment]

    part = Busy()
    loop, wire = make_loop(seats=[part])
    assert tell(loop, wire, from_coordinator(Finish())) == []
    part.is_over = True  # type: ignore[assignment, misc]
    assert [type(message) for _, message, _ in tell(loop, wire)] == [Finished]


def test_a_departure_has_a_clock_for_each_set_of_a_worker_of_this_run() -> None:
    loop, wire = make_loop(seats=[Departures()])
    tell(loop, wire, registers(0, 0), from_coordinator(Resume(seq=1)))
    for worker, left in ((0, [1, 1]), (7, [1])):
        departed = from_coordinator(Departed(worker=worker, left=left))
        with pytest.raises(ProtocolError, match=r"sent Departed for \d parameter sets"):
            loop.decide(departed)
    with pytest.raises(ProtocolError, match="worker 0 sent Departed"):
        loop.decide(ControlArrived(worker_id(0), Departed(worker=0, left=[1])))
    assert tell(loop, wire, from_coordinator(Departed(worker=0, left=[0]))) == []
    assert not loop.sets[0].core.has_members


def test_a_server_that_keeps_no_checkpoints_has_nothing_to_do_for_them() -> None:
    store: SetStore = ShardStore(TensorShard).of_set(0)
    keeper = store.keeper
    assert type(keeper) is Keeper
    assert (keeper.is_busy, keeper.is_reserving, keeper.go_on()) == (False, False, False)
    assert (keeper.outcome(), keeper.statistics(0)) == (None, {})
    with pytest.raises(InvariantError, match="on a server that keeps none"):
        _ = keeper.memory


@pytest.mark.parametrize("server", [0, 1])
def test_a_spec_names_the_settings_that_keep_memory_for_each_group(server: int) -> None:
    partition = small_partition(2)
    setup = Setup(
        partition=partition.encode(),
        optimizer="torch.optim.SGD",
        hyper=pack_hyperparameters([{"lr": 0.1}]),
    )
    built = BuiltSet(0, partition, (0,) * len(partition.chunks), setup)
    options = ServerOptions(
        server=server, shard_weights=(1.0, 1.0), modes=("ssp",), receive_buffers=2, compensation=0.5
    )
    spec = options.spec(replace(RAW_WIRE, has_copies=True), built)
    expected = [
        ("codec.pull_copies = on", partition.num_bytes, "holds"),
        ("consistency.stale_updates = compensate:0.5", partition.num_bytes, "was given"),
    ]
    assert list(spec.kept_per_group()) == (expected if server == 0 else [])
