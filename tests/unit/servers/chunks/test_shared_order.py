"""Why pushes do not deadlock: one order that all groups share, and credits that come back."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from psdist.protocol.control import Register, Settings, Setup
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import worker_id, worker_of
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Built,
    Fail,
    Held,
    HeldBlocks,
    Hold,
    Receipt,
    Reply,
    ReplySent,
)
from psdist.servers.protocol.chunks.policy import policy_for
from psdist.servers.protocol.state import ServerCore

NUM_CHUNKS = 16
CREDITS = 4
UP, DOWN = range(NUM_CHUNKS), range(NUM_CHUNKS)[::-1]


def iterate(
    *orders: range, slots: int, has_receipts: bool = True, max_norm: float = 0.0, times: int = 2
) -> int:
    """Every group, of one worker, pushes all chunks in its order, ``times`` times in turn; how many
    replies come before nothing happens any more."""
    groups = range(len(orders))
    core = ServerCore(
        server=0, policy=policy_for("sync", staleness=0), groups=[(group,) for group in groups]
    )
    setup = Setup(partition=b"", optimizer="", hyper=b"", max_norm=max_norm)
    core.handle(ControlArrived(worker_id(0), setup))
    sizes = (4,) * NUM_CHUNKS
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * NUM_CHUNKS,
        smallest=sizes,
        largest=sizes,
    )
    core.handle(
        Built(
            range(NUM_CHUNKS),
            [Frame(capacity=4) for _ in range(slots)],
            initials=rule,
            pushes=rule,
            num_pieces=1,
            num_optimizer_groups=1,
            blocks=HeldBlocks([0] * NUM_CHUNKS, [1] * NUM_CHUNKS),
        )
    )
    hyper = pack_hyperparameters([{"lr": 0.1}])
    for group in groups:
        register = Register(group=group, workers=[group], clock=0)
        core.handle(ControlArrived(worker_id(group), register))
        settings = Settings(version=1, hyper=hyper, absent=[])
        core.handle(ControlArrived(worker_id(group), settings))
    to_send = [deque(order) for order in orders]
    credits = [CREDITS for _ in groups]
    replies = [0 for _ in groups]
    received: set[tuple[int, int]] = set()
    events: deque[Any] = deque()

    def send() -> None:
        for group in groups:
            while to_send[group] and credits[group]:
                credits[group] -= 1
                chunk = to_send[group].popleft()
                header = Header(
                    kind=Kind.PUSH,
                    sender=worker_id(group),
                    group=group,
                    chunk=chunk,
                    clock=replies[group] // NUM_CHUNKS,
                    settings=1,
                    weight=1.0,
                    length=4,
                    dtype=Dtype.FLOAT32,
                    flags=Flag.RECEIPT if has_receipts else Flag.NONE,
                )
                events.append(Offered(header.sender, Kind.PUSH, chunk, 4, header))

    send()
    while events:
        for action in core.handle(events.popleft()):
            assert not isinstance(action, Fail), action
            if isinstance(action, Accept):
                events.append(Arrived(action.ticket.sender, action.ticket, action.slot))
            elif isinstance(action, Hold):
                events.append(Held(action.chunk, (1.0,)))
            elif isinstance(action, Receipt):
                credits[worker_of(action.peer)] += 1
                received.add((action.peer, action.chunk))
            elif isinstance(action, Reply):
                group = worker_of(action.token.peer)
                replies[group] += 1
                if (action.token.peer, action.token.chunk) in received:
                    received.remove((action.token.peer, action.token.chunk))
                else:
                    credits[group] += 1
                if not replies[group] % NUM_CHUNKS and replies[group] < times * NUM_CHUNKS:
                    to_send[group].extend(orders[group])
                events.append(ReplySent(action.token))
        core.check_invariants()
        send()
    return sum(replies)


@pytest.mark.parametrize("slots", [2, 3, 64])
@pytest.mark.parametrize("has_receipts", [False, True])
def test_groups_that_share_the_ascending_order_all_get_through_with_two_slots(
    slots: int, has_receipts: bool
) -> None:
    replies = iterate(UP, UP, UP, slots=slots, has_receipts=has_receipts)
    assert replies == 3 * 2 * NUM_CHUNKS


def test_opposite_orders_deadlock_whatever_the_slots_where_credits_wait_for_replies() -> None:
    assert iterate(UP, DOWN, slots=64, has_receipts=False) == 0


def test_opposite_orders_deadlock_with_receipts_too_where_there_are_fewer_slots_than_chunks() -> (
    None
):
    assert iterate(UP, DOWN, slots=64) == 2 * 2 * NUM_CHUNKS
    assert iterate(UP, DOWN, slots=4) == 0


@pytest.mark.parametrize("slots", [2, 3, 64])
def test_held_steps_get_through_with_two_slots_because_receipts_bring_credits_back(
    slots: int,
) -> None:
    assert iterate(UP, UP, UP, slots=slots, max_norm=1.0) == 3 * 2 * NUM_CHUNKS


def test_held_steps_would_wait_for_ever_for_pushes_that_have_no_credit() -> None:
    assert iterate(UP, UP, slots=64, max_norm=1.0, has_receipts=False) == 0
