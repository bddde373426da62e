"""The ids of the next batch, found out from those of the batches before.

A look-up is traced to a tensor of the newest batch of a loader: to the same memory, or to the
same values, of the whole tensor or of an index of one dimension. A place that was found twice in a
row is expected in the next batch, which is read from the loader when a step ends. An expectation
that is wrong costs time, never more.

    foresight = Foresight(num_tables, peek=loaders.peek)
    foresight.batch(batch)                         # the script receives this batch
    foresight.used(table, given)                   # a forward pass has looked these up
    foresight.wanted(1)                            # by table: the ids of the next batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from psdist.tables.kernels import row_kernels
from psdist.tables.specs import Ids

_SEEN = 2
"""Batches in which a table's ids lay at the same place, until the place is expected."""
_TRIES = 8
"""Look-ups of a table whose ids are searched for in the batch, while none is found."""
Path = tuple[Any, ...]
"""Keys and indexes from a batch to a tensor."""


class Place(NamedTuple):
    """A view of a tensor of a batch."""

    path: Path
    offset: int
    """Elements from the tensor's first one."""
    shape: tuple[int, ...]
    """-1: the length of the batch."""
    stride: tuple[int, ...]
    whole: tuple[Any, ...]
    """Shape of the tensor without its first dimension, and its strides."""

    @classmethod
    def at(cls, path: Path, tensor: torch.Tensor, view: torch.Tensor) -> Place:
        shape = tuple(-1 if n == tensor.shape[0] else n for n in view.shape[:1])
        return cls(
            path,
            int(view.storage_offset() - tensor.storage_offset()),
            (*shape, *view.shape[1:]),
            view.stride(),
            _whole(tensor),
        )

    def of(self, leaves: Mapping[Path, torch.Tensor]) -> torch.Tensor | None:
        """Return the view in another batch; None if the batch has other shapes, or is too short."""
        tensor = leaves.get(self.path)
        if tensor is None or _whole(tensor) != self.whole or self.offset < 0:
            return None
        shape = [tensor.shape[0] if n == -1 else n for n in self.shape]
        if self.offset + _extent(shape, self.stride) > _extent(tensor.shape, tensor.stride()):
            return None
        return tensor.as_strided(shape, self.stride, tensor.storage_offset() + self.offset)


def _whole(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape[1:], tensor.stride()


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first one of a view to its last."""
    return 1 + sum((n - 1) * each for n, each in zip(shape, stride, strict=True))


def leaves_of(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors of integers in a batch, with their paths."""
    if isinstance(tree, torch.Tensor):
        is_plain = tree.layout is torch.strided and not tree.is_nested
        if is_plain and tree.dim() and tree.dtype in (torch.int64, torch.int32):
            yield path, tree
    elif isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from leaves_of(each, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, each in enumerate(tree):
            yield from leaves_of(each, (*path, number))


class Foresight:
    def __init__(self, num_tables: int, *, peek: Callable[[int], Any] | None) -> None:
        """``peek(n)``: return the n-th of the batches that follow, None if there is none. Without
        it nothing is expected but what the script announces."""
        self._peek = peek
        self._leaves: dict[Path, torch.Tensor] = {}
        """Tensors of the newest batch."""
        self._places: list[dict[Place, int]] = [{} for _ in range(num_tables)]
        """By table: places of ids in the last iteration, with the iterations in a row."""
        self._now: list[list[Place]] = [[] for _ in range(num_tables)]
        self._tries = [0] * num_tables
        """Look-ups in a row whose ids were not found."""
        self._announced: list[list[Ids]] = [[] for _ in range(num_tables)]

    def batch(self, batch: Any) -> None:
        """The script receives this batch."""
        if self._peek is not None:
            self._leaves = dict(leaves_of(batch))

    def announce(self, table: int, ids: Ids) -> None:
        """The script says that the next forward pass has these ids."""
        self._announced[table].append(ids)

    def used(self, table: int, given: torch.Tensor) -> None:
        """A forward pass has looked up the ids of this tensor."""
        if self._leaves and (place := self._place_of(table, given)) is not None:
            self._now[table].append(place)
            self._tries[table] = 0

    def _place_of(self, table: int, given: torch.Tensor) -> Place | None:
        for known in self._places[table]:  # mostly it is where it was
            if (tensor := known.of(self._leaves)) is not None and _is_same(tensor, given):
                return known
        if self._tries[table] >= _TRIES:
            return None
        self._tries[table] += 1
        for path, leaf in self._leaves.items():
            if leaf.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
                place = Place.at(path, leaf, given)
                if place.of(self._leaves) is not None:  # else it lies next to this tensor
                    return place
            views = [leaf, *(view for dim in range(1, leaf.dim()) for view in leaf.unbind(dim))]
            for view in views:
                if _is_same(view, given):
                    return Place.at(path, leaf, view)
        return None

    def wanted(self, number: int) -> list[Ids]:
        """Return, by table, the ids of the ``number``-th batch from now, ascending. A step ends."""
        wanted = [list(each) for each in self._announced]
        for each in self._announced:
            each.clear()
        self._places = [
            {place: min(_SEEN, before.get(place, 0) + 1) for place in now}
            for before, now in zip(self._places, self._now, strict=True)
        ]
        self._now = [[] for _ in self._now]
        expected = [
            [place for place, seen in each.items() if seen == _SEEN] for each in self._places
        ]
        if self._peek is not None and any(expected) and (batch := self._peek(number)) is not None:
            leaves = dict(leaves_of(batch))
            for table, places in enumerate(expected):
                tensors = (place.of(leaves) for place in places)
                wanted[table] += [_flat(each) for each in tensors if each is not None]
        return list(map(_distinct, wanted))


def _is_same(view: torch.Tensor, given: torch.Tensor) -> bool:
    """True if both have the same values, in order."""
    if view.numel() != given.numel() or not view.numel():
        return False
    is_view = view.data_ptr() == given.data_ptr() and view.dtype == given.dtype
    return (is_view and view.stride() == given.stride()) or bool(
        (view.reshape(-1).cpu() == given.reshape(-1).cpu()).all()
    )


def _flat(tensor: torch.Tensor) -> Ids:
    flat: Ids = tensor.reshape(-1).cpu().long().numpy()
    return flat


def _distinct(ids: Sequence[Ids]) -> Ids:
    if not ids:
        return np.empty(0, np.int64)
    joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
    return row_kernels().distinct(joined)[0]
