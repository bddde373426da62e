"""The log of a shard whose server has died, put together from that server's and its buddy's.

A buddy logs what the server logs, at the same positions, and goes on behind its TAKEOVER event. So
its events are those of the shard. What the dead server logged beyond was told to nobody. Checksums
of replies that the dead server had made are in its own record, as far as it came to write them.

    log = joined(log_of_server, log_of_buddy)      # HistoryError where they differ
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from psdist.errors import HistoryError
from psdist.history.records import EventKind, ServerLog


def joined(server: ServerLog, copy: ServerLog) -> ServerLog:
    """The shard's log. Raises :class:`HistoryError` where the two do not tell of one shard."""
    (taken,) = np.nonzero(copy.events["kind"] == EventKind.TAKEOVER)
    if len(taken) > 1:
        raise HistoryError(
            f"history/copy-{server.server}.events is damaged: a buddy has taken the server's place "
            f"{len(taken)} times"
        )
    is_taken = bool(len(taken))
    until = int(taken[0]) if is_taken else len(copy.events)
    both = min(until, len(server.events))
    differs = np.flatnonzero(server.events[:both] != copy.events[:both])
    is_short = server.is_complete and copy.is_complete and until != len(server.events)
    if len(differs) or (is_short and not is_taken):
        at = int(differs[0]) if len(differs) else both
        raise HistoryError(
            f"history/server-{server.server}.events and history/copy-{server.server}.events differ "
            f"from record {at} on: a server and its buddy did not apply the same updates"
        )
    if not is_taken:
        return (
            server
            if server.is_complete or len(server.events) > until
            else replace(server, events=copy.events, is_complete=copy.is_complete)
        )
    sums = server.checksums[server.checksums["position"] <= until]
    return ServerLog(
        server=server.server,
        events=copy.events,
        checksums=np.concatenate([sums, copy.checksums]),
        is_complete=copy.is_complete,
    )
