"""A rank under ``psdist run``: connect, then serve, or run the user's script and finish.

status = run_program(resolved_or_error, Program(name="train.py", arguments=("--epochs", "5")))
"""

from __future__ import annotations

import os
from contextlib import nullcontext

from psdist.commands.program import Program
from psdist.config.sources import Resolved
from psdist.errors import UsageError, UserError
from psdist.install import detect
from psdist.protocol.ids import worker_id
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.checkpointing.script_signals import keep_until_asked
from psdist.ranks.connecting import connect
from psdist.ranks.loading import uncollected
from psdist.ranks.lobby import take_place
from psdist.ranks.parent_link import connect_to_parent
from psdist.ranks.rank import Rank


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
        rank = connect(outcome, num_workers=num_workers, parent=parent)
    except AgreedExit as agreed:
        if parent is not None:
            parent.failed(agreed.status)
        return agreed.status
    return rank.exit.run(lambda: _take_part(rank, program))


def _take_part(rank: Rank, program: Program) -> int:
    rank.reach("importing")
    # These import torch: only once the configuration is known to be good, and where a host on
    # which that fails ends the job. Either takes 0.1 s of a core and 10 MiB beyond torch.
    with uncollected():
        if rank.role != "worker" or rank.is_alone:
            from psdist.ranks import server as serve
        if rank.role != "server":
            from psdist import joining

    if rank.role != "worker":
        if (status := serve.serve(rank)) or rank.session.replace is None:
            return status
    elif rank.is_substitute:
        rank.reach("training")
        if not take_place(rank):
            return 0
    if rank.is_alone:
        serve.write_summary_if_it_fails(rank)
    rank.reach("starting")
    parent = rank.exit.parent
    if parent is not None and rank.me == worker_id(0):  # the chief
        parent.take_input()
    with parent.script() if parent is not None else nullcontext():
        rank.exit.run(lambda: _run_as_main(program))  # sys.exit(0) is a good end
    if joining.the_job() is None:
        raise UsageError(
            f"the {program} ended without calling psdist.init(); add the four lines that "
            "the README shows (import, init, prepare, save)"
        )
    return joining.finish()


def _run_as_main(program: Program) -> int:
    program.run_as_main()
    return 0
