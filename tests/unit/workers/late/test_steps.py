"""Whether a step may return before its replies: what stands against it on this worker is heeded.

The loop, the overlap and the driver are played here; the model is a real one.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from psdist.protocol.partition import Partition, Piece
from psdist.workers.late.steps import LateSteps


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.utils.counters.clear()


def late_steps(model: nn.Module, *, group_size: int, has_mirrors: bool) -> LateSteps:
    """Of a worker whose overlap is on."""
    parameters = list(model.parameters())
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
    flat: Any = SimpleNamespace(
        parameters=parameters, transfers=SimpleNamespace(has_mirrors=has_mirrors)
    )
    overlap: Any = SimpleNamespace(may_end_later=True, move_values=lambda _chunks: None)
    return LateSteps(
        partition,
        range(len(partition.chunks)),
        flat,
        cast(Any, SimpleNamespace(core=SimpleNamespace(set_index=0))),
        cast(Any, SimpleNamespace()),
        module=model,
        overlap=overlap,
        driver=cast(Any, SimpleNamespace()),
        group_size=group_size,
    )


def test_a_worker_alone_in_its_group_with_a_model_on_the_cpu_may_return_early() -> None:
    late = late_steps(nn.Linear(4, 4), group_size=1, has_mirrors=False)
    assert late.may_begin()
    late.stop()


def test_what_the_script_has_written_is_moved_again_before_a_step_returns() -> None:
    late = late_steps(nn.Linear(4, 4), group_size=1, has_mirrors=False)
    done: list[str] = []
    late._overlap.move_written = lambda: done.append("written")  # type: ignore[method-assign]
    late._tail = cast(Any, SimpleNamespace(begin=lambda clock: done.append(f"tail {clock}")))
    late.begin(7)
    assert done == ["written", "tail 7"]
    assert late.num_late == 1


@pytest.mark.parametrize(
    ("group_size", "has_mirrors", "why"),
    [(2, False, "a worker in a group of several"), (1, True, "the model is on a device")],
)
def test_in_a_group_of_several_and_on_a_device_no_step_returns_early_and_that_is_told_once(
    group_size: int, has_mirrors: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="psdist"):
        late = late_steps(nn.Linear(4, 4), group_size=group_size, has_mirrors=has_mirrors)
        assert not late.may_begin()
        assert not late.may_begin()
    (line,) = [each for each in caplog.messages if "transfer.overlap = full is as auto" in each]
    assert why in line
