"""Losses that scripts report, for local steps, codecs and rollback; pure.

losses = Losses(reader, guard=RiseGuard(factor=2.0))
losses.handle(worker_id(0), LossReported(...), job)    # LossHeard, and perhaps Rollback
losses.good                        # a checkpoint of at most this many rounds precedes a rise
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from psdist.controller.kept import Rollback, TuningState
from psdist.controller.loss_steps import MOST_LOSS, counts_nonfinite
from psdist.controller.observed import LossHeard
from psdist.controller.rollback import Rise, RiseGuard
from psdist.controller.snapshots import Fields, Nested
from psdist.protocol.control import Control, LossReported
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart, refuse


class LossReader(Protocol):
    """Local steps or codecs."""

    def report(self, message: LossReported) -> bool:
        """Take in losses. False if nothing depends on them, or they cannot be such."""
        ...

    def rolled_back(self, round_number: int, rise: Rise) -> Rollback:
        """Return what follows from a loss that has blown up in this round."""
        ...


class Losses(CoordinatorPart):
    NAME = "losses"
    TAKES = (LossReported,)
    STATE = Fields(
        {
            Nested: "_guard",
        }
    )

    def __init__(
        self, reader: LossReader, *, guard: RiseGuard | None = None, must_read: bool = True
    ) -> None:
        """``guard``: decides when the loss has blown up; ``must_read``: False if the reader may
        ignore losses, which are for the guard alone then."""
        self._reader = reader
        self._guard = guard
        self._must_read = must_read

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, LossReported)
        worker, count, total = message.worker, message.count, message.total
        job.require_worker(peer, worker, message)
        if message.round < 0 or count < 1 or not abs(total) <= MOST_LOSS * count:
            refuse(peer, f"reported {count} losses of {total}, which is damaged")
        is_held_back = self._guard is not None and counts_nonfinite(total)
        if not is_held_back and not self._reader.report(message) and self._must_read:
            refuse(peer, "sent LossReported, unasked or damaged")
        return [LossHeard(worker, message.round, count, total), *self._judge(message)]

    def _judge(self, message: LossReported) -> list[Rollback]:
        """Ask for a rollback if the loss has blown up."""
        if self._guard is None:
            return []
        rise = self._guard.report(message.round, message.count, message.total)
        return [] if rise is None else [self._reader.rolled_back(message.round, rise)]

    def keep(self, tuning_state: TuningState, clock: int) -> TuningState:
        return (
            tuning_state if self._guard is None else replace(tuning_state, rise=self._guard.kept())
        )

    @property
    def good(self) -> int | None:
        """Maximum rounds of a checkpoint that precedes the rise of the loss, if it rises. None
        without rollback."""
        return None if self._guard is None else self._guard.kept().good
