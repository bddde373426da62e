"""Credits that come back with a receipt, before the reply."""

from __future__ import annotations

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Arrived
from psdist.protocol.header import Flag, Header, Kind
from psdist.workers.protocol.actions import SendPush
from psdist.workers.protocol.transfers import Transfers
from tests.unit.workers.protocol.test_transfer_limits import arrive, begin, make, reply, sends


def receipt(chunk: int, *, clock: int = 0, server: int | None = None) -> Header:
    owner = (0, 2, 0, 2)[chunk] if server is None else server
    return Header(kind=Kind.RECEIPT, sender=owner, chunk=chunk, clock=clock)


def outstanding(transfers: Transfers) -> dict[int, int]:
    return {server: number for server, number in transfers.outstanding.items() if number}


@pytest.mark.parametrize(
    ("mine", "credits", "asking"),
    [
        ((0, 1, 2, 3), 1, {0, 1, 2, 3}),
        ((0, 1, 2), 1, {0, 2}),
        ((0, 1, 2, 3), 2, set()),
        ((), 1, set()),
    ],
)
def test_receipts_are_asked_of_servers_to_which_there_is_more_to_push_than_credits(
    mine: tuple[int, ...], credits: int, asking: set[int]
) -> None:
    transfers = make(mine=mine, credits=credits)
    actions = begin(transfers)
    pushed = []
    while actions:
        action = actions.pop(0)
        assert isinstance(action, SendPush)
        pushed.append(action.header)
        actions += arrive(transfers, reply(action.header.chunk))
    assert {each.chunk for each in pushed if each.flags == Flag.RECEIPT} == asking
    assert {each.flags for each in pushed if each.chunk not in asking} <= {Flag.NONE}


def test_a_receipt_lets_the_next_push_go_and_the_reply_then_brings_no_credit() -> None:
    transfers = make(mine=(0, 2), credits=1)
    assert sends(begin(transfers)) == [(0, 0)]
    assert sends(arrive(transfers, receipt(0))) == [(0, 2)]
    assert outstanding(transfers) == {0: 1}
    assert arrive(transfers, reply(0)) == []
    assert outstanding(transfers) == {0: 1}
    assert arrive(transfers, reply(2)) == []
    assert outstanding(transfers) == {}
    assert transfers.missing() == []
    assert transfers.duplicates == 0


def test_the_reply_to_one_push_and_the_receipt_of_another_are_a_credit_each() -> None:
    transfers = make(mine=(0, 2), credits=1)
    begin(transfers)
    assert sends(arrive(transfers, reply(0))) == [(0, 2)]
    assert arrive(transfers, receipt(2)) == []
    assert outstanding(transfers) == {}
    assert transfers.missing() == [(2, 0)]
    assert arrive(transfers, reply(2)) == []
    assert sends(begin(transfers, clock=1)) == [(0, 0)]
    assert sends(arrive(transfers, receipt(0, clock=1))) == [(0, 2)]


def test_a_second_receipt_and_one_behind_its_reply_are_duplicates() -> None:
    transfers = make(mine=(0, 2), credits=1)
    begin(transfers)
    arrive(transfers, receipt(0))
    assert arrive(transfers, receipt(0)) == []
    assert transfers.duplicates == 1
    arrive(transfers, reply(0))
    assert arrive(transfers, receipt(0)) == []
    arrive(transfers, reply(2))
    begin(transfers, clock=1)
    assert arrive(transfers, receipt(0)) == []
    assert outstanding(transfers) == {0: 1}
    assert transfers.duplicates == 3
    transfers.check_invariants()


@pytest.mark.parametrize(
    ("header", "peer"),
    [
        (receipt(2), 0),  # waits for a credit
        (receipt(0, clock=1), 0),
        (receipt(0, clock=-1), 0),
        (receipt(0), 2),
        (receipt(1), 2),  # not in the slice
        (receipt(3), 2),  # the only one for that server: it has not asked
        (receipt(0)._replace(chunk=4), 0),
    ],
)
def test_a_receipt_of_what_was_not_sent_or_has_not_asked_for_one_names_the_server(
    header: Header, peer: int
) -> None:
    transfers = make(mine=(0, 2, 3), credits=1)
    begin(transfers)
    told = (
        f"worker 0: server {peer} sent a receipt of iteration {header.clock} of chunk "
        f"{header.chunk}, which this worker has not sent it, or not asked one for"
    )
    with pytest.raises(ProtocolError, match=told):
        transfers.on_arrived(Arrived(peer, header, None))


def test_a_reply_that_is_being_received_is_not_over_with_a_receipt() -> None:
    transfers = make(mine=(0, 2), credits=1)
    begin(transfers)
    transfers.incoming.add(0)
    arrive(transfers, receipt(0))
    assert transfers.incoming == {0}


def test_a_credit_that_came_back_twice_contradicts_itself() -> None:
    transfers = make(mine=(0, 2), credits=1)
    begin(transfers)
    transfers.received.add(0)
    with pytest.raises(InvariantError, match="owes 2 replies; 1 messages were sent, 1 received"):
        transfers.check_invariants()
