"""Pairs of features as settings of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return settings that turn on the features of both examples, each by its first setting; None
    if these are the same setting with two values."""
    first, second = (dict([next(iter(each.items()))]) if each else {} for each in (one, other))
    is_same = all(second.get(key, value) == value for key, value in first.items())
    return {**one, **other, **first, **second} if is_same else None
