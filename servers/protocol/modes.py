"""Changing the mode of a run: the registrar's machine of proposals; pure.

Every server decides by itself what it sends, so all must agree from which round on a new mode
rules. It takes two phases. *Propose*: each server answers, for each parameter set, the highest
round for which it has sent parameters, and from then on keeps back what is for later rounds.
*Commit*: the new mode rules from the round after the highest of these. So no server has sent
parameters of such a round under the old rule, nor judges those of an earlier one by the new rule.

    modes = ModeChanges(num_servers=2)
    modes.propose(Decision("ssp", 3, why="the script"))           # ProposeMode for every server
    modes.on_proposed(0, ModeProposed(number=1, server=0, rounds=[7]))
    modes.on_proposed(1, ModeProposed(number=1, server=1, rounds=[9]))
                                                                  # CommitMode from round 10 on

One change at a time; servers get the messages of one before those of the next. Where psdist
chooses the codecs they change in the same way, and the mode stays. What ruled when is part of a
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.controller.decisions import Decision
from psdist.controller.kept import KeptModes
from psdist.errors import ProtocolError
from psdist.mode_names import Mode
from psdist.protocol.control import CommitMode, ModeProposed, ProposeMode
from psdist.protocol.ids import server_id
from psdist.servers.protocol.actions import SendControl


@dataclass(frozen=True, slots=True)
class ModeChanged:
    """The mode is another one, for each set from this round on."""

    rounds: tuple[int, ...]
    mode: Mode
    staleness: int
    why: str
    level: int = -1
    """Which codecs rule from there on, where psdist chooses them: then the mode is the same."""


@dataclass(frozen=True, slots=True)
class ModeObserved:
    """What rounds of a group have taken, from ``first_round`` on, in microseconds: for the record.
    ``is_judged``: whether the mode could change then."""

    group: int
    first_round: int
    own_us: list[int]
    waits_us: list[int]
    is_judged: bool
    errors_ppm: list[int]
    """Where psdist chooses the codecs, what they have left out of pushes, in millionths."""


@dataclass(frozen=True, slots=True)
class GroupGone:
    """A group has died: its rounds are not looked at any more, for the record."""

    group: int


@dataclass(frozen=True, slots=True)
class GroupCame:
    """A group has joined, and makes this round first: from the next one on its rounds are looked
    at, for the record."""

    group: int
    first_round: int


@dataclass(frozen=True, slots=True)
class LevelsSized:
    """Bytes of one group's exchange, by level of the codecs among which psdist chooses."""

    sizes: list[int]


class ModeChanges:
    TAKES = (ModeProposed,)

    def __init__(self, *, num_servers: int, begins: KeptModes | None = None) -> None:
        """``begins``: the modes with which the run begins, where it may change them."""
        self._num_servers = num_servers
        self.kept = begins
        """For a checkpoint that is made now, while no change is under way."""
        self._number = 0
        self._proposed: Decision | None = None
        self._highest: dict[int, list[int]] = {}
        """By server what it has answered, set by set."""
        self._committed: CommitMode | None = None
        """The last one."""

    @property
    def is_settling(self) -> bool:
        """Whether some server has still to answer."""
        return self._proposed is not None

    def propose(self, decided: Decision) -> list[SendControl]:
        """No other change is under way."""
        assert self._proposed is None
        self._number += 1
        self._proposed = decided
        message = ProposeMode(number=self._number)
        return [SendControl(server_id(server), message) for server in range(self._num_servers)]

    def ask_again(self, server: int) -> list[SendControl]:
        """Another one has taken the place of ``server``: it may not have heard of the last change,
        which said again changes nothing, and owes the answer that was not given."""
        told = [] if self._committed is None else [self._committed]
        peer, number = server_id(server), self._number
        actions = [SendControl(peer, each) for each in told]
        if self.is_settling and server not in self._highest:
            actions.append(SendControl(peer, ProposeMode(number=number)))
        return actions

    def on_proposed(self, server: int, message: ModeProposed) -> list[SendControl | ModeChanged]:
        """A server keeps later rounds back; with the last one all are told the round."""
        is_wrong = message.number != self._number or self._proposed is None
        is_damaged = not message.rounds or min(message.rounds) < -1
        if is_wrong or is_damaged or server in self._highest:
            raise ProtocolError(
                f"the registrar: server {server} sent ModeProposed {message.number} of the rounds "
                f"{message.rounds[:8]} in change {self._number}, unasked, twice or damaged"
            )
        self._highest[server] = message.rounds
        if len(self._highest) < self._num_servers:
            return []
        assert self._proposed is not None
        decided = self._proposed
        answers = list(self._highest.values())
        num_sets = max(map(len, answers))
        rounds = tuple(
            1 + max(answer[index] for answer in answers if index < len(answer))
            for index in range(num_sets)
        )
        self._proposed = None
        self._highest.clear()
        self._committed = commit = CommitMode(
            number=self._number,
            rounds=list(rounds),
            mode=decided.mode,
            staleness=decided.staleness,
            level=decided.level,
        )
        told = [SendControl(server_id(each), commit) for each in range(self._num_servers)]
        if self.kept is not None:
            self.kept = self.kept.then(rounds, decided.mode, decided.staleness)
        change = ModeChanged(rounds, decided.mode, decided.staleness, decided.why, decided.level)
        return [*told, change]
