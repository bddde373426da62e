"""Values of a log line, and means of trees: what goes in, what comes out, what is refused."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from psdist.errors import CollectiveError, UsageError
from psdist.protocol.collected import Brought, collected
from psdist.protocol.control import Enter
from psdist.workers.metrics import (
    FALSE,
    OWN_NAMES,
    TRUE,
    logged,
    mean_of,
    number,
    pack,
    packed_flag,
)

Point = namedtuple("Point", ["x", "y"])


def mean(*trees: Any) -> Any:
    """What the first of these workers gets."""
    return mean_of(trees[0], bring(*trees))


def bring(*trees: Any) -> Brought:
    """What comes back when workers bring these trees."""
    packed = [pack(tree, num_workers=len(trees)) for tree in trees]
    return Brought.decode(
        collected(
            1,
            [
                Enter(worker=worker, seq=1, name="mean", payload=described, values=values)
                for worker, (described, values) in enumerate(packed)
            ],
        )
    )


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        ((1, 2), 1.5),
        ((True, False), 0.5),
        ((np.float32(0.5), 1.5), 1.0),
        ((torch.tensor(3.0, requires_grad=True), torch.tensor(4)), 3.5),
        (([1, [2.0]], [3, [4.0]]), [2.0, [3.0]]),
        ((Point(x=1, y=(2,)), Point(x=2, y=(3,))), Point(x=1.5, y=(2.5,))),
        ((OrderedDict(b=1, a=3), {"a": 1, "b": 2}), {"b": 1.5, "a": 2.0}),
        (({0: 1, "0": 3}, {0: 2, "0": 5}), {0: 1.5, "0": 4.0}),
        (({"deep": {"er": []}}, {"deep": {"er": []}}), {"deep": {"er": []}}),
        ((float("inf"), 1.0), float("inf")),
    ],
)
def test_the_mean_of_a_tree_has_its_shape(trees: tuple[Any, Any], expected: Any) -> None:
    result = mean(*trees)
    assert result == expected
    assert type(result) is type(expected)


def test_tensors_with_dimensions_stay_tensors() -> None:
    first = {"a": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), "b": torch.tensor([1, 2])}
    second = {"a": torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16), "b": torch.tensor([2, 2])}
    result = mean(first, second)
    assert torch.equal(result["a"], torch.tensor([[2.0, 3.0]], dtype=torch.bfloat16))
    assert torch.equal(result["b"], torch.tensor([1.5, 2.0], dtype=torch.float64))
    assert first["b"].tolist() == [1, 2]


def test_all_workers_get_the_same_bits() -> None:
    values = [0.1, 1e17, -1e17, 0.3]
    brought = bring(*({"loss": value} for value in values))
    assert len({mean_of({"loss": value}, brought)["loss"] for value in values}) == 1
    assert mean_of({"loss": 0}, brought) == {"loss": (((0.1 + 1e17) - 1e17) + 0.3) / 4}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ("loss", "job.mean: its argument is a str; it takes numbers and tensors, and dicts, "),
        ({"a": [1, None]}, r"job.mean: \['a'\]\[1\] is a NoneType"),
        (torch.ones(2, dtype=torch.complex64), "its argument is a torch.complex64 tensor"),
    ],
)
def test_what_has_no_mean_is_refused_by_its_place(tree: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        pack(tree, num_workers=1)


def test_too_many_numbers_for_a_message_are_refused() -> None:
    pack(torch.zeros(1 << 20), num_workers=2)
    with pytest.raises(UsageError, match=r"job.mean of 1,048,576 numbers on 16 workers"):
        pack(torch.zeros(1 << 20), num_workers=16)


@pytest.mark.parametrize(
    ("first", "other", "told"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, r"worker 0 it ends, on worker 1 \['b'\] is a number;"),
        ([1, 2], [1], r"worker 0 \[1\] is a number, on worker 1 it ends;"),
        (torch.ones(2), torch.ones(3), r"it is a float32 tensor of shape \[2\], on worker 1 it is"),
        (1.0, torch.ones(1), r"worker 0 it is a number, on worker 1 it is a float32 tensor of"),
    ],
)
def test_different_trees_are_told_apart(first: Any, other: Any, told: str) -> None:
    brought = bring(first, other)
    errors = set()
    for tree in (first, other):
        with pytest.raises(CollectiveError, match=told) as caught:
            mean_of(tree, brought)
        errors.add(str(caught.value))
    assert len(errors) == 1


def test_a_log_line_takes_a_dict_for_names_that_are_no_identifiers() -> None:
    line = logged(
        {"loss/train": torch.tensor([0.5])}, {"epoch": np.int64(3), "note": "a", "x": None}
    )
    assert line == {"loss/train": 0.5, "epoch": 3, "note": "a", "x": None}
    assert type(line["epoch"]) is int


@pytest.mark.parametrize(
    ("values", "more", "told"),
    [
        ({"loss": 1}, {"loss": 2}, "job.log: loss is given twice, in the dict and by keyword"),
        ({3: 1}, {}, "job.log: the name 3 is of type int; names must be strings"),
        (
            {},
            {"loss": torch.ones(2)},
            r"job.log\(loss=...\): the tensor has 2 values, job.log takes",
        ),
        ({"a/b": np.ones(2)}, {}, r"job.log\(a/b=...\): the tensor has 2 values, job.log takes"),
        ({}, {"loss": [1]}, r"job.log\(loss=...\): a list; numbers and strings only"),
        (0.5, {}, r"job.log takes names with their values, job.log\(loss=x\) .* given a float"),
        *(
            ({}, {name: 1}, rf"job.log\({name}=...\): every line has a {name} of its own")
            for name in OWN_NAMES
        ),
    ],
)
def test_a_log_line_that_cannot_be_written_is_refused(
    values: Any, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        logged(values, more)


@pytest.mark.parametrize(
    ("flag", "packed"),
    [
        (True, TRUE),
        (0, FALSE),
        (0.5, TRUE),
        (torch.tensor([0]), FALSE),
        (torch.tensor(2.0), TRUE),
        (np.bool_(False), FALSE),
    ],
)
def test_a_flag_is_a_bool_a_number_or_a_tensor_of_one_value(flag: Any, packed: bytes) -> None:
    assert packed_flag("any", flag) == packed


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (torch.ones(2), r"job\.all: the tensor has 2 values, .* job\.all\(flags\.all\(\)\)"),
        (np.ones(3), r"job\.all: the tensor has 3 values"),
        ("yes", r"job\.all: a str; it takes a bool, a number or a tensor of one value"),
        (None, r"job\.all: a NoneType"),
    ],
)
def test_what_is_no_flag_is_refused(flag: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        packed_flag("all", flag)


@pytest.mark.parametrize(
    "value", [0.5, torch.tensor([[0.5]], requires_grad=True), np.float32(0.5), np.array([0.5])]
)
def test_a_loss_is_a_number_or_a_tensor_of_one(value: Any) -> None:
    assert number("job.report", value) == 0.5
    assert number("job.report", 3) == 3.0
    assert type(number("job.report", torch.tensor(3))) is float
    assert number("job.report", 10**400) == float("inf")
    assert number("job.report", -(10**400)) == float("-inf")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.ones(2), "job.report: the tensor has 2 values, it takes one"),
        (np.ones(3), "job.report: the tensor has 3 values"),
        ("0.5", "job.report: a str; it takes a number"),
        (True, "job.report: a bool; it takes a number"),
        (torch.tensor(True), "job.report: a bool; it takes a number"),
        (None, "job.report: a NoneType; it takes a number"),
    ],
)
def test_what_is_no_number_is_no_loss(value: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        number("job.report", value)
