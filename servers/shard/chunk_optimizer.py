"""One torch optimizer on one chunk of a server's flat parameters.

Owns the optimizer object and its state, and which parts of the chunk it sees as tensors. It never
decides whether an optimizer is allowed (psdist.protocol.optimizers does), never converts dtypes,
never averages gradients and never allocates parameter memory: values and gradients are the
caller's.

    optimizer = ChunkOptimizer(
        name="torch.optim.SGD", traits=traits("torch.optim.SGD"), hyper={"lr": 0.1},
        values=flat[0:1024], segments=[SegmentSpec(piece=0, offset=0, length=1000)],
    )
    optimizer.step(values=flat[0:1024], grad=grad, hyper={"lr": 0.1}, lr_scale=1.0,
                   absent=frozenset())

**Elementwise optimizers** see the chunk as one tensor, however many pieces it holds. The first
time that a piece has no gradient the tensor and its state are split, one tensor per segment, for
good. Both give the same bits: a segment's tensor reaches to where the next one begins, so its last
elements go through the same vector code as in the whole. (Tried: cut at the segment's true end,
fused SGD differs in the last bit. Padding therefore takes part in steps; zeros there stay zeros.)

**Whole-tensor optimizers** see every piece of the chunk in its own shape, as in a script's own
optimizer; padding is no part of it.

**How a step is computed.** Fused where torch has it, else torch's loop over tensors; never
foreach, which on the CPU takes 1.4 to 2 times as long for one tensor of 1024 elements (it splits
and regroups lists) and may round otherwise. ``Optimizer.step`` takes 34 us for SGD and 61 us for
Adam on 1024 elements (torch 2.13, one core), most of it bookkeeping for profilers, compilers and
many tensors. So once the state exists, the four fused optimizers call torch's kernel as ``step``
does: 7 and 12 us for the whole of `ChunkOptimizer.step`. These kernels are not public: where one
is not proved (psdist.servers.shard.fused_kernels), ``step`` does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from psdist.errors import InvariantError, OptimizerRefusedError
from psdist.protocol.optimizer_state import PieceState, fits_torch
from psdist.protocol.optimizers import LOCAL_KEYS, HyperValue, OptimizerKind, OptimizerTraits
from psdist.servers.shard.frozen_adam import FrozenAdam
from psdist.servers.shard.fused_kernels import Switches, can_fuse, is_proven, kernel_for, switches
from psdist.servers.shard.optimizer_classes import (
    construct,
    find_class,
    format_hyperparameters,
    torch_step,
)
from psdist.servers.shard.optimizer_state import begin, describe, is_begun


@dataclass(frozen=True, kw_only=True)
class SegmentSpec:
    """The part of a piece that lies in the chunk; ``offset`` and ``length`` in elements from the
    chunk's start, ``shape`` the piece's (whole-tensor optimizers need it)."""

    piece: int
    offset: int
    length: int
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Part:
    """A stretch of the chunk that the optimizer holds as one parameter."""

    piece: int
    start: int
    end: int
    shape: tuple[int, ...]
    is_all: bool
    """True if the part is the whole chunk."""
    parameter: Tensor
    state: dict[str, Any] | None = None
    """The optimizer's state of this parameter, once torch's own code has made a step under the
    present switches, which completes the state."""

    def of(self, chunk: Tensor) -> Tensor:
        """This stretch of ``chunk``, in the shape that the optimizer sees."""
        if not self.is_all:  # a slice and a view would take 2 us each
            chunk = chunk[self.start : self.end]
        return chunk if len(self.shape) == 1 else chunk.view(self.shape)


class ChunkOptimizer:
    """See the module's docstring. Not thread-safe: one step at a time."""

    def __init__(
        self,
        *,
        name: str,
        traits: OptimizerTraits,
        hyper: Mapping[str, HyperValue],
        values: Tensor,
        segments: Sequence[SegmentSpec],
        extra: Sequence[str] = (),
        freeze_step: int = 0,
    ) -> None:
        """``values``: 1-D, float32 or float64, the chunk's master values; unchanged here, and
        kept alive. ``freeze_step``: steps after which Adam's second moment is frozen; 0: never.

        Raises OptimizerRefusedError with torch's own text if the class is missing or refuses
        the hyperparameters or the shape.
        """
        _check_segments(values, segments, traits)
        self._name = name
        self._traits = traits
        self._segments = tuple(segments)
        self._pieces = frozenset(segment.piece for segment in segments)
        self._num_elements = values.numel()
        self._dtype = values.dtype
        self._device = values.device
        self._bound: Tensor | None = None
        self._is_checked = False
        if traits.kind is OptimizerKind.ELEMENTWISE:
            self._parts = [_part(-1, 0, values.numel(), (values.numel(),), values)]
        else:
            self._parts = [
                _part(each.piece, each.offset, each.offset + each.length, each.shape or (), values)
                for each in segments
            ]
        self._is_merged = traits.kind is OptimizerKind.ELEMENTWISE and len(segments) > 1

        optimizer_class = find_class(name, extra=extra)
        is_fused = self._is_fused = can_fuse(name, values.dtype, str(values.device))
        self._optimizer = construct(
            optimizer_class, [part.parameter for part in self._parts], hyper, is_fused=is_fused
        )
        self._torch_step = torch_step(optimizer_class)
        self._group = self._optimizer.param_groups[0]
        if "lr" not in self._group:
            raise OptimizerRefusedError(
                f"{name} cannot run on a parameter server: its groups have no lr"
            )
        self._kernel = kernel_for(name) if is_fused else None
        self._frozen = FrozenAdam(after=freeze_step) if freeze_step else None
        self._hyper: Mapping[str, HyperValue] = {}
        self._switches: Switches = ()
        self._apply(hyper)

    def step(
        self,
        *,
        values: Tensor,
        grad: Tensor,
        hyper: Mapping[str, HyperValue],
        lr_scale: float,
        absent: frozenset[int],
    ) -> None:
        """Make one optimizer step on ``values`` in place; ``grad`` may be overwritten.

        ``values`` may be other memory than last time. ``values`` and ``grad`` have the chunk's
        length and dtype. ``hyper`` is not copied: pass a new mapping when it changes. ``lr_scale``
        multiplies lr in this step only. Pieces in ``absent`` keep their values and their state.
        """
        if grad.dtype is not values.dtype or values.dtype is not self._dtype:
            raise InvariantError(f"step on {values.dtype} with {grad.dtype}, not {self._dtype}")
        if not values.numel() == grad.numel() == self._num_elements:
            raise InvariantError(
                f"step on {values.numel()} elements with {grad.numel()}, not {self._num_elements}"
            )
        if hyper is not self._hyper:
            self._apply(hyper)
        lr = self._group["lr"]
        if lr_scale != 1.0:
            if not self._traits.lr_scales:
                raise InvariantError(f"{self._name} with lr x {lr_scale}: check_mode was not asked")
            lr *= lr_scale

        parts = self._parts
        if absent and not absent.isdisjoint(self._pieces):
            if absent.issuperset(self._pieces):
                return
            if self._is_merged:
                self._split()
            parts = [part for part in self._parts if part.piece not in absent]

        if self._frozen is not None:
            parts = self._step_frozen(self._frozen, parts, values, grad, lr)
            if not parts:
                return
        try:
            # Not looked up by the parameter, because torch hashes parameters in Python.
            states = [part.state for part in parts if part.state is not None]
            if self._kernel is not None and len(states) == len(parts):
                self._kernel(
                    [part.of(values) for part in parts],
                    [part.of(grad) for part in parts],
                    states,
                    self._group,
                    lr,
                )
            else:
                self._step_by_torch(parts, values, grad, lr)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            # Torch raises these for hyperparameters that its constructor did not check.
            raise OptimizerRefusedError(
                f"{self._name} cannot make a step with {format_hyperparameters(self._hyper)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def begin_state(self, states: Mapping[int, PieceState]) -> None:
        """Before the first step: resume with these pieces' state; other pieces have fresh state.
        Elements are zero until the caller fills :meth:`state_elements`."""
        wanted = [states.get(segment.piece, {}) for segment in self._segments]
        for key, entry in (item for state in wanted for item in state.items()):
            if not fits_torch(self._name, key, entry):
                raise OptimizerRefusedError(
                    f"{self._name} cannot continue with {entry} as state {key!r} of a parameter"
                )
        if self._is_merged and any(each != wanted[0] for each in wanted):
            self._split()
        for part, state in zip(self._parts, wanted, strict=False):  # merged: all are the same
            if state:
                self._optimizer.state[part.parameter] = begin(
                    state,
                    part.shape,
                    self._dtype,
                    is_fused=self._is_fused,
                    device=self._device,
                )

    def describe_state(self) -> dict[int, PieceState]:
        """Return the description of the state of each piece that has state."""
        states = {}
        for segment in self._segments:
            part = self._part_at(segment.offset)
            if state := self._optimizer.state.get(part.parameter):
                states[segment.piece] = describe(state, part.shape)
        return states

    def state_tensors(self, offset: int) -> Mapping[str, Any]:
        """Return the state itself of the segment at ``offset`` of the chunk."""
        found: Mapping[str, Any] = self._optimizer.state.get(self._part_at(offset).parameter, {})
        return found

    def set_whole(self, offset: int, key: str, value: Tensor) -> None:
        """Set an entry of its own shape, for the segment at ``offset``, which has begun state."""
        self._optimizer.state[self._part_at(offset).parameter][key] = value

    def state_elements(self, key: str, start: int, length: int) -> Tensor:
        """Return the memory of ``length`` elements of one entry, from element ``start`` of the
        chunk on. They lie in one segment."""
        part = self._part_at(start)
        value: Tensor = self._optimizer.state[part.parameter][key]
        return value.view(-1)[start - part.start : start - part.start + length]

    def _part_at(self, element: int) -> _Part:
        return next(part for part in self._parts if part.start <= element < part.end)

    def state_bytes(self) -> int:
        """Bytes of optimizer state held now; most optimizers make it in their first step."""
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        }
        return sum(storages.values())

    def _apply(self, hyper: Mapping[str, HyperValue]) -> None:
        """Apply hyperparameters; ignore keys that are not in its group (a scheduler's own)."""
        if hyper != self._hyper:
            lr = hyper.get("lr", 0.0)
            if isinstance(lr, bool) or not isinstance(lr, int | float):
                raise OptimizerRefusedError(f"{self._name} refuses lr={lr!r}: not a number")
            for key, value in hyper.items():
                if key in self._group and key not in LOCAL_KEYS:
                    self._group[key] = value
            now = switches(self._group)
            if now != self._switches:
                # Momentum or amsgrad switched on: torch's own step adds the state that this needs.
                self._switches = now
                for part in self._parts:
                    part.state = None
        self._hyper = hyper

    def _step_by_torch(
        self, parts: Sequence[_Part], values: Tensor, grad: Tensor, lr: float
    ) -> None:
        if values is not self._bound:
            for part in self._parts:
                part.parameter.data = part.of(values)
            self._bound = values
        state = self._optimizer.state
        # Fused SGD tells a first step by looking at all tensors together, so those that have state
        # and those that have none must not be mixed in one call.
        with_state = [part for part in parts if is_begun(state.get(part.parameter))]
        without = [part for part in parts if not is_begun(state.get(part.parameter))]
        usual_lr = self._group["lr"]
        for together in (with_state, without):
            if not together:
                continue
            try:
                self._group["lr"] = lr
                for part in together:
                    part.parameter.grad = part.of(grad)
                self._torch_step(self._optimizer)
            finally:
                self._group["lr"] = usual_lr
                for part in together:
                    part.parameter.grad = None
        if not self._is_checked:
            self._check_state()
        if self._kernel is not None and not is_proven(
            self._name, self._group, self._switches, self._dtype, str(self._device)
        ):
            self._kernel = None
        if self._kernel is not None:
            for part in parts:
                part.state = state[part.parameter]

    def _step_frozen(
        self, frozen: FrozenAdam, parts: Sequence[_Part], values: Tensor, grad: Tensor, lr: float
    ) -> list[_Part]:
        """Step the parts whose second moment is frozen. Return the other parts."""
        if self._is_merged and frozen.rules(self._optimizer.state.get(parts[0].parameter)):
            self._split()  # blocks of values are those of a piece
            parts = self._parts
        left = []
        for part in parts:
            state = self._optimizer.state.get(part.parameter)
            if frozen.rules(state):
                frozen.step(part.of(values), part.of(grad), state, self._group, lr)
            else:
                left.append(part)
        return left

    def _check_state(self) -> None:
        """Refuse an elementwise optimizer whose state is not per element: it cannot be split."""
        self._is_checked = True
        for part in self._parts if self._traits.kind is OptimizerKind.ELEMENTWISE else ():
            for key, value in self._optimizer.state.get(part.parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != part.shape:
                    raise OptimizerRefusedError(
                        f"{self._name} is marked elementwise in the server's configuration, but "
                        f"its state {key!r} has the shape {tuple(value.shape)} for a parameter of "
                        f'the shape {part.shape}; mark it whole: "{self._name}=whole"'
                    )

    def _split(self) -> None:
        """Replace the chunk's one parameter by one per segment, each with its share of state."""
        (merged,) = self._parts
        state = self._optimizer.state.pop(merged.parameter, {})
        ends = [segment.offset for segment in self._segments[1:]] + [merged.end]
        self._parts = []
        for segment, end in zip(self._segments, ends, strict=True):
            start = segment.offset
            part = _part(segment.piece, start, end, (end - start,), merged.parameter.data)
            self._parts.append(part)
            if state:
                share = {
                    key: _share(value, start, end, merged.shape) for key, value in state.items()
                }
                self._optimizer.state[part.parameter] = share
                part.state = share if merged.state is not None else None
        self._group["params"] = [part.parameter for part in self._parts]
        self._is_merged = False


def _part(piece: int, start: int, end: int, shape: tuple[int, ...], values: Tensor) -> _Part:
    # detach() makes a tensor of its own on the same memory: its data and grad are set later.
    parameter = values.detach()[start:end].view(shape).detach()
    is_all = end - start == values.numel()
    return _Part(piece=piece, start=start, end=end, shape=shape, is_all=is_all, parameter=parameter)


def _share(value: Any, start: int, end: int, shape: tuple[int, ...]) -> Any:
    """Return a segment's part of a state entry: a view if per element, else a copy."""
    if not isinstance(value, Tensor):
        return value
    return value[start:end] if value.shape == shape else value.clone()


def _check_segments(
    values: Tensor, segments: Sequence[SegmentSpec], traits: OptimizerTraits
) -> None:
    if values.dim() != 1 or values.dtype not in (torch.float32, torch.float64):
        raise InvariantError(f"a chunk of {values.dtype} with shape {tuple(values.shape)}")
    end = 0
    for segment in segments:
        if segment.offset < end or segment.length < 1:
            raise InvariantError(f"segments are empty or overlap: {segments}")
        end = segment.offset + segment.length
    if not segments or end > values.numel():
        raise InvariantError(f"segments do not fit {values.numel()} elements: {segments}")
    if traits.kind is OptimizerKind.WHOLE_TENSOR and not all(
        each.shape is not None and prod(each.shape) == each.length for each in segments
    ):
        raise InvariantError(f"{traits.name} needs segments with their whole shapes: {segments}")
