"""An exact test of whether tensors share memory.

    first = first_overlap(moving, staying)       # (Extent, Extent) or None

job.prepare moves each trained parameter into flat memory. A tensor that shared the old memory would
keep the old values, so prepare refuses every such pair. Views of one storage that do not
overlap, such as parameters cut out of one flat buffer, are fine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, kw_only=True, eq=False)
class Extent:
    """The memory of one tensor. It keeps the tensor's geometry, and does not keep the tensor."""

    name: str
    device: str
    start: int
    """Address of the first element."""
    item_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    storage: StorageWeakRef

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Extent:
        """``tensor`` must be strided and have at least one element."""
        return cls(
            name=name,
            device=str(tensor.device),
            start=tensor.data_ptr(),
            item_bytes=tensor.itemsize,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            storage=StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call] # torch's
        )

    @property
    def is_alive(self) -> bool:
        """True if a tensor still uses this storage. Otherwise its addresses may be reused."""
        return not self.storage.expired()  # type: ignore[no-untyped-call] # torch's

    @property
    def stop(self) -> int:
        """The address after the last element."""
        steps = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.start + (steps + 1) * self.item_bytes

    @property
    def has_distinct_elements(self) -> bool:
        """True if each dimension steps over everything inside it. False also where the elements
        are distinct in a less regular way."""
        reach = 1
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1 and step < reach:
                return False
            reach += (n - 1) * step
        return True


def first_overlap(
    moving: Sequence[Extent], staying: Sequence[Extent]
) -> tuple[Extent, Extent] | None:
    """Return two extents with a common byte; at least one of them is in ``moving``.

    An extent of ``moving`` whose own elements overlap is returned twice. None: there is no overlap.
    """
    order = {id(each): place for place, each in enumerate([*moving, *staying])}
    for cluster in _clusters([*moving, *staying]):
        cluster.sort(key=lambda each: order[id(each)])
        movers = [each for each in cluster if order[id(each)] < len(moving)]
        is_alone = len(cluster) == 1 and cluster[0].has_distinct_elements
        if movers and not is_alone and (found := _first_in(movers, cluster[len(movers) :])):
            return found
    return None


def _clusters(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Extents whose address ranges overlap, directly or through others."""
    ordered = sorted(extents, key=lambda each: (each.device, each.start))
    for _, on_device in groupby(ordered, key=lambda each: each.device):
        cluster: list[Extent] = []
        stop = 0
        for each in on_device:
            if cluster and each.start >= stop:
                yield cluster
                cluster = []
            stop = max(stop, each.stop) if cluster else each.stop
            cluster.append(each)
        yield cluster


def _first_in(moving: Sequence[Extent], staying: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Return the first overlap in a cluster, found by marking the owner of each unit of its memory.

    The time and memory are those of a copy of the cluster.

    Solving the strides' equations needs no memory, but its time has no bound.
    """
    extents = [*staying, *moving]
    base = min(each.start for each in extents)
    unit = math.gcd(
        *(each.item_bytes for each in extents), *(each.start - base for each in extents)
    )
    owner = torch.zeros((max(each.stop for each in extents) - base) // unit, dtype=torch.int32)
    for index, each in enumerate(extents):
        view = _units(each, owner, base, unit)
        is_moving = index >= len(staying)
        if is_moving and (before := int(view.max())):
            return extents[before - 1], each
        view.fill_(index + 1)
        if is_moving and not each.has_distinct_elements:
            num_units = math.prod(each.shape) * each.item_bytes // unit
            memory = owner[(each.start - base) // unit : (each.stop - base) // unit]
            if int((memory == index + 1).sum()) != num_units:
                return each, each
    return None


def _units(extent: Extent, owner: torch.Tensor, base: int, unit: int) -> torch.Tensor:
    """The units of ``extent`` in ``owner``, each at least once."""
    per_item = extent.item_bytes // unit
    # torch does not write to a dimension with stride 0; its first index has all units.
    dimensions = [
        (n, step * per_item) for n, step in zip(extent.shape, extent.stride, strict=True) if step
    ]
    dimensions.append((per_item, 1))
    return owner.as_strided(
        [n for n, _ in dimensions],
        [step for _, step in dimensions],
        (extent.start - base) // unit,
    )
