"""The command line: ``psdist run``, ``plan``, ``check``, ``doctor``, ``bench`` and ``probe``.

``cli`` turns words into calls; every other module is one command, imported only when it is called.
Exceptions are the modules that choose what ``run`` runs, and ``launch``, the parent of mpirun. This
module ends a command whose standard output fails: the disk is full, or the reader has left. It also
prints the JSON of all commands.

A command may import every other room, no room imports a command, and ``cli`` imports neither torch
nor MPI, so that ``psdist --help`` and ``psdist plan`` answer on a login node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

from psdist.errors import UserError

READER_LEFT_STATUS: Final = 128 + signal.SIGPIPE
"""As a shell reports it of a program that SIGPIPE has ended."""


def print_json(command: str, content: Mapping[str, object]) -> None:
    """Print what ``psdist COMMAND --json`` shows. docs/reference/json.md lists the keys; a change
    of them raises the version."""
    print(json.dumps({"format": f"psdist {command}", "version": 1, **content}, indent=1))


def open_missing() -> None:
    """Open the null device for standard output and error where the caller has closed them. The
    next file that is opened would take the number of a closed one, and what is written to it."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
            os.dup2(nowhere.fileno(), number)
            os.set_inheritable(number, True)  # dup2 leaves it out where both numbers are one
            setattr(sys, name, nowhere)


def flush() -> None:
    """Write out what is buffered. Raises OSError, as the end of the process would not."""
    if not sys.stdout.closed:
        sys.stdout.flush()


def report_failure(error: OSError) -> int | None:
    """Print one line if standard output has failed, and return the exit status; None if
    another file has failed."""
    if sys.stdout.closed:
        return None
    try:
        # Buffered text fails again; without a buffer only another write tells.
        print(flush=True)
    except BrokenPipeError:
        discard()
        return READER_LEFT_STATUS
    except OSError:
        discard()
        print(
            f"psdist: error: standard output: cannot be written ({error.strerror}): free some "
            "space, or send it elsewhere",
            file=sys.stderr,
        )
        return UserError.exit_status
    return None


def discard() -> None:
    """Let what is still buffered go nowhere: it would fail again at the end of the process."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
