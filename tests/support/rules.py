"""Round rules for tests: a rule by itself, and runs that change their mode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from psdist.mode_names import Mode
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.rules import MakeRule, RoundRule, RuleContext
from psdist.servers.protocol.rules.switching import Switching


def switching(*modes: tuple[int, Mode, int], kind: type[Switching] = Switching) -> MakeRule:
    """Return the rule of a run with these modes: (first round, mode, staleness), in order."""
    return partial(kind, modes=[ChangeMode(*each) for each in modes])


def made(make_rule: MakeRule, *, num_groups: int = 2) -> RoundRule:
    """Return the rule on server 0, with groups of one worker each that have not registered."""
    membership = Membership(server=0, groups=[(group,) for group in range(num_groups)])
    return make_rule(RuleContext(0, membership))


class Secret(Switching):
    """Its log names other changes than the rule makes."""

    def __init__(
        self,
        context: RuleContext,
        *,
        modes: Sequence[ChangeMode],
        logged: Sequence[ChangeMode],
    ) -> None:
        super().__init__(context, modes=modes)
        self.scheduled = logged


def secretly(
    *modes: tuple[int, Mode, int], logged: Sequence[tuple[int, Mode, int]] = ()
) -> MakeRule:
    """As ``switching``, where the log has only the changes ``logged``."""
    names = [ChangeMode(*each) for each in logged]
    return partial(Secret, modes=[ChangeMode(*each) for each in modes], logged=names)
