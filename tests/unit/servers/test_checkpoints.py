"""Checkpoints as servers and the coordinator decide about them: when one begins, what is kept, when
it is whole, and where clocks begin that resume from one."""

from __future__ import annotations

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.checkpoints import (
    FirstClocks,
    checkpoint_name,
    number_of,
    pack_clocks,
    unpack_clocks,
)
from psdist.protocol.control import (
    Collected,
    Done,
    Enter,
    Held,
    Leave,
    Progress,
    Register,
    Resume,
    Resumed,
    Setup,
    Suspend,
    WriteFailed,
    Written,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import Fail, MembershipEvent, SendControl, TakeSnapshot
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.checkpoints import (
    BeginCheckpoint,
    CompleteCheckpoint,
    DropCheckpoint,
)
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorAction
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.start import Start
from psdist.servers.protocol.state import ServerCore
from tests.unit.servers.test_state import built, core_of

PEERS = (server_id(0), worker_id(0), worker_id(1))
STEP = "step-00000003"


# -- names and clocks ------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [0, 7, 12345678, 123456789])
def test_a_name_says_its_clock(clock: int) -> None:
    assert number_of(checkpoint_name(clock)) == clock


@pytest.mark.parametrize(
    "name", ["", "step-7", "step-000000007", "step-0000000x", "../step-00000007"]
)
def test_what_is_no_name_has_no_clock(name: str) -> None:
    assert number_of(name) is None


def test_clocks_travel_as_they_are() -> None:
    assert unpack_clocks(pack_clocks([3, 0, 12])) == (3, 0, 12)
    for data in (b"", b"-1", b"1  2", b"x", b"1 " * 5000, b"9" * 30):
        assert unpack_clocks(data) is None


# -- the coordinator
# ---------------------------------------------------------------------------------


def enter(coordinator: Coordinator, seq: int, *clocks: str) -> list[CoordinatorAction]:
    actions: list[CoordinatorAction] = []
    for worker, each in enumerate(clocks):
        message = Enter(worker=worker, seq=seq, name="checkpoint", payload=each.encode())
        actions += coordinator.handle(worker_id(worker), message)
    return actions


def written(name: str = STEP) -> Written:
    return Written(checkpoint=name, num_bytes=9, crc32=1)


def begun() -> Coordinator:
    coordinator = assemble(num_workers=2, num_servers=1)
    resume = SendControl(server_id(0), Resume(seq=1, checkpoint=STEP))
    assert enter(coordinator, 1, "3 8", "5 1") == [BeginCheckpoint(STEP), resume]
    return coordinator


def test_a_checkpoint_is_named_after_the_lowest_clock_and_told_to_all() -> None:
    coordinator = begun()
    actions = coordinator.handle(server_id(0), Resumed(seq=1, server=0))
    answer = Collected(seq=1, payloads=[STEP.encode()], runs=[0, 2], values=b"", error="")
    assert actions == [SendControl(worker_id(worker), answer) for worker in (0, 1)]


@pytest.mark.parametrize(
    ("name", "is_met"), [("checkpoint", True), ("checkpoint", False), ("prepare", False)]
)
def test_workers_that_psdist_calls_together_at_different_clocks_have_missed_nothing(
    name: str, is_met: bool
) -> None:
    coordinator = assemble(num_workers=2, num_servers=1, mode="ssp", staleness=3)
    if is_met:
        for worker, clock in enumerate((3, 5)):
            held = Held(worker=worker, number=1, hold=1, what="checkpoint", clocks=[clock])
            coordinator.handle(worker_id(worker), held)
    actions: list[CoordinatorAction] = []
    for worker, clock in enumerate((3, 5)):
        progress = Progress(worker=worker, clock=clock, samples=clock)
        actions += coordinator.handle(worker_id(worker), progress)
        entered = Enter(worker=worker, seq=1, name=name, payload=b"%d" % clock)
        actions += coordinator.handle(worker_id(worker), entered)
    assert any(isinstance(each, Warn) for each in actions) == (name == "checkpoint" and not is_met)


def test_it_is_complete_when_everybody_has_written() -> None:
    coordinator = begun()
    assert not coordinator.handle(PEERS[0], written())
    assert not coordinator.handle(PEERS[2], written())
    files = dict.fromkeys((PEERS[0], PEERS[2], PEERS[1]), (9, 1))
    assert coordinator.handle(PEERS[1], written()) == [
        CompleteCheckpoint(STEP, [(3, 8), (5, 1)], files)
    ]


def test_one_file_that_is_missing_drops_it_once_all_have_told() -> None:
    coordinator = begun()
    problem = WriteFailed(checkpoint=STEP, problem="no space left")
    assert not coordinator.handle(PEERS[1], problem)
    assert not coordinator.handle(PEERS[0], written())
    assert coordinator.handle(PEERS[2], written()) == [
        DropCheckpoint(STEP, {PEERS[1]: "no space left"})
    ]


def test_the_next_one_waits_until_the_one_before_is_written() -> None:
    coordinator = begun()
    coordinator.handle(server_id(0), Resumed(seq=1, server=0))
    coordinator.handle(PEERS[1], written())
    coordinator.handle(PEERS[2], written())
    assert not enter(coordinator, 2, "6 8", "6 8")
    complete, begin, resume = coordinator.handle(PEERS[0], written())
    assert isinstance(complete, CompleteCheckpoint)
    assert begin == BeginCheckpoint("step-00000006")
    assert resume == SendControl(server_id(0), Resume(seq=2, checkpoint="step-00000006"))


def test_the_end_of_a_job_waits_until_its_last_one_is_whole() -> None:
    coordinator = begun()
    coordinator.handle(server_id(0), Resumed(seq=1, server=0))
    coordinator.handle(PEERS[1], written())
    coordinator.handle(PEERS[2], written())
    for worker in (0, 1):
        message = Enter(worker=worker, seq=2, name="written", payload=b"")
        assert not coordinator.handle(worker_id(worker), message)
    complete, resume = coordinator.handle(PEERS[0], written())
    assert isinstance(complete, CompleteCheckpoint)
    assert resume == SendControl(server_id(0), Resume(seq=2, checkpoint=""))


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (worker_id(0), written("step-00000004")),
        (worker_id(2), written()),
        (server_id(1), written()),
        (worker_id(0), Written(checkpoint=STEP, num_bytes=-1, crc32=1)),
        (worker_id(0), Written(checkpoint=STEP, num_bytes=1, crc32=2**32)),
        (worker_id(0), WriteFailed(checkpoint=STEP, problem="x" * 3000)),
        (worker_id(0), WriteFailed(checkpoint=STEP, problem="two\nlines")),
        (worker_id(0), Done(worker=0, statistics={})),
    ],
)
def test_who_may_not_say_so_is_named(peer: int, message: Written | WriteFailed | Done) -> None:
    coordinator = begun()
    coordinator.handle(server_id(0), Resumed(seq=1, server=0))
    with pytest.raises(ProtocolError, match=r"the coordinator: (worker|server) . "):
        coordinator.handle(peer, message)


def test_nobody_tells_of_a_file_twice_or_of_none() -> None:
    coordinator = begun()
    coordinator.handle(PEERS[0], written())
    with pytest.raises(ProtocolError, match="told of its file twice"):
        coordinator.handle(PEERS[0], written())
    with pytest.raises(ProtocolError, match="none is being written"):
        assemble(num_workers=1, num_servers=1).handle(PEERS[0], written())


def test_what_are_no_clocks_is_refused_and_other_numbers_of_sets_fail_for_all() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    with pytest.raises(ProtocolError, match="worker 0 entered checkpoint with an invalid pay"):
        enter(coordinator, 1, "-3")
    actions = enter(assemble(num_workers=2, num_servers=1), 1, "3", "3 4")
    errors = [each.message.error for each in actions if isinstance(each, SendControl)]  # type: ignore[union-attr]
    assert len(errors) == 2
    assert "different numbers of prepared optimizers: 1, 2" in errors[0]


# -- a server --------------------------------------------------------------------------------------


def loaded(core: ServerCore, chunks: int) -> ServerCore:
    for chunk in range(chunks):
        core.handle(
            Arrived(
                worker_id(0),
                Header(kind=Kind.INIT, sender=worker_id(0), chunk=chunk, length=4, dtype=1),
                Frame(capacity=4),
            )
        )
    return core


def resume(checkpoint: str) -> ControlArrived:
    return ControlArrived(COORDINATOR, Resume(seq=1, checkpoint=checkpoint))


def test_a_snapshot_is_taken_before_anybody_counts_again() -> None:
    core = loaded(core_of("ssp", chunks=2), 2)
    for group in (0, 1):
        suspend = Suspend(group=group, clock=0, seq=1)
        core.handle(ControlArrived(worker_id(group), suspend))
    actions = core.handle(resume("step-00000000"))
    assert actions == [
        TakeSnapshot(0, (0, 1)),
        MembershipEvent("resume", 0, 0, 1),
        MembershipEvent("resume", 1, 0, 1),
    ]


def test_a_checkpoint_in_the_middle_of_something_is_refused() -> None:
    core = core_of("ssp", chunks=1)
    (failed,) = core.handle(resume("step-00000000"))
    assert isinstance(failed, Fail)
    assert "before there were any values" in str(failed.error)
    (failed,) = loaded(core_of("sync", chunks=1), 1).handle(resume("step-7"))
    assert isinstance(failed, Fail)
    assert "wants a checkpoint 'step-7'" in str(failed.error)


def restored(mode: str = "sync", clocks: tuple[int, ...] = (5, 7)) -> ServerCore:
    core = assemble_core(
        server=0,
        make_rule=rule_for(mode, staleness=1),
        groups=[(0,), (1,)],
        start=Start(FirstClocks(checkpoint="step-00000005", clocks=clocks)),
    )
    setup = Setup(partition=b"", optimizer="", hyper=b"", restore="step-00000005")
    core.handle(ControlArrived(worker_id(0), setup))
    core.handle(built(1, [Frame(capacity=4) for _ in range(4)]))
    return core


def register(core: ServerCore, group: int, clock: int) -> list[object]:
    message = Register(group=group, workers=[group], clock=clock)
    return list(core.handle(ControlArrived(worker_id(group), message)))


def test_groups_begin_where_the_checkpoint_has_them() -> None:
    core = restored()
    assert register(core, 0, 5)[0] == MembershipEvent("join", 0, 5, 1)
    assert register(core, 1, 7)[0] == MembershipEvent("join", 1, 7, 1)
    core.check_invariants()
    clock = core.chunk_states[0].clock
    clock.catch_up()
    assert (clock.done, clock.min_done) == ([5, 7], 5)
    assert core.statistics().updates == 0
    left = core.handle(ControlArrived(worker_id(1), Leave(group=1, clock=7)))
    assert left[0] == MembershipEvent("leave", 1, 7, 1)


@pytest.mark.parametrize("is_restored", [True, False])
def test_what_leaders_say_before_the_model_is_logged_behind_what_is_restored(
    is_restored: bool,
) -> None:
    """As a replica logs it, which knows of them only when it knows the model."""
    first = FirstClocks(checkpoint=STEP, clocks=(5, 7)) if is_restored else None
    core = assemble_core(
        server=0, make_rule=rule_for("sync", staleness=0), groups=[(0,), (1,)], start=Start(first)
    )
    joined = MembershipEvent("join", 1, 7 if is_restored else 0, 1)
    suspended = MembershipEvent("suspend", 1, joined.clock, 1)
    answers = register(core, 1, joined.clock)
    suspend = Suspend(group=1, clock=joined.clock, seq=1)
    at_once = [*answers, *core.handle(ControlArrived(worker_id(1), suspend))]
    told = [each for each in at_once if isinstance(each, MembershipEvent)]
    assert told == ([] if is_restored else [joined, suspended])
    setup = Setup(partition=b"", optimizer="", hyper=b"", restore=STEP if is_restored else "")
    core.handle(ControlArrived(worker_id(0), setup))
    later = core.handle(built(1, [Frame(capacity=4) for _ in range(4)]))
    assert later[: 2 * is_restored] == ([joined, suspended] if is_restored else [])
    assert not any(isinstance(each, MembershipEvent) for each in later[2:])
    assert register(core, 0, 5 if is_restored else 0)[0].kind == "join"  # type: ignore[attr-defined]


@pytest.mark.parametrize("clock", [0, 4, 6])
def test_a_group_that_begins_elsewhere_is_refused(clock: int) -> None:
    (failed,) = register(restored(), 0, clock)
    assert isinstance(failed, Fail)
    assert f"registered group 0 at clock {clock}, not at 5" in str(failed.error)


def test_the_chief_and_the_server_go_on_from_the_same_or_not_at_all() -> None:
    for first, told in ((None, STEP), (FirstClocks(checkpoint=STEP, clocks=(3,)), "")):
        core = assemble_core(
            server=0, make_rule=rule_for("sync", staleness=0), groups=[(0,)], start=Start(first)
        )
        setup = Setup(partition=b"", optimizer="", hyper=b"", restore=told)
        (failed,) = core.handle(ControlArrived(worker_id(0), setup))
        assert isinstance(failed, Fail)
        assert "sent Setup that continues from checkpoint" in str(failed.error)
