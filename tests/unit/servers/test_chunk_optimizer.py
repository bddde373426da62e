"""An optimizer on a chunk gives the bits of torch's own optimizer on every tensor by itself.

Longer than other modules: one table of optimizers, every property asked of each.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from psdist.errors import InvariantError, OptimizerRefusedError
from psdist.protocol.optimizers import OptimizerKind, traits
from psdist.servers.shard import fused_kernels
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec
from tests.unit.protocol.test_optimizers import IDS, VARIANTS

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
ELEMENTWISE = [
    pytest.param(name, options, id=case)
    for (name, options), case in zip(VARIANTS, IDS, strict=True)
    if traits(f"torch.optim.{name}").kind is OptimizerKind.ELEMENTWISE
]
WHOLE = [
    pytest.param(name, options, id=case)
    for (name, options), case in zip(VARIANTS, IDS, strict=True)
    if traits(f"torch.optim.{name}").kind is OptimizerKind.WHOLE_TENSOR
]


def layout(lengths: list[int]) -> tuple[list[SegmentSpec], int]:
    """Segments from multiples of 64 elements on, and the length of their chunk."""
    segments, offset = [], 0
    for piece, length in enumerate(lengths):
        segments.append(SegmentSpec(piece=piece, offset=offset, length=length))
        offset += -(-length // 64) * 64
    return segments, offset


def padded(segments: list[SegmentSpec], num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(num_elements, dtype=dtype)
    for segment in segments:
        flat[segment.offset : segment.offset + segment.length].normal_()
    return flat


class PerTensor:
    """The reference: plain torch, an optimizer for each segment's tensor."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        values: torch.Tensor,
        segments: list[SegmentSpec],
    ) -> None:
        implementation = {"fused": True} if name in FUSED else {"foreach": False}
        self._segments = segments
        # Tensors are padded to whole vectors of the processor, as the chunk is.
        self._ends = [-(-(each.offset + each.length) // 64) * 64 for each in segments]
        self.tensors = [
            values[segment.offset : end].clone()
            for segment, end in zip(segments, self._ends, strict=True)
        ]
        self._optimizers = [
            getattr(torch.optim, name)([tensor], **options, **implementation)
            for tensor in self.tensors
        ]

    def step(self, grad: torch.Tensor, changed: dict[str, Any], absent: frozenset[int]) -> None:
        for segment, end, tensor, optimizer in zip(
            self._segments, self._ends, self.tensors, self._optimizers, strict=True
        ):
            if segment.piece not in absent:
                optimizer.param_groups[0].update(changed)
                tensor.grad = grad[segment.offset : end].clone()
                optimizer.step()

    def equals(self, values: torch.Tensor) -> bool:
        return all(
            torch.equal(tensor[: segment.length], values[segment.offset :][: segment.length])
            for tensor, segment in zip(self.tensors, self._segments, strict=True)
        )


def make(
    name: str,
    hyper: dict[str, Any],
    values: torch.Tensor,
    segments: list[SegmentSpec],
    extra: tuple[str, ...] = (),
) -> ChunkOptimizer:
    full = name if ":" in name else f"torch.optim.{name}"
    return ChunkOptimizer(
        name=full,
        traits=traits(full, extra=extra),
        hyper=hyper,
        values=values,
        segments=segments,
        extra=extra,
    )


def whole_chunk(num_elements: int) -> list[SegmentSpec]:
    return [SegmentSpec(piece=0, offset=0, length=num_elements)]


def check_against_torch(
    name: str,
    options: dict[str, Any],
    lengths: list[int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    absence: float = 0.0,
    num_steps: int = 12,
) -> None:
    """Two buffers in turn, lr scheduled and scaled, pieces absent at random."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    segments, num_elements = layout(lengths)
    buffers = [padded(segments, num_elements, dtype), torch.zeros(num_elements, dtype=dtype)]
    reference = PerTensor(name, options, buffers[0], segments)
    optimizer = make(name, options, buffers[0], segments)
    scales = traits(f"torch.optim.{name}").lr_scales
    hyper = options
    for step in range(num_steps):
        if step % 3 == 2:
            hyper = {**hyper, "lr": hyper["lr"] * 0.7}
        lr_scale = 0.3 if scales and step % 2 else 1.0
        absent = frozenset(piece for piece in range(len(lengths)) if chance.random() < absence)
        grad = padded(segments, num_elements, dtype) * 10.0 ** -(step % 4)
        reference.step(grad, {"lr": hyper["lr"] * lr_scale}, absent)
        if step % 2:
            buffers.reverse()
            buffers[0].copy_(buffers[1])
        before = buffers[1].clone()
        optimizer.step(values=buffers[0], grad=grad, hyper=hyper, lr_scale=lr_scale, absent=absent)
        assert reference.equals(buffers[0]), f"step {step}, absent {sorted(absent)}"
        assert torch.equal(before, buffers[1]), "the other buffer must not change"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_a_merged_chunk_gives_the_bits_of_separate_tensors(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    check_against_torch(name, options, [64, 100, 7, 640, 1, 129], dtype=dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_absent_pieces_are_untouched_and_the_others_keep_their_bits(
    name: str, options: dict[str, Any], seed: int
) -> None:
    # From seed 2 on everybody is present at first more often, so that there is state to split.
    check_against_torch(
        name, options, [64, 100, 7, 1, 192], seed=seed, absence=0.5 if seed < 2 else 0.1
    )


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_a_chunk_with_one_piece_waits_while_it_is_absent(
    name: str, options: dict[str, Any]
) -> None:
    check_against_torch(name, options, [200], absence=0.5)


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_bits_do_not_depend_on_where_torchs_threads_divide_the_chunk(
    name: str, options: dict[str, Any]
) -> None:
    check_against_torch(name, options, [40_001, 70_000], num_steps=4)
    check_against_torch(name, options, [40_001, 70_000], num_steps=4, seed=1, absence=0.3)


@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_a_whole_tensor_optimizer_sees_the_pieces_shape(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = torch.randn(24, 40)
    torch_optimizer = getattr(torch.optim, name)([reference], **options)
    values = torch.cat([reference.reshape(-1).clone(), torch.zeros(64)])
    segments = [SegmentSpec(piece=3, offset=0, length=960, shape=(24, 40))]
    optimizer = make(name, options, values, segments)
    for step in range(6):
        grad = torch.randn(24, 40)
        if step != 2:
            reference.grad = grad.clone()
            torch_optimizer.step()
        optimizer.step(
            values=values,
            grad=torch.cat([grad.reshape(-1), torch.zeros(64)]),
            hyper=options,
            lr_scale=1.0,
            absent=frozenset([3] if step == 2 else [4]),
        )
        assert torch.equal(values[:960], reference.reshape(-1))
        assert not values[960:].any()


@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_several_whole_tensors_of_a_chunk_are_stepped_as_by_an_optimizer_on_all(
    name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    shapes = [(24, 40), (5, 7), (16, 16)]
    references = [torch.randn(shape) for shape in shapes]
    torch_optimizer = getattr(torch.optim, name)(references, **options)
    segments, length = layout([reference.numel() for reference in references])
    segments = [
        dataclasses.replace(segment, shape=shape)
        for segment, shape in zip(segments, shapes, strict=True)
    ]
    values = torch.zeros(length)

    def parts(flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[each.offset : each.offset + each.length].view(each.shape or ())
            for each in segments
        ]

    for part, reference in zip(parts(values), references, strict=True):
        part.copy_(reference)
    optimizer = make(name, options, values, segments)
    for absent in ({}, {1}, {}, {0, 2}, {0, 1, 2}, {}):
        grad = torch.randn(length)
        for piece, (part, reference) in enumerate(zip(parts(grad), references, strict=True)):
            reference.grad = None if piece in absent else part.clone()
        torch_optimizer.step()
        optimizer.step(
            values=values, grad=grad, hyper=options, lr_scale=1.0, absent=frozenset(absent)
        )
        assert all(map(torch.equal, parts(values), references))
    held = sum(map(torch.count_nonzero, parts(values)))
    assert held == torch.count_nonzero(values), "padding was written to"


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_kernel_that_does_not_reproduce_torch_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(values: list[torch.Tensor], *_: object) -> None:
        values[0].add_(1.0)

    def missing(*_: object) -> None:
        raise TypeError("unexpected keyword argument")

    for kernel in (wrong, missing):
        monkeypatch.setattr(fused_kernels, "_PROVEN", {})
        monkeypatch.setitem(fused_kernels._KERNELS, f"torch.optim.{name}", kernel)
        check_against_torch(name, {"lr": 0.1}, [100, 64], absence=0.2)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_the_kernels_reproduce_this_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proven: dict[Any, bool] = {}
    monkeypatch.setattr(fused_kernels, "_PROVEN", proven)
    for case, options in VARIANTS:
        if case == name:
            check_against_torch(name, options, [100, 64])
    assert proven
    assert all(proven.values())


@pytest.mark.parametrize("first_absent", [(1,), ()])
def test_momentum_switched_on_in_the_middle_of_a_run_starts_as_in_torch(
    first_absent: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    segments, num_elements = layout([100, 64, 30])
    values = padded(segments, num_elements, torch.float32)
    reference = PerTensor("SGD", {"lr": 0.1, "dampening": 0.5}, values, segments)
    optimizer = make("SGD", {"lr": 0.1, "dampening": 0.5}, values, segments)
    for step, (momentum, absent) in enumerate(
        [(0, ()), (0.9, first_absent), (0.9, ()), (0, ()), (0.8, (2,)), (0.8, ()), (0.9, ())]
    ):
        grad = padded(segments, num_elements, torch.float32)
        hyper = {"lr": 0.1, "dampening": 0.5, "momentum": momentum}
        reference.step(grad, hyper, frozenset(absent))
        optimizer.step(
            values=values, grad=grad, hyper=hyper, lr_scale=1.0, absent=frozenset(absent)
        )
        assert reference.equals(values), step


def test_lr_scale_counts_for_one_step_and_one_is_exact() -> None:
    values, hyper = torch.zeros(64), {"lr": 0.1}
    optimizer = make("SGD", hyper, values, whole_chunk(64))
    moved = []
    for lr_scale in (0.5, 1.0, 0.5, 1.0):
        before = values[0].item()
        optimizer.step(
            values=values,
            grad=torch.ones(64),
            hyper=hyper,
            lr_scale=lr_scale,
            absent=frozenset(),
        )
        moved.append(values[0].item() - before)
    assert moved == pytest.approx([-0.05, -0.1, -0.05, -0.1])


def test_what_a_scheduler_adds_and_what_only_matters_to_a_worker_is_left_out() -> None:
    values = torch.ones(64)
    hyper = {"lr": 0.1, "max_lr": 3.0, "fused": False, "differentiable": True, "params": 7}
    optimizer = make("AdamW", hyper, values, whole_chunk(64))
    for lr in (0.1, 0.2):
        optimizer.step(
            values=values,
            grad=torch.ones(64),
            hyper={**hyper, "lr": lr},
            lr_scale=1.0,
            absent=frozenset(),
        )
    reference = torch.ones(64)
    plain = torch.optim.AdamW([reference], lr=0.1, fused=True)
    for lr in (0.1, 0.2):
        plain.param_groups[0]["lr"] = lr
        reference.grad = torch.ones(64)
        plain.step()
    assert torch.equal(values, reference)


def test_state_bytes_grow_in_the_first_step_and_not_by_splitting() -> None:
    segments, num_elements = layout([64, 100, 64])
    values = torch.zeros(num_elements)
    optimizer = make("Adam", {"lr": 0.1}, values, segments)
    step: dict[str, Any] = {"values": values, "hyper": {"lr": 0.1}, "lr_scale": 1.0}
    assert optimizer.state_bytes() == 0
    optimizer.step(grad=torch.ones(num_elements), absent=frozenset(), **step)
    merged = optimizer.state_bytes()
    assert merged == 2 * 4 * num_elements + 4
    optimizer.step(grad=torch.ones(num_elements), absent=frozenset([1]), **step)
    assert optimizer.state_bytes() == 2 * 4 * num_elements + 3 * 4


# Refusals


def refusal(name: str, hyper: dict[str, Any], **where: Any) -> str:
    with pytest.raises(OptimizerRefusedError) as caught:
        make(name, hyper, **{"values": torch.zeros(64), "segments": whole_chunk(64), **where})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_that_torch_refuses_are_refused_in_torchs_words() -> None:
    assert refusal("SGD", {"lr": -1.0}) == (
        "torch.optim.SGD refuses lr=-1.0: Invalid learning rate: -1.0"
    )
    assert "Nesterov momentum requires a momentum" in refusal("SGD", {"lr": 1, "nesterov": True})
    vector = [SegmentSpec(piece=0, offset=0, length=64, shape=(64,))]
    assert "Muon only supports 2D parameters" in refusal("Muon", {"lr": 0.1}, segments=vector)
    assert refusal("SGD", {"lr": None}).startswith("torch.optim.SGD refuses lr=None: ")


def test_values_that_break_a_later_step_are_refused_with_what_torch_said() -> None:
    values = torch.zeros(64)
    optimizer = make("RMSprop", {"lr": 0.1}, values, whole_chunk(64))
    step: dict[str, Any] = {"values": values, "lr_scale": 1.0, "absent": frozenset()}
    optimizer.step(grad=torch.ones(64), hyper={"lr": 0.1}, **step)
    with pytest.raises(
        OptimizerRefusedError,
        match=r"torch.optim.RMSprop cannot make a step with lr=0.1, momentum=0.9: KeyError: "
        "'momentum_buffer'",
    ):
        optimizer.step(grad=torch.ones(64), hyper={"lr": 0.1, "momentum": 0.9}, **step)
    with pytest.raises(OptimizerRefusedError, match="refuses lr=None: not a number"):
        optimizer.step(grad=torch.ones(64), hyper={"lr": None}, **step)
    fused = make("Adam", {"lr": 0.1}, values, whole_chunk(64))
    for _ in range(2):
        fused.step(grad=torch.ones(64), hyper={"lr": 0.1}, **step)
    with pytest.raises(OptimizerRefusedError, match=r"betas=\(0.9,\): ValueError"):
        fused.step(grad=torch.ones(64), hyper={"lr": 0.1, "betas": (0.9,)}, **step)


def test_a_class_that_this_servers_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Adadelta")
    text = refusal("Adadelta", {"lr": 0.1})
    assert text.startswith("torch.optim.Adadelta is not in torch ")


class Signs(torch.optim.Optimizer):
    """An elementwise optimizer of a user; its constructor calls the group's key otherwise."""

    def __init__(self, params: Any, lr: float = 1.0, beta: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": beta})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["mean"] = group["decay"] * state.get("mean", 0.0) + parameter.grad
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(group["lr"] * state["mean"].sign())


class Norms(torch.optim.SGD):
    """Not elementwise: it keeps one number per row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["norms"] = torch.ones(parameter.numel() // 2)


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_a_class_named_by_the_configuration_runs_and_is_split() -> None:
    name = f"{__name__}:Signs"
    segments, num_elements = layout([10, 64])
    values = torch.zeros(num_elements)
    hyper = {"lr": 0.5, "decay": 0.5}
    optimizer = make(name, hyper, values, segments, (f"{name}=elementwise+lr_scales",))
    for absent in ((), (0,), ()):
        optimizer.step(
            values=values,
            grad=torch.ones(num_elements),
            hyper=hyper,
            lr_scale=0.5,
            absent=frozenset(absent),
        )
    assert values[:10].tolist() == [-0.5] * 10
    assert values[64:].tolist() == [-0.75] * 64


def test_a_class_that_is_not_elementwise_although_marked_is_refused_at_its_first_step() -> None:
    name = f"{__name__}:Norms"
    values = torch.zeros(64)
    optimizer = make(name, {"lr": 0.1}, values, whole_chunk(64), (f"{name}=elementwise",))
    with pytest.raises(OptimizerRefusedError, match=r"state 'norms' has the shape \(32,\)"):
        optimizer.step(
            values=values,
            grad=torch.ones(64),
            hyper={"lr": 0.1},
            lr_scale=1.0,
            absent=frozenset(),
        )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module:Lion", "cannot be imported on this server: No module named"),
        ("psdist.errors:Lion", "cannot be imported on this server: .* has no attribute 'Lion'"),
        ("psdist.errors:PsdistError", "is not a subclass of torch.optim.Optimizer"),
        (f"{__name__}:NoRate", "its groups have no lr"),
    ],
)
def test_an_entry_that_names_no_optimizer_is_refused(name: str, told: str) -> None:
    segments = [SegmentSpec(piece=0, offset=0, length=64, shape=(8, 8))]
    with pytest.raises(OptimizerRefusedError, match=told):
        make(name, {}, torch.zeros(64), segments, (name,))


def test_a_name_that_the_configuration_does_not_hold_is_not_imported() -> None:
    name = "antigravity:Lion"
    with pytest.raises(OptimizerRefusedError, match="cannot run on a parameter server"):
        ChunkOptimizer(
            name=name,
            traits=traits(name, extra=(name,)),
            hyper={},
            values=torch.zeros(4),
            segments=[SegmentSpec(piece=0, offset=0, length=4, shape=(4,))],
        )


# Misuse by the server's own code


@pytest.mark.parametrize(
    ("values", "segments", "name"),
    [
        (torch.zeros(64, dtype=torch.bfloat16), whole_chunk(64), "SGD"),
        (torch.zeros(8, 8), whole_chunk(64), "SGD"),
        (torch.zeros(64), [], "SGD"),
        (torch.zeros(64), whole_chunk(65), "SGD"),
        (torch.zeros(64), whole_chunk(40) + whole_chunk(64), "SGD"),
        (torch.zeros(64), whole_chunk(0), "SGD"),
        (torch.zeros(64), whole_chunk(64), "Adafactor"),
        (torch.zeros(64), [SegmentSpec(piece=0, offset=0, length=64, shape=(8,))], "Adafactor"),
    ],
)
def test_segments_that_do_not_fit_the_chunk_are_an_invariant_error(
    values: torch.Tensor, segments: list[SegmentSpec], name: str
) -> None:
    with pytest.raises(InvariantError):
        make(name, {"lr": 0.1}, values, segments)


@pytest.mark.parametrize(
    ("values", "grad"),
    [
        (torch.zeros(64), torch.zeros(63)),
        (torch.zeros(128), torch.zeros(128)),
        (torch.zeros(64), torch.zeros(64, dtype=torch.float16)),
        (torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)),
    ],
)
def test_a_step_on_other_sizes_or_dtypes_is_an_invariant_error(
    values: torch.Tensor, grad: torch.Tensor
) -> None:
    optimizer = make("SGD", {"lr": 0.1}, torch.zeros(64), whole_chunk(64))
    with pytest.raises(InvariantError):
        optimizer.step(
            values=values, grad=grad, hyper={"lr": 0.1}, lr_scale=1.0, absent=frozenset()
        )


def test_scaling_an_lr_that_does_not_scale_is_an_invariant_error() -> None:
    values = torch.zeros(64)
    optimizer = make("Rprop", {"lr": 0.1}, values, whole_chunk(64))
    with pytest.raises(InvariantError, match="check_mode was not asked"):
        optimizer.step(
            values=values,
            grad=values.clone(),
            hyper={"lr": 0.1},
            lr_scale=0.5,
            absent=frozenset(),
        )
