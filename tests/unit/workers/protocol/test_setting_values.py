"""The chief sends its values of every chunk, and each is receipted."""

from __future__ import annotations

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Arrived
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id
from psdist.workers.protocol.actions import SendValues
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    SETUP,
    make_core,
    offer,
    push,
    receipt_of,
    register,
    reply_to,
)


def arrive(core: WorkerCore, header: Header) -> list[Header]:
    """The headers that are sent then."""
    actions = core.handle(Arrived(header.sender, header, None))
    core.check_invariants()
    return headers(actions)


def headers(actions: object) -> list[Header]:
    assert isinstance(actions, list)
    assert all(isinstance(each, SendValues) for each in actions)
    return [each.header for each in actions]


def receipt(header: Header) -> Header:
    return receipt_of(header, pull_number=header.pull_number)


def test_all_chunks_of_the_model_go_to_their_servers_as_far_as_credits_last() -> None:
    core = make_core(members=(0, 1), credits=2)  # whose slice is half of them
    actions = core.begin_load(clock=0)
    assert [(each.peer, each.header.chunk) for each in actions] == [
        (server_id(OWNERS[chunk]), chunk) for chunk in (0, 2, 1, 3)
    ]
    waiting = headers(actions)
    sent: list[int] = []
    assert core.awaits() == "servers to set the values of job.set_parameters"
    while waiting:
        header = waiting.pop(0)
        sent.append(header.chunk)
        assert (header.kind, header.pull_number, header.length) == (Kind.INIT, 1, BYTES)
        assert not core.is_idle
        waiting += arrive(core, receipt(header))
    assert sorted(sent) == list(range(len(OWNERS)))
    assert core.is_idle
    assert not core.versions, "nothing in place has changed"


def test_second_receipts_are_duplicates() -> None:
    core = make_core(credits=9)
    for number in (1, 2):
        sent = headers(core.begin_load(clock=0))
        for header in sent:
            assert header.pull_number == number
            arrive(core, receipt(header))
            arrive(core, receipt(header))
    arrive(core, receipt(sent[0]._replace(pull_number=1)))
    assert core.counts().duplicates == 2 * len(sent) + 1


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"pull_number": 2}, "receipt of iteration 0 of chunk 0, number 2, which this worker"),
        ({"chunk": 4}, "receipt of iteration 0 of chunk 4, number 1, which this worker"),
        ({"sender": server_id(1)}, "receipt of iteration 0 of chunk 0, number 1, which this"),
        ({"chunk": 6}, "receipt of iteration 0 of chunk 6, number 1, which this worker"),
        ({"pull_number": 0}, "receipt of iteration 0 of chunk 0, which this worker has not"),
    ],
)
def test_a_receipt_of_what_was_not_sent_names_the_server(
    changed: dict[str, int], told: str
) -> None:
    core = make_core()
    first, *_ = headers(core.begin_load(clock=0))
    wrong = receipt(first)._replace(**changed)
    with pytest.raises(ProtocolError, match=told):
        core.handle(Arrived(wrong.sender, wrong, None))


def test_parameters_are_no_answer_to_values() -> None:
    core = make_core()
    first, *_ = headers(core.begin_load(clock=0))
    reply = reply_to(first)
    told = "sent a message of kind 2 about chunk 0; server 0 owes a receipt"
    with pytest.raises(ProtocolError, match=told):
        core.handle(offer(reply))
    with pytest.raises(ProtocolError, match=told):
        core.handle(Arrived(reply.sender, reply, None))


def test_the_chief_alone_sets_values_and_not_while_anything_is_under_way() -> None:
    with pytest.raises(InvariantError, match="worker 1 sets values; the chief does"):
        make_core(1, members=(0, 1)).begin_load(clock=0)
    core = make_core()
    push(core)
    with pytest.raises(InvariantError, match="began before the last push or pull was over"):
        core.begin_load(clock=1)
    core = make_core()
    register(core)
    core.begin_collective("push")
    with pytest.raises(InvariantError, match="between collectives"):
        core.begin_load(clock=0)


def test_pulls_and_values_are_counted_together() -> None:
    """The server tells old deliveries by the number, of either."""
    core = make_core(credits=9)
    numbers = []
    for header in headers(core.begin_load(clock=0)):
        numbers.append(header.pull_number)
        arrive(core, receipt(header))
    (action, *_) = core.transfers.begin_pull(clock=0, chunks=[0], is_fresh=True)
    assert set(numbers) == {1}
    assert action.header.pull_number == 2  # type: ignore[union-attr]


def test_no_values_are_set_before_the_initial_ones_have_left() -> None:
    core = make_core()
    core.begin_setup(SETUP)
    assert core.membership.is_joining
    with pytest.raises(InvariantError, match="worker 0 sets values; the chief does, between coll"):
        core.begin_load(clock=0)
