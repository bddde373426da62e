"""Changes that psdist makes within a run by itself: from observations to decisions.

The modules decide when to change between sync and bounded staleness (``mode``), which bound
staleness has (``bound``), which codecs to send with (``codec``, with the exchange's part of a
window of rounds in ``paces``, the time at each level in ``level_times``, and the rounds of groups
that are in different ones in ``own_window``), and how many local steps groups make (``steps`` by
their speed, ``loss_steps`` by the loss); ``kept`` is their state in a checkpoint. Pure: numbers in,
decisions out. The coordinator runs one of them, ``psdist check`` feeds it the recorded observations
and must get the same decisions. It must not import anything of psdist but the modes' names.

    control = CodecControl(num_groups=4, names=["none", "fp16", "int8"])
    control.observe(Observation(group=0, first_round=1, own_us=[...], waits_us=[...]))
    decision = control.judge()                                # None, or what to change to
    control.committed(decision, 140)                          # it rules from round 140 on

This module has the input of a controller, its decision, and the window of rounds that it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.mode_names import Mode

WINDOW: Final = 20
"""Most rounds that a decision reads; all of them ran under the current choice."""

_MOST_KEPT: Final = 10_000
"""Rounds of a group that wait for others to report theirs."""


@dataclass(frozen=True, slots=True)
class Decision:
    mode: Mode
    staleness: int
    why: str
    level: int = -1
    """Codec level: 0 for the least lossy codecs among which psdist chooses; -1 if codecs do not
    change."""


class Times(NamedTuple):
    """The times of one round of a group."""

    own_us: int
    """Time without waiting for servers."""
    wait_us: int
    error_ppm: int = 0
    """||p - C(p)|| / ||p|| of the pushes of the group's leader, in millionths."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The times of a group's rounds from ``first_round`` on, in microseconds."""

    group: int
    first_round: int
    own_us: Sequence[int]
    waits_us: Sequence[int]
    errors_ppm: Sequence[int] = ()
    """As :attr:`Times.error_ppm`; empty if psdist does not choose the codecs."""

    def times(self) -> list[Times]:
        """Return the times of each round."""
        errors = self.errors_ppm or [0] * len(self.own_us)
        return [Times(*each) for each in zip(self.own_us, self.waits_us, errors, strict=True)]


class Window(HasSnapshot):
    """The rounds that the next decision reads, of all groups in the job."""

    STATE = Fields(
        {
            int: "first",
            dict[int, dict[int, Times]]: "_rounds",
        }
    )

    def __init__(self, *, num_groups: int, first: int) -> None:
        self.first = first
        self._rounds: dict[int, dict[int, Times]] = {group: {} for group in range(num_groups)}
        """Group -> round -> times; no round before the window."""

    @property
    def groups(self) -> frozenset[int]:
        """Groups whose rounds the window needs."""
        return frozenset(self._rounds)

    def lose(self, group: int) -> None:
        """The group has failed: drop its rounds, and need no more of them."""
        del self._rounds[group]

    def admit(self, group: int, first_round: int) -> None:
        """The group has joined with ``first_round``. It reports no times of that round, so the
        window begins after it."""
        self._rounds[group] = {}
        self.begin(max(self.first, first_round + 1))

    def add(self, seen: Observation) -> None:
        rounds = self._rounds[seen.group]
        for round_number, each in enumerate(seen.times(), start=seen.first_round):
            if round_number >= self.first:
                rounds[round_number] = each
        if len(rounds) > _MOST_KEPT:  # another group reports no more: its script has ended
            self.begin(seen.first_round + len(seen.own_us))

    def so_far(self) -> list[list[Times]]:
        """Return the first rounds that all groups have reported, [groups][at most WINDOW]; they
        stay in the window."""
        end = self.first
        while end < self.first + WINDOW and all(end in each for each in self._rounds.values()):
            end += 1
        return [[each[at] for at in range(self.first, end)] for each in self._rounds.values()]

    def take(self) -> list[list[Times]] | None:
        """Return [groups][WINDOW] once all groups have reported every round, and begin the next
        window after it; else None."""
        found = self.so_far()
        if any(len(each) < WINDOW for each in found):
            return None
        self.begin(self.first + WINDOW)
        return found

    def begin(self, first: int) -> None:
        self.first = first
        for rounds in self._rounds.values():
            for each in [each for each in rounds if each < first]:
                del rounds[each]


class Watched(Protocol):
    """Reports of rounds: :class:`Window`, or :class:`psdist.controller.own_window.OwnWindow` if
    groups are in different rounds."""

    @property
    def groups(self) -> frozenset[int]: ...

    def lose(self, group: int) -> None: ...

    def admit(self, group: int, first_round: int) -> None: ...

    def add(self, seen: Observation) -> None: ...


class Controller(HasSnapshot, ABC):
    """Base of :mod:`psdist.controller.mode`, :mod:`psdist.controller.bound` and
    :mod:`psdist.controller.codec`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._sizes: tuple[int, ...] = ()
        """By level: bytes of one group's exchange in both directions; () before they are known."""

    def know_sizes(self, sizes: Sequence[int]) -> None:
        """Set the bytes of an exchange by level, once the set is built."""
        self._sizes = tuple(sizes)

    @property
    def groups(self) -> frozenset[int]:
        """Groups in the job."""
        return self._watched.groups

    def observe(self, seen: Observation) -> None:
        """Add the times of rounds of one of :attr:`groups`."""
        self._watched.add(seen)

    def lose(self, group: int) -> None:
        """One of :attr:`groups` has failed."""
        self._watched.lose(group)

    def admit(self, group: int, first_round: int) -> None:
        """Another group has joined with ``first_round``."""
        self._watched.admit(group, first_round)

    @abstractmethod
    def judge(self) -> Decision | None:
        """Return the decision that follows from the window, None for no change. After a full window
        the next one begins."""

    @abstractmethod
    def committed(self, decision: Decision, round_number: int) -> None:
        """The decision is in force from this round on: forget the rounds before it."""
