"""The table of optimizers against torch itself, and the wire form of hyperparameters."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given

from psdist.errors import ConfigError, OptimizerRefusedError, ProtocolError
from psdist.protocol.optimizers import (
    ACCEPTED,
    REFUSED,
    OptimizerKind,
    canonical_name,
    check_mode,
    difference,
    has_second_moment,
    hyperparameters,
    pack_hyperparameters,
    traits,
    unpack_hyperparameters,
)

# Every accepted class, with each option that makes it take another branch.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.5}),
    ("Adadelta", {"lr": 0.5, "weight_decay": 0.1}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RMSprop", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
    ("ASGD", {"lr": 0.01, "weight_decay": 0.1, "t0": 2.0}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.01, "weight_decay": 0.1}),
]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(VARIANTS)]


def gradients(seed: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# The table


def test_every_optimizer_class_of_this_torch_is_in_the_table() -> None:
    found = {
        canonical_name(value)
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert found - {*ACCEPTED, *REFUSED} == set()
    assert not set(ACCEPTED) & set(REFUSED)
    assert {f"torch.optim.{name}" for name, _ in VARIANTS} == set(ACCEPTED)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_lr_scales_the_movement_of_one_step_where_the_table_says_so(
    name: str, options: dict[str, Any]
) -> None:
    def movement(lr: float, last_lr: float, num_steps: int) -> torch.Tensor:
        parameter = gradients(7, 0, (16, 8))
        optimizer = getattr(torch.optim, name)([parameter], **{**options, "lr": lr})
        for step in range(num_steps):
            if step == num_steps - 1:
                optimizer.param_groups[0]["lr"] = last_lr
                before = parameter.clone()
            parameter.grad = gradients(8, step, (16, 8))
            optimizer.step()
        return parameter - before

    is_proportional = all(
        torch.allclose(
            movement(lr, weight * lr, num_steps),
            weight * movement(lr, lr, num_steps),
            rtol=1e-9,
            atol=1e-12,
        )
        for lr in (options["lr"], 2.0)  # min(lr, 1/sqrt(t)) shows only where lr is large
        for num_steps in (1, 2, 6)
        for weight in (0.25, 0.1)
    )
    assert is_proportional == traits(f"torch.optim.{name}").lr_scales


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_a_flat_step_equals_a_step_per_tensor_exactly_for_the_elementwise(
    name: str, options: dict[str, Any]
) -> None:
    shapes = [(16, 8), (64, 4), (2, 32)]
    tensors = [gradients(1, index, shape) for index, shape in enumerate(shapes)]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    optimizer_class = getattr(torch.optim, name)
    separate = optimizer_class(tensors, **options)
    is_equal = True
    try:
        joined = optimizer_class([flat], **options)
    except ValueError:  # Muon: only 2-D
        is_equal = False
    for step in range(5 if is_equal else 0):
        grads = [gradients(2 + index, step, shape) for index, shape in enumerate(shapes)]
        flat.grad = torch.cat([grad.reshape(-1) for grad in grads])
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = grad
        joined.step()
        separate.step()
        is_equal &= torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]))
    assert is_equal == (traits(f"torch.optim.{name}").kind is OptimizerKind.ELEMENTWISE)


def test_torch_keeps_its_hyperparameters_in_the_group_under_their_constructor_names() -> None:
    # What psdist.protocol.optimizers relies on: known=optimizer.defaults loses nothing that
    # matters.
    for name, options in VARIANTS:
        optimizer = getattr(torch.optim, name)([torch.zeros(2, 2)], **options)
        (kept,) = hyperparameters(optimizer.param_groups, known=optimizer.defaults)
        assert {key: kept[key] for key in options} == options


def test_importing_the_table_does_not_import_torch() -> None:
    code = "import sys, psdist.protocol.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Names and refusals


class Mine(torch.optim.SGD):
    pass


def test_names_do_not_depend_on_the_module_that_defines_a_class() -> None:
    assert canonical_name(torch.optim.AdamW) == "torch.optim.AdamW"
    assert canonical_name(torch.optim.Adafactor) == "torch.optim.Adafactor"
    assert canonical_name(Mine) == f"{__name__}:Mine"


def refusal(name: str, extra: tuple[str, ...] = ()) -> str:
    with pytest.raises(OptimizerRefusedError) as caught:
        traits(name, extra=extra)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refused_classes_are_named_with_the_reason_and_what_to_use() -> None:
    assert refusal("torch.optim.LBFGS") == (
        "torch.optim.LBFGS cannot run on a parameter server: it evaluates the loss several times "
        "in a step, and a server has gradients only; use torch.optim.SGD or torch.optim.AdamW"
    )
    assert refusal("torch.optim.SparseAdam") == (
        "torch.optim.SparseAdam cannot run on a parameter server: it takes sparse gradients only, "
        "and psdist sends dense ones; use torch.optim.Adam"
    )


def test_an_unknown_class_is_refused_with_the_entry_that_would_allow_it() -> None:
    assert 'add "lion:Lion" to the setting training.optimizers' in refusal("lion:Lion")
    assert "torch.optim.SGD" in refusal("torch.optim.Shampoo")
    assert "lion" in refusal("lion:Lion", extra=("lion:Tiger",))


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("name", ["Rprop", "ASGD", "Adafactor"])
def test_an_optimizer_whose_lr_does_not_scale_is_refused_outside_sync(name: str, mode: str) -> None:
    accepted = traits(f"torch.optim.{name}")
    check_mode(accepted, "sync")
    with pytest.raises(OptimizerRefusedError) as caught:
        check_mode(accepted, mode)
    text = str(caught.value)
    assert text.startswith(f"torch.optim.{name} cannot run in {mode} mode")
    assert text.endswith(f"{accepted.reason}; use mode sync or another optimizer")
    assert accepted.reason
    assert "\n" not in text


def test_only_a_second_moment_can_stay() -> None:
    for name in ("torch.optim.Adam", "torch.optim.AdamW"):
        assert has_second_moment(name, [{"amsgrad": False}])
        assert not has_second_moment(name, [{"amsgrad": False}, {"amsgrad": True}])
    for name in ("torch.optim.SGD", "torch.optim.NAdam"):
        assert not has_second_moment(name, [{}])


def test_the_others_run_in_every_mode() -> None:
    for accepted in ACCEPTED.values():
        for mode in ("sync", "ssp", "async") if accepted.lr_scales else ("sync",):
            check_mode(accepted, mode)


def test_an_entry_of_the_configuration_is_whole_and_sync_only_unless_marked() -> None:
    plain = traits("lion:Lion", extra=("a.b:C.D=whole", "lion:Lion"))
    assert (plain.kind, plain.lr_scales) == (OptimizerKind.WHOLE_TENSOR, False)
    with pytest.raises(OptimizerRefusedError, match=r'"lion:Lion=whole\+lr_scales" says so'):
        check_mode(plain, "ssp")
    marked = traits("lion:Lion", extra=("lion:Lion=elementwise+lr_scales",))
    assert (marked.kind, marked.lr_scales) == (OptimizerKind.ELEMENTWISE, True)
    check_mode(marked, "async")
    assert not traits("lion:Lion", extra=("lion:Lion=elementwise",)).lr_scales


def test_an_entry_of_the_configuration_does_not_change_what_the_table_says() -> None:
    entries = ("torch.optim:LBFGS=elementwise", "torch.optim.lbfgs:LBFGS=elementwise")
    refusal("torch.optim.LBFGS", extra=entries)


@pytest.mark.parametrize(
    "entry",
    [
        "lion",
        "lion:",
        ":Lion",
        "lion:Lion=",
        "lion:Lion=flat",
        "lion:Lion=whole+",
        "lion:Lion=whole+lr",
        "lion:Lion+lr_scales",
        "lion Lion:x",
        "a-b:C",
        "a:b:c",
    ],
)
def test_a_malformed_entry_is_a_configuration_error(entry: str) -> None:
    with pytest.raises(
        ConfigError, match=r"setting training.optimizers: .* is not of the form module:Class"
    ):
        traits("lion:Lion", extra=(entry,))


# Hyperparameters


def test_hyperparameters_are_plain_and_only_the_optimizers_own() -> None:
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam(
        [{"params": [weights], "name": "decoder"}], lr=torch.tensor(0.25), fused=True
    )
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert hyperparameters(optimizer.param_groups, known=optimizer.defaults) == [
        {
            "amsgrad": False,
            "betas": (0.95, 0.999),
            "decoupled_weight_decay": False,
            "eps": 1e-8,
            "lr": pytest.approx(0.04),
            "maximize": False,
            "weight_decay": 0,
        }
    ]


def test_numbers_of_other_libraries_become_plain_numbers() -> None:
    group = {"lr": np.float32(0.5), "steps": np.int64(3), "on": np.bool_(True), "b": [1, 2.0]}
    (plain,) = hyperparameters([group])
    assert plain == {"b": (1, 2.0), "lr": 0.5, "on": True, "steps": 3}
    assert [type(value) for value in plain.values()] == [tuple, float, bool, int]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("match_rms_adamw", r"lr is 'match_rms_adamw' \(str\)"),
        ({"a": 1}, r"lr is \{'a': 1\} \(dict\)"),
        (torch.zeros(2), r"lr is tensor\(\[0., 0.\]\) \(Tensor\)"),
        ((1, (2, object())), r"lr is <object .*> \(object\)"),
        (1j, r"\(complex\)"),
        (math.nan, "lr is nan; look at the schedule"),
        (torch.tensor(math.nan), "lr is nan; look at the schedule"),
        (2**80, "does not fit into 64 bits"),
        ((((((1,),),),),), "nested too deeply or has more than 1024 members"),
        (torch.zeros(5, 5, 5), r"lr is tensor\(\[\[\[0., .* \(Tensor\)"),
    ],
)
def test_any_other_value_is_refused_with_key_and_type(value: object, told: str) -> None:
    with pytest.raises(OptimizerRefusedError, match="optimizer group 1: .*" + told) as caught:
        hyperparameters([{"lr": 0.1}, {"lr": value}])
    assert "\n" not in str(caught.value)
    with pytest.raises(OptimizerRefusedError, match=told):
        pack_hyperparameters([{"lr": 0.1}, {"lr": value}])  # type: ignore[dict-item]


def test_a_difference_names_the_key_both_values_and_the_group() -> None:
    first: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1}]
    second: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.05}]
    assert difference(first, second) == "lr 0.1 against 0.05 in optimizer group 1"
    assert difference(first, first) == ""
    assert difference(first, first[:1]) == "2 optimizer groups against 1"
    assert difference([{"eps": 1}], [{}]) == "eps 1 against nothing in optimizer group 0"
    many = [{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}]
    assert difference(many, [{}]).endswith("c 1 against nothing in optimizer group 0; and 2 more")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
).filter(lambda value: str(value).count("(") <= 4)
KEYS = st.sampled_from(["lr", "betas", "eps", "momentum", "größe", "_x"])
GROUPS = st.lists(st.dictionaries(KEYS, VALUES, max_size=4), max_size=3)


def shuffled(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(reversed(list(group.items()))) for group in groups]


@given(GROUPS)
def test_what_is_packed_is_unpacked_exactly(groups: list[dict[str, Any]]) -> None:
    packed = pack_hyperparameters(groups)
    unpacked = unpack_hyperparameters(packed)
    assert difference(unpacked, groups) == ""
    assert [{**group} for group in unpacked] == groups
    assert pack_hyperparameters(shuffled(groups)) == packed
    assert pack_hyperparameters(unpacked) == packed


@given(GROUPS, GROUPS)
def test_there_is_a_difference_exactly_where_the_bytes_differ(
    first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> None:
    are_equal = pack_hyperparameters(first) == pack_hyperparameters(second)
    assert (difference(first, second) == "") == are_equal


@given(GROUPS, st.data())
def test_damaged_bytes_are_a_protocol_error_or_other_hyperparameters(
    groups: list[dict[str, Any]], data: st.DataObject
) -> None:
    packed = bytearray(pack_hyperparameters(groups))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    try:
        unpacked = unpack_hyperparameters(bytes(packed))
    except ProtocolError:
        return
    assert pack_hyperparameters(unpacked) == packed


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_a_protocol_error_or_canonical(received: bytes) -> None:
    try:
        unpacked = unpack_hyperparameters(received)
    except ProtocolError:
        return
    assert pack_hyperparameters(unpacked) == received


@pytest.mark.parametrize(
    "received",
    [
        b"",
        msgpack.packb({"lr": 0.1}),
        msgpack.packb([1]),
        msgpack.packb([{"lr": "text"}]),
        msgpack.packb([{"lr": b"bytes"}]),
        msgpack.packb([{"lr": {"a": 1}}]),
        msgpack.packb([{b"lr": 0.1}]),
        msgpack.packb([{1: 0.1}]),
        msgpack.packb([{"not a name": 0.1}]),
        msgpack.packb([{"x" * 200: 0.1}]),
        msgpack.packb([{"lr": math.nan}]),
        msgpack.packb([{"lr": 2**64 - 1}]),
        msgpack.packb([{"lr": msgpack.Timestamp(1, 2)}]),
        msgpack.packb([{"lr": msgpack.ExtType(5, b"x")}]),
        msgpack.packb([{"lr": [[[[[1]]]]]}]),
        msgpack.packb([{"lr": [1] * 2000}]),
        msgpack.packb([{"lr": 0.5}], use_single_float=True),
        msgpack.packb([{"lr": -0.0}]),
        msgpack.packb([{"lr": 0.1, "betas": 0.2}]),
        msgpack.packb([{}] * 70_000),
        msgpack.packb([{f"k{number}": 0 for number in range(300)}]),
        msgpack.packb([{"lr": 0.1}]) + b"\x00",
        msgpack.packb([{"lr": 0.1}])[:-1],
        b"\x91\x82\xa2lr\x01\xa2lr\x02",
        bytes(9 * 2**20),
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_not_hyperparameters_is_a_protocol_error(received: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed hyperparameters in a message") as caught:
        unpack_hyperparameters(received)
    assert "\n" not in str(caught.value)


def test_more_hyperparameters_than_a_message_takes_are_refused_at_the_sender() -> None:
    with pytest.raises(OptimizerRefusedError, match="allowed are"):
        pack_hyperparameters([{"lr": tuple(range(1000))}] * 5000)
