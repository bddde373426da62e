"""Time of a round at each level of codecs, observed or predicted; pure.

    times = LevelTimes()
    times.take_in(0, Seen(own_us=1000, exposed_us=9000, window=1), sizes)
    times.round_us(3, sizes)                                # of another level

Own and exposed time of tried levels are known. For another level, own time is that of the nearest
tried level, and exposed time follows the bytes: on the line through the two levels whose bytes
are nearest; where one is known, on that through it and the exposed time that an earlier line has
shown to be there without bytes, 0 at first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_COUNTS: Final = 0.10
"""Part of a round: a change of waiting by less does not count."""


class Seen(NamedTuple):
    own_us: int
    exposed_us: int
    window: int
    """The how-manieth it was."""

    @property
    def round_us(self) -> int:
        return self.own_us + self.exposed_us


@dataclass(slots=True)
class LevelTimes:
    """Times of all groups together, or of one."""

    seen: dict[int, Seen] = field(default_factory=dict)
    """By level."""
    fixed_us: float = 0.0
    """Exposed time that no bytes make shorter, as the line through two levels has said last."""

    def take_in(self, level: int, now: Seen) -> bool:
        """Whether the network is another one than before: then the rest is forgotten."""
        before = self.seen.get(level)
        is_another = before is not None and _is_another_network(before, now)
        if is_another:
            self.seen.clear()
        self.seen[level] = now
        return is_another

    def keep(self, counts: Callable[[int, int], bool], sizes: Sequence[int]) -> None:
        """Keep an observation of a level if ``counts(level, window)``, and so for the last line.
        ``sizes``: bytes of an exchange, by level."""
        self.seen = {level: seen for level, seen in self.seen.items() if counts(level, seen.window)}
        known = self._known(sizes)
        if len(known) > 1:
            small, large = min(known), max(known)
            slope = max(0.0, (known[large] - known[small]) / (large - small))
            self.fixed_us = max(0.0, known[small] - slope * small)

    def round_us(self, level: int, sizes: Sequence[int]) -> float:
        """With this level."""
        return self.own_us(level) + self.exposed_us(level, sizes)

    def own_us(self, level: int) -> int:
        nearest = min(self.seen, key=lambda each: (abs(each - level), each))
        return self.seen[nearest].own_us

    def exposed_us(self, level: int, sizes: Sequence[int]) -> float:
        if (seen := self.seen.get(level)) is not None:
            return seen.exposed_us
        size, known = sizes[level], self._known(sizes)
        tried = sorted(known)
        if len(tried) == 1:
            fixed_us = min(self.fixed_us, known[tried[0]])
            return fixed_us + (known[tried[0]] - fixed_us) * size / tried[0]
        place = sum(each < size for each in tried)  # so many are smaller
        small, large = tried[max(0, min(place - 1, len(tried) - 2)) :][:2]
        slope = max(0.0, (known[large] - known[small]) / (large - small))
        nearer = large if 2 * size > small + large else small
        return max(0.0, known[nearer] + slope * (size - nearer))

    def _known(self, sizes: Sequence[int]) -> dict[int, int]:
        """Bytes -> exposed time, of what was seen."""
        return {sizes[level]: seen.exposed_us for level, seen in sorted(self.seen.items())}


def _is_another_network(before: Seen, now: Seen) -> bool:
    """True if waiting has halved or doubled since then, and the change is a part of the round that
    counts."""
    least, most = sorted((before.exposed_us, now.exposed_us))
    return most >= 2 * least and most - least > _COUNTS * max(before.round_us, now.round_us)
