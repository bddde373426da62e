"""Children of this process: forked, watched, killed when they hang.

Owns the processes. This process has imported the libraries that are slow to import and nothing of
psdist, so a child begins with them and with a clean psdist. What a child prints goes into memory;
what it says is a file of lines of JSON. Kills only what it has started, by pid: a child is the head
of a session of its own, with which the processes that its tests have started end.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""More than a fast test needs: an endless list ends before the machine does."""


@dataclass(frozen=True)
class Job:
    """What a child is to do: ``work(say_to, scratch)`` returns its exit status."""

    what: Any
    """For whoever asked; comes back with the outcome."""
    work: Callable[[int, str], int]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    what: Any
    status: int
    """Exit status; minus the signal that ended it."""
    has_hung: bool
    said: list[dict[str, Any]]
    printed: str
    took_s: float


@dataclass
class _Child:
    job: Job
    pid: int
    handle: int
    """A pidfd: readable when the child has ended."""
    said: int
    printed: int
    scratch: str
    began_s: float = field(default_factory=time.monotonic)

    @property
    def ends_s(self) -> float:
        return self.began_s + self.job.limit_s


def run_all(jobs: Iterable[Job], *, at_once: int) -> Iterator[Outcome]:
    """Outcomes as they come. ``jobs`` is read only when there is room for another child."""
    waiting = iter(jobs)
    running: list[_Child] = []
    is_over = False
    try:
        while not is_over or running:
            while not is_over and len(running) < at_once:
                job = next(waiting, None)
                if job is None:
                    is_over = True
                else:
                    running.append(_fork(job))
            if running:
                for child in _ended(running):
                    running.remove(child)
                    yield _outcome(child, has_hung=False)
            for child in [each for each in running if time.monotonic() > each.ends_s]:
                running.remove(child)
                _kill(child)
                yield _outcome(child, has_hung=True)
    finally:
        for child in running:
            _kill(child)
            _outcome(child, has_hung=True)


def _fork(job: Job) -> _Child:
    said, printed = os.memfd_create("said"), os.memfd_create("printed")
    scratch = tempfile.mkdtemp(prefix="psdist-mutation-")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Child(job, pid, os.pidfd_open(pid), said, printed, scratch)
    status = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        for number in (signal.SIGPROF, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        status = job.work(said, os.path.join(scratch, "tests"))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _ended(running: list[_Child]) -> list[_Child]:
    """Waits until a child has ended, or one has had its time."""
    wait_s = max(0.0, min(child.ends_s for child in running) - time.monotonic())
    ready, _, _ = select.select([child.handle for child in running], [], [], wait_s)
    return [child for child in running if child.handle in ready]


def _kill(child: _Child) -> None:
    signal.pidfd_send_signal(child.handle, signal.SIGKILL)


def _outcome(child: _Child, *, has_hung: bool) -> Outcome:
    # Dead, but not waited for: its number is nobody else's yet. What its tests left running ends.
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    said, printed = _read(child.said), _read(child.printed)
    os.close(child.handle)
    shutil.rmtree(child.scratch, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(
        what=child.job.what,
        status=code,
        has_hung=has_hung or code == -signal.SIGPROF,
        said=[json.loads(line) for line in said.splitlines() if line.endswith("}")],
        printed=printed,
        took_s=time.monotonic() - child.began_s,
    )


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")
