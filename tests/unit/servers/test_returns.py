"""What of the dead goes back to the epoch: what the registrar decides, and whom it tells."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.collected import PREPARED
from psdist.protocol.control import (
    Buried,
    Collected,
    Commit,
    Control,
    Enter,
    Held,
    Propose,
    Resume,
    Resumed,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.returns import (
    RETURN,
    DataStanding,
    Return,
    pack_refusal,
    pack_standing,
    unpack_return,
)
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.meetings import Meetings
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.returns import NO_ITERATION, Returns


def standing(clock: int, seen: int, **more: Any) -> DataStanding:
    """In the third pass over the second dataset, whose passes have 10 batches."""
    told: dict[str, Any] = {
        "clock": clock, "per_round": 1, "dataset": 1, "is_open": True, "seen": seen,
        "num_batches": 10, "counts": (5, 3), **more,
    }  # fmt: skip
    return DataStanding(**told)


def decide(reached: dict[int, int], *standings: DataStanding | str, first: int = 0) -> Any:
    returns = Returns()
    returns.on_buried({worker: (clock,) for worker, clock in reached.items()})
    return unpack_return(returns.decide(packed(*standings, first=first)))


def packed(*standings: DataStanding | str, first: int = 0) -> dict[int, bytes]:
    return {
        first + worker: pack_refusal(each) if isinstance(each, str) else pack_standing(each)
        for worker, each in enumerate(standings)
    }


@pytest.mark.parametrize("is_first", [True, False])
def test_who_has_not_begun_a_pass_knows_nothing_of_its_length(is_first: bool) -> None:
    """One of two is in front of it, and the pass before had more batches."""
    before = standing(20, 0, is_open=False, num_batches=13, counts=(5, 2))
    both = [before, standing(20, 0)] if is_first else [standing(20, 0), before]
    found = decide({4: 20}, *both)
    assert (found.ordinal, found.at, found.num_batches) == (2, 0, 10)


def test_the_pass_is_cut_where_the_farthest_is() -> None:
    found = decide({4: 22, 5: 27}, standing(24, 4), standing(26, 6), standing(25, 5))
    assert found == Return(
        dataset=1, ordinal=2, at=6, num_batches=10, living=(0, 1, 2),
        brought=((4, 2), (5, 7)), lost=0, counts=(5, 3),
    )  # fmt: skip


def test_an_iteration_of_several_batches_counts_for_as_many() -> None:
    found = decide({2: 11}, standing(12, 6, per_round=3), standing(13, 9, per_round=3))
    assert (found.at, found.brought) == (9, ((2, 3),))


def test_of_a_pass_that_somebody_has_ended_nothing_is_dealt() -> None:
    between = standing(30, 0, is_open=False)
    found = decide({2: 27}, between, standing(28, 8))
    assert (found.ordinal, found.at, found.brought, found.lost) == (3, 0, ((2, 0),), 3)
    ahead = standing(33, 3, counts=(5, 4))
    found = decide({4: 29, 5: 34}, ahead, standing(28, 8), between)
    assert (found.ordinal, found.at, found.brought, found.lost) == (3, 3, ((4, 0), (5, 4)), 1)
    assert found.counts == (5, 4)


def test_who_has_not_begun_is_behind_those_who_have() -> None:
    fresh = DataStanding(0, 0, None, False, 0, 0, ())
    found = decide({2: 1}, standing(2, 2, counts=(0, 1)), fresh)
    assert (found.dataset, found.ordinal, found.at, found.brought) == (1, 0, 2, ((2, 1),))
    assert found.counts == (0, 1)
    found = decide({2: 0}, fresh, fresh)
    assert (found.dataset, found.brought, found.counts) == (None, ((2, 0),), ())


@pytest.mark.parametrize(
    ("standings", "why"),
    [
        ((standing(5, 5), "of its own"), "of its own"),
        ((standing(5, 5), standing(5, 5, dataset=0)), "workers are at different datasets"),
        (
            (standing(5, 5), standing(5, 5, per_round=2)),
            "iterations take different numbers of batches",
        ),
        (
            (standing(5, 5), standing(4, 5)),
            "workers' iterations do not say where in their data they are",
        ),
        (
            (standing(5, 5), standing(6, 9, counts=(5, 2))),
            "workers' iterations do not say where in their data they are",
        ),
        ((standing(5, 5), standing(4, 4, num_batches=11)), "workers' passes are not of one length"),
        ((standing(5, 5, per_round=0), standing(5, 5, per_round=0)), NO_ITERATION),
    ],
    ids=["told", "datasets", "rounds", "positions", "clocks", "lengths", "no iteration"],
)
def test_why_nothing_goes_back(standings: tuple[DataStanding | str, ...], why: str) -> None:
    assert decide({2: 3}, *standings) == why


def test_each_death_is_decided_of_once_and_the_most_that_a_server_has_told_counts() -> None:
    returns = Returns()
    returns.on_buried({2: (4,), 3: (1, 2)})
    returns.on_buried({2: (3,), 3: (2,)})
    assert returns.reached == {2: (4,), 3: (2, 2)}
    first = unpack_return(returns.decide(packed(standing(5, 5), standing(5, 5))))
    assert isinstance(first, Return)
    assert first.brought == ((2, 4), (3, 2))
    returns.on_buried({2: (4,), 3: (2, 2), 0: (6,)})
    second = unpack_return(returns.decide(packed(standing(8, 8), first=1)))
    assert isinstance(second, Return)
    assert (second.living, second.brought) == ((1,), ((0, 6),))


def test_who_has_come_lives_though_servers_know_better() -> None:
    returns = Returns()
    returns.on_buried({1: (5,), 2: (5,)})
    found = unpack_return(returns.decide(packed(standing(5, 5), standing(5, 5))))
    assert isinstance(found, Return)
    assert found.brought == ((2, 5),)
    found = unpack_return(returns.decide(packed(standing(6, 6))))
    assert isinstance(found, Return)
    assert found.brought == ((1, 5),)


# -- the registrar -------------------------------------------------------------------------------


def tell(registrar: Registrar, peer: int, message: Control) -> list[tuple[int, Control]]:
    actions = registrar.handle(peer, message)
    return [(each.peer, each.message) for each in actions if isinstance(each, SendControl)]


def enter(
    registrar: Registrar, worker: int, seq: int, name: str, payload: bytes
) -> list[tuple[int, Control]]:
    message = Enter(worker=worker, seq=seq, name=name, payload=payload, values=b"")
    return tell(registrar, worker_id(worker), message)


def registrar_of(num_servers: int = 2) -> Registrar:
    """Of workers 0 to 3, of which 1 and 2 are a group, and which have prepared."""
    registrar = Registrar(
        num_workers=4, num_servers=num_servers, max_deaths=2, groups=((0,), (1, 2), (3,))
    )
    for worker in range(4):
        enter(registrar, worker, 1, "prepare", PREPARED)
    for server in range(num_servers):
        tell(registrar, server_id(server), Resumed(seq=1, server=server))
    return registrar


def test_all_who_live_are_told_what_of_the_whole_group_goes_back() -> None:
    registrar = registrar_of()
    registrar.on_lost(worker_id(2), "worker 2")
    for server, reached in enumerate(([3], [4])):
        buried = Buried(generation=1, server=server, reached=reached)
        tell(registrar, server_id(server), buried)
    payload = pack_standing(standing(5, 5))
    assert enter(registrar, 0, 2, RETURN, payload) == []
    resume = [(server_id(server), Resume(seq=2, checkpoint="")) for server in range(2)]
    assert enter(registrar, 3, 2, RETURN, payload) == resume
    assert tell(registrar, server_id(1), Resumed(seq=2, server=1)) == []
    told = tell(registrar, server_id(0), Resumed(seq=2, server=0))
    assert [peer for peer, _ in told] == [worker_id(0), worker_id(3)]
    answer = told[0][1]
    assert isinstance(answer, Collected)
    found = unpack_return(answer.payloads[0])
    assert isinstance(found, Return)
    assert (found.living, found.brought) == ((0, 3), ((1, 4), (2, 4)))
    assert answer.runs == [0, 4]


def test_what_is_no_standing_is_refused() -> None:
    registrar = registrar_of()
    with pytest.raises(ProtocolError, match="entered a return with what are no clocks"):
        enter(registrar, 0, 2, RETURN, b"5 1 what")


def test_clocks_of_other_workers_than_the_dead_are_refused() -> None:
    registrar = registrar_of()
    registrar.on_lost(worker_id(0), "worker 0")
    registrar.on_lost(worker_id(3), "worker 3")
    tell(registrar, server_id(0), Buried(generation=1, server=0, reached=[3]))
    tell(registrar, server_id(1), Buried(generation=1, server=1, reached=[3]))
    with pytest.raises(ProtocolError, match="server 0 sent Buried with 3 clocks of 2 workers"):
        tell(registrar, server_id(0), Buried(generation=2, server=0, reached=[3, 3, 3]))
    with pytest.raises(ProtocolError, match="of generation 1 in generation 2"):
        tell(registrar, server_id(0), Buried(generation=1, server=0, reached=[3]))


def test_samples_go_back_before_a_checkpoint_is_made_that_is_due_as_well() -> None:
    meetings = Meetings(num_workers=2, groups=(), staleness=0)
    held = Held(worker=0, number=1, hold=1, what=RETURN, clocks=[3])
    told = meetings.on_told(0, held, is_collecting=False)
    assert [each.message for each in told] == [Propose(number=1)]
    held = Held(worker=1, number=1, hold=1, what="end", clocks=[3])
    told = meetings.on_told(1, held, is_collecting=False)
    assert {each.message for each in told} == {Commit(number=1, what=RETURN)}
    assert not meetings.take_met()  # no checkpoint comes of it
