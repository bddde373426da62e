"""What follows when the parent is asked to end its job. Pure: signals and time in, steps out.

    ending = Ending()
    ending.on_signal(signal.SIGINT, now_s=0.0, has_worker=True, has_coordinator=True)
    ending.on_time(now_s=31.0)       # TellRanks was the first step; EndByCoordinator is the second

First the scripts are told, and may save what they want; then the coordinator ends the job; then the
launcher ends its ranks; then all are killed. Each stage has its time, and another signal cuts it
short. Who carries the steps out is psdist.commands.launch.parent.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TypeAlias


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
