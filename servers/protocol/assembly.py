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
from psdist.protocol.checkpoints import FirstClocks
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules.backup import Backup
from psdist.servers.protocol.rules.clipping import Clipped
from psdist.servers.protocol.rules.on_arrival import Async, Ssp
from psdist.servers.protocol.rules.rule import MakeRule, RoundRule, RuleContext
from psdist.servers.protocol.rules.switching import Switching
from psdist.servers.protocol.rules.sync import Sync
from psdist.servers.protocol.settings import SettingsOfWorkers
from psdist.servers.protocol.state import ServerCore

RULES: Final[tuple[type[RoundRule], ...]] = (Sync, Ssp, Async, Switching, Backup, Clipped)


def rule_for(mode: str, *, staleness: int = 0, has_stale_lr: bool = False) -> MakeRule:
    """Return the rule of a run in one mode. ``staleness``: rounds (ssp); ``has_stale_lr``: divide
    the lr of an update by its staleness (ssp, async). Raise :class:`ConfigError` for another
    mode."""
    if mode == "sync":
        return Sync
    if mode == "ssp":
        return partial(Ssp, staleness=staleness, has_stale_lr=has_stale_lr)
    if mode == "async":
        return partial(Async, has_stale_lr=has_stale_lr)
    raise ConfigError(f"mode = {mode!r}: allowed are sync, ssp and async")


def assemble_core(
    *,
    server: int,
    make_rule: MakeRule,
    groups: Sequence[tuple[int, ...]],
    pipeline: int = 0,
    resumed_up_to: int = 0,
    first: FirstClocks | None = None,
    picture: ShardState | None = None,
    survives_workers: bool = False,
    num_substitutes: int = 0,
    reforms: bool = False,
) -> ServerCore:
    """Return the state machine of one set on one server.

    ``groups``: the workers of each group of the plan, its leader first; ``pipeline``: rounds whose
    replies a worker may leave outstanding; ``resumed_up_to``: collectives that ended before the set
    existed; ``first``: the checkpoint that the set continues; ``picture``: state of the failed
    server that this one replaces. For the others see :class:`Membership`."""
    membership = Membership(
        server=server,
        groups=groups,
        first=first.clocks if first is not None else (),
        resumed_up_to=resumed_up_to,
        survives_workers=survives_workers,
        num_substitutes=num_substitutes,
        reforms=reforms,
    )
    rule = make_rule(RuleContext(server, membership, pipeline, first))
    settings = SettingsOfWorkers(
        server=server, pipeline=pipeline, may_begin_late=reforms or picture is not None
    )
    restores = first.checkpoint if first is not None else ""
    return ServerCore(
        server=server,
        membership=membership,
        rule=rule,
        settings=settings,
        restores=restores,
        picture=picture,
    )
