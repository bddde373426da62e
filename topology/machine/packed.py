"""The types by which pydantic reads a machine that another rank has packed, within limits.

cpus: CpuSet                                      # from "0-3,8"
cores: Annotated[tuple[Annotated[Core, row_of(Core)], ...], MANY]    # from [[0, "0", ...], ...]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from psdist.errors import PlacementError
from psdist.topology.text import HOST_NAME, bitmap, shown
from psdist.topology.text.models import Number, String, Whole, fault, fits

MAX_MEMBERS: Final = 1_000_000


@dataclass(slots=True)
class Budget:
    """How many PUs the sets of one machine may still have together: a range is short, its set is
    not."""

    members: int = MAX_MEMBERS


def _cpus(value: object, info: ValidationInfo) -> frozenset[int]:
    if not isinstance(value, str):
        raise fault(f"is {shown(value)}, not a list of PUs like 0-3,8")
    try:
        found = bitmap.parse_list(value)
    except PlacementError as error:
        raise fault(f"is no set: {error}") from None
    budget = info.context
    assert isinstance(budget, Budget)
    budget.members -= len(found)
    if budget.members < 0:
        raise fault(f"is one of sets with more than {MAX_MEMBERS:,} PUs together")
    return found


def _ordered_cpus(value: object, info: ValidationInfo) -> tuple[int, ...]:
    found = tuple(sorted(_cpus(value, info)))
    if not found:
        raise fault("is '', not the PUs of a core")
    return found


CpuSet: TypeAlias = Annotated[frozenset[int], PlainValidator(_cpus)]
CoreCpus: TypeAlias = Annotated[tuple[int, ...], PlainValidator(_ordered_cpus)]
Count: TypeAlias = Annotated[Whole, Field(ge=0, lt=1 << 64)]
OsIndex: TypeAlias = Annotated[Whole, Field(ge=-1, lt=1 << 64)]
Index: TypeAlias = Annotated[Whole, Field(ge=-1, lt=bitmap.MAX_CPUS)]
"""-1 is psdist.topology.machine.UNKNOWN."""
Speed: TypeAlias = Annotated[Number, Field(ge=0, lt=1e18)]
MachineName: TypeAlias = Annotated[
    String, fits(lambda name: not name or HOST_NAME.fullmatch(name), "a host name")
]
MANY: Final = Field(max_length=bitmap.MAX_CPUS, fail_fast=True)
"""For lists of what a machine has many of."""


def row_of(declared: type[Any]) -> BeforeValidator:
    """Takes a list with the fields of a dataclass in their order."""
    names = tuple(field.name for field in fields(declared))

    def named(value: object) -> dict[str, object]:
        if not isinstance(value, list | tuple) or len(value) != len(names):
            raise fault(f"is {shown(value)}, not {len(names)} fields")
        return dict(zip(names, value, strict=True))

    return BeforeValidator(named)
