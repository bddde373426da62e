"""Changes of the mode and of the codecs while a set trains: what one server does about them; pure.

A change has two phases (docs/guides/modes.md). While it is proposed, the server sends nothing for
rounds above the highest one for which it sent parameters. The decision names a round that no server
has sent parameters for, and the held replies leave.

    changes = RoundChanges(membership=membership, rule=rule)
    changes.on_hold_rounds(HoldRounds())
    changes.on_change_mode(ChangeMode(10, "ssp", 3, number=1))      # [ChangeMode(...), Reply(...)]
"""

from __future__ import annotations

from collections.abc import Mapping

from psdist.protocol.control import BeginCodecs, Setup
from psdist.servers.protocol.actions import (
    Action,
    ChangeCodecs,
    ChangeMode,
    HoldRounds,
    SendControl,
)
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules import RoundRule


def rule_of_set(rule: RoundRule, peer: int, setup: Setup) -> RoundRule:
    """Return the rule for what ``peer`` describes, which takes the replies of ``rule``: tables may
    have a mode of their own. Raise as :meth:`RoundRule.for_model`."""
    make = rule.context.of_tables
    if not setup.tables or make is None:
        return rule.for_model(peer, setup)
    own = make(rule.context)
    own.replies = rule.replies
    own.replies.follow(own.required_min_done)
    return own.for_model(peer, setup)


class RoundChanges:
    def __init__(self, *, membership: Membership, rule: RoundRule) -> None:
        self._membership = membership
        self._rule = rule
        self._replies = rule.replies
        self._chunks: Mapping[int, ChunkState] = {}
        self._is_built = False
        self._scheduled = rule.scheduled
        self.modes: list[ChangeMode] = []
        """Modes of later rounds that this server received, in order."""
        self.levels: list[ChangeCodecs] = []
        """Codecs of later rounds that this server received, in order."""

    def take_over(self, picture: ShardState) -> None:
        """Continue with the changes that a failed server received. Its replies are lost."""
        self._scheduled = ()
        self.modes, self.levels = list(picture.modes), list(picture.levels)
        for each in self.modes:
            self._rule.change_mode(each)
        sent = picture.highest_sent
        if picture.held_above is not None:
            self._rule.hold_rounds(picture.held_above, ())
        elif picture.clocks:
            sent += self._rule.pipeline
        self._replies.highest_sent = max(self._replies.highest_sent, sent)

    def build(self, chunks: Mapping[int, ChunkState]) -> list[Action]:
        """The shard is built: record the scheduled modes, and send every worker the codecs that a
        failed server may not have sent to all."""
        self._chunks, self._is_built = chunks, True
        self.modes += self._scheduled
        events: list[Action] = [*self._scheduled]
        for change in self.levels:
            events += self._codecs_to_workers(change)
        return events

    def on_hold_rounds(self, event: HoldRounds) -> list[Action]:  # noqa: ARG002 - it has no fields
        self._rule.hold_rounds(self._replies.highest_sent, self._chunks.values())
        return []

    def on_change_mode(self, event: ChangeMode) -> list[Action]:
        if event.number and any(each.number >= event.number for each in self.modes):
            return []  # a repetition, because the server that received it first has failed
        self._rule.change_mode(event)
        if not self._is_built:
            self._scheduled = (event,)
            return []
        self.modes.append(event)
        return [event, *self._let_go()]

    def on_change_codecs(self, event: ChangeCodecs) -> list[Action]:
        """Every worker receives the change before the first parameters for that round, and so
        before it pushes anything in that round."""
        if event in self.levels:
            return []  # a repetition, because the server that received it first has failed
        self._replies.release_rounds()
        self.levels.append(event)
        return [event, *self._codecs_to_workers(event), *self._let_go()]

    def _codecs_to_workers(self, change: ChangeCodecs) -> list[SendControl]:
        message = BeginCodecs(number=change.number, round=change.round, level=change.level)
        return [SendControl(worker, message) for worker in sorted(self._membership.group_of)]

    def _let_go(self) -> list[Action]:
        """Return the parked replies that may leave now."""
        chunks = self._chunks.values()
        return [action for chunk in chunks for action in self._replies.let_go(chunk)]
