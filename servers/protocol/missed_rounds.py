"""Backup groups at the coordinator: groups may miss rounds; pure.

A group that has missed several rounds waits for the open round to close
(psdist.servers.protocol.rules.closing). So a worker that holds before that round is in its way. The
clocks of workers differ where one has missed a round and another has not.

    MissedRounds().waits(blocked=5, held=7)     # True
    MissedRounds().waits(blocked=6, held=7)     # False: a group that missed one round continues
"""

from __future__ import annotations

from psdist.controller.snapshots import Fields
from psdist.servers.protocol.coordinator import CoordinatorPart


class MissedRounds(CoordinatorPart):
    NAME = "missed_rounds"
    APART = ("prepare",)
    STATE = Fields({})

    def waits(self, blocked: int, held: int) -> bool:
        return held > blocked + 1

    def resume_at(self, clocks: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """A worker that missed rounds unknowingly resumes with the others."""
        highest = tuple(map(max, zip(*clocks.values(), strict=True)))
        return dict.fromkeys(clocks, highest)
