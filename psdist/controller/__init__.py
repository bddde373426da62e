"""What psdist changes within a run by itself: from what was observed to what is decided.

Lives here: when to change between sync and bounded staleness (``mode``), which bound staleness has
(``bound``), which codecs to send with (``codec``, with what an exchange is of a window of rounds in
``paces``, what it takes at each level in ``level_times``, and the rounds of groups that are in
different ones in ``own_window``), and how many local steps groups make (``steps`` by their speed,
``loss_steps`` by the loss); in ``kept`` what a checkpoint has of that. Pure: numbers in, decisions
out. The coordinator runs one of them, ``psdist check`` feeds it what was recorded and must get the
same decisions. It must not import anything of psdist but the modes' names.

    control = CodecControl(num_groups=4, names=["none", "fp16", "int8"])
    control.observe(Observation(group=0, first_round=1, own_us=[...], waits_us=[...]))
    decision = control.judge()                                # None, or what to change to
    control.committed(decision, 140)                          # it rules from round 140 on

What a controller is told, what it decides, and the rounds that it looks at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.mode_names import Mode

WINDOW: Final = 20
"""Rounds that a decision looks at, at most, all of them under what rules now."""

_MOST_KEPT: Final = 10_000
"""Rounds of a group that wait for others to report theirs."""


@dataclass(frozen=True, slots=True)
class Decision:
    mode: Mode
    staleness: int
    why: str
    level: int = -1
    """Of the codecs among which psdist chooses, the least lossy ones are level 0; -1 where they are
    none of what changes."""


class Times(NamedTuple):
    """Of one round of a group."""

    own_us: int
    """Computing, and whatever else is not waiting for servers."""
    wait_us: int
    error_ppm: int = 0
    """||p - C(p)|| / ||p|| of what the group's leader has pushed, in millionths."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What rounds of a group have taken, from ``first_round`` on, in microseconds."""

    group: int
    first_round: int
    own_us: Sequence[int]
    waits_us: Sequence[int]
    errors_ppm: Sequence[int] = ()
    """As :attr:`Times.error_ppm`; nothing where psdist does not choose the codecs."""

    def times(self) -> list[Times]:
        """By round."""
        errors = self.errors_ppm or [0] * len(self.own_us)
        return [Times(*each) for each in zip(self.own_us, self.waits_us, errors, strict=True)]


class Window(HasSnapshot):
    """The next rounds to be looked at, of all groups that are in the job."""

    STATE = Fields(
        {
            int: "first",
            dict[int, dict[int, Times]]: "_rounds",
        }
    )

    def __init__(self, *, num_groups: int, first: int) -> None:
        self.first = first
        self._rounds: dict[int, dict[int, Times]] = {group: {} for group in range(num_groups)}
        """By group, from the window on."""

    @property
    def groups(self) -> frozenset[int]:
        """Whose rounds are waited for."""
        return frozenset(self._rounds)

    def lose(self, group: int) -> None:
        """It has died: what it has told is dropped, and nothing more of it is waited for."""
        del self._rounds[group]

    def admit(self, group: int, first_round: int) -> None:
        """It has joined, and makes its first round there, of which it tells nothing: windows are
        of rounds behind that."""
        self._rounds[group] = {}
        self.begin(max(self.first, first_round + 1))

    def add(self, seen: Observation) -> None:
        rounds = self._rounds[seen.group]
        for round_number, each in enumerate(seen.times(), start=seen.first_round):
            if round_number >= self.first:
                rounds[round_number] = each
        if len(rounds) > _MOST_KEPT:  # another group says nothing more: its script has ended
            self.begin(seen.first_round + len(seen.own_us))

    @property
    def num_told(self) -> int:
        """So many of its first rounds all groups have told of, :data:`WINDOW` at most."""
        told = 0
        while told < WINDOW and all(self.first + told in each for each in self._rounds.values()):
            told += 1
        return told

    def so_far(self) -> list[list[Times]]:
        """[groups][:attr:`num_told`]; they stay in the window."""
        window = range(self.first, self.first + self.num_told)
        return [[rounds[each] for each in window] for rounds in self._rounds.values()]

    def take(self) -> list[list[Times]] | None:
        """[groups][WINDOW], once all have told of every round; the next window begins behind."""
        if self.num_told < WINDOW:
            return None
        found = self.so_far()
        self.begin(self.first + WINDOW)
        return found

    def begin(self, first: int) -> None:
        self.first = first
        for rounds in self._rounds.values():
            for each in [each for each in rounds if each < first]:
                del rounds[each]


class Watched(Protocol):
    """What is told of rounds: :class:`Window`, or :class:`psdist.controller.own_window.OwnWindow`
    where groups are in different ones."""

    @property
    def groups(self) -> frozenset[int]: ...

    def lose(self, group: int) -> None: ...

    def admit(self, group: int, first_round: int) -> None: ...

    def add(self, seen: Observation) -> None: ...


class Controller(HasSnapshot, ABC):
    """What :mod:`psdist.controller.mode`, :mod:`psdist.controller.bound` and
    :mod:`psdist.controller.codec` have in common."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._sizes: tuple[int, ...] = ()
        """By level: bytes of one group's exchange, both ways; () before they are known."""

    def know_sizes(self, sizes: Sequence[int]) -> None:
        """Set once it is built."""
        self._sizes = tuple(sizes)

    @property
    def groups(self) -> frozenset[int]:
        """Those that are in the job."""
        return self._watched.groups

    def observe(self, seen: Observation) -> None:
        """What these rounds of a group, one of :attr:`groups`, have taken."""
        self._watched.add(seen)

    def lose(self, group: int) -> None:
        """One of :attr:`groups` has died."""
        self._watched.lose(group)

    def admit(self, group: int, first_round: int) -> None:
        """Another one has joined, with its first round there."""
        self._watched.admit(group, first_round)

    @abstractmethod
    def judge(self) -> Decision | None:
        """What the window says; once it is whole, the next one begins behind it."""

    @abstractmethod
    def committed(self, decision: Decision, round_number: int) -> None:
        """The decision rules from this round on: what was before says nothing of it."""
