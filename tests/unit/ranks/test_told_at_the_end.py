"""What a rank tells the command that has started it of others, when the job is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from psdist.protocol.ids import server_id, worker_id
from psdist.ranks.context import RankContext
from psdist.report.facts import RankSurvived


class Parent:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, fact: Any) -> None:
        self.told.append(fact)


@pytest.mark.parametrize("survives", [False, True])
def test_who_has_died_is_not_missed_on_a_host_without_the_coordinator(survives: bool) -> None:
    context: Any = SimpleNamespace(
        parent=Parent(),
        survives_workers=False,
        survives_servers=survives,
        transport=SimpleNamespace(lost={worker_id(1): ""}, moved={server_id(0): ""}),
        roles=SimpleNamespace(rank_of_peer={worker_id(1): 4, server_id(0): 0}),
    )
    RankContext._tell_parent_of_survived(context)
    ranks = {each.rank for each in context.parent.told if isinstance(each, RankSurvived)}
    assert ranks == ({0, 4} if survives else set())
