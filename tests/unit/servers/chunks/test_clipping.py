"""Held steps: when chunks are held, the messages between servers, and the steps then."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from psdist.errors import InvariantError, NonFiniteGradientError, ProtocolError
from psdist.protocol.control import Leave, Register, Settings, Setup, SumsOfSquares
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Build,
    Built,
    Contribution,
    EmptyStep,
    Fail,
    Fold,
    HeldBlocks,
    Hold,
    Receipt,
    Reply,
    ReplySent,
    SendControl,
    SlotContent,
    StartSum,
    Step,
    SumMoved,
    Unchanged,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.rules.clipping import Clipped, coefficient

HYPER = pack_hyperparameters([{"lr": 0.1}])
NORM = 2.0


class Server:
    """Server 1; ``owners`` and ``numbers`` (of blocks) by chunk. Groups of one worker."""

    def __init__(
        self,
        owners: Sequence[int] = (1, 1),
        numbers: Sequence[int] | None = None,
        *,
        groups: int = 2,
        slots: int = 4,
        mode: str = "sync",
        order: Sequence[int] = (),
    ) -> None:
        self.core = assemble_core(
            server=1,
            make_rule=rule_for(mode, staleness=1),
            groups=[(group,) for group in range(groups)],
        )
        self.setup = Setup(partition=b"", optimizer="", hyper=b"", max_norm=NORM, order=list(order))
        assert self.handle(ControlArrived(worker_id(0), self.setup)) == [Build(self.setup)]
        sizes = (4,) * len(owners)
        rule = PayloadRule(
            codec=CodecCode.RAW,
            name="raw",
            dtypes=(Dtype.FLOAT32,) * len(owners),
            smallest=sizes,
            largest=sizes,
        )
        self.slots = [Frame(capacity=4) for _ in range(slots)]
        built = Built(
            [chunk for chunk, owner in enumerate(owners) if owner == 1],
            self.slots,
            initials=rule,
            pushes=rule,
            num_pieces=4,
            num_optimizer_groups=1,
            blocks=HeldBlocks(owners, numbers or [1] * len(owners)),
        )
        assert self.handle(built) == []
        for group in range(groups):
            register = Register(group=group, workers=[group], clock=0)
            self.handle(ControlArrived(worker_id(group), register))
            settings = Settings(version=1, hyper=HYPER, absent=[group])
            self.handle(ControlArrived(worker_id(group), settings))

    def handle(self, event: Any) -> list[Any]:
        actions = self.core.handle(event)
        if not any(isinstance(action, Fail) for action in actions):
            self.core.check_invariants()
        return actions

    def push(
        self, group: int, chunk: int, clock: int = 0, *, weight: float = 1.0, flags: int = 0
    ) -> list[Any]:
        """A gradient arrives in a slot."""
        header = self.header(group, chunk, clock)._replace(length=4, weight=weight, flags=flags)
        (accept,) = self.handle(Offered(header.sender, Kind.PUSH, chunk, 4, header, clock=clock))
        assert isinstance(accept, Accept)
        return self.handle(Arrived(header.sender, header, accept.slot))

    def push_nothing(self, group: int, chunk: int, clock: int = 0, *, flags: int = 0) -> list[Any]:
        header = self.header(group, chunk, clock)._replace(weight=1.0, flags=flags)
        return self.handle(Arrived(header.sender, header, None))

    def header(self, group: int, chunk: int, clock: int) -> Header:
        return Header(
            kind=Kind.PUSH,
            sender=worker_id(group),
            group=group,
            chunk=chunk,
            clock=clock,
            settings=1,
            dtype=Dtype.FLOAT32,
        )

    def hold(self, chunk: int, clock: int = 0, *, groups: int = 2) -> None:
        """All groups push."""
        for group in range(groups):
            actions = self.push(group, chunk, clock)
        assert [each for each in actions if isinstance(each, Hold)]

    def held(self, chunk: int, *squares: float) -> list[Any]:
        return self.handle(SumMoved(chunk, squares))

    def told(self, server: int, *values: float, round_: int = 0) -> list[Any]:
        packed = struct.pack(f"<{len(values)}d", *values)
        message = SumsOfSquares(round=round_, values=packed)
        return self.handle(ControlArrived(server_id(server), message))

    @property
    def clipped(self) -> Clipped:
        assert isinstance(self.core.rule, Clipped)
        return self.core.rule

    @property
    def num_free(self) -> int:
        return self.core.rule.pool.num_free


def kinds(actions: Sequence[Any]) -> list[type]:
    return [type(each) for each in actions]


def test_what_is_complete_is_held_and_its_slot_free_and_nothing_is_stepped() -> None:
    server = Server()
    (start,) = server.push(0, 0, weight=0.5)
    assert isinstance(start, StartSum)
    fold, hold = server.push(1, 0, weight=1.5)
    assert isinstance(fold, Fold)
    assert hold == Hold(0, start.slot, 0.5)
    assert server.num_free == 4
    assert server.held(0, 9.0) == []


def test_all_are_stepped_when_the_norm_is_known_in_the_order_in_which_they_are_sent() -> None:
    server = Server(order=(1, 0))
    server.hold(1)
    server.hold(0)
    assert server.held(0, 16.0) == []
    actions = server.held(1, 9.0)
    assert kinds(actions) == [Step, Reply, Reply] * 2
    pushes = tuple(Contribution(group, 0, 1.0, False) for group in (0, 1))
    for chunk in (0, 1):
        assert actions[3 * (1 - chunk)] == Step(
            chunk=chunk,
            gradient=None,
            content=SlotContent.HELD,
            gradient_scale=NORM / (5 + 1e-6),
            lr_scale=1.0,
            hyper=HYPER,
            absent=frozenset(),
            source=0,
            target=0,
            contributions=pushes,
        )
    assert [each.min_done for each in actions if isinstance(each, Reply)] == [1] * 4
    assert server.core.statistics().steps == 2


def test_a_piece_that_all_lack_is_left_out_of_the_step() -> None:
    server = Server((1,), groups=1)
    server.push(0, 0)
    step, _ = server.held(0, 1.0)
    assert step.absent == {0}
    assert step.gradient_scale == 1.0


@pytest.mark.parametrize(
    ("squares", "expected"),
    [
        ((), 1.0),
        ((0.0,), 1.0),
        ((9.0, 16.0), NORM / (5 + 1e-6)),
        ((NORM * NORM,), NORM / (NORM + 1e-6)),
        ((1.0,), 1.0),
        # One by one from the first: math.fsum, and any other order, would count the ones.
        ((2.0**54, *[1.0] * 4096), NORM / (2.0**27 + 1e-6)),
        ((*[1.0] * 4096, 2.0**54), NORM / (math.sqrt(2.0**54 + 4096) + 1e-6)),
    ],
)
def test_the_coefficient_is_that_of_torch_and_squares_are_added_one_by_one(
    squares: Sequence[float], expected: float
) -> None:
    assert coefficient(squares, NORM) == expected


def test_the_other_servers_that_hold_chunks_are_told_and_waited_for() -> None:
    server = Server((1, 3, 0, 1, 3), (2, 1, 1, 1, 3), order=(4, 3, 1, 0, 2))
    server.hold(3)
    server.held(3, 3.0)
    server.hold(0)
    message = SumsOfSquares(round=0, values=struct.pack("<3d", 1.0, 2.0, 3.0))
    assert server.held(0, 1.0, 2.0) == [SendControl(0, message), SendControl(3, message)]
    assert server.told(3, 4.0, 5.0, 6.0, 7.0) == []
    actions = server.told(0, 8.0)
    assert kinds(actions) == [Step, Reply, Reply] * 2
    assert [each.chunk for each in actions if isinstance(each, Step)] == [3, 0]
    assert actions[0].gradient_scale == NORM / (6 + 1e-6)


def test_others_may_be_ready_first() -> None:
    server = Server((0, 1))
    assert server.told(0, 3.0) == []
    server.hold(1)
    actions = server.held(1, 6.0)
    assert kinds(actions) == [SendControl, Step, Reply, Reply]
    assert actions[1].gradient_scale == NORM / (3 + 1e-6)


def test_a_server_that_has_heard_from_all_may_tell_the_next_rounds_sums_early() -> None:
    """Its chunks are stepped, answered and pushed again before this server has the third's sums."""
    server = Server((0, 1, 2))
    server.hold(1)
    server.held(1, 1.0)
    server.told(0, 2.0)
    assert server.told(0, 16.0, round_=1) == []
    step, *_ = server.told(2, 6.0)
    assert step.gradient_scale == NORM / (3 + 1e-6)
    server.hold(1, 1)
    (first, second) = server.held(1, 8.0)
    assert (first.message.round, second.message.round) == (1, 1)
    step, *_ = server.told(2, 1.0, round_=1)
    assert step.gradient_scale == NORM / (5 + 1e-6)


@pytest.mark.parametrize("mine", [0, 1])
@pytest.mark.parametrize("is_large_first", [False, True])
def test_squares_are_added_in_the_order_of_chunks_whoever_holds_them(
    mine: int, is_large_first: bool
) -> None:
    """Behind the large one the others are too small to count; before it they add up."""
    ones, large = (1.0,) * 4096, (2.0**54,)
    theirs = [large, ones] if is_large_first else [ones, large]
    owners = [mine, 1 - mine]
    server = Server(owners, [len(each) for each in theirs])
    server.told(0, *theirs[owners.index(0)])
    chunk = owners.index(1)
    server.hold(chunk)
    actions = server.held(chunk, *theirs[chunk])
    step = next(each for each in actions if isinstance(each, Step))
    total = 2.0**54 + (0 if is_large_first else 4096)
    assert step.gradient_scale == NORM / (math.sqrt(total) + 1e-6)


def test_where_a_chunk_is_held_without_a_gradient_the_next_ones_push_is_received() -> None:
    server = Server((1, 1), slots=2)
    assert server.push_nothing(0, 0) == []
    assert server.handle(Offered(worker_id(0), Kind.PUSH, 1, 4, "waits")) == []
    (accept,) = server.push_nothing(1, 0)
    assert isinstance(accept, Accept)
    assert accept.ticket == "waits"


def test_a_chunk_without_a_gradient_counts_as_zero_and_makes_no_step() -> None:
    server = Server((1, 1, 0), (1, 2, 1), order=(1, 0, 2))
    assert server.push_nothing(0, 1) == []
    assert server.push_nothing(1, 1) == []
    server.hold(0)
    message = SumsOfSquares(round=0, values=struct.pack("<3d", 16.0, 0.0, 0.0))
    assert server.held(0, 16.0) == [SendControl(0, message)]
    actions = server.told(0, 0.0)
    assert kinds(actions) == [EmptyStep, Reply, Reply, Step, Reply, Reply]
    assert actions[0] == EmptyStep(1, tuple(Contribution(g, 0, 1.0, True) for g in (0, 1)))


def test_an_iteration_without_a_gradient_steps_nothing() -> None:
    server = Server((1, 1))
    for chunk, group in ((0, 0), (0, 1), (1, 0)):
        assert server.push_nothing(group, chunk) == []
    assert kinds(server.push_nothing(1, 1)) == [EmptyStep, Reply, Reply] * 2
    assert server.core.statistics().steps == 0
    server.hold(0, 1)
    server.hold(1, 1)
    server.held(0, 0.0)
    assert kinds(server.held(1, 0.0)) == [Step, Reply, Reply] * 2


def test_rounds_follow_one_another() -> None:
    server = Server((0, 1))
    for number in range(3):
        server.hold(1, number)
        (tell,) = server.held(1, float(number))
        assert tell.message.round == number
        step, *_ = server.told(0, 4.0, round_=number)
        assert step.gradient_scale == min(1.0, NORM / (math.sqrt(4.0 + number) + 1e-6))
    assert server.core.statistics().steps == 3


def test_a_group_that_leaves_completes_what_waits_for_it() -> None:
    server = Server((1, 1))
    server.push(0, 0)
    server.push(0, 1)
    actions = server.handle(ControlArrived(worker_id(1), Leave(group=1, clock=0)))
    assert [each.chunk for each in actions if isinstance(each, Hold)] == [0, 1]
    server.held(0, 1.0)
    assert kinds(server.held(1, 1.0)) == [Step, Reply] * 2


def pull(server: Server, group: int, chunk: int, number: int) -> list[Any]:
    header = Header(
        kind=Kind.PULL, sender=worker_id(group), chunk=chunk, pull_number=number, flags=Flag.FRESH
    )
    return server.handle(Arrived(worker_id(group), header, None))


def test_a_step_waits_for_a_buffer_and_the_round_for_that_step() -> None:
    server = Server((1, 1), groups=4)
    server.core.chunk_states[0].is_loaded = True
    (first,) = pull(server, 2, 0, 1)
    server.core.chunk_states[0].current = 1
    (second,) = pull(server, 3, 0, 1)
    for group in (2, 3):
        server.handle(ControlArrived(worker_id(group), Leave(group=group, clock=0)))
    server.hold(0)
    server.hold(1)
    server.held(0, 1.0)
    actions = server.held(1, 8.0)
    assert kinds(actions) == [Step, Reply, Reply]
    assert actions[0].chunk == 1
    # Chunk 1 of the next round is complete, and waits until this one has ended.
    assert kinds(server.push(0, 1, 1)) == [StartSum]
    assert kinds(server.push(1, 1, 1)) == [Fold]
    step, *replies, hold = server.handle(ReplySent(first.token))
    assert (step.chunk, step.gradient_scale) == (0, NORM / (3 + 1e-6))
    assert (step.source, step.target) == (1, 0)
    assert kinds(replies) == [Reply, Reply]
    assert (hold.chunk, hold.scale) == (1, 0.5)
    assert (first.token.buffer, second.token.buffer) == (0, 1)
    assert server.core.statistics().copies_on_write == 1


def test_what_is_held_takes_no_slot_and_the_frontier_passes_it() -> None:
    """Two slots: an accumulator is only begun for the frontier."""
    server = Server((1,) * 6, slots=2)
    for chunk in range(6):
        server.hold(chunk)
        server.held(chunk, 1.0)
        assert server.num_free == 2
    for chunk in range(6):
        server.hold(chunk, 1)


def test_a_push_of_the_next_iteration_waits_behind_what_is_held() -> None:
    server = Server((1, 1, 0), groups=1)
    for chunk in (0, 1):
        server.push(0, chunk)
        server.held(chunk, 1.0)
    assert server.push_nothing(0, 0, 1) == []
    actions = server.told(0, 1.0)
    assert kinds(actions) == [Step, Reply, Step, Reply]
    assert server.clipped._squares == {0: (0.0,)}, "of the next round"


def test_a_push_that_is_held_is_acknowledged_where_that_is_asked_for() -> None:
    server = Server((1, 1))
    receipt = Receipt(worker_id(0), 0, 0)
    assert server.push(0, 0, flags=Flag.RECEIPT)[1:] == [receipt]
    assert server.push(1, 0, flags=Flag.RECEIPT)[-1] == Receipt(worker_id(1), 0, 0)
    assert server.push_nothing(0, 1, flags=Flag.RECEIPT) == [Receipt(worker_id(0), 1, 0)]


def test_a_second_push_or_one_that_asks_for_nothing_gets_no_receipt() -> None:
    server = Server((1, 1))
    server.push_nothing(0, 0, flags=Flag.RECEIPT)
    assert server.push_nothing(0, 0, flags=Flag.RECEIPT) == []
    assert server.push_nothing(0, 1, flags=Flag.CHECKSUMMED) == []


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_a_push_that_is_answered_at_once_needs_no_receipt(mode: str, held: int) -> None:
    """Whether its sender is sent parameters or holds them already."""
    header = Server((1,)).header(0, 0, 0)._replace(flags=Flag.RECEIPT, chunk_version=held)
    core = assemble_core(server=1, make_rule=rule_for(mode, staleness=0), groups=[(0,), (1,)])
    core.handle(
        ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"", max_norm=0.0))
    )
    rule = PayloadRule(codec=0, name="raw", dtypes=(Dtype.FLOAT32,), smallest=(4,), largest=(4,))
    core.handle(
        Built([0], [Frame()] * 3, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1)
    )
    for group in (0, 1):
        register = Register(group=group, workers=[group], clock=0)
        core.handle(ControlArrived(worker_id(group), register))
        settings = Settings(version=1, hyper=HYPER, absent=[])
        core.handle(ControlArrived(worker_id(group), settings))
    first = core.handle(Arrived(worker_id(0), header, None))
    other = header._replace(sender=worker_id(1), group=1)
    second = core.handle(Arrived(worker_id(1), other, None))
    receipt = Receipt(worker_id(0), 0, 0)
    reply = Unchanged if held else Reply
    answered = [[reply], [reply]] if mode == "async" else [[Receipt], [reply, reply]]
    for actions, expected in zip((first, second), answered, strict=True):
        assert [each for each in kinds(actions) if each is not EmptyStep] == expected
    assert (receipt in first) == (mode != "async")


# -- what is refused -------------------------------------------------------------------------------


def failure(actions: Sequence[Any]) -> Exception:
    (fail,) = actions
    assert isinstance(fail, Fail)
    return fail.error


@pytest.mark.parametrize(
    ("say", "told"),
    [
        (lambda s: s.told(2, 1.0), "server 1: server 2 sent sums of squares which holds nothing"),
        (lambda s: s.told(1, 1.0), "server 1 sent sums of squares which holds nothing that is"),
        (lambda s: s.told(worker_id(0), 1.0), "worker 0 sent sums of squares which holds nothing"),
        (lambda s: s.told(0, 1.0), "of 8 bytes; its 2 blocks need 8 each"),
        (lambda s: s.told(0, 1.0, 2.0, 3.0), "of 24 bytes; its 2 blocks need 8 each"),
        (lambda s: s.told(0, 1.0, 2.0, round_=1), "of round 1 in round 0$"),
        (lambda s: s.told(0, 1.0, 2.0, round_=-1), "of round -1 in round 0$"),
        (
            lambda s: [*s.told(0, 1.0, 2.0), *s.told(0, 1.0, 2.0)],
            "of round 0 in round 0, a second time",
        ),
        (
            lambda s: [
                *s.told(0, 1.0, 2.0),
                *s.told(0, 1.0, 2.0, round_=1),
                *s.told(0, 1.0, 2.0, round_=1),
            ],
            "of round 1 in round 0, a second time",
        ),
        (
            lambda s: [*s.told(0, 1.0, 2.0), *s.told(0, 1.0, 2.0, round_=2)],
            "of round 2 in round 0$",
        ),
        (lambda s: s.told(0, 1.0, math.nan), "that are not all finite and 0 or more"),
        (lambda s: s.told(0, math.inf, 1.0), "that are not all finite and 0 or more"),
        (lambda s: s.told(0, 1.0, -1.0), "that are not all finite and 0 or more"),
    ],
)
def test_wrong_sums_name_the_server(say: Callable[[Server], list[Any]], told: str) -> None:
    error = failure(say(Server((0, 1), (2, 1))))
    assert isinstance(error, ProtocolError)
    assert str(error).startswith("server 1: ")
    with pytest.raises(ProtocolError, match=told):
        raise error


def test_zero_is_a_sum_of_squares() -> None:
    assert Server((0, 1), (2, 1)).told(0, 0.0, 0.0) == []


def test_a_server_that_holds_nothing_is_told_nothing() -> None:
    error = failure(Server((0, 0)).told(0, 1.0, 1.0))
    assert "which holds nothing that is clipped with this server's chunks" in str(error)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_where_updates_are_applied_on_arrival_servers_do_not_clip(mode: str) -> None:
    server = Server((1,), mode=mode)
    assert kinds(server.push(0, 0))[0] is Step
    told = "server 0 sent SumsOfSquares, which this set does not take"
    assert told in str(failure(server.told(0, 1.0)))


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
    core = assemble_core(server=1, make_rule=rule_for("sync", staleness=0), groups=[(0,)])
    setup = Setup(partition=b"", optimizer="", hyper=b"", max_norm=norm)
    error = failure(core.handle(ControlArrived(worker_id(0), setup)))
    assert str(error) == f"server 1: worker 0 sent Setup with the norm {norm} to clip to"


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_gradients_that_are_too_large_together_are_told_of(wrong: float) -> None:
    server = Server((1, 1))
    server.hold(0)
    error = failure(server.held(0, wrong))
    assert isinstance(error, NonFiniteGradientError)
    assert str(error) == (
        "server 1: in round 0 the weighted mean of all groups' gradients of chunk 0 has no finite "
        "norm to clip; the gradients were finite, but too large together: lower the learning rate"
    )


# -- what contradicts itself -----------------------------------------------------------------------


def forget_that_it_is_held(server: Server) -> None:
    server.clipped._is_empty.clear()


def let_the_frontier_stay(server: Server) -> None:
    server.core.chunk_states[0].is_held = False


def hold_what_nobody_brought(server: Server) -> None:
    server.core.chunk_states[1].is_held = True
    server.clipped._is_empty[1] = True


def know_too_early(server: Server) -> None:
    server.clipped._coefficient = 1.0
    server.core.chunk_states[0].is_held = False


def learn_the_last_squares_and_do_nothing(server: Server) -> None:
    server.held(0, 1.0)
    server.clipped._squares[1] = (1.0,)
    server.clipped._told[2] = (1.0,)


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (forget_that_it_is_held, r"chunk 0 is stuck; missing: \[\]"),
        (let_the_frontier_stay, r"chunks \[\] are held, not \[0\]"),
        (hold_what_nobody_brought, r"a chunk of \[0, 1\] is held without a contribution"),
        (know_too_early, r"chunk 0 is stuck; missing: \[\]"),
        (learn_the_last_squares_and_do_nothing, "the coefficient None, all told: True"),
    ],
)
def test_a_state_that_contradicts_itself_is_told(
    break_it: Callable[[Server], None], told: str
) -> None:
    server = Server((1, 1, 2))
    server.hold(0)
    server.core.check_invariants()
    break_it(server)
    with pytest.raises(InvariantError, match=told):
        server.core.check_invariants()
