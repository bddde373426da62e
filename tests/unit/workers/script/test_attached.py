"""What a script attaches, and how it learns of what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from psdist.errors import CheckpointError, UsageError
from psdist.workers.script.attached import Attached
from tests.support.script_runs import Worker, play, resume


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_what_is_attached_has_its_state_at_once_and_again_where_training_goes_on() -> None:
    attached = Attached(tell=print)
    attached.restore({"counter": {"count": 5}})
    counter = Counter()
    attached.add({"counter": counter}, has_begun=False)
    assert counter.count == 5
    counter.count += 1
    attached.resume()
    assert counter.count == 5


def test_both_what_the_checkpoint_has_not_and_what_the_script_has_not_is_said() -> None:
    lines: list[str] = []
    attached = Attached(tell=lines.append)
    attached.restore({"old": {}, "older": {}})
    attached.add({"new": Counter()}, has_begun=False)
    attached.resume()
    assert lines == [
        "job.attach: new is not in the checkpoint that the run resumes; it keeps the state "
        "that the script has given it",
        "the checkpoint has state of old, older, which this script has not attached; it is dropped",
    ]


@pytest.mark.parametrize(
    ("objects", "has_begun", "told"),
    [
        ({"a": Counter()}, True, r"attach\(a=...\) was called after training had begun"),
        ({"a": 3}, False, r"a int has no state_dict\(\); plain values belong into job.state"),
        ({"a": torch.optim.SGD(nn.Linear(1, 1).parameters())}, False, "servers hold the state"),
    ],
)
def test_what_cannot_be_attached_is_refused(
    objects: dict[str, Any], has_begun: bool, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        Attached(tell=print).add(objects, has_begun=has_begun)


def test_a_name_stands_for_one_object() -> None:
    attached = Attached(tell=print)
    attached.add({"a": Counter()}, has_begun=False)
    with pytest.raises(UsageError, match="a is attached already"):
        attached.add({"a": Counter()}, has_begun=False)


def test_state_that_an_object_does_not_take_names_the_object() -> None:
    attached = Attached(tell=print)
    attached.restore({"counter": {"number": 5}})
    with pytest.raises(CheckpointError, match="counter, a Counter, does not take the state"):
        attached.add({"counter": Counter()}, has_begun=False)


def _with_buffer(size: int) -> Any:
    def script(job: Worker) -> None:
        model = nn.Sequential(nn.Linear(1, size), nn.BatchNorm1d(size))
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in job.epochs(2):
            job.step()

    return script


def test_a_buffer_of_another_shape_is_an_error_that_names_it() -> None:
    tree = play(_with_buffer(3), cut_at=1).tree
    assert tree is not None
    told = r"step-00000007 has 1.running_mean: \[3\], torch.float32; the script's model has \[4\]"
    with pytest.raises(CheckpointError, match=told):
        resume(_with_buffer(4), tree)


@pytest.mark.parametrize("key", ["format", "state", "attached", "epochs", "data"])
@pytest.mark.parametrize("value", [None, 7, [3]])
def test_a_damaged_tree_is_a_checkpoint_error(key: str, value: object) -> None:
    tree = play(_with_buffer(3), cut_at=1).tree
    assert tree is not None
    tree[key] = value
    with pytest.raises(CheckpointError, match="step-00000007"):
        resume(_with_buffer(3), tree)


@pytest.mark.parametrize("key", ["python", "numpy", "torch"])
def test_damaged_random_numbers_are_a_checkpoint_error(key: str) -> None:
    tree = play(_with_buffer(3), cut_at=1).tree
    assert tree is not None
    tree["random"][key] = [1, torch.zeros(3), None]
    with pytest.raises(CheckpointError, match="random numbers cannot be set"):
        resume(_with_buffer(3), tree)


class Tallied(nn.Module):
    """With state of its own that is no tensor, and a buffer that each pass puts another one for."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.tally = {"passes": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.tally["passes"] += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.tally)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.tally = dict(state)


def tallied(job: Worker) -> None:
    model = nn.Sequential(nn.Linear(1, 2), Tallied())
    job.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    for _ in job.epochs(4):
        model(torch.ones(1, 1))
        job.step(model[1].seen, str(model[1].tally))


def test_what_a_module_keeps_in_python_and_buffers_that_are_replaced_go_on() -> None:
    whole = play(tallied)
    first = play(tallied, cut_at=3)
    assert first.tree is not None
    assert first.trace + resume(tallied, first.tree).trace == whole.trace


def test_frozen_parameters_are_in_the_chiefs_file_alone_while_they_are_alike() -> None:
    def changed(job: Worker) -> None:
        model = nn.Sequential(nn.Linear(1, 2), Tallied())
        job.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        for epoch in job.epochs(4):
            if epoch == 2:
                with torch.no_grad():
                    model[1].frozen += 1
            job.step()

    def names(share: tuple[int, int], cut_at: int) -> set[str]:
        tree = play(changed, cut_at=cut_at, share=share).tree
        assert tree is not None
        return set(tree["models"][0])

    assert "1.frozen" in names((0, 2), 1)
    assert "1.frozen" not in names((1, 2), 1)
    assert "1.seen" in names((1, 2), 1)
    assert "1.frozen" in names((1, 2), 3)
