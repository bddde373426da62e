"""Processes of a job, as its parent starts, signals and watches them.

    mpirun = start(command, environment, death_signal=signal.SIGTERM)
    rank = RankProcess.of(pid=4711)
    rank.signal_group(signal.SIGSTOP)

mpirun gets a session of its own: the terminal's Ctrl-C then reaches the parent only, which passes
it on once. It dies with its parent, whatever ends that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.errors import LaunchError

_PR_SET_PDEATHSIG: Final = 1


def start(
    command: Sequence[str], environment: Mapping[str, str], *, death_signal: int
) -> subprocess.Popen[bytes]:
    """Start ``command`` with pipes for its output and nothing as its input.

    To be called by the main thread: the kernel sends ``death_signal`` when the thread ends that
    started the process. Raises LaunchError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        # Between fork and exec, in a process of one thread.
        libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that is no child of ours, told apart from a later one with the same number."""

    pid: int
    started: str
    """When, as the kernel counts; empty if it had ended already."""

    @classmethod
    def of(cls, pid: int) -> RankProcess:
        return cls(pid, _start_time(pid))

    @property
    def is_alive(self) -> bool:
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal_group(self, number: int) -> None:
        """To this process and those it has started, where the launcher gave it a group."""
        if not self.is_alive:
            return
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def _start_time(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in brackets, may have spaces and brackets of its own.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
