"""How many local steps all groups make in a round: decided from the loss that the script reports.

Pure: numbers in, decisions out. The coordinator runs it (``steps_by = loss``), and ``psdist check``
feeds it what was recorded and must get the same decisions.

    control = LossStepControl(num_workers=2, num_groups=2, local_steps=16)
    control.report(worker=0, count=16, total=40.0)       # of reports since the last decision
    control.choose()                                     # Choice((16, 16), "")

AdaComm (Wang & Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime
Trade-off in Local-Update SGD", MLSys 2019, section 4): with F the loss now, F_0 the first one and
H_0 steps at first,

    H = ceil(H_0 sqrt(F / F_0))

which falls with the loss and never rises here. F is the mean of all reports since the last
decision; without any, nothing changes.
"""

from __future__ import annotations

import math
from typing import Final

from psdist.controller.kept import KeptSteps, are_starts
from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.controller.steps import Choice

MOST_LOSS: Final = 1e100
"""The largest loss there may be: sums of all reports stay finite."""


def counts_nonfinite(total: float) -> bool:
    """True if a NaN or an infinity was among losses with this sum. Each of them counts as
    :data:`MOST_LOSS` where ``rollback`` is set. They decide nothing else: one
    would be the first loss, or the least fall, of all others."""
    return total >= MOST_LOSS


class LossStepControl(HasSnapshot):
    STATE = Fields(
        {
            int: "_now _count",
            list[float]: "_totals",
            float | None: "_first_loss",
        }
    )

    def __init__(self, *, num_workers: int, num_groups: int, local_steps: int) -> None:
        """``local_steps``: H_0, of every group until the loss has fallen."""
        self._num_groups = num_groups
        self._at_first = self._now = local_steps
        self._totals = [0.0] * num_workers
        """By worker: the sum of its reports since the last decision, so that the order in which
        reports arrive changes no bit."""
        self._count = 0
        self._first_loss: float | None = None

    @property
    def now(self) -> int:
        """Steps that every group makes, as chosen last."""
        return self._now

    def kept(self, starts: tuple[tuple[int, int], ...], num_fixed: int) -> KeptSteps:
        """For a checkpoint; what was fixed until then is the caller's."""
        return KeptSteps(
            starts=starts,
            num_fixed=num_fixed,
            first_loss=self._first_loss,
            totals=tuple(self._totals),
            count=self._count,
        )

    def go_on(self, kept: KeptSteps) -> None:
        """Restore from a checkpoint, before anything is reported. Raises ValueError for what no
        such run has. Other workers continue with the sum of those reports."""
        losses = [*kept.totals, kept.first_loss or 0.0]
        if (
            not are_starts(kept.starts, least=1, most=self._at_first)
            or min(kept.num_fixed, kept.count) < 0
            or not all(0 <= each < math.inf for each in losses)
        ):
            raise ValueError(f"of more than {self._at_first} local steps, or not whole")
        self._now = kept.starts[-1][1]
        self._first_loss, self._count = kept.first_loss, kept.count
        rest = [0.0] * (len(self._totals) - 1)
        is_same = len(kept.totals) == len(self._totals)
        self._totals = [*kept.totals] if is_same else [sum(kept.totals), *rest]

    def report(self, worker: int, count: int, total: float) -> None:
        """This worker's script has reported ``count`` > 0 losses since its last report, with this
        sum; each is from 0 to :data:`MOST_LOSS`."""
        self._totals[worker] += total
        self._count += count

    def choose(self) -> Choice:
        """Return the steps of every group from now on."""
        if not self._count:
            return self._choice("")
        loss = sum(self._totals) / self._count
        self._totals, self._count = [0.0] * len(self._totals), 0
        if self._first_loss is None:
            self._first_loss = loss
        if not self._first_loss:
            return self._choice("")
        ratio = min(1.0, loss / self._first_loss)
        steps = max(1, math.ceil(self._at_first * math.sqrt(ratio)))
        if steps >= self._now:
            return self._choice("")
        self._now = steps
        return self._choice(f"the loss is {loss:.4g}, {self._first_loss:.4g} at first")

    def of_all(self, steps: int) -> tuple[int, ...]:
        """By group, where each makes so many."""
        return (steps,) * self._num_groups

    def _choice(self, why: str) -> Choice:
        return Choice(self.of_all(self._now), why)
