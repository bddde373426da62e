"""Signals of the parent, the steps by which it ends its job on request, and how the job ended.

    ending = Ending()
    ending.on_signal(signal.SIGINT, now_s=0.0, has_worker=True, has_coordinator=True)
    ending.on_time(now_s=31.0)       # TellRanks was the first step; EndByCoordinator is the second
    verdict = judge(returncode=137, deaths=noise.deaths, ...)
    verdict.status, verdict.line     # the exit status; the one line if no rank has given the reason

First the scripts get a notice and may save; then the coordinator ends the job; then the launcher
ends its ranks; then all are killed. Another signal cuts a stage short. :class:`Ending` and
:func:`judge` are pure. Launchers report the signals by which they end ranks, so the reports of
ranks count before the statuses of launchers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeAlias

from psdist.commands.launch.noise import Death


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
    """Time for the scripts: the default of Slurm."""
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
        """True if a further signal would have no effect."""
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
        """Stop as after Ctrl-Z until a SIGCONT. Return the other signals that came meanwhile.
        Without a shell that could continue this process, return at once."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _take_note)
        came = self.take()
        if signal.SIGCONT in came:
            came.remove(signal.SIGCONT)
        return came


def _take_note(_number: int, _frame: FrameType | None) -> None:
    """The number is in the pipe by now."""


_SIGNAL_STATUS = 128
_OUT_OF_MEMORY = "out of memory? (dmesg would say so)"
_NO_SPACE = (
    "no space left in /dev/shm or TMPDIR? (df; docker run --shm-size=1g gives a container more)"
)
_HINTS: Mapping[int, str] = {
    signal.SIGKILL: _OUT_OF_MEMORY,
    signal.SIGBUS: _NO_SPACE,
    signal.SIGXFSZ: "a file reached the size limit? (ulimit -f)",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    status: int
    line: str | None = None


def judge(
    returncode: int,
    *,
    told: Sequence[int],
    interrupted_by: int | None,
    deaths: Sequence[Death],
    vanished: Sequence[str],
    num_vanished_first: int,
    num_started: int,
    max_deaths: int = 0,
    lost_hosts: Sequence[str] = (),
) -> Verdict:
    """``returncode``: the launcher's, negative for a signal; ``told``: statuses that ranks have
    given; ``vanished``: names of ranks that ended without a word, the first one first;
    ``num_vanished_first``: how many of them before any rank reported a failure; ``num_started``:
    ranks that have had a line; ``max_deaths``: number of ranks that may fail while the job
    continues; ``lost_hosts``: those that the launcher does not reach any more."""
    failures = [status for status in told if status]
    if failures:
        if not num_vanished_first or interrupted_by is not None:
            return Verdict(failures[0])
        return Verdict(
            failures[0],
            f"psdist: error: before that {vanished[0]} ended and said nothing: killed, "
            f"{_OUT_OF_MEMORY}, or by os._exit",
        )
    if lost_hosts and interrupted_by is None:  # whatever it returns: Open MPI's returns 0
        return Verdict(
            returncode if returncode > 0 else 1,
            f"psdist: error: mpirun has lost {', '.join(lost_hosts)}, cut off or gone, and ends "
            "the job: start it again on hosts that reach each other (--resume continues from "
            "the last checkpoint)",
        )
    if returncode == 0:
        # A rank that vanished may have finished or not.
        is_survived = len(vanished) <= max_deaths
        return Verdict(0) if is_survived else _unexplained(vanished[0], 1, returncode)
    if interrupted_by is not None:
        return Verdict(_SIGNAL_STATUS + interrupted_by)
    if deaths:
        death = deaths[0]
        who = vanished[0] if vanished else f"the process {death.pid} on {death.host}"
        if death.rank is not None and not vanished:
            who = f"rank {death.rank} on {death.host}"
        return Verdict(
            _SIGNAL_STATUS + death.signal,
            f"psdist: error: {who} was ended by signal {_signal(death.signal)}"
            f"{_hint(death.signal)}",
        )
    if returncode < 0:
        return Verdict(
            _SIGNAL_STATUS - returncode,
            f"psdist: error: mpirun was ended by signal {_signal(-returncode)}; its ranks on this "
            f"host have been ended{'' if returncode == -signal.SIGKILL else _hint(-returncode)}",
        )
    if vanished:
        return _unexplained(vanished[0], returncode, returncode)
    if not num_started:
        return Verdict(
            returncode,
            f"psdist: error: mpirun ended with status {returncode} before any rank had started; "
            "its output is above",
        )
    return Verdict(returncode, f"psdist: error: mpirun ended with status {returncode}")


def _unexplained(who: str, status: int, returncode: int) -> Verdict:
    return Verdict(
        status,
        f"psdist: error: {who} ended before the job was complete and said nothing (mpirun's status "
        f"is {returncode}): did it call os._exit?",
    )


def _hint(number: int) -> str:
    return f"; {_HINTS[number]}" if number in _HINTS else ""


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)
