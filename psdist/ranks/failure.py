"""What is told when a rank fails, and how it ends the job: once, with rank and host, never cut off.

    status = run_or_fail(context, train)      # whatever train() raises ends every rank

The user's mistakes, and what the network did to us, are one line that names the line of the
script; everything else is a traceback that begins at the script. The rank's log has the whole one.
Owns words and the last moments of a process; how the words reach the rank that prints them is
psdist.ranks.context's.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol, TypeGuard

from psdist.errors import (
    BuriedError,
    HostLostError,
    InvariantError,
    JobEndedError,
    PeerLostError,
    PsdistError,
    TransportError,
)
from psdist.ranks.process_group_errors import explain_process_group

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
        """The checkpoint that ``--resume`` goes on from."""


class CanFail(Protocol):
    def fail(self, text: str, status: int) -> NoReturn:
        """End every rank of the job; ``text`` is printed once."""
        ...

    def end_buried(self, text: str) -> NoReturn:
        """End this rank alone, with status 0: the job goes on without it. ``text`` says why."""
        ...

    def end_told(self, status: int) -> NoReturn:
        """End this rank alone: another one has ended the job, and said why."""
        ...

    def cause_of(self, error: Exception) -> Exception:
        """What has happened elsewhere that ``error`` is a consequence of, or ``error``."""
        ...


class CanAbort(Protocol):
    """An MPI communicator."""

    def Abort(self, errorcode: int) -> NoReturn: ...


def run_or_fail(context: CanFail, run: Callable[[], int]) -> int:
    """``run()``, but whatever it raises ends the whole job, told once. A process that ``run()`` has
    forked ends here, and by itself: the rank and its MPI are its parent's."""
    rank = os.getpid()
    try:
        status = run()
    except SystemExit as stop:
        end_if_forked(rank, stop)
        if stop.code in (None, 0):
            return 0
        fail_with(context, stop)
    except BaseException as error:  # a rank that only stops would leave the others waiting
        end_if_forked(rank, error)
        fail_with(context, error)
    end_if_forked(rank, None)
    return status


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


def fail_with(context: CanFail, error: BaseException) -> NoReturn:
    """End the job because of ``error``."""
    whole = "".join(traceback.format_exception(error))
    logger.info("this rank failed:\n%s", printable(whole).rstrip())
    if _may_be_a_consequence(error):
        error = context.cause_of(error)
    if isinstance(error, JobEndedError):
        context.end_told(error.exit_status)
    if isinstance(error, BuriedError):
        context.end_buried(printable(str(error)))
    text, status = format_error(error)
    context.fail(text, status)


def _may_be_a_consequence(error: BaseException) -> TypeGuard[Exception]:
    """Of the death of another rank: what a library or the network says, and no mistake of ours or
    of the user's."""
    if isinstance(error, PsdistError):
        return isinstance(error, TransportError) and not isinstance(
            error, PeerLostError | HostLostError
        )
    return isinstance(error, Exception)


def format_error(error: BaseException) -> tuple[str, int]:
    """What to say about ``error``, and the exit status of the job."""
    if (mistake := explain_process_group(error)) is not None:
        error = mistake.with_traceback(error.__traceback__)
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return f"exited with status {int(error.code)}", (error.code & 0xFF) or 1
        return printable(str(error.code)), 1
    if isinstance(error, Requeued):
        from_where = f"goes on from {error.newest}" if error.newest else "starts afresh"
        return f"{_REQUEUE}: ended by SIGUSR1; --resume {from_where}", REQUEUE_STATUS
    if isinstance(error, KeyboardInterrupt):
        return interruption(error.number if isinstance(error, Interrupted) else signal.SIGINT)
    if isinstance(error, PsdistError) and not isinstance(error, InvariantError):
        return printable(f"error{_script_line(error.__traceback__)}: {error}"), error.exit_status
    lines = traceback.format_exception(type(error), error, _from_script(error.__traceback__))
    status = error.exit_status if isinstance(error, PsdistError) else 1
    return printable("".join(lines).rstrip()), status


def interruption(number: int) -> tuple[str, int]:
    """What to say of a job that this signal has ended, and its exit status."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return f"{_INTERRUPTED}{by}", _SIGNAL_STATUS + number


def requeue(why: str) -> tuple[str, int]:
    """What to say of a job that is to be started again, and its exit status."""
    return f"{_REQUEUE}: {why}", REQUEUE_STATUS


def is_requeue(text: str, status: int) -> bool:
    """Whether a job that ended with these wants to be started again."""
    return status == REQUEUE_STATUS and text.startswith(_REQUEUE)


def is_interruption(text: str, status: int) -> bool:
    """Whether a job that ended with these was interrupted: it has not failed."""
    return status > _SIGNAL_STATUS and text.startswith(_INTERRUPTED)


def printable(text: str) -> str:
    """``text`` without lone surrogates (file names that are not UTF-8), so that it can travel."""
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
    now."""
    separator = ":\n" if "\n" in text else ": "
    with suppress(OSError, ValueError):  # closed, or a full disk: there is nobody to tell
        print(f"{heading}{separator}{text}", file=sys.stderr, flush=True)
    flush_output()
    if comm is not None:
        wait_until_read()
        tell()
        _close_standard_error()
        comm.Abort(status)
    os._exit(status)


def _close_standard_error() -> None:
    """All has been said: what an MPI library has to say of its own Abort helps nobody."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def flush_output() -> None:
    """What the script has printed, out of this process: Abort throws buffers away."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed by the script, or no stream
            stream.flush()


def wait_until_read() -> None:
    """Until the launcher has taken what this rank printed: the end of a job overtakes what still
    lies in its pipes."""
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
    """From now on Ctrl-C does not cut off what a failing rank says."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without our own frames before the script's first; unchanged if we ran none."""
    at, inside = trace, False
    while at is not None:
        if at.tb_frame.f_code.co_filename in _RUNPY:
            inside = True
        elif inside:
            return at
        at = at.tb_next
    return None if inside else trace


def _script_line(trace: TracebackType | None) -> str:
    """`` at train.py line 12``: where the script called psdist; nothing where it did not."""
    found = ""
    at = _from_script(trace)
    while at is not None:
        path = at.tb_frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            break
        # Not a library's frame between the two: torch wraps optimizer.step.
        if not (path.startswith(_NO_SCRIPTS) or "/site-packages/" in path):
            found = f" at {os.path.basename(path)} line {at.tb_lineno}"
        at = at.tb_next
    return found
