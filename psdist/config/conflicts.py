"""The table of needs and conflicts, as rows and as Markdown.

conflicts_table()        # (Row(pair=("backup groups", ...), ...), ...)
print(as_markdown())     # docs/reference/conflicts.md has it

The table is psdist.features; psdist.config.compatibility compares it with the settings of a run.
"""

from __future__ import annotations

from typing import NamedTuple

from psdist.config.compatibility import off_of
from psdist.config.settings import RunConfig
from psdist.features import FEATURES, Feature

_NAMED = {each.name: each for each in FEATURES}


class Row(NamedTuple):
    pair: tuple[str, str]
    """The feature and the other one; for a need with a choice, all choices."""
    settings: tuple[str, str]
    """An example of each; "" for a property of the script."""
    is_need: bool
    """True if the first does not work without the second, False if it does not work with it."""
    reason: str
    remedy: str


def conflicts_table() -> tuple[Row, ...]:
    """Return a row for each need and each conflict, in the order of the declarations."""
    rows = []
    for feature in FEATURES:
        off = off_of(feature, _example(feature))
        for need in feature.needs:
            others = [_NAMED[name] for name in need.features]
            remedy = ", or ".join([*(each.on for each in others), off])
            rows.append(
                Row(
                    pair=(feature.name, " or ".join(need.features)),
                    settings=(_example(feature), " or ".join(map(_example, others))),
                    is_need=True,
                    reason=need.reason,
                    remedy=remedy,
                )
            )
        for conflict in feature.conflicts:
            other = _NAMED[conflict.feature]
            rows.append(
                Row(
                    pair=(feature.name, other.name),
                    settings=(_example(feature), _example(other)),
                    is_need=False,
                    reason=conflict.reason,
                    remedy=f"{off_of(other, _example(other))}, or {off}",
                )
            )
    return tuple(rows)


def as_markdown() -> str:
    lines = ["| feature | | other | reason | remedy |", "|---|---|---|---|---|"]
    for row in conflicts_table():
        one, other = (
            f"{name} (`{setting}`)" if setting else name
            for name, setting in zip(row.pair, row.settings, strict=True)
        )
        relation = "needs" if row.is_need else "excludes"
        lines.append(f"| {one} | {relation} | {other} | {row.reason} | {row.remedy} |")
    return "\n".join(lines) + "\n"


def _example(feature: Feature) -> str:
    """Return the first setting of the first example; "" for a property of the script."""
    for example in feature.settings:
        return RunConfig.model_validate(example).setting_text(next(iter(example)))
    return ""
