"""Spans of a worker: of a model's passes, of a group's operations, of calls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from psdist.tracing import Lane, Span
from psdist.tracing.files import Spans, read_traces
from psdist.tracing.tracer import Tracer
from psdist.workers.group.channel import Done, Pending
from psdist.workers.traced import Passes, TracedChannel, span_of_call, traced
from tests.support.traces import about


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Tracer]:
    made = Tracer(tmp_path, about(num_ranks=1))
    yield made
    made.close()


def recorded(tracer: Tracer, folder: Path) -> Spans:
    tracer.close()
    return read_traces(folder, [])[0].spans


def kinds(spans: Spans) -> list[str]:
    return [Span(kind).name for kind in spans["kind"]]


def test_forward_and_backward_of_a_model_are_spans_of_their_iteration(
    tracer: Tracer, tmp_path: Path
) -> None:
    model = torch.nn.Linear(4, 2)
    clock = 0
    Passes(tracer, clock=lambda: clock).attach(model)
    for _ in range(2):
        out = model(torch.ones(3, 4))
        out.sum().backward()
        clock += 1
    spans = recorded(tracer, tmp_path)
    assert kinds(spans) == ["FORWARD", "BACKWARD"] * 2
    assert spans["clock"].tolist() == [0, 0, 1, 1]
    assert (spans["end_ns"][:-1] <= spans["begin_ns"][1:]).all()


def test_a_pass_without_gradients_is_an_evaluation(tracer: Tracer, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    Passes(tracer, clock=lambda: 0).attach(model)
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert kinds(recorded(tracer, tmp_path)) == ["EVALUATION"]


def test_a_loss_of_a_part_of_the_outputs_has_one_backward(tracer: Tracer, tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"a": [self.one(x)], "b": (self.two(x), "words")}

    model = Both()
    Passes(tracer, clock=lambda: 0).attach(model)
    out = model(torch.ones(3, 4))
    (out["a"][0].sum() + out["b"][0].sum()).backward()
    model(torch.ones(3, 4))["b"][0].sum().backward()
    assert kinds(recorded(tracer, tmp_path)) == ["FORWARD", "BACKWARD"] * 2


def test_passes_that_raise_are_over(tracer: Tracer, tmp_path: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: object, *_gradients: torch.Tensor) -> None:
            raise RuntimeError("on purpose")

    model = torch.nn.Linear(4, 2)
    Passes(tracer, clock=lambda: 0).attach(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    hidden = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fails = model(Fails.apply(hidden(torch.ones(3, 4))))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="on purpose"):
        fails.sum().backward()
    model(torch.ones(3, 4)).sum().backward()
    spans = recorded(tracer, tmp_path)
    assert kinds(spans)[-2:] == ["FORWARD", "BACKWARD"]
    assert spans["begin_ns"][-1] >= spans["end_ns"][-2]


def test_copies_of_a_model_tell_nobody(tracer: Tracer, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    Passes(tracer, clock=lambda: 0).attach(model)
    copy.deepcopy(model)(torch.ones(3, 4)).sum().backward()
    assert kinds(recorded(tracer, tmp_path)) == []


def test_a_models_own_hooks_are_gone_with_their_handles(tracer: Tracer, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    for handle in Passes(tracer, clock=lambda: 0).attach(model):
        handle.remove()
    model(torch.ones(3, 4)).sum().backward()
    assert kinds(recorded(tracer, tmp_path)) == []


class Slow(Done[None]):
    """Done when it is asked for the third time."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked = 0

    def is_done(self) -> bool:
        self.asked += 1
        return self.asked >= 3


class Channel:
    """A group of two that never waits for the other."""

    def __init__(self, size: int = 2) -> None:
        self.place, self.size = 0, size

    def duplicate(self) -> Channel:
        return Channel(self.size)

    def all_gather(self, _flats: object, _slices: object) -> Pending[None]:
        return Slow()

    def agree(self, _call: str, _values: object = ()) -> Pending[list[list[float]]]:
        return Done([[1.0]])


def test_an_operation_of_the_group_lasts_until_it_is_seen_done(
    tracer: Tracer, tmp_path: Path
) -> None:
    channel = TracedChannel(Channel(), tracer)  # type: ignore[arg-type]
    pending = channel.all_gather([], [])
    while not pending.is_done():
        before_ns = tracer.now()
    pending.result()
    assert channel.agree("save").result() == [[1.0]]
    channel.duplicate().agree("save").result()
    spans = recorded(tracer, tmp_path)
    assert kinds(spans) == ["GATHER", "AGREE", "AGREE"]
    assert spans["lane"].tolist() == [Lane.GROUP, Lane.GROUP, Lane.EARLY]
    assert spans["end_ns"][0] >= before_ns


def test_a_worker_alone_has_no_group_to_wait_for(tracer: Tracer, tmp_path: Path) -> None:
    TracedChannel(Channel(1), tracer).agree("save").result()  # type: ignore[arg-type]
    assert kinds(recorded(tracer, tmp_path)) == []


def test_a_call_is_a_span_also_where_it_raises(tracer: Tracer, tmp_path: Path) -> None:
    clock = 3

    def step() -> None:
        nonlocal clock
        clock += 1
        raise ValueError

    with pytest.raises(ValueError):
        traced(tracer, Span.STEP, clock=lambda: clock, set_index=2)(step)()
    spans = recorded(tracer, tmp_path)
    assert (spans["clock"][0], spans["set_index"][0]) == (3, 2)


def test_a_method_without_a_tracer_is_called_as_it_is(tracer: Tracer, tmp_path: Path) -> None:
    class Job:
        tracer: Tracer | None = None

        @span_of_call(Span.SAVE, lambda job: job.tracer)
        def save(self, path: str, *, more: int = 0) -> str:
            return f"{path} {more}"

    job = Job()
    assert job.save("a", more=2) == "a 2"
    job.tracer = tracer
    assert job.save("b") == "b 0"
    assert kinds(recorded(tracer, tmp_path)) == ["SAVE"]
