"""What a rank does under ``psdist run``: connect, then serve, or run the user's script and finish.

status = run_program(resolved_or_error, Program(name="train.py", arguments=("--epochs", "5")))
"""

from __future__ import annotations

import os
from contextlib import nullcontext

from psdist.commands.program import Program
from psdist.config.sources import Resolved
from psdist.errors import UsageError, UserError
from psdist.install.launcher import detect
from psdist.protocol.ids import worker_id
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.checkpointing.script_signals import keep_until_asked
from psdist.ranks.connecting import connect
from psdist.ranks.context import RankContext
from psdist.ranks.failure import run_or_fail
from psdist.ranks.loading import uncollected
from psdist.ranks.parent_link import connect_to_parent
from psdist.ranks.taking_place import take_place


def run_program(
    outcome: Resolved | UserError, program: Program, *, num_workers: int | None = None
) -> int:
    """This rank's exit status. ``outcome`` is the configuration or the mistake that all ranks must
    hear of; the program runs on workers only. ``num_workers``: how many of them the user expects;
    a world with another number is an error."""
    keep_until_asked()
    launcher = detect(os.environ)
    parent = None
    if launcher.is_present:
        parent = connect_to_parent(os.environ, rank=launcher.rank or 0)
    try:
        context = connect(outcome, num_workers=num_workers, parent=parent)
    except AgreedExit as agreed:
        if parent is not None:
            parent.failed(agreed.status)
        return agreed.status
    return run_or_fail(context, lambda: _take_part(context, program))


def _take_part(context: RankContext, program: Program) -> int:
    context.reach("importing")
    # These import torch: only once the configuration is known to be good, and where a host on
    # which that fails ends the job.
    with uncollected():
        from psdist import joining
        from psdist.ranks import server as serve

    if context.role != "worker":
        if (status := serve.serve(context)) or context.replace is None:
            return status
    elif context.is_substitute:
        context.reach("training")
        if not take_place(context):
            return 0
    if context.comm is None:
        serve.write_summary_if_it_fails(context)
    context.reach("starting")
    parent = context.parent
    if parent is not None and context.me == worker_id(0):  # the chief
        parent.take_input()
    with parent.script() if parent is not None else nullcontext():
        run_or_fail(context, lambda: _run_as_main(program))  # sys.exit(0) is a good end
    if joining.the_job() is None:
        raise UsageError(
            f"the {program} ended without calling psdist.init(); add the four lines that "
            "the README shows (import, init, prepare, save)"
        )
    return joining.finish()


def _run_as_main(program: Program) -> int:
    program.run_as_main()
    return 0
