"""A script that python itself runs: ``python train.py``, ``mpirun python train.py``, or a REPL.

psdist did not start such a script. So psdist.init() connects by the environment, and hooks of the
interpreter report how the script ends. A server rank serves here and never returns.

    rank = connect_or_serve(finish)
    job = Job(rank.session)
    tell_errors()              # again: torch.distributed has put a hook of its own around ours
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from psdist.config.sources import resolve
from psdist.errors import UserError
from psdist.install import detect
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.connecting import connect, current
from psdist.ranks.lobby import take_place
from psdist.ranks.rank import Rank


def connect_or_serve(finish: Callable[[], int], check: Callable[[], object] = lambda: None) -> Rank:
    """Return this worker's rank; ``finish`` is called when the script has ended without an error.

    ``check`` raises UserError for wrong settings of the script. Exits the process on servers, and
    if the ranks agree that they cannot begin.
    """
    outcome: Any
    try:
        outcome = resolve(command_line={}, environment=os.environ, file=None)
        check()
    except UserError as error:
        if _is_interactive():
            raise
        outcome = error
    try:
        rank = connect(outcome)
    except AgreedExit as agreed:
        sys.exit(agreed.status)
    if rank.role != "worker" or rank.is_alone:
        from psdist.ranks import server  # a worker imports nothing of servers
    if rank.role != "worker":
        status = rank.exit.run(lambda: server.serve(rank))
        if status or rank.session.replace is None:
            sys.exit(status)
    elif rank.is_substitute and not rank.exit.run(lambda: int(take_place(rank))):
        sys.exit(0)
    tell_errors()
    atexit.register(_finish_at_exit, finish, os.getpid())
    if rank.is_alone:
        server.write_summary_if_it_fails(rank)
    return rank


def tell_errors() -> None:
    """From now on an uncaught error is printed once and ends the job.

    The hook of torch.distributed must not stay around ours: it replaces sys.stderr by a buffer,
    and the text printed before the process ends would be lost.
    """
    sys.excepthook = _excepthook


def _is_interactive() -> bool:
    """True if a user types at this process. A process that a launcher started ends with its
    script, because other ranks wait for it."""
    if detect(os.environ).is_present:
        return False
    # ps1 is there from the first prompt on; with `python -i` that comes after the script.
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or os.environ.get("PYTHONINSPECT"))


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    rank = current()
    if rank is None or _is_interactive():
        sys.__excepthook__(kind, error, trace)
        return
    rank.exit.fail_with(error)


def _finish_at_exit(finish: Callable[[], int], process: int) -> None:
    rank = current()
    if rank is None or os.getpid() != process:  # a process that the script has forked
        return
    # Python sets it for the error that ended the script, whichever hook handled it. At a prompt it
    # is an earlier error, which did not end anything.
    error = getattr(sys, "last_value", None)
    if (
        isinstance(error, BaseException)
        and not _is_interactive()
        and (not rank.is_alone or rank.session.is_open)
    ):
        rank.exit.fail_with(error)
    rank.exit.run(finish)
