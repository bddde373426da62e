"""sync with backup groups, on a server that another one tells who contributes to a round."""

from __future__ import annotations

from functools import partial
from typing import Any

from psdist.protocol.control import CloseRound, Register, Settings, Setup, Suspend
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import Accept, Built, HeldBlocks, LeftOut, StartSum, Step
from psdist.servers.protocol.assembly import assemble_core
from psdist.servers.protocol.rules.backup import Backup


class Backed:
    def __init__(self, mine: int = 1) -> None:
        """``mine``: the chunk that this server has; the other server has the other one of two. The
        server of chunk 0, which all send first, decides."""
        self.mine = mine
        groups = [(0,), (1,), (2,)]
        rule = partial(Backup, backup=1, wait_every=9)
        self.core = assemble_core(server=0, make_rule=rule, groups=groups)
        self.core.handle(
            ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b""))
        )
        sizes = (4, 4)
        rule = PayloadRule(
            codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,) * 2, smallest=sizes,
            largest=sizes,
        )  # fmt: skip
        built = Built(
            [mine],
            [Frame(capacity=4) for _ in range(4)],
            initials=rule,
            pushes=rule,
            num_pieces=1,
            num_optimizer_groups=1,
            blocks=HeldBlocks([mine, 1 - mine], [1, 1]),
        )
        self.core.handle(built)
        hyper = pack_hyperparameters([{"lr": 0.1}])
        for group in range(3):
            self.tell(group, Register(group=group, workers=[group], clock=0))
            self.tell(group, Settings(version=1, hyper=hyper, absent=[]))

    def tell(self, worker: int, message: Any) -> list[Any]:
        return self._checked(ControlArrived(worker_id(worker), message))

    def close(self, *groups: int, missed: int, number: int = 0) -> list[Any]:
        closed = CloseRound(number=number, round=number, groups=list(groups), missed=[missed])
        return self._checked(ControlArrived(server_id(1), closed))

    def offer(self, group: int, clock: int = 0) -> list[Any]:
        offered = Offered(worker_id(group), Kind.PUSH, self.mine, 4, "ticket", clock=clock)
        return self._checked(offered)

    def arrive(self, group: int, slot: Frame | None, clock: int = 0) -> list[Any]:
        """Without a slot, a push without a gradient."""
        header = Header(
            kind=Kind.PUSH, sender=worker_id(group), group=group, chunk=self.mine, clock=clock,
            length=0 if slot is None else 4, settings=1, weight=1.0, dtype=Dtype.FLOAT32,
        )  # fmt: skip
        return self._checked(Arrived(worker_id(group), header, slot))

    def push(self, group: int, clock: int) -> list[Any]:
        offered = self.offer(group, clock)
        (accept,) = [each for each in offered if isinstance(each, Accept)]
        return [*offered, *self.arrive(group, accept.slot, clock)]

    def _checked(self, event: Any) -> list[Any]:
        actions = self.core.handle(event)
        self.core.check_invariants()
        return actions


def kinds(actions: list[Any]) -> list[type]:
    return [type(each) for each in actions]


def test_a_round_waits_for_the_word_that_a_group_has_stopped() -> None:
    """The server that decides knows it already: every log shows who was waited for."""
    backed = Backed()
    (accept,) = backed.offer(0)
    assert backed.arrive(0, accept.slot) == [], "who contributes is not known"
    assert backed.close(0, missed=1) == [], "group 2 counts here"
    told = backed.tell(2, Suspend(group=2, clock=0, seq=1))
    assert {StartSum, Step} <= set(kinds(told))


def test_an_update_that_is_too_late_takes_a_slot_at_once_and_is_dropped() -> None:
    backed = Backed()
    backed.close(0, 1, missed=2)
    (accept,) = backed.offer(2)
    assert isinstance(accept, Accept), "out of turn"
    dropped = backed.arrive(2, accept.slot)
    assert LeftOut in kinds(dropped)
    assert not {StartSum, Step} & set(kinds(dropped))
    (first,) = backed.offer(0)
    backed.arrive(0, first.slot)
    (second,) = backed.offer(1)
    assert Step in kinds(backed.arrive(1, second.slot))


def test_a_late_update_needs_no_turn_where_few_slots_are_free() -> None:
    backed = Backed()
    backed.close(0, 1, missed=2)
    backed.offer(2)
    early = backed.core.rule.slots_needed(backed.mine, 1)
    late = backed.core.rule.slots_needed(backed.mine, 2)
    assert late < early


def test_an_update_without_a_gradient_completes_the_step_of_its_round() -> None:
    backed = Backed()
    backed.close(0, 1, missed=2)
    (accept,) = backed.offer(0)
    backed.arrive(0, accept.slot)
    assert Step in kinds(backed.arrive(1, None))


def test_a_group_that_sits_out_continues_when_no_other_makes_the_round() -> None:
    backed = Backed(mine=0)
    for clock in range(2):
        backed.push(0, clock)
        assert Step in kinds(backed.push(2, clock))
    assert LeftOut not in kinds(backed.push(1, 0)), "it sits out round 2"
    assert LeftOut not in kinds(backed.tell(2, Suspend(group=2, clock=2, seq=1)))
    told = backed.tell(0, Suspend(group=0, clock=2, seq=1))
    assert [each for each in told if isinstance(each, LeftOut)] == [LeftOut(worker_id(1), 0, 0, 2)]


def test_a_round_names_its_groups_in_order() -> None:
    (fail,) = Backed().close(1, 0, missed=2)
    assert "sent CloseRound of the groups [1, 0], missed by [2]" in str(fail.error)
