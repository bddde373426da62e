"""The text and exit status for an error that ends a rank, and the last steps of its process.

    text, status = format_error(error)
    end_all(comm, heading, text, status)

Mistakes of the user and errors of the network are one line that names the line of the script;
every other error is a traceback that begins at the script. The rank's log has the whole traceback.
psdist.ranks.exit sends the text to the rank that prints it.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import runpy
import signal
import stat
import sys
import sysconfig
import termios
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Protocol, TypeGuard

from psdist.errors import (
    HostLostError,
    InvariantError,
    PeerLostError,
    PsdistError,
    TransportError,
    UsageError,
)
from psdist.install import survives_deaths

logger = logging.getLogger("psdist")

_SIGNAL_STATUS = 128
"""A shell reports this, and the signal's number, for a program that a signal has ended."""
_INTERRUPTED = "interrupted"
_REQUEUE = "requeue"
REQUEUE_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
_READ_TIMEOUT_S = 2.0
_FORWARD_S = 0.1
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_EXPLANATIONS: Final[Mapping[str, str]] = {
    "trying to initialize the default process group twice": "dist.init_process_group() was called "
    "by the script: psdist.init() has already created the group; remove this call",
    "Error initializing torch.distributed using env://": "dist.init_process_group() was called by "
    "the script: psdist.init() creates the group; remove this call",
    "Default process group has not been initialized": "torch.distributed has no process group: "
    "psdist.init() creates it and job.close() ends it; use it only in between, and remove "
    "dist.destroy_process_group() from the script",
}
"""Part of an error of torch -> the mistake of the script. The advice of torch is to call
init_process_group, which is wrong here: psdist.init() calls it."""
_RUNPY = ("<frozen runpy>", runpy.__file__)
_NO_SCRIPTS = ("<", sysconfig.get_path("stdlib") + os.sep)


class Interrupted(KeyboardInterrupt):
    """Another signal than Ctrl-C's asks this rank to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Requeued(KeyboardInterrupt):
    """SIGUSR1 has asked this job to make a checkpoint and end, so that it may be started again."""

    def __init__(self, newest: str | None) -> None:
        super().__init__(newest)
        self.newest = newest
        """The checkpoint that ``--resume`` starts from."""


class CanAbort(Protocol):
    """An MPI communicator."""

    def Abort(self, errorcode: int) -> NoReturn: ...


def end_if_forked(rank: int, error: BaseException | None) -> None:
    """End this process, and nothing else, unless it is the ``rank``'s own."""
    if os.getpid() == rank:
        return
    status = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = (error.code or 0) & 0xFF
    elif error is not None:
        text = error.code if isinstance(error, SystemExit) else traceback.format_exc().rstrip()
        print(text, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def may_be_a_consequence(error: BaseException) -> TypeGuard[Exception]:
    """True if the failure of another rank may have caused ``error``: an error of a library or of
    the network, and neither a mistake of the user nor a bug of psdist."""
    if isinstance(error, PsdistError):
        return isinstance(error, TransportError) and not isinstance(
            error, PeerLostError | HostLostError
        )
    return isinstance(error, Exception)


def format_error(error: BaseException) -> tuple[str, int]:
    """Return the text of ``error``, and the exit status of the job."""
    if (mistake := _explain_process_group(error)) is not None:
        error = mistake.with_traceback(error.__traceback__)
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return f"exited with status {int(error.code)}", (error.code & 0xFF) or 1
        return printable(str(error.code)), 1
    if isinstance(error, Requeued):
        from_where = f"continues from {error.newest}" if error.newest else "starts afresh"
        return f"{_REQUEUE}: ended by SIGUSR1; --resume {from_where}", REQUEUE_STATUS
    if isinstance(error, KeyboardInterrupt):
        return interruption(error.number if isinstance(error, Interrupted) else signal.SIGINT)
    if isinstance(error, PsdistError) and not isinstance(error, InvariantError):
        return printable(f"error{_script_line(error.__traceback__)}: {error}"), error.exit_status
    lines = traceback.format_exception(type(error), error, _from_script(error.__traceback__))
    status = error.exit_status if isinstance(error, PsdistError) else 1
    return printable("".join(lines).rstrip()), status


def _explain_process_group(error: BaseException) -> UsageError | None:
    """Return the mistake of the script that led to this error of torch; None for other errors."""
    if not isinstance(error, ValueError):
        return None
    message = str(error)
    return next((UsageError(text) for part, text in _EXPLANATIONS.items() if part in message), None)


def interruption(number: int) -> tuple[str, int]:
    """Return the text for a job that this signal has ended, and its exit status."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return f"{_INTERRUPTED}{by}", _SIGNAL_STATUS + number


def requeue(why: str) -> tuple[str, int]:
    """Return the text for a job that must be started again, and its exit status."""
    return f"{_REQUEUE}: {why}", REQUEUE_STATUS


def is_requeue(text: str, status: int) -> bool:
    """True if a job that ended with this text and status must be started again."""
    return status == REQUEUE_STATUS and text.startswith(_REQUEUE)


def is_interruption(text: str, status: int) -> bool:
    """True if a job that ended with this text and status was interrupted and has not failed."""
    return status > _SIGNAL_STATUS and text.startswith(_INTERRUPTED)


def printable(text: str) -> str:
    """Return ``text`` without lone surrogates (file names that are not UTF-8), to be sent."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def end_all(
    comm: CanAbort | None,
    heading: str,
    text: str,
    status: int,
    *,
    tell: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Print, ``tell()`` the others, and end every rank of ``comm`` (this process alone if None),
    now. Under ULFM, Abort ends only its caller and may hang mpirun (docs/dev/decisions.md).
    So this process exits. The others end because they receive a message or notice it."""
    separator = ":\n" if "\n" in text else ": "
    with suppress(OSError, ValueError):  # stderr is closed, or its disk is full
        print(f"{heading}{separator}{text}", file=sys.stderr, flush=True)
    flush_output()
    if comm is not None:
        wait_until_read()
        tell()
        if not survives_deaths(os.environ):
            _close_standard_error()
            comm.Abort(status)
    os._exit(status)


def _close_standard_error() -> None:
    """The reason has been printed: the MPI library's lines about its own Abort do not help."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def flush_output() -> None:
    """Flush the script's output, because Abort discards buffers."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed by the script, or no stream
            stream.flush()


def wait_until_read() -> None:
    """Wait until the launcher has read this rank's output: the end of a job would overtake the
    output that is still in the pipes."""
    deadline = time.monotonic() + _READ_TIMEOUT_S
    unread = array.array("i", [0])
    for descriptor in (1, 2):
        with suppress(OSError):  # closed by the script
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                continue
            while time.monotonic() < deadline:
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                if not unread[0]:
                    break
                time.sleep(1e-3)
    time.sleep(_FORWARD_S)  # from a daemon of the launcher to the launcher itself


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on, so that it does not cut off the text of a failing rank."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without the frames before the script's first one; unchanged if psdist did
    not run the script."""
    at, inside = trace, False
    while at is not None:
        if at.tb_frame.f_code.co_filename in _RUNPY:
            inside = True
        elif inside:
            return at
        at = at.tb_next
    return None if inside else trace


def _script_line(trace: TracebackType | None) -> str:
    """Return the place where the script called psdist (`` at train.py line 12``), or ""."""
    found = ""
    at = _from_script(trace)
    while at is not None:
        path = at.tb_frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            break
        # Skip frames of libraries in between: torch wraps optimizer.step.
        if not (path.startswith(_NO_SCRIPTS) or "/site-packages/" in path):
            found = f" at {os.path.basename(path)} line {at.tb_lineno}"
        at = at.tb_next
    return found
