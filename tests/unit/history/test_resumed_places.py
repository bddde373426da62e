"""Where groups of a resumed attempt may begin when some had failed, and spares had their places."""

from __future__ import annotations

import pytest

from psdist.history.rules.log.kept import Kept, _begins_at
from psdist.history.run_record import RunRecord
from tests.support.history.toy_run import ToyRun

CUT = (9, 4, 7)
"""Clocks of groups 0 and 1 and of a substitute, group 2, which has joined; a failed group has the
lowest clock of active ones."""


def record(clocks: tuple[int, ...], *, mode: str = "async", num_substitutes: int = 1) -> RunRecord:
    groups = tuple((worker,) for worker in range(len(clocks)))
    toy = ToyRun(seed=0, groups=groups, iterations=(9,) * len(clocks), num_servers=1, num_chunks=1)
    changed = {"mode": mode, "staleness": None, "num_substitutes": num_substitutes}
    return toy.record.model_copy(update={**changed, "first_clocks": clocks})


def begins(
    clocks: tuple[int, ...],
    *,
    dead: tuple[int, ...],
    cut: tuple[int, ...] = CUT,
    is_apart: bool = False,
    **more: object,
) -> bool:
    kept = Kept(number=min(cut), cut=cut, crc=None, dead=frozenset(dead))
    made = record((0, 0, 0))
    return _begins_at(record(clocks, **more), made, kept, is_apart=is_apart)  # type: ignore[arg-type]


def test_who_lived_begins_where_it_was_and_nowhere_else() -> None:
    assert begins((9, 4, 0), dead=(2,), cut=(9, 4, 4))
    assert not begins((4, 9, 0), dead=(2,), cut=(9, 4, 4))
    assert not begins((7, 4, 0), dead=())


@pytest.mark.parametrize(("clock", "is_right"), [(7, True), (4, True), (9, False), (0, False)])
def test_a_dead_one_s_place_goes_on_where_its_substitute_was_or_at_the_lowest(
    clock: int, is_right: bool
) -> None:
    assert begins((9, clock, 0), dead=(1,)) == is_right


def test_substitutes_begin_nowhere() -> None:
    assert not begins((9, 7, 7), dead=(1,))


def test_with_other_spares_the_layout_is_the_same() -> None:
    assert begins((9, 7), dead=(1,), num_substitutes=0)
    assert begins((9, 7, 0, 0), dead=(1,), num_substitutes=2)


def test_in_another_layout_all_begin_at_the_lowest() -> None:
    assert begins((4, 4, 4, 0), dead=(1,))
    assert not begins((9, 7, 4, 0), dead=(1,))
    assert begins((4, 4, 0), dead=(1,), mode="sync")
    assert begins((4, 4, 0), dead=(1,), is_apart=True)
    assert not begins((9, 7, 0), dead=(1,), is_apart=True)
    assert not begins((9, 7, 0), dead=(1,), mode="sync")
