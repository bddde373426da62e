"""A script that python itself runs: ``python train.py``, ``mpirun python train.py``, or a REPL.

Nobody stands around such a script, so psdist.init() connects by the environment, and hooks of the
interpreter tell how the script ends. A server rank serves here and never returns.

    context = connect_or_serve(finish)
    job = Job(context)
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
from psdist.install.launcher import detect
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.connecting import connect, current
from psdist.ranks.context import RankContext
from psdist.ranks.failure import fail_with, run_or_fail
from psdist.ranks.server import serve, write_summary_if_it_fails
from psdist.ranks.taking_place import take_place


def connect_or_serve(
    finish: Callable[[], int], check: Callable[[], object] = lambda: None
) -> RankContext:
    """This worker's context; its ``finish`` is called when the script has ended well.

    ``check`` raises UserError for what the script has passed and cannot be. Exits the process on
    servers, and where the ranks agree that they cannot begin.
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
        context = connect(outcome)
    except AgreedExit as agreed:
        sys.exit(agreed.status)
    if context.role != "worker":
        status = run_or_fail(context, lambda: serve(context))
        if status or context.replace is None:
            sys.exit(status)
    elif context.is_substitute and not run_or_fail(context, lambda: int(take_place(context))):
        sys.exit(0)
    tell_errors()
    atexit.register(_finish_at_exit, finish, os.getpid())
    if context.comm is None:
        write_summary_if_it_fails(context)
    return context


def tell_errors() -> None:
    """From now on an error that nothing catches is told once and ends the job.

    A hook around ours must not stay: torch.distributed's puts a buffer in place of sys.stderr, in
    which everything that is said before the process ends would be lost.
    """
    sys.excepthook = _excepthook


def _is_interactive() -> bool:
    """Whether a person types at this process. One that a launcher started ends with its script:
    other ranks wait for it."""
    if detect(os.environ).is_present:
        return False
    # ps1 is there from the first prompt on; with `python -i` that comes after the script.
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or os.environ.get("PYTHONINSPECT"))


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    context = current()
    if context is None or _is_interactive():
        sys.__excepthook__(kind, error, trace)
        return
    fail_with(context, error)


def _finish_at_exit(finish: Callable[[], int], rank: int) -> None:
    context = current()
    if context is None or os.getpid() != rank:  # a process that the script has forked
        return
    # Set by Python for what ended the script, even if a hook other than ours was told of it. At a
    # prompt it is an error that the person has seen, and went on.
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not _is_interactive() and context.is_waited_for:
        fail_with(context, error)
    run_or_fail(context, finish)
