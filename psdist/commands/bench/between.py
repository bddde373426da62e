"""The start of a benchmark that measures between the ranks of a job.

return between_ranks({"group": "rank"}, why_not=alone("bench step", "mpirun -n 4"), run=measure)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from psdist.config.sources import resolve
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.connecting import connect
from psdist.ranks.context import RankContext
from psdist.ranks.failure import run_or_fail


def between_ranks(
    settings: Mapping[str, str],
    *,
    why_not: Callable[[RankContext], str],
    run: Callable[[RankContext], int],
) -> int:
    """The exit status of ``run``; 2 where ``why_not`` says why these ranks cannot be measured."""
    try:
        context = connect(resolve(command_line=settings, environment=os.environ, file=None))
    except AgreedExit as agreed:
        return agreed.status
    if problem := why_not(context):
        if context.rank == 0:
            print(f"psdist: error: {problem}", file=sys.stderr)
        context.close()
        return 2
    return run_or_fail(context, lambda: run(context))


def alone(name: str, start: str) -> Callable[[RankContext], str]:
    """Refuses one process; ``start``: how to begin instead."""
    return lambda context: (
        f"{name} measures between ranks; start it as {start} psdist {name}"
        if context.comm is None
        else ""
    )
