"""Tables for tests: their descriptions, pushes in slots, and what a server has of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import Contribution, SlotContent, Step
from psdist.tables.optimizers import row_optimizer
from psdist.tables.payloads import pack_push
from psdist.tables.specs import Ids, Rows, TableSpec, TableSpecs

ARGUMENTS: Mapping[str, Mapping[str, float]] = {
    "RowSGD": {},
    "RowWiseAdagrad": {"eps": 1e-8, "initial_accumulator_value": 0.0},
    "LazyAdam": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "row_wise": 0.0},
    "FTRL": {"beta": 1.0, "l1": 0.0, "l2": 0.0},
}


def specs_of(
    num_parts: int,
    *optimizers: str,
    num_rows: int | None = 500,
    max_rows: int = 1 << 12,
    codec: str = "none",
    **fields: object,
) -> TableSpecs:
    """A table for each optimizer, of dim 2, 3, 4 ..."""
    tables = [
        TableSpec(
            name=f"table {number}",
            num_rows=num_rows,
            dim=2 + number,
            optimizer=name,
            arguments=ARGUMENTS[name],
            seed=3,
            scale=0.5,
        )
        for number, name in enumerate(optimizers or ("RowSGD", "RowWiseAdagrad"))
    ]
    for each in tables:
        row_optimizer(each.optimizer, each.arguments)
    tables = [replace(each, **fields) for each in tables]  # type: ignore[arg-type]
    return TableSpecs(tables=tuple(tables), num_parts=num_parts, max_rows=max_rows, codec=codec)


def drawn_rows(
    specs: TableSpecs, random: np.random.Generator, *, most: int = 40
) -> list[tuple[Ids, Rows]]:
    """By table: distinct ids, ascending, and gradients."""
    found = []
    for table in specs.tables:
        ids = drawn_ids(table, random, most=most)
        rows = random.standard_normal((len(ids), table.dim)).astype(np.float32)
        found.append((ids, rows))
    return found


def drawn_ids(table: TableSpec, random: np.random.Generator, *, most: int = 40) -> Ids:
    low, high = (-(2**63), 2**63 - 1) if table.num_rows is None else (0, table.num_rows)
    return np.unique(random.integers(low, high, random.integers(0, most + 1), dtype=np.int64))


def of_part(
    specs: TableSpecs, rows: Sequence[tuple[Ids, Rows]], part: int
) -> list[tuple[Ids, Rows]]:
    found = []
    for table, (ids, values) in enumerate(rows):
        at = specs.split(table, ids)[part]
        found.append((ids[at], values[at]))
    return found


def ids_of_part(specs: TableSpecs, ids: Sequence[Ids], part: int) -> list[Ids]:
    return [each[specs.split(table, each)[part]] for table, each in enumerate(ids)]


def no_ids(specs: TableSpecs) -> list[Ids]:
    return [np.empty(0, np.int64) for _ in specs.tables]


def slot_of(payload: memoryview | bytes | npt.NDArray[np.uint8]) -> Frame:
    frame = Frame(memoryview(bytearray(payload)))
    frame.num_received = frame.capacity
    return frame


def push_of(
    specs: TableSpecs, rows: Sequence[tuple[Ids, Rows]], part: int, **more: object
) -> Frame:
    """A slot with the push of ``rows`` that are of ``part``."""
    given = {"wanted": no_ids(specs), **more}
    return slot_of(pack_push(specs, of_part(specs, rows, part), **given))  # type: ignore[arg-type]


def step_of(
    chunk: int,
    clock: int,
    groups: Sequence[int],
    hyper: bytes,
    *,
    slot: Frame | None = None,
    scale: float = 1.0,
) -> Step:
    """The step of a round of these groups; of the push in ``slot`` alone, if given."""
    return Step(
        chunk=chunk,
        gradient=slot or Frame(),
        content=SlotContent.SUM if slot is None else SlotContent.GRADIENT,
        gradient_scale=scale,
        lr_scale=1.0,
        hyper=hyper,
        absent=frozenset(),
        source=0,
        target=0,
        contributions=tuple(Contribution(group, clock, 1.0, False) for group in groups),
    )
