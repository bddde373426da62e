"""The log of a shard whose server has died, put together from that server's and its buddy's.

A buddy logs what the server logs, at the same positions, and goes on behind its TAKEOVER event. So
its events are those of the shard. What the dead server logged beyond was told to nobody. Checksums
of replies that the dead server had made are in its own record, as far as it came to write them.

Of a parameter set that is described behind its server's death, or in which no more than groups had
registered by then, the log is that of who goes on in its place, from its first event.

A copy that was filled later has a log from there on: both begin with one FILLED event, which says
at which position of the shard's log that is. Its keeper may take the place in turn.

    log = joined(log_of_server, log_of_buddy, name="copy-1")      # HistoryError where they differ
    log = joined(log, log_of_the_next, name="copy-1-2")
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from psdist.errors import HistoryError
from psdist.history.records import EventKind, ServerLog


def joined(log: ServerLog, copy: ServerLog, *, name: str) -> ServerLog:
    """The shard's log out of what is known of it, its server's and that of the copies before, and
    that of another copy, in files called ``name``. Raises :class:`HistoryError` where the two do
    not tell of one shard."""
    first = _first_position(copy, name)
    (taken,) = np.nonzero(copy.events["kind"] == EventKind.TAKEOVER)
    if len(taken) > 1:
        raise HistoryError(
            f"history/{name}.events is damaged: a buddy has taken the server's place "
            f"{len(taken)} times"
        )
    is_taken = bool(len(taken))
    had_begun = log.is_complete or (log.events["kind"] != EventKind.JOIN).any()
    if not (had_begun or is_taken or first) and len(copy.checksums):  # whose replies were sampled
        return replace(copy, server=log.server)
    until = int(taken[0]) if is_taken else len(copy.events)
    both = min(until, max(0, len(log.events) - first))
    differs = np.flatnonzero(log.events[first : first + both] != copy.events[:both])
    is_short = log.is_complete and copy.is_complete and first + until != len(log.events)
    if len(differs) or first > len(log.events) or (is_short and not is_taken):
        at = first + (int(differs[0]) if len(differs) else both)
        raise HistoryError(
            f"history/server-{log.server}.events and history/{name}.events differ from record {at} "
            "on: a server and its buddy did not apply the same updates"
        )
    if not is_taken:
        is_further = len(log.events) > first + until and not copy.is_complete
        if log.is_complete or is_further:
            return log
        events = np.concatenate([log.events[:first], copy.events])
        ends = copy.is_complete
        return replace(log, events=events, is_complete=ends, has_died=ends)
    sums = log.checksums[log.checksums["position"] <= first + until]
    return ServerLog(
        server=log.server,
        events=np.concatenate([log.events[:first], copy.events], dtype=copy.events.dtype),
        checksums=np.concatenate([sums, copy.checksums]),
        is_complete=copy.is_complete,
    )


def _first_position(copy: ServerLog, name: str) -> int:
    """In the shard's log, of the copy's first event."""
    if not len(copy.events) or copy.events[0]["kind"] != EventKind.FILLED:
        return 0
    position = float(copy.events[0]["weight"])
    if not position.is_integer() or position < 0:
        raise HistoryError(f"history/{name}.events is damaged: it begins at position {position:g}")
    return int(position)
