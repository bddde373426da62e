"""From which round on a mode may change in a set that resumes from a checkpoint."""

from __future__ import annotations

from psdist.protocol.checkpoints import FirstClocks
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.assembly import assemble_core
from psdist.servers.protocol.start import Start
from tests.support.rules import switching


def highest_sent(first: FirstClocks | None, *changes: ChangeMode) -> int:
    rule = switching((0, "ssp", 3), *(each[:3] for each in changes))
    core = assemble_core(server=0, make_rule=rule, groups=((0,), (1,)), start=Start(first))
    return core.highest_sent


def test_no_change_is_for_a_round_that_had_begun_or_before_one_that_was_set() -> None:
    first = FirstClocks(checkpoint="step-00000005", clocks=(5, 7))
    assert highest_sent(None) == -1
    assert highest_sent(first) == 7
    assert highest_sent(first, ChangeMode(12, "sync", 0)) == 11
    assert highest_sent(first, ChangeMode(3, "sync", 0)) == 7
