"""Snapshots of the coordinator: a machine restored from one decides as the original would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import msgpack
import pytest

from psdist.controller import Controller, Observation
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.controller.steps import StepControl
from psdist.errors import ProtocolError
from psdist.protocol.collected import PREPARED
from psdist.protocol.control import (
    AskSteps,
    Control,
    Enter,
    Evict,
    Finish,
    LossReported,
    ModeProposed,
    Progress,
    Resumed,
    RoundTook,
    encode_control,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.failover.lines import Lines
from tests.digests import FAMILIES
from tests.support.coordinators import assemble
from tests.support.virtual.job import VirtualJob

FIRST = 3
"""The message before which the first twin is made."""
EVERY = 5
"""Messages between two twins."""


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *(("small", seed) for seed in (0, 3, 7)),
        *(("codecs", 2), ("modes", 0), ("modes", 5), ("backup", 1), ("workers-die", 0)),
        *(("workers-die", 3), ("groups-go-on", 1), ("groups-go-on", 4), ("servers-die", 2)),
        *(("modes-and-deaths", 1), ("joins", 0), ("joins", 2), ("spares", 1), ("refills", 2)),
        *(("shared-spares", 0), ("shared-spares", 3), ("modes-and-servers", 1)),
    ],
)
def test_a_twin_that_goes_on_with_a_snapshot_decides_the_same(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is made. Jobs, failures and the order of messages are drawn by the seed."""
    make = VirtualJob._coordinator
    num_compared = 0

    def watched(job: VirtualJob, num_workers: int) -> Coordinator:
        first = make(job, num_workers)
        twin: Coordinator | None = None
        num_calls = 0

        def both(name: str) -> Callable[..., Any]:
            decide = getattr(first, name)

            def call(*given: Any) -> Any:
                nonlocal twin, num_calls, num_compared
                num_calls += 1
                if num_calls >= FIRST and not num_calls % EVERY:
                    twin = make(job, num_workers)
                    twin.from_snapshot(first.to_snapshot())
                    assert twin.to_snapshot() == first.to_snapshot()
                elif twin is not None and twin.to_snapshot() != first.to_snapshot():
                    twin = None  # a test of this job has acted on a part directly
                actions = decide(*given)
                if twin is not None:
                    assert getattr(twin, name)(*given) == actions
                    assert twin.to_snapshot() == first.to_snapshot()
                    num_compared += 1
                return actions

            return call

        for name in ("handle", "on_lost", "on_server_lost", "know_sizes"):
            setattr(first, name, both(name))
        return first

    monkeypatch.setattr(VirtualJob, "_coordinator", watched)
    FAMILIES[family][0](seed)
    assert num_compared > 5


def tell(coordinator: Coordinator, *messages: Any) -> list[Any]:
    return [
        action
        for message in messages
        for action in coordinator.handle(
            server_id(message.server) if hasattr(message, "server") else worker_id(message.worker),
            message,
        )
    ]


def prepare(coordinator: Coordinator) -> Coordinator:
    for worker in range(3):
        tell(coordinator, Enter(worker=worker, seq=1, name="prepare", payload=PREPARED))
    tell(coordinator, Resumed(seq=1, server=0))
    return coordinator


GROUPS = ((0,), (1,), (2,))
NAMES = ["none", "int8", "int4"]


def drawn(pick: random.Random, round_number: int) -> list[Control]:
    """Return workers' reports of one round."""
    own_us = [pick.choice([1000, 9000]) for _ in GROUPS]
    return [
        Progress(
            worker=worker,
            clock=round_number + 1,
            samples=1,
            first_round=round_number,
            own_us=[own_us[worker]],
            waits_us=[pick.choice([500, 20_000])],
            errors_ppm=[pick.randrange(9)],
        )
        for worker in range(3)
    ]


def losses(pick: random.Random, round_number: int) -> list[Control]:
    return [
        LossReported(worker=worker, round=round_number, count=1, total=pick.uniform(0.1, 4.0))
        for worker in range(3)
    ]


def steps(round_number: int) -> list[Control]:
    return [
        *(
            RoundTook(worker=each, round=round_number, step_us=900 + 700 * each)
            for each in range(3)
        ),
        *(AskSteps(worker=each, loader=1, number=0, block=round_number) for each in range(3)),
    ]


def asked(round_number: int) -> list[Control]:
    return [AskSteps(worker=each, loader=1, number=0, block=round_number) for each in range(3)]


CODEC = {"num_groups": 3, "names": NAMES}
Told: TypeAlias = Callable[[random.Random, int], list[Control]]
PARTS: dict[str, tuple[Callable[[], Coordinator], Told]] = {
    "bound": (
        lambda: controlled(BoundControl(num_groups=3, lowest=1, highest=6)),
        drawn,
    ),
    "mode": (lambda: controlled(ModeControl(num_groups=3, staleness=3)), drawn),
    "codecs": (lambda: controlled(CodecControl(**CODEC, loss_patience=2)), drawn),
    "codecs in async": (lambda: controlled(CodecControl(**CODEC, mode="async")), drawn),
    "codecs by the loss": (
        lambda: controlled(CodecControl(**CODEC, loss_patience=2), rollback=1.1),
        lambda pick, number: [*drawn(pick, number), *losses(pick, number)],
    ),
    "steps by speed": (
        lambda: stepped(StepControl(sizes=[1, 1, 1], local_steps=8), mode="ssp"),
        lambda _pick, number: steps(number),
    ),
    "steps by the loss": (
        lambda: stepped(LossStepControl(num_workers=3, num_groups=3, local_steps=8), rollback=1.1),
        lambda pick, number: [*losses(pick, number), *asked(number)],
    ),
}


def controlled(control: Controller, **more: Any) -> Coordinator:
    made = assemble(num_workers=3, num_servers=1, groups=GROUPS, control=control, **more)
    made.know_sizes([9000, 3000, 1000])
    return made


def stepped(steps: Any, **more: Any) -> Coordinator:
    return assemble(num_workers=3, num_servers=1, groups=GROUPS, steps=steps, **more)


@pytest.mark.parametrize("name", PARTS)
def test_what_psdist_chooses_goes_on_as_it_would(name: str) -> None:
    make, told = PARTS[name]
    pick = random.Random(name)
    first = prepare(make())
    for round_number in range(60):
        twin = make()
        twin.from_snapshot(first.to_snapshot())
        assert twin.to_snapshot() == first.to_snapshot()
        for message in told(pick, round_number):
            actions = tell(first, message)
            assert tell(twin, message) == actions
            if first.is_settling:
                assert twin.is_settling
                (number,) = {each.message.number for each in actions if hasattr(each, "message")}
                answer = proposed(number, round_number)
                assert tell(first, answer) == tell(twin, answer)
        assert twin.kept(round_number) == first.kept(round_number)


def proposed(number: int, round_number: int) -> Control:
    return ModeProposed(number=number, server=0, rounds=[round_number])


def test_what_a_controller_has_observed_is_in_its_snapshot() -> None:
    control = ModeControl(num_groups=2, staleness=3)
    fresh = control.to_snapshot()
    control.observe(Observation(0, 5, [5, 6], [7, 8], [1, 2]))
    assert control.to_snapshot() != fresh


def test_lines_come_back_with_what_they_keep() -> None:
    lines, found = Lines(), Lines()
    lines.say(worker_id(1), Finish())
    found.from_snapshot(lines.to_snapshot())
    found.close()
    assert found.on_follows(worker_id(1), 0) == [Finish()]


def test_a_snapshot_of_a_job_with_other_parts_is_refused() -> None:
    plain = assemble(num_workers=3, num_servers=1)
    with pytest.raises(ValueError, match="not of the parts checkpoints"):
        plain.from_snapshot(controlled(ModeControl(num_groups=3, staleness=3)).to_snapshot())


def coordinator_log() -> CoordinatorLog:
    coordinator = assemble(
        num_workers=3,
        num_servers=2,
        groups=GROUPS,
        buddies=(1, 0),
        max_deaths=2,
        control=ModeControl(num_groups=3, staleness=3),
    )
    return CoordinatorLog(coordinator, standby=server_id(1), num_workers=3, num_servers=2)


def test_whatever_is_damaged_ends_in_one_line() -> None:
    first = coordinator_log()
    for worker in range(3):
        enter = Enter(worker=worker, seq=1, name="barrier", payload=b"")
        first.coordinator.handle(worker_id(worker), enter)
    first.coordinator.membership.on_lost(2, "worker 2", is_ready=True)
    state = first.to_snapshot()
    coordinator_log().from_snapshot(state)
    pick, refused, nothing = random.Random(0), list[str](), coordinator_log().to_snapshot()
    for _ in range(2000):
        data = bytearray(state[: pick.randrange(len(state))] if pick.random() < 0.3 else state)
        for _ in range(pick.choice([1, 1, 2, 8])):
            if data:
                data[pick.randrange(len(data))] = pick.randrange(256)
        other = coordinator_log()
        try:
            other.from_snapshot(bytes(data))
        except ProtocolError as error:
            refused.append(str(error))
            assert other.to_snapshot() == nothing, "what was valid in it has changed nothing"
    assert len(refused) > 1000
    assert not any("\n" in each for each in refused)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1", msgpack.packb(7), msgpack.packb([1]), msgpack.packb({(1,): 2})),
        msgpack.packb([["x"], {}]),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_no_such_state_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(not msgpack|field )"):
        Fields({int: "number", dict[int, str]: "names"}).read(HasSnapshot(), data)


def test_another_message_in_place_of_one_is_refused() -> None:
    membership = assemble(num_workers=2, num_servers=1, max_deaths=1).membership
    state = list(msgpack.unpackb(membership.to_snapshot()))
    at = next(at for at, each in enumerate(state) if isinstance(each, bytes))
    state[at], whole = Lines.__name__.encode(), state[at]
    with pytest.raises((ValueError, ProtocolError)):
        membership.from_snapshot(msgpack.packb(state))
    assert whole == encode_control(Evict(generation=0, dead=[]))
    state[at] = encode_control(Finish())
    with pytest.raises(ValueError, match="Finish instead of Evict"):
        membership.from_snapshot(msgpack.packb(state))
