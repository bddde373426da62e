"""What a rank does under ``psdist run``: connect, then serve, or run the user's script and finish.

status = run_script(resolved_or_error, "train.py", ["--epochs", "5"])
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from psdist.config.sources import Resolved
from psdist.errors import UsageError, UserError
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.context import RankContext, connect
from psdist.ranks.failure import run_or_fail


def run_script(
    outcome: Resolved | UserError,
    script: str,
    arguments: Sequence[str],
    *,
    num_workers: int | None = None,
) -> int:
    """This rank's exit status. ``outcome`` is the configuration or the mistake that all ranks must
    hear of; the script runs on workers only, with ``arguments`` as its own. ``num_workers``: how
    many of them the user expects; a world with another number is an error."""
    try:
        context = connect(outcome, num_workers=num_workers)
    except AgreedExit as agreed:
        return agreed.status
    return run_or_fail(context, lambda: _take_part(context, script, arguments))


def _take_part(context: RankContext, script: str, arguments: Sequence[str]) -> int:
    # These import torch: only once the configuration is known to be good, and where a host on
    # which that fails ends the job.
    from psdist import job
    from psdist.ranks import server as serve

    if context.role == "server":
        return serve.serve(context)
    serve.serve_beside(context)
    run_or_fail(context, lambda: _run_as_main(script, arguments))  # sys.exit(0) is a good end
    ran = job.the_job()
    if ran is None:
        raise UsageError(
            f"the script {script} ended without calling psdist.init(); add the four lines that "
            "the README shows (init, prepare, loader, save)"
        )
    return ran.finish()


def _run_as_main(script: str, arguments: Sequence[str]) -> int:
    sys.argv = [script, *arguments]
    folder = str(Path(script).resolve().parent)
    if sys.flags.safe_path:  # the first entry is one of PYTHONPATH, not the place of a program
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder  # as python itself does
    runpy.run_path(script, run_name="__main__")
    return 0
