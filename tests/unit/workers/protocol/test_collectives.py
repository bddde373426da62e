"""The collectives of the job, as one worker's machine takes part in them."""

from __future__ import annotations

import pytest

from psdist.errors import CollectiveError, InvariantError, ProtocolError
from psdist.protocol.collected import Brought
from psdist.protocol.control import (
    Absent,
    Collected,
    Enter,
    Suspend,
)
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.workers.protocol.actions import (
    Warn,
)
from tests.support.virtual.worker_machine import (
    Network,
    collect,
    control,
    make_core,
    messages,
    push,
    register,
)


def test_a_registered_leader_suspends_its_group_before_it_enters() -> None:
    core = make_core()
    register(core)
    network = Network(core, seed=0)
    for _ in range(2):
        network.do(push(core))
        network.run()
    actions = core.begin_collective("save", b"payload")
    suspend = Suspend(group=7, clock=2, seq=1)
    assert messages(actions) == [
        (server_id(0), suspend),
        (server_id(1), suspend),
        (COORDINATOR, Enter(worker=0, seq=1, name="save", payload=b"payload")),
    ]


def test_nobody_else_suspends_a_group() -> None:
    not_registered, not_leader = make_core(), make_core(1, members=(0, 1))
    for core in (not_registered, not_leader):
        assert [type(each) for _, each in messages(core.begin_collective("mean"))] == [Enter]


def test_answers_belong_to_their_collective_whatever_came_before() -> None:
    core = make_core()
    for seq in (1, 2, 3):
        core.begin_collective("mean", b"")
        for old in range(1, seq):
            collect(core, old)
            assert not core.collectives.is_answered
        collect(core, seq)
        assert core.collectives.is_answered
        assert core.collectives.take() == Brought((b"mine",), ((0, 3),), b"")
        collect(core, seq)
        assert not core.collectives.is_answered
    assert core.counts().duplicates == 0 + 1 + 2 + 3


@pytest.mark.parametrize("runs", [[0], [0, 0], [2, 1], [-2, 1], [0, -1]])
def test_an_answer_whose_runs_do_not_fit_its_payloads_is_an_error(runs: list[int]) -> None:
    core = make_core()
    core.begin_collective("mean")
    control(core, COORDINATOR, Collected(seq=1, payloads=[b"a"], runs=runs, values=b"", error=""))
    with pytest.raises(
        ProtocolError, match="the coordinator sent Collected of 1 payloads with runs"
    ):
        core.collectives.take()


def test_what_each_has_brought_is_told_as_runs_of_workers() -> None:
    brought = Brought((b"a", b"b"), ((0, 2), (1, 1), (0, 1), (2, 2)), b"")
    assert brought.num_workers == 6
    assert [brought.of(each) for each in range(6)] == [b"a", b"a", b"b", b"a", None, None]
    assert brought.unlike(b"a") == [2, 4, 5]
    assert brought.unlike(b"b") == [0, 1, 3, 4, 5]
    assert brought.unlike(b"c") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(InvariantError):
        brought.of(6)


def test_who_is_absent_is_named_as_far_as_told() -> None:
    core = make_core()
    core.begin_collective("mean")
    assert control(core, COORDINATOR, Absent(seq=1, workers=[2, 5], num_absent=9)) == [
        Warn("the collective waits for workers 2, 5 and 7 more")
    ]


def test_a_failed_collective_is_an_error_in_the_coordinators_words_and_is_over() -> None:
    core = make_core()
    core.begin_collective("save", b"")
    collect(core, 1, error="save was called by worker 0 only")
    with pytest.raises(CollectiveError, match=r"^save was called by worker 0 only$"):
        core.collectives.take()
    assert core.begin_collective("save", b"")


@pytest.mark.parametrize(
    ("peer", "seq"), [(COORDINATOR, 0), (COORDINATOR, 2), (server_id(1), 1), (worker_id(3), 1)]
)
@pytest.mark.parametrize("kind", ["Collected", "Absent"])
def test_an_answer_to_what_was_not_entered_is_an_error_that_names_the_peer(
    peer: int, seq: int, kind: str
) -> None:
    core = make_core()
    core.begin_collective("mean", b"")
    message = (
        Collected(seq=seq, payloads=[], runs=[], values=b"", error="")
        if kind == "Collected"
        else Absent(seq=seq, workers=[1], num_absent=1)
    )
    name = "worker 3" if peer == worker_id(3) else f"server {peer}"
    with pytest.raises(ProtocolError, match=rf"worker 0: {name} sent {kind} of collective {seq}"):
        control(core, peer, message)


def test_who_is_absent_is_said_while_it_matters_and_not_afterwards() -> None:
    core = make_core()
    core.begin_collective("mean", b"")
    assert control(core, COORDINATOR, Absent(seq=1, workers=[2, 5], num_absent=2)) == [
        Warn("the collective waits for workers 2, 5")
    ]
    assert control(core, COORDINATOR, Absent(seq=1, workers=[5], num_absent=1)) == [
        Warn("the collective waits for worker 5")
    ]
    assert control(core, COORDINATOR, Absent(seq=1, workers=[5], num_absent=2)) == [
        Warn("the collective waits for worker 5 and 1 more")
    ]
    assert control(core, COORDINATOR, Absent(seq=1, workers=[], num_absent=0)) == [
        Warn("the collective waits for workers that are on their way")
    ]
    collect(core, 1)
    for num_absent in (1, 9):
        late = Absent(seq=1, workers=[5], num_absent=num_absent)
        assert control(core, COORDINATOR, late) == []
