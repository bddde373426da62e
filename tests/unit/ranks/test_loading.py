"""Importing what is large: the collector lies still meanwhile, and is afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from psdist.ranks.loading import uncollected


@pytest.fixture(autouse=True)
def the_collector_as_it_was() -> Iterator[None]:
    was_enabled, num_frozen = gc.isenabled(), gc.get_freeze_count()
    yield
    gc.unfreeze()
    if num_frozen:
        gc.freeze()
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_afterwards_also_after_an_error(
    is_enabled: bool,
) -> None:
    (gc.enable if is_enabled else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() is is_enabled
    with pytest.raises(ImportError), uncollected():
        raise ImportError("libcudart.so.12")
    assert gc.isenabled() is is_enabled


def test_what_was_made_inside_is_never_looked_at_again() -> None:
    gc.unfreeze()
    with uncollected():
        made = [[] for _ in range(10)]
    looked_at = {id(each) for each in gc.get_objects()}
    assert gc.get_freeze_count() > 10
    assert not looked_at & {id(each) for each in made}
