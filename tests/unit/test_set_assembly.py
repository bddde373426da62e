"""Which step strategy a parameter set gets, who clips its gradients, and what is logged of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psdist.config.settings import RunConfig
from psdist.protocol.partition import Partition, Piece
from psdist.set_assembly import (
    ORDERS,
    Clipping,
    EarlyChoice,
    SetRequest,
    Setting,
    strategy_of,
    why_never,
    why_not_here,
)
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import Layout, lay_out, make_loop
from psdist.workers.blocking import Blocking, Iteration, Parts
from psdist.workers.early.group_overlap import GroupEarlyPush
from psdist.workers.early.overlap import EarlyPush
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.late.pipelined import Pipelined
from psdist.workers.late.steps import LateWait
from psdist.workers.missed_rounds import WorkerRule
from psdist.workers.protocol import Seat
from tests.support.virtual.early_worker import AnyTime
from tests.support.virtual.group import VirtualGroup
from tests.support.virtual.network import LinkModel, VirtualNetwork


def config(**settings: Any) -> RunConfig:
    return RunConfig(**settings)


def strategy(
    setting: Setting, *, group_size: int = 1, why_not: str = "", has_driver: bool = True
) -> Blocking:
    model = torch.nn.Linear(4, 4)
    pieces = [
        Piece(
            name=name,
            shape=tuple(each.shape),
            stride=each.stride(),
            dtype="float32",
            optimizer_group=0,
        )
        for name, each in model.named_parameters()
    ]
    partition = Partition.cut(pieces, chunk_bytes=None)
    channel: GroupChannel = AloneChannel()
    members = tuple(range(group_size))
    if group_size > 1:
        network = VirtualNetwork(seed=0)
        channel = VirtualGroup(network, members, seed=0, link=LinkModel()).channel(0)
    transport: Any = SimpleNamespace(poll=lambda: None)
    seat = Seat(worker=0, group=0, members=members, num_servers=1)
    loop = make_loop(transport, seat, waiting=Waiting(is_spinning=True))
    layout = Layout(
        partition=partition,
        owners=[0] * len(partition.chunks),
        order=ORDERS[setting](partition),
    )
    parameters = list(model.parameters())
    early = EarlyChoice(setting, why_not)
    reduces_early = early.is_on and group_size > 1
    memory = lay_out(loop, channel, layout, parameters, credits=1, reduces_early=reduces_early)
    iteration = Iteration(0, hyperparameters=lambda: b"", on_end=lambda: None)
    parts = Parts(iteration, memory.group, memory.flat, loop, memory.values, WorkerRule())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    made = strategy_of(
        SetRequest(model, SimpleNamespace(), optimizer, optimizer, 0.0, setting),  # type: ignore[arg-type]
        parts,
        early,
        driver=AnyTime() if has_driver else None,
        another_end=channel.duplicate,
        sums=memory.sums,
        free_s=loop.now_s,
        newest=memory.flat.values,
    )
    made.stop()
    return made


@pytest.mark.parametrize(
    ("setting", "options", "kind"),
    [
        ("off", {"has_driver": False}, Blocking),
        ("off", {}, Pipelined),
        ("auto", {}, EarlyPush),
        ("strict", {}, EarlyPush),
        ("auto", {"why_not": "no thread", "has_driver": False}, EarlyPush),
        ("auto", {"group_size": 2}, GroupEarlyPush),
        ("full", {}, LateWait),
        ("full", {"group_size": 2}, GroupEarlyPush),
    ],
)
def test_a_set_gets_the_strategy_of_its_settings(
    setting: Setting, options: dict[str, Any], kind: type[Blocking]
) -> None:
    assert type(strategy(setting, **options)) is kind


def test_that_full_is_as_auto_in_a_group_of_several_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="psdist"):
        strategy("full", group_size=2)
    (line,) = [each for each in caplog.messages if "transfer.overlap = full is as auto" in each]
    assert "a worker in a group of several" in line


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("has_thread", [True, False])
def test_on_the_cpu_gradients_may_leave_with_and_without_a_thread(
    group_size: int, has_thread: bool
) -> None:
    assert not why_not_here(device="cpu", group_size=group_size, has_thread=has_thread)


def test_on_a_gpu_they_may_from_a_worker_alone_whose_loop_a_thread_may_drive() -> None:
    assert not why_not_here(device="cuda", group_size=1, has_thread=True)
    assert "groups of several" in why_not_here(device="cuda", group_size=2, has_thread=True)
    assert "MPI_THREAD_MULTIPLE" in why_not_here(device="cuda", group_size=1, has_thread=False)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pipeline": 1, "mode": "async"}, "pipeline = 1"),
        ({"local_steps": 4}, "gradients of local steps"),
        ({"push_codec": "skip:0.1"}, "with skip"),
        ({"backup": 1}, "with backup groups"),
        ({"on_nonfinite": "skip"}, "on_nonfinite = skip"),
        ({}, ""),
    ],
)
def test_why_no_gradient_of_a_job_leaves_before_step(settings: dict[str, Any], why: str) -> None:
    found = why_never(config(**settings), clips_to=0.0, is_alone=False, reforms=False)
    assert found.find(why) >= 0
    assert bool(found) == bool(why)


def test_a_group_that_shrinks_reduces_in_step_alone() -> None:
    never = why_never(config(), clips_to=0.0, is_alone=False, reforms=True)
    assert never == "a group that may shrink reduces in step() alone"


@pytest.mark.parametrize(
    ("settings", "clipping"),
    [
        ({}, (0.0, 0.0, 2.0)),
        ({"mode": "async"}, (2.0, 0.0, 2.0)),
        ({"push_codec": "int8"}, (2.0, 0.0, 0.0)),
        ({"backup": 1}, (2.0, 0.0, 0.0)),
        ({"local_steps": 4}, (2.0, 0.0, 0.0)),
        ({"local_steps": 4, "outer": "accumulate"}, (0.0, 0.0, 2.0)),
        ({"local_steps": 4, "outer": "accumulate", "push_codec": "int8"}, (0.0, 2.0, 0.0)),
    ],
)
def test_who_clips_to_max_grad_norm(settings: dict[str, Any], clipping: tuple[float, ...]) -> None:
    made = Clipping.of(config(**settings), 2.0)
    assert made[:3] == clipping
    is_own = "push_codec" in settings or "backup" in settings
    assert bool(made.why_own) == is_own
    assert Clipping.of(config(**settings), 0.0) == (0.0, 0.0, 0.0, "")
