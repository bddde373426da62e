"""Machines and fabrics for tests, as files: shapes that are checked in, and real ones.

Owns where they are and what is said where the real ones are missing. The shapes are in
tests/data/machines; the real ones are in ../shared/topologies, next to the clone, and not part of
the project: without that folder the tests read the shapes alone, and say so at the end.

    @pytest.mark.parametrize("name", [*SHAPES, *real("cts1-pascal.xml")])
    def test_a_machine_is_read(name: str) -> None:
        hwloc_xml.read(machine_file(name))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.mpirun import REPOSITORY

SHAPE_FOLDER = REPOSITORY / "tests" / "data" / "machines"
SHAPES = tuple(sorted(path.name for path in SHAPE_FOLDER.glob("*.xml")))
REAL_FOLDER = REPOSITORY.parent / "shared" / "topologies"
IS_MISSING = "../shared is not beside the clone"
"""Start of the reason of a test that is skipped for that."""

Row = TypeVar("Row")


def real(*rows: Row) -> tuple[Row, ...]:
    """The rows of a parametrization that need real machines; none where there are none."""
    return rows if REAL_FOLDER.is_dir() else ()


def machine_file(name: str) -> Path:
    """The shape of that name, or the real machine."""
    path = SHAPE_FOLDER / name
    if path.is_file():
        return path
    path = REAL_FOLDER / name
    if not path.is_file():
        pytest.skip(f"{IS_MISSING}: no {name} in {REAL_FOLDER.relative_to(REPOSITORY.parent)}")
    return path


def summary(reasons: Sequence[str]) -> str:
    """The last lines of a run about real machines; ``reasons`` are those of all skipped tests."""
    if REAL_FOLDER.is_dir():
        return ""
    num_skipped = sum(IS_MISSING in reason for reason in reasons)
    return (
        f"{IS_MISSING}: {num_skipped} tests skipped for that; shapes of machines in "
        f"{SHAPE_FOLDER.relative_to(REPOSITORY)} stand in for the real ones"
    )
