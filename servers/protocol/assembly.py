"""Put the state machine of a parameter set together; pure.

    rule = rule_for("ssp", staleness=3)
    core = assemble_core(server=0, make_rule=rule, groups=[(0, 1), (2,)])

To add a mode, write its rule (psdist.servers.protocol.rules) and name it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from psdist.errors import ConfigError
from psdist.servers.protocol.membership import IsOut, Membership
from psdist.servers.protocol.rules import MakeRule, RoundRule, RuleContext
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT, ByWeight
from psdist.servers.protocol.rules.backup import Backup
from psdist.servers.protocol.rules.clipping import Clipped, Sync
from psdist.servers.protocol.rules.on_arrival import Async, Ssp
from psdist.servers.protocol.rules.switching import Switching
from psdist.servers.protocol.settings import SettingsOfWorkers
from psdist.servers.protocol.start import Start
from psdist.servers.protocol.state import ServerCore

RULES: Final[tuple[type[RoundRule], ...]] = (Sync, Ssp, Async, Switching, Backup, Clipped)


def rule_for(mode: str, *, staleness: int = 0, scale: ByWeight = BY_WEIGHT) -> MakeRule:
    """Return the rule of a run in one mode. ``staleness``: rounds (ssp); ``scale``: of the lr of an
    update (ssp, async). Raise :class:`ConfigError` for another mode."""
    if mode == "sync":
        return Sync
    if mode == "ssp":
        return partial(Ssp, staleness=staleness, scale=scale)
    if mode == "async":
        return partial(Async, scale=scale)
    raise ConfigError(f"mode = {mode!r}: allowed are sync, ssp and async")


def assemble_core(
    *,
    server: int,
    make_rule: MakeRule,
    groups: Sequence[tuple[int, ...]],
    start: Start | None = None,
    pipeline: int = 0,
    resumed_up_to: int = 0,
    survives_workers: bool = False,
    num_substitutes: int = 0,
    is_out: IsOut = any,
    of_tables: MakeRule | None = None,
) -> ServerCore:
    """Return the state machine of one set on one server.

    ``groups``: the workers of each group of the plan, its leader first; ``start``: what the set
    begins with, by default nothing; ``pipeline``: rounds whose replies a worker may leave
    outstanding; ``resumed_up_to``: collectives that ended before the set existed; ``of_tables``:
    the rule if the chief describes tables, by default ``make_rule``. For the others see
    :class:`Membership`."""
    start = start or Start()
    first = start.first
    membership = Membership(
        server=server,
        groups=groups,
        first=first.clocks if first is not None else (),
        resumed_up_to=resumed_up_to,
        survives_workers=survives_workers,
        num_substitutes=num_substitutes,
        is_out=is_out,
    )
    rule = make_rule(RuleContext(server, membership, pipeline, first, of_tables))
    settings = SettingsOfWorkers(server=server, pipeline=pipeline)
    return ServerCore(
        server=server, membership=membership, rule=rule, settings=settings, start=start
    )
