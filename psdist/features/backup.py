"""Backup groups in ``run.json``: the promise on rounds that groups may miss."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class BackupPromise(BaseModel):
    backup: _Count = 0
    """Most groups that may miss a round."""
    backup_every: _Count = 0
    """A group misses fewer rounds than this in a row."""
    missed_running: tuple[_Count, ...] = ()
    """Rounds in a row that each group had missed; empty if nothing was restored, or if no group may
    miss a round."""

    def fault_of_missed(self, num_restored: int) -> str:
        """Return the fault of ``missed_running``, "" if it is right; ``num_restored``: groups that
        begin at a checkpoint."""
        if len(self.missed_running) == num_restored * bool(self.backup):
            return ""
        return (
            f"missed_running is of {len(self.missed_running)} groups, {num_restored} are restored, "
            f"backup is {self.backup}"
        )
