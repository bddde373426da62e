"""What a worker sends again when the server that it was sent to has failed."""

from __future__ import annotations

from collections.abc import Sequence

from psdist.protocol.events import Arrived
from psdist.protocol.header import Flag, Header
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendPush
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.resending import ResendingTransfers
from tests.support.virtual.worker_machine import (
    OWNERS,
    PARTITION,
    RULE,
    offer,
    push,
    receipt_of,
    reply_to,
)


def made(*, credits: int) -> tuple[WorkerCore, ResendingTransfers]:
    seat = Seat(worker=0, group=7, members=(0,), num_servers=2, servers_have_buddies=True)
    core = WorkerCore(seat, describe_group=str)
    core.take_slice(PARTITION, owners=OWNERS, credits=credits, replies=RULE)
    transfers = core.transfers
    assert isinstance(transfers, ResendingTransfers)
    return core, transfers


def pushed(actions: Sequence[Action]) -> list[Header]:
    return [each.header for each in actions if isinstance(each, SendPush)]


def answer(core: WorkerCore, header: Header) -> list[Header]:
    """The reply to it has come; what leaves then."""
    reply = reply_to(header)
    core.handle(offer(reply))
    return pushed(core.handle(Arrived(reply.sender, reply, None)))


def test_what_that_server_has_not_answered_is_sent_again_before_the_rest_and_nothing_else() -> None:
    core, transfers = made(credits=2)
    sent = pushed(push(core))
    assert [each.chunk for each in sent] == [0, 2, 1, 3]
    answer(core, sent[0])  # chunk 4 leaves in its place
    again = pushed(transfers.send_again(0))
    assert [each.chunk for each in again] == [2, 4]
    assert all(each.flags & Flag.RETRANSMIT for each in again)
    (third, *more) = answer(core, sent[2])
    assert (third.chunk, third.flags & Flag.RETRANSMIT, more) == (5, 0, [])


def test_what_waits_to_be_sent_again_is_sent_once_though_the_next_one_dies_as_well() -> None:
    core, transfers = made(credits=1)
    sent = [each for each in pushed(push(core)) if OWNERS[each.chunk] == 0]
    for _ in range(2):  # what has been received makes room, and is not answered yet
        receipt = receipt_of(sent[-1])
        sent += pushed(core.handle(Arrived(receipt.sender, receipt, None)))
    assert [each.chunk for each in sent] == [0, 2, 4]
    assert [each.chunk for each in pushed(transfers.send_again(0))] == [0]
    again = pushed(transfers.send_again(0))
    seen = []
    while again:
        seen += [each.chunk for each in again]
        again = answer(core, again[0])
    assert seen == [0, 2, 4]
