"""Rules for rounds that close without a worker's group.

rule = WorkerRule()                               # every round waits for this group
rule = MissedRounds(group, loop, uses, on_missed=...)
clock = yield from rule.next_clock(7)             # after the replies of iteration 7
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.reduction import CALL, Reduced, WorkerGroup, in_group
from psdist.workers.values import Uses


class WorkerRule:
    """No round closes without this worker's group."""

    num_missed = 0
    """Rounds that the group has missed."""

    def before_push(self, clock: int, reduced: Reduced) -> Generator[Wait, None, None]:
        """Iteration ``clock`` is pushed next."""
        del clock, reduced
        yield from ()

    def next_clock(self, clock: int) -> Generator[Wait, None, int]:
        """Return the clock of the next iteration. All replies of iteration ``clock`` are here."""
        yield from ()
        return clock + 1


class MissedRounds(WorkerRule):
    """A round may close without this worker's group. Its servers then name the round with which
    the group continues; its parameters replace the replies."""

    def __init__(
        self,
        group: WorkerGroup,
        loop: WorkerLoop,
        uses: Uses,
        *,
        on_missed: Callable[[int], None],
    ) -> None:
        """``on_missed(rounds)``: the group leaves out this many rounds after the one it missed."""
        self._group = group
        self._loop = loop
        self._uses = uses
        self._on_missed = on_missed

    def next_clock(self, clock: int) -> Generator[Wait, None, int]:
        joins_at = yield from self._joining()
        if not joins_at:
            return clock + 1
        skipped = range(clock + 1, joins_at)
        self.num_missed += 1 + len(skipped)
        mine = self._group.mine
        for each in skipped:
            self._uses.record_push(each, 0.0, 0.0, set(mine))
        self._loop.core.transfers.skip_to(joins_at)
        self._on_missed(len(skipped))
        self._loop.begin_pull(clock=joins_at, chunks=mine, is_fresh=False)
        yield self._loop.wait_for_replies()
        return joins_at

    def _joining(self) -> Generator[Wait, None, int]:
        """Return the round with which the group continues if it has missed this one, else 0.
        Servers send it only to workers that push a part."""
        told = [self._loop.core.transfers.take_joining()]
        rows = yield from in_group(self._group.channel.agree(CALL, told), CALL)
        return max(int(each) for (each,) in rows)
