"""The description of the user's model: pieces, names, and tensors that are not trained.

    model = ModelDescription.of(module, optimizer)
    model.pieces                 # what the optimizer holds, in the module's order
    model.lines(optimizer)       # equal on all workers or an error

It reads the module and the optimizer and changes neither.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from psdist.errors import ModelError
from psdist.protocol.collected import Brought
from psdist.protocol.memory import dtype_name
from psdist.protocol.optimizers import (
    OptimizerKind,
    canonical_name,
    check_mode,
    hyperparameters,
    pack_hyperparameters,
    traits,
)
from psdist.protocol.partition import ITEM_BYTES, Partition, Piece


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    pieces: tuple[Piece, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    """``parameters[i]`` is piece i."""
    untrained: tuple[tuple[str, torch.Tensor], ...]
    """Buffers, empty parameters, and parameters that the optimizer does not hold. They begin with
    the chief's values and are never pushed."""
    frozen: tuple[tuple[str, torch.nn.Parameter], ...]
    """Parameters among these without gradient. They must stay without one."""
    optimizer: str

    @classmethod
    def of(cls, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ModelDescription:
        """Raises :class:`ModelError` for what cannot be trained on servers."""
        group_of: dict[int, int] = {}
        for index, members in enumerate(optimizer.param_groups):
            for parameter in members["params"]:
                group_of[id(parameter)] = index
        pieces: list[Piece] = []
        parameters: list[torch.nn.Parameter] = []
        untrained: list[tuple[str, torch.Tensor]] = []
        frozen: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in module.named_parameters():  # tied ones once, under the first name
            group = group_of.pop(id(parameter), None)
            is_frozen = not parameter.requires_grad
            dtype = dtype_name(parameter.dtype)
            # A frozen one may have any dtype, integers for example, while it stays frozen.
            is_held = group is not None and (not is_frozen or dtype in ITEM_BYTES)
            if group is None or not is_held or not parameter.numel():
                untrained.append((name, parameter))
                if is_frozen and parameter.numel():
                    frozen.append((name, parameter))
                continue
            pieces.append(
                Piece(
                    name=name,
                    shape=tuple(parameter.shape),
                    stride=_dense_stride(parameter),
                    dtype=dtype,
                    optimizer_group=group,
                    is_frozen=is_frozen,
                )
            )
            parameters.append(parameter)
        if group_of:
            raise ModelError(
                f"the optimizer holds {len(group_of)} parameters that are not in the model passed "
                "to prepare; pass one module that contains them all"
            )
        untrained.extend(module.named_buffers())
        return cls(
            pieces=tuple(pieces),
            parameters=tuple(parameters),
            untrained=tuple(untrained),
            frozen=tuple(frozen),
            optimizer=canonical_name(type(optimizer)),
        )

    @property
    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters of the pieces with their names."""
        names = [piece.name for piece in self.pieces]
        return list(zip(names, self.parameters, strict=True))

    def lines(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return a line for each property on which all workers must agree."""
        found = [f"optimizer {self.optimizer}"]
        groups = hyperparameters(optimizer.param_groups, known=optimizer.defaults)
        for index, values in enumerate(groups):
            settings = ", ".join(f"{key}={value}" for key, value in values.items())
            found.append(f"optimizer group {index}: {settings}")
        found += [
            f"parameter {piece.name}: shape {list(piece.shape)}, dtype {piece.dtype}, "
            f"stride {list(piece.stride)}, optimizer group {piece.optimizer_group}"
            f"{', frozen' if piece.is_frozen else ''}"
            for piece in self.pieces
        ]
        found += [
            f"untrained {name}: shape {list(tensor.shape)}, dtype {dtype_name(tensor.dtype)}"
            for name, tensor in self.untrained
        ]
        return found

    def cut(
        self,
        *,
        chunk_bytes: int | None,
        mode: str,
        extra_optimizers: Sequence[str],
        link_bytes_per_s: float = math.inf,
    ) -> Partition:
        """Cut the pieces as the optimizer needs them; ``chunk_bytes`` None: by the model's size and
        the slowest link.

        Raises :class:`OptimizerRefusedError` for an optimizer that servers do not run, or not in
        this mode; ``extra_optimizers``: names that the configuration allows besides torch's.
        """
        marks = traits(self.optimizer, extra=extra_optimizers)
        check_mode(marks, mode)
        is_whole = marks.kind == OptimizerKind.WHOLE_TENSOR
        pieces = self.pieces
        if is_whole:  # servers step the matrix row by row, so it must not be transposed
            pieces = tuple(
                dataclasses.replace(piece, stride=_row_major(piece.shape)) for piece in pieces
            )
        return Partition.cut(
            pieces,
            chunk_bytes=chunk_bytes,
            whole_tensors=is_whole,
            link_bytes_per_s=link_bytes_per_s,
        )

    def saved_names(
        self, module: torch.nn.Module, *, skips_others: bool = False
    ) -> dict[str, torch.Tensor | int]:
        """Return the entries of the module's own state_dict by name: the piece's index if it is
        trained (tied parameters have several names), else the tensor. Other values (a module's
        extra state) raise :class:`ModelError`, or are omitted with ``skips_others``."""
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        names: dict[str, torch.Tensor | int] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                if skips_others:
                    continue
                raise ModelError(
                    f"state_dict entry {name} is a {type(value).__name__}, not a tensor, and "
                    "cannot be saved as safetensors"
                )
            index = index_of.get(id(value))
            names[name] = value.detach() if index is None else index
        return names


def packed_hyperparameters(optimizer: torch.optim.Optimizer) -> bytes:
    """Pack the hyperparameters of ``optimizer``'s groups: its own keys, not users' labels."""
    return pack_hyperparameters(hyperparameters(optimizer.param_groups, known=optimizer.defaults))


def agree_on_model(
    lines: list[str],
    *,
    worker: int,
    ranks: Sequence[int],
    collective: Callable[[bytes], Brought],
) -> None:
    """Compare ``lines`` with all other workers. ``collective`` returns the payload of each worker.

    Raises :class:`ModelError`, the same on all workers, with the first difference and the worker
    with its rank in ``ranks``. The lines are sent only if digests differ.
    """
    packed = pack_lines(lines)
    digests = collective(hashlib.sha256(packed).digest())
    others = digests.unlike(digests.payloads[0])
    if not others:
        return
    other = others[0]
    shown = collective(packed if worker in (0, other) else b"")
    first, second = (shown.of(each) for each in (0, other))
    assert first is not None
    assert second is not None
    difference = first_difference(unpack_lines(first), unpack_lines(second))
    raise ModelError(
        f"the model differs between workers 0 and {other} (rank {ranks[other]}): {difference}; all "
        "workers must build the same model and optimizer (values may differ, the chief's are used)"
    )


def first_difference(mine: list[str], theirs: list[str]) -> str:
    """Return the first line in which two workers' descriptions differ, as part of a message."""
    for left, right in zip(mine, theirs, strict=False):
        if left != right:
            return f"{left!r} against {right!r}"
    longer, shorter = (mine, theirs) if len(mine) > len(theirs) else (theirs, mine)
    return f"{longer[len(shorter)]!r} is missing on one of them"


def pack_lines(lines: list[str]) -> bytes:
    packed: bytes = msgpack.packb(lines)
    return packed


def unpack_lines(data: bytes) -> list[str]:
    lines: Any = msgpack.unpackb(data)
    return [str(line) for line in lines]


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the parameter's own strides if its memory has no holes (channels_last, transposed),
    else the strides of a contiguous tensor."""
    expected = 1
    for extent, stride in sorted(
        zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if extent == 1:
            continue
        if stride != expected:
            return _row_major(parameter.shape)
        expected *= extent
    return tuple(parameter.stride())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())
