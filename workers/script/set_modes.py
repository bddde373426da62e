"""Calls of ``job.set_mode`` that a resumed script repeats on its way to the checkpoint. Pure.

    modes = SetModes()
    modes.counts("ssp", 3, is_resuming=False)        # True; noted for checkpoints
    tree = modes.collect()
    modes.restore(tree, has_place=True)              # in another process
    modes.counts("ssp", 3, is_resuming=True)         # False: a repeated call

A checkpoint may record the place in the script (an epoch, a loader's pass). All calls before that
place are repeated. A script with its own loop, ``while job.clock < 1000:``, has no such place. Its
calls before the next iteration are repeated if it had made them, in that order, before its first
iteration or since the last iteration before the checkpoint. Other calls are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Call = tuple[str, int]


class SetModes:
    def __init__(self) -> None:
        self._first: list[_Call] = []
        """Calls before the run's first iteration."""
        self._newest: list[_Call] = []
        """Calls since its last iteration."""
        self._has_begun = False
        """True if the run has made an iteration, in this attempt or before."""
        self._again: list[_Call] = []
        """Calls that a script without a recorded place may repeat."""
        self._has_place = False

    def counts(self, mode: str, staleness: int, *, is_resuming: bool) -> bool:
        """True if this call sets the mode. ``is_resuming``: the script has not yet reached the
        place of its checkpoint."""
        call = mode, staleness
        if is_resuming and self._has_place:
            return False
        if is_resuming and call in self._again:
            del self._again[: self._again.index(call) + 1]
            return False
        if not self._has_begun:
            self._first.append(call)
        self._newest.append(call)
        return True

    def end_iteration(self) -> None:
        self._has_begun = True
        self._newest.clear()

    def collect(self) -> dict[str, Any]:
        """Return a tree of plain values."""
        return {
            "first": self._first.copy(),
            "newest": self._newest.copy(),
            "has begun": self._has_begun,
        }

    def restore(self, tree: Mapping[str, Any], *, has_place: bool) -> None:
        """``tree``: of :meth:`collect`; ``has_place``: the checkpoint records the place in the
        script."""
        self._first, self._newest = _calls(tree["first"]), _calls(tree["newest"])
        self._has_begun, self._has_place = bool(tree["has begun"]), has_place
        newest = self._newest if self._has_begun else []
        self._again = [*self._first, *newest]


def _calls(told: Sequence[Sequence[Any]]) -> list[_Call]:
    return [(str(mode), int(staleness)) for mode, staleness in told]
