"""Traces made by hand: for tests of what is made of them.

trace = made(worker(0), [span(Span.STEP, 10, 20, clock=1)])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from psdist.tracing import DTYPE, NONE, Lane, Span
from psdist.tracing.files import About, Trace

MS = 1_000_000


def about(rank: int = 0, **fields: Any) -> About:
    given = {"role": "worker", "index": rank, "group": rank, "num_ranks": 4, "host": "n1", "pid": 7}
    return About(psdist="1", rank=rank, **{**given, **fields})


def server(rank: int, index: int = 0, **fields: Any) -> About:
    return about(rank, role="server", index=index, group=None, **fields)


def span(kind: Span, begin: int, end: int, **fields: Any) -> dict[str, Any]:
    """Times in milliseconds."""
    lane = Lane.SERVER if kind >= Span.RECEIVE else Lane.SCRIPT
    given = {"clock": NONE, "chunk": NONE, "other": NONE, "lane": lane}
    return {**given, "kind": kind, "begin_ns": begin * MS, "end_ns": end * MS, **fields}


def made(whose: About, spans: Sequence[dict[str, Any]]) -> Trace:
    records = np.zeros(len(spans), DTYPE)
    for record, fields in zip(records, spans, strict=True):
        for name, value in fields.items():
            record[name] = value
    closed = whose.model_copy(update={"num_spans": len(spans)})
    return Trace(about=closed, spans=records, bound_ns=0, is_drift_known=True)
