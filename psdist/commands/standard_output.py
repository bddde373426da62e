"""The end of a command whose standard output takes no more: a full disk, or a reader that has left.

try:
    status = command()
    flush()
except OSError as error:
    status = told(error)         # 2, 141, or None: another file has failed
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from psdist.errors import UserError

READER_LEFT_STATUS: Final = 128 + signal.SIGPIPE
"""As a shell reports it of a program that SIGPIPE has ended."""


def flush() -> None:
    """Write out what is buffered. Raises OSError, as the end of the process would not."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def told(error: OSError) -> int | None:
    """Say in one line that ``error`` has ended the output; the exit status. None if another file
    than standard output has failed."""
    if sys.stdout is None or sys.stdout.closed:
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
