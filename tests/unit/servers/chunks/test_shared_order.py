"""Why pushes do not deadlock: one order that all groups share, and credits that come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from psdist.errors import ProtocolError
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
    HeldBlocks,
    Hold,
    Receipt,
    Reply,
    ReplySent,
    SumMoved,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for

NUM_CHUNKS = 16
CREDITS = 4
UP, DOWN = range(NUM_CHUNKS), range(NUM_CHUNKS)[::-1]
MIXED = Random(3).sample(UP, NUM_CHUNKS)


def iterate(
    *orders: Sequence[int],
    told: Sequence[int] = (),
    slots: int,
    has_receipts: bool = True,
    max_norm: float = 0.0,
    times: int = 2,
    is_refusing: bool = True,
    is_empty: bool = False,
) -> int:
    """Every group, of one worker, pushes all chunks in its order, ``times`` times in turn; how many
    replies come before nothing happens any more. ``told``: the chief's order;
    ``is_refusing``: whether the server refuses another one."""
    groups = range(len(orders))
    core = assemble_core(
        server=0, make_rule=rule_for("sync", staleness=0), groups=[(group,) for group in groups]
    )
    if not is_refusing:
        core._refuse_order = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
    setup = Setup(partition=b"", optimizer="", hyper=b"", max_norm=max_norm, order=list(told))
    core.handle(ControlArrived(worker_id(0), setup))
    sizes = (4,) * NUM_CHUNKS
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * NUM_CHUNKS,
        smallest=sizes,
        largest=sizes,
    )
    for failed in core.handle(
        Built(
            range(NUM_CHUNKS),
            [Frame(capacity=4) for _ in range(slots)],
            initials=rule,
            pushes=rule,
            num_pieces=1,
            num_optimizer_groups=1,
            blocks=HeldBlocks([0] * NUM_CHUNKS, [1] * NUM_CHUNKS),
        )
    ):
        assert isinstance(failed, Fail)
        raise failed.error
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
                    length=0 if is_empty else 4,
                    dtype=Dtype.FLOAT32,
                    flags=Flag.RECEIPT if has_receipts else Flag.NONE,
                )
                if is_empty:
                    events.append(Arrived(header.sender, header, None))
                    continue
                what = Kind.PUSH, chunk, 4, header
                events.append(Offered(header.sender, *what, clock=header.clock))

    send()
    while events:
        for action in core.handle(events.popleft()):
            if isinstance(action, Fail):
                raise action.error
            if isinstance(action, Accept):
                events.append(Arrived(action.ticket.sender, action.ticket, action.slot))
            elif isinstance(action, Hold):
                events.append(SumMoved(action.chunk, (1.0,)))
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


@pytest.mark.parametrize("order", [UP, DOWN, MIXED], ids=["up", "down", "mixed"])
@pytest.mark.parametrize("slots", [2, 3, 64])
@pytest.mark.parametrize("has_receipts", [False, True])
def test_groups_that_share_an_order_all_get_through_with_two_slots(
    order: Sequence[int], slots: int, has_receipts: bool
) -> None:
    replies = iterate(order, order, order, told=order, slots=slots, has_receipts=has_receipts)
    assert replies == 3 * 2 * NUM_CHUNKS


@pytest.mark.parametrize("order", [DOWN, MIXED], ids=["down", "mixed"])
def test_where_slots_are_kept_for_another_order_a_shared_one_does_not_help(
    order: Sequence[int],
) -> None:
    assert iterate(order, order, order, slots=2, is_refusing=False) == 0


def test_opposite_orders_deadlock_whatever_the_slots_where_credits_wait_for_replies() -> None:
    assert iterate(UP, DOWN, slots=64, has_receipts=False, is_refusing=False) == 0


def test_opposite_orders_deadlock_with_receipts_too_where_there_are_fewer_slots_than_chunks() -> (
    None
):
    assert iterate(UP, DOWN, slots=64, is_refusing=False) == 2 * 2 * NUM_CHUNKS
    assert iterate(UP, DOWN, slots=4, is_refusing=False) == 0


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize(
    ("orders", "told", "words"),
    [
        ((UP, DOWN), UP, "worker 1 pushed iteration 0 of chunk 14 after iteration 0 of chunk 15"),
        ((UP, DOWN), DOWN, "worker 0 pushed iteration 0 of chunk 1 after iteration 0 of chunk 0"),
        ((UP, UP), DOWN, "worker 0 pushed iteration 0 of chunk 1 after iteration 0 of chunk 0"),
        (
            (UP, [0, 1, 2, 4, 3, *range(5, NUM_CHUNKS)]),
            UP,
            "worker 1 pushed iteration 0 of chunk 3 after iteration 0 of chunk 4",
        ),
    ],
)
def test_a_push_out_of_the_order_that_all_share_is_refused_whatever_the_slots(
    orders: tuple[Sequence[int], ...], told: Sequence[int], words: str, slots: int, is_empty: bool
) -> None:
    with pytest.raises(
        ProtocolError, match=f"server 0: {words}; all groups push in the chief's order"
    ):
        iterate(*orders, told=told, slots=slots, is_empty=is_empty)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([*UP][:-1], "leaves chunk 15 out"),
        ([*UP, 3], "names chunk 3 twice"),
        ([0, 0, *range(2, NUM_CHUNKS)], "names chunk 0 twice"),
        ([*range(1, NUM_CHUNKS + 1)], "names chunk 16; the set has 16 chunks"),
        ([-1, *range(1, NUM_CHUNKS)], "names chunk -1; the set has 16 chunks"),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(told: list[int], words: str) -> None:
    with pytest.raises(ProtocolError, match=f"worker 0 sent Setup with an order that {words}$"):
        iterate(UP, told=told, slots=4)


@pytest.mark.parametrize("order", [UP, DOWN, MIXED], ids=["up", "down", "mixed"])
@pytest.mark.parametrize("slots", [2, 3, 64])
def test_held_steps_get_through_with_two_slots_because_receipts_bring_credits_back(
    slots: int, order: Sequence[int]
) -> None:
    replies = iterate(order, order, order, told=order, slots=slots, max_norm=1.0)
    assert replies == 3 * 2 * NUM_CHUNKS


def test_held_steps_would_wait_for_ever_for_pushes_that_have_no_credit() -> None:
    assert iterate(UP, UP, slots=64, max_norm=1.0, has_receipts=False) == 0
