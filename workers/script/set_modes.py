"""Which calls of ``job.set_mode`` a resumed script makes once more on its way to where its
checkpoint was made, and which are new; pure.

    modes = SetModes()
    modes.counts("ssp", 3, is_resuming=False)        # True; noted for checkpoints
    tree = modes.collect()
    modes.restore(tree, has_place=True)              # in another process
    modes.counts("ssp", 3, is_resuming=True)         # False: the run goes on with it already

Where a checkpoint says where training goes on (an epoch, a loader's pass), all that the script does
until there was done before. A script with a loop of its own, ``while job.clock < 1000:``, is there
at once: what it calls before it trains is made once more if it is what it had called before its
first iteration, or since the iteration before the checkpoint, in that order; else it is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Call = tuple[str, int]


class SetModes:
    def __init__(self) -> None:
        self._first: list[_Call] = []
        """Those before the run's first iteration,"""
        self._newest: list[_Call] = []
        """and those since its last one."""
        self._has_begun = False
        """Whether the run has made an iteration, in this attempt or before."""
        self._again: list[_Call] = []
        """What a script without a place to go on from may call once more."""
        self._has_place = False

    def counts(self, mode: str, staleness: int, *, is_resuming: bool) -> bool:
        """Whether this call sets the mode. ``is_resuming``: the script has still to come to where
        its checkpoint was made."""
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
        """A tree of plain values."""
        return {
            "first": self._first.copy(),
            "newest": self._newest.copy(),
            "has begun": self._has_begun,
        }

    def restore(self, tree: Mapping[str, Any], *, has_place: bool) -> None:
        """``tree``: of :meth:`collect`; ``has_place``: whether the checkpoint says where in the
        script training goes on."""
        self._first, self._newest = _calls(tree["first"]), _calls(tree["newest"])
        self._has_begun, self._has_place = bool(tree["has begun"]), has_place
        newest = self._newest if self._has_begun else []
        self._again = [*self._first, *newest]


def _calls(told: Sequence[Sequence[Any]]) -> list[_Call]:
    return [(str(mode), int(staleness)) for mode, staleness in told]
