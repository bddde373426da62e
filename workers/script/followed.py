"""Check that a spare could take the place of a failed worker in this script. Pure.

A spare runs the script from its start, alone, and joins the others at the epoch and batch of the
chief (job.epochs and the loaders record them). So the script must not call a collective between its
start, or the start of an epoch, and the next training batch. Every worker refuses such a script at
the first such call, also in a run without failures.

    followed = FollowedScript()
    followed.begin_epoch(num_loops=1)
    followed.ask_for_batch(a_pass)
    followed.end_iteration()
    followed.call("mean")
"""

from __future__ import annotations

from typing import Final

from psdist.errors import UsageError

_ALONE: Final = (
    "a spare that takes a worker's place would call it alone, when its script runs from the start "
    "to where the others are"
)
_OR: Final = (
    "or leave failures.spares out (with failures.replication = buddy, or set failures.max_deaths = "
    "0)"
)


class FollowedScript:
    def __init__(self) -> None:
        self._called = ""
        """The first collective since the script, or the epoch, began."""
        self._is_in_epochs = False
        self._pass: object = None
        """The pass of the last training batch."""

    def call(self, collective: str) -> None:
        """The script calls a collective."""
        self._called = self._called or collective

    def begin_epoch(self, *, num_loops: int) -> None:
        """An epoch begins, in loop number ``num_loops`` over job.epochs. Raises
        :class:`UsageError`."""
        if num_loops > 1:
            raise UsageError(
                "job.epochs was looped over a second time, with spares for workers' places: a "
                "spare's script would come alone to what stands between the loops; make one loop "
                f"of them, {_OR}"
            )
        if self._called and not self._is_in_epochs:
            raise UsageError(
                f"{_words(self._called)} was called before the loop over job.epochs, with spares "
                f"for workers' places: {_ALONE}; call it in the loop or after it, {_OR}"
            )
        self._is_in_epochs, self._called = True, ""

    def ask_for_batch(self, a_pass: object) -> None:
        """The script asks a loader for a batch to train with. Raises :class:`UsageError`."""
        if a_pass is self._pass:
            return
        self._pass = a_pass
        if self._called and self._is_in_epochs:
            raise UsageError(
                f"{_words(self._called)} was called in an epoch in front of a training loop, with "
                f"spares for workers' places: {_ALONE}; call it after the epoch's last training "
                f"loop, {_OR}"
            )

    def end_iteration(self) -> None:
        """A step was made. Raises :class:`UsageError`."""
        if not self._is_in_epochs:
            raise UsageError(
                "a step was made outside of a loop over job.epochs(n), with spares for workers' "
                "places: a spare's script finds by job.epochs where the others are; write for "
                f"epoch in job.epochs(n), {_OR}"
            )


def _words(collective: str) -> str:
    if collective == "loader":
        return "a DataLoader with a sampler of its own, whose order workers compare,"
    return f"job.{collective}"
