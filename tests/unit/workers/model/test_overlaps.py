"""Which tensors share memory, compared with numpy's exact answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psdist.workers.model.overlaps import Extent, first_overlap


def extents(*tensors: torch.Tensor) -> list[Extent]:
    return [Extent.of(str(place), each) for place, each in enumerate(tensors)]


def names(found: tuple[Extent, Extent] | None) -> tuple[str, str] | None:
    return None if found is None else (found[0].name, found[1].name)


def random_view(flat: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """Return a view of one to three dimensions with any strides that stay inside of ``flat``."""
    while True:
        shape = [int(n) for n in random.integers(1, 5, random.integers(1, 4))]
        stride = [int(n) for n in random.integers(0, 9, len(shape))]
        start = int(random.integers(0, len(flat)))
        last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if last < len(flat):
            return flat.as_strided(shape, stride, start)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    storage = torch.arange(len(tensor.untyped_storage()) // tensor.itemsize)
    places = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return len(places.unique()) < tensor.numel()


@pytest.mark.parametrize("seed", range(10))
def test_of_random_views_an_overlap_is_found_exactly_where_numpy_finds_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(200):
        flat = torch.zeros(40)
        moving = [random_view(flat, random) for _ in range(2)]
        staying = [random_view(flat, random)]
        pairs = [(moving[0], moving[1]), (moving[0], staying[0]), (moving[1], staying[0])]
        expected = any(np.shares_memory(a.numpy(), b.numpy()) for a, b in pairs)
        expected = expected or any(map(overlaps_itself, moving))
        found = first_overlap(extents(*moving), extents(*staying))
        assert (found is not None) == expected, (moving, staying)


def test_parts_of_one_buffer_side_by_side_do_not_overlap() -> None:
    flat = torch.zeros(24)
    parts = [part.view(2, 4) for part in flat.split(8)]
    assert first_overlap(extents(*parts), []) is None


def test_columns_of_one_matrix_do_not_overlap_although_their_ranges_do() -> None:
    matrix = torch.zeros(5, 9)
    assert first_overlap(extents(*matrix.split(3, dim=1)), []) is None
    assert names(first_overlap(extents(matrix[:, :4], matrix[:, 3:]), [])) == ("0", "1")


def test_tensors_that_stay_may_share_memory_and_the_first_that_moves_is_named() -> None:
    flat = torch.zeros(8)
    staying = extents(flat, flat.view(2, 4), flat[:1].expand(4))
    assert first_overlap([], staying) is None
    found = first_overlap([Extent.of("weight", flat[7:])], staying)
    assert names(found) == ("1", "weight")


def test_other_item_sizes_and_storages_over_the_same_bytes_are_seen() -> None:
    flat = torch.zeros(4)
    halves = flat.view(torch.bfloat16)
    assert names(first_overlap(extents(flat, halves[7:]), [])) == ("0", "1")
    assert first_overlap(extents(flat[:3], halves[6:]), []) is None
    array = np.zeros(8, dtype=np.float32)
    one, other = torch.from_numpy(array[:5]), torch.from_numpy(array[4:])
    assert names(first_overlap(extents(one, other), [])) == ("0", "1")


def test_memory_of_tensors_that_are_gone_is_not_alive() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:]
    extent = Extent.of("x", tensor)
    del tensor
    assert extent.is_alive
    del view
    assert not extent.is_alive
