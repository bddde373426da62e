"""The log of a shard whose place another server has taken, by parameter set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from psdist.history.records import EventKind
from psdist.history.writers import EventCount, ServerHistory
from psdist.servers.replication.keeping import KeptShard


def test_a_log_goes_on_behind_the_takeover_and_that_of_a_later_set_begins_without_one() -> None:
    made: list[tuple[int, ...]] = []

    def make_history(*given: int) -> ServerHistory:
        made.append(given)
        return ServerHistory(None, given[0])

    kept: Any = SimpleNamespace(
        _options=SimpleNamespace(make_history=make_history), _server=3, number=2
    )
    recorded, counted = ServerHistory(None, 3), EventCount(7)
    logs = [recorded, counted]
    assert KeptShard.log_from_here(kept, logs, 0, host=1) is recorded
    assert recorded.log().events[["kind", "clock"]].tolist() == [(EventKind.TAKEOVER, 1)]
    assert KeptShard.log_from_here(kept, logs, 1, host=1) is counted
    assert counted.position == 8
    assert made == []
    later = KeptShard.log_from_here(kept, logs, 2, host=1)
    assert made == [(3, 2, 2, 0)]
    assert later is not None
    assert later.position == 0
