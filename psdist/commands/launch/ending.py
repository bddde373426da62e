"""Signals of the parent, and the steps by which it ends its job on request.

    ending = Ending()
    ending.on_signal(signal.SIGINT, now_s=0.0, has_worker=True, has_coordinator=True)
    ending.on_time(now_s=31.0)       # TellRanks was the first step; EndByCoordinator is the second

First the scripts are told, and may save what they want; then the coordinator ends the job; then the
launcher ends its ranks; then all are killed. Each stage has its time, and another signal cuts it
short. :class:`Ending` is pure; psdist.commands.launch.parent carries the steps out.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class TellRanks:
    """Every rank of this host gets the signal, once."""

    number: int


@dataclass(frozen=True, slots=True)
class EndByCoordinator:
    """The coordinator writes its files and ends every rank."""

    number: int


@dataclass(frozen=True, slots=True)
class SignalLauncher:
    number: int


@dataclass(frozen=True, slots=True)
class KillRanks:
    """Those of this host that are still there."""


Step: TypeAlias = TellRanks | EndByCoordinator | SignalLauncher | KillRanks


class Ending:
    GRACE_S = 30.0
    """For the scripts, as much as Slurm gives."""
    COORDINATOR_S = 3.0
    LAUNCHER_S = 5.0
    _STAGES = ("running", "scripts", "registrar", "launcher", "killed")

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        """``grace_s``: the setting; scripts have as long, and at least GRACE_S."""
        self._grace_s = max(self.GRACE_S, grace_s)
        self._stage = "running"
        self.number: int | None = None
        """The signal that asked for the end."""
        self.deadline_s: float | None = None
        """When :meth:`on_time` has something to do."""

    @property
    def is_hard(self) -> bool:
        """Whether another signal has nothing left to hurry."""
        return self._stage == "killed"

    def on_signal(
        self, number: int, *, now_s: float, has_worker: bool, has_coordinator: bool
    ) -> list[Step]:
        """SIGINT, SIGTERM or SIGHUP has come. Whether ranks of this host have these roles: a worker
        can be told, and fails for all others; the coordinator can end the job."""
        if self._stage == "running":
            self.number = number
            first = "registrar" if has_coordinator else "launcher"
            return self._enter("scripts" if has_worker else first, now_s)
        return self._next(now_s)

    def on_time(self, *, now_s: float) -> list[Step]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        return self._next(now_s)

    def _next(self, now_s: float) -> list[Step]:
        if self.is_hard:
            return []
        return self._enter(self._STAGES[self._STAGES.index(self._stage) + 1], now_s)

    def _enter(self, stage: str, now_s: float) -> list[Step]:
        assert self.number is not None
        self._stage = stage
        if stage == "scripts":
            self.deadline_s = now_s + self._grace_s
            return [TellRanks(self.number)]
        if stage == "registrar":
            self.deadline_s = now_s + self.COORDINATOR_S
            return [EndByCoordinator(self.number)]
        if stage == "launcher":
            self.deadline_s = now_s + self.LAUNCHER_S
            return [SignalLauncher(signal.SIGTERM)]
        self.deadline_s = None
        return [SignalLauncher(signal.SIGKILL), KillRanks()]


ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAKEN: Final = (
    *ENDINGS,
    signal.SIGUSR1,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGCHLD,
    signal.SIGWINCH,
)


class Signals:
    """The parent's signals: its loop takes one at a time, never in the middle of something else.

    A signal that was ignored when the parent started stays ignored: ``nohup``, and shells that
    start a command in the background, rely on it. ``descriptor`` is readable if one has arrived.
    """

    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        for end in (self.descriptor, self._write_end):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _TAKEN:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _take_note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._write_end)

    def take(self) -> list[int]:
        """Those that have come since the last call, in order."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []

    def stop_here(self) -> list[int]:
        """Be stopped as by Ctrl-Z, until somebody continues this process; what came meanwhile,
        without the SIGCONT that did. Where nobody could (no shell), this returns at once."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _take_note)
        came = self.take()
        if signal.SIGCONT in came:
            came.remove(signal.SIGCONT)
        return came


def _take_note(_number: int, _frame: FrameType | None) -> None:
    """The number is in the pipe by now."""
