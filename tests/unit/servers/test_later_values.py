"""Values that the chief sets in the middle of a run: when a server takes them, and where to."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvariantError
from psdist.protocol.control import Suspend
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import (
    Accept,
    Fail,
    Load,
    Receipt,
    Reply,
    ReplySent,
    Step,
    Unchanged,
)
from psdist.servers.protocol.state import ServerCore
from tests.unit.servers.test_state import core_of, only, push

CHIEF = worker_id(0)
MODES = ("sync", "ssp", "async")


def values(number: int, *, clock: int = 0, length: int = 4) -> Header:
    return Header(
        kind=Kind.INIT, sender=CHIEF, chunk=0, clock=clock, pull_number=number, length=length,
        dtype=Dtype.FLOAT32,
    )  # fmt: skip


def bring(core: ServerCore, header: Header) -> tuple[list[Any], Frame]:
    """Actions that follow when they are offered and have arrived, and the slot."""
    (accept,) = core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "ticket"))
    assert isinstance(accept, Accept)
    actions = core.handle(Arrived(CHIEF, header, accept.slot))
    core.check_invariants()
    return actions, accept.slot


def pull(core: ServerCore, worker: int, number: int, *, clock: int = 0, held: int = 0) -> Any:
    header = Header(
        kind=Kind.PULL, sender=worker_id(worker), chunk=0, clock=clock, pull_number=number,
        flags=Flag.FRESH, chunk_version=held,
    )  # fmt: skip
    (answer,) = core.handle(Arrived(worker_id(worker), header, None))
    return answer


def loaded(mode: str = "async", **settings: Any) -> ServerCore:
    core = core_of(mode, **settings)
    bring(core, values(0))
    return core


@pytest.mark.parametrize("mode", MODES)
def test_the_chiefs_values_make_a_version_and_are_receipted_with_their_number(mode: str) -> None:
    core = loaded(mode)
    actions, slot = bring(core, values(3))
    assert actions == [Load(0, slot, 0, 0, 0, 3), Receipt(CHIEF, 0, 0, 3)]
    assert isinstance(pull(core, 1, 1, held=1), Reply)
    assert pull(core, 1, 2, held=2).version == 2
    assert isinstance(pull(core, 1, 3, held=2), Unchanged)


@pytest.mark.parametrize("mode", MODES)
def test_they_come_behind_the_updates_of_all_groups(mode: str) -> None:
    core = loaded(mode)
    sent = [*push(core, 0, 0), *push(core, 1, 0)]
    steps = only(sent, Step)
    for reply in only(sent, Reply):
        core.handle(ReplySent(reply.token))
    actions, slot = bring(core, values(1, clock=1))
    assert actions[0] == Load(0, slot, steps[-1].target, 0, 1, 1)
    (step,) = only([*push(core, 0, 1), *push(core, 1, 1)], Step)[:1]
    assert step.source == steps[-1].target


def test_a_second_delivery_is_dropped_and_an_older_number_too() -> None:
    core = loaded()
    bring(core, values(3))
    for number in (3, 2, 1, 0):
        actions, _ = bring(core, values(number))
        assert actions == []
    assert core.statistics().duplicates == 4
    actions, _ = bring(core, values(4))
    assert [type(each) for each in actions] == [Load, Receipt]


def test_a_buffer_that_an_open_reply_reads_is_not_written() -> None:
    core = loaded()
    reply = pull(core, 1, 1)
    (load, _), _ = bring(core, values(1))
    assert (reply.token.buffer, load.target) == (0, 1)
    assert pull(core, 1, 2).token.buffer == 1


def test_values_wait_in_their_slot_while_replies_from_both_buffers_are_open() -> None:
    core = loaded(slots=2, groups=3)
    first = pull(core, 1, 1)
    bring(core, values(1))
    second = pull(core, 2, 1)
    assert (first.token.buffer, second.token.buffer) == (0, 1)
    actions, slot = bring(core, values(2))
    assert actions == []
    assert core.rule.pool.num_free == 1
    done = core.handle(ReplySent(first.token))
    assert done == [Load(0, slot, 0, 0, 0, 2), Receipt(CHIEF, 0, 0, 2)]
    core.check_invariants()


def test_nobody_pushes_while_values_wait() -> None:
    core = loaded(groups=3)
    for worker in (1, 2):
        pull(core, worker, 1)
        actions, _ = bring(core, values(worker))
    assert actions == []
    (fail,) = push(core, 1, 0)
    assert isinstance(fail, Fail)
    assert str(fail.error) == "server 0: worker 1 pushed chunk 0, whose values are being set"


def test_values_that_wait_beside_a_free_buffer_contradict_the_state() -> None:
    core = loaded()
    chunk = core.chunk_states[0]
    chunk.loading = (0, 0, 1, Frame())  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="values wait to be set, and a buffer is free"):
        chunk.check_invariants()


def test_an_offer_behind_a_second_delivery_is_accepted_after_it() -> None:
    core = loaded(slots=2)
    (first,) = core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "first"))
    (again,) = core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "again"))
    assert core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "next")) == []
    assert core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "and next")) == []
    actions = core.handle(Arrived(CHIEF, values(1), first.slot))
    assert [each.ticket for each in only(actions, Accept)] == ["next"]
    actions = core.handle(Arrived(CHIEF, values(1), again.slot))
    assert [each.ticket for each in only(actions, Accept)] == ["and next"]


def test_a_suspended_chief_may_set_values() -> None:
    """All are in a collective."""
    core = loaded()
    core.handle(ControlArrived(CHIEF, Suspend(group=0, clock=0, seq=1)))
    actions, _ = bring(core, values(1))
    assert [type(each) for each in actions] == [Load, Receipt]


def refusal(core: ServerCore, header: Header) -> str:
    (accept,) = core.handle(Offered(CHIEF, Kind.INIT, 0, 4, "ticket"))
    (fail,) = core.handle(Arrived(CHIEF, header, accept.slot))
    assert isinstance(fail, Fail)
    return str(fail.error)


def test_values_are_refused_before_the_first_and_at_another_iteration() -> None:
    told = (
        "server 0: worker 0 set values of chunk 0 at iteration {}, in the middle of updates or "
        "before there were any values; the chunk contains {} of its group"
    )
    assert refusal(core_of("async"), values(1)) == told.format(0, 0)
    core = loaded()
    push(core, 0, 0)
    for clock in (0, 2, -1):
        assert refusal(core, values(1, clock=clock)) == told.format(clock, 1)


@pytest.mark.parametrize("group", [0, 1])
def test_values_are_refused_while_a_sum_is_gathered(group: int) -> None:
    core = loaded("sync")
    push(core, group, 0)
    assert "in the middle of updates" in refusal(core, values(1))


def test_values_of_another_size_are_refused() -> None:
    assert "sent 3 bytes of chunk 0" in refusal(loaded(), values(1, length=3))
