"""What a worker keeps: trees become JSON and tensors, and come back as they were."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from psdist.checkpoint import plain, strict, tree
from psdist.errors import CheckpointError, UsageError


def there_and_back(value: Any) -> Any:
    kept, tensors = tree.pack(value)
    return tree.unpack(json.loads(json.dumps(kept, allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**200),
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "a\n\0é\U0001f600",
        [],
        (),
        {},
        set(),
        {1, (2, "a")},
        [1, [2, (3, {"four": {5: 6.0}})]],
        {"tuple": [1], 1: "a", None: 2, (1, 2): 3, 2.5: 4, "float": "nan"},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter([1, 1, 2]),
        b"",
        b"\0\xff",
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)  # also -0.0 and the order of keys


KEYS = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(allow_nan=False),
    some.text(some.characters(exclude_categories=["Cs"])),
    some.binary(),
)


@given(
    some.recursive(
        KEYS,
        lambda inner: some.one_of(
            some.lists(inner),
            some.lists(inner).map(tuple),
            some.dictionaries(KEYS, inner),
            some.dictionaries(KEYS, inner).map(OrderedDict),
        ),
    )
)
def test_any_tree_of_plain_values_comes_back_as_it_was(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_the_deepest_tree_that_is_taken_can_be_read_from_a_file() -> None:
    value: Any = math.inf
    for _ in range(plain.MOST_DEPTH):
        value = {-math.inf: value}
    kept, tensors = tree.pack(value)
    text = json.dumps(kept)
    assert tree.unpack(strict.parse_json(text, where="it"), tensors) == value
    with pytest.raises(UsageError, match="more than 64 levels deep"):
        tree.pack([value])


def test_nan_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan))


def test_tensors_come_back_on_the_cpu_with_dtype_shape_and_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        value = torch.arange(24).to(dtype).view(2, 3, 4).transpose(0, 2)
        back = there_and_back({"x": value})["x"]
        assert back.dtype is dtype
        assert torch.equal(back, value)
    assert there_and_back(torch.tensor(True)).shape == ()
    assert there_and_back(torch.empty(0, 3)).shape == (0, 3)
    assert not there_and_back(torch.nn.Parameter(torch.ones(2))).requires_grad


def test_a_tree_keeps_copies() -> None:
    tensor, array = torch.ones(3), np.ones(3)
    kept, tensors = tree.pack([tensor, array])
    tensor.zero_()
    array[:] = 0
    assert [each.sum().item() for each in tree.unpack(kept, tensors)] == [3, 3]


def test_arrays_and_numbers_of_numpy_come_back() -> None:
    for value in (np.arange(6, dtype=np.uint32).reshape(2, 3), np.array(True), np.ones(0)):
        back = there_and_back(value)
        assert type(back) is np.ndarray
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)
    back = there_and_back(np.float64(0.1))
    assert type(back) is np.float64
    assert back == 0.1
    assert np.array_equal(there_and_back(np.arange(3, dtype=">i4")), np.arange(3))


def test_generators_go_on_where_they_were() -> None:
    own, numbers = random.Random(3), np.random.RandomState(4)
    own.random()
    numbers.rand()
    kept = there_and_back({"python": own.getstate(), "numpy": numbers.get_state()})
    expected = own.random(), numbers.rand()
    own.setstate(kept["python"])
    numbers.set_state(kept["numpy"])
    assert (own.random(), numbers.rand()) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {"b": object()}]}, r"^the value\['a'\]\[1\]\['b'\] is a builtins.object: "),
        (deque([1]), "is a collections.deque: a checkpoint keeps"),
        (defaultdict(list), "is a collections.defaultdict"),
        ({object(): 1}, "^a key of the value is a builtins.object"),
        (torch.ones(2).to_sparse(), "is a torch.sparse_coo tensor of torch.float32"),
        (torch.zeros(2, dtype=torch.complex128), "tensor of torch.complex128"),
        (np.array(["a"]), "is a numpy array of <U1"),
        (np.array([object()]), "is a numpy array of object"),
        (2**9000, "is a number of 9001 bits"),
        ("\ud800", "lone surrogate"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_by_its_place(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tree.pack(value)


def test_a_tree_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="more than 64 levels deep, or holds itself"):
        tree.pack(value)


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"a": 1},
        {"tuple": 1},
        {"tuple": [], "set": []},
        {"set": [[1]]},
        {"dict": [[1, 2], [1, 3]]},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"dict": 3},
        {"float": "1.0"},
        {"float": 1.0},
        {"tensor": "9"},
        {"tensor": 0},
        {"tensor": ["0"]},
        {"bytes": "0"},
        {"scalar": "0"},
        {"array": "1"},
        {"builtins.object": []},
        [{"counter": [[1, 2, 3]]}],
    ],
    ids=str,
)
def test_json_that_no_tree_becomes_is_refused(kept: object) -> None:
    tensors = {"0": torch.ones(2), "1": torch.ones(2).bfloat16()}
    with pytest.raises(CheckpointError):
        tree.unpack(kept, tensors)


def test_json_that_is_too_deep_is_refused() -> None:
    kept: object = 1
    for _ in range(100):
        kept = [kept]
    with pytest.raises(CheckpointError, match="64 levels"):
        plain.unpack(kept)


def test_plain_values_alone_take_no_tensors() -> None:
    with pytest.raises(UsageError, match=r"lr\['x'\] is a torch.Tensor"):
        plain.pack({"x": torch.ones(1)}, path="lr")
    with pytest.raises(CheckpointError, match="'tensor' is no kind of value"):
        plain.unpack({"tensor": "0"})
