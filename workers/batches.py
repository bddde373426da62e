"""The batches of an iteration: how many samples it has used, and what it weighs.

batches.hand_out(num_samples=8, nominal=16.0)
batches.use(0)                            # a forward pass follows
batches.weight                            # 0.5: half of a full batch
batches.use_unseen()                      # the step, without a forward pass that was seen
batches.end_iteration()
"""

from __future__ import annotations


class Batches:
    def __init__(self) -> None:
        self.samples = 0
        """Of finished iterations."""
        self._handed_out: tuple[int, float] = (0, 0.0)
        """(samples, samples of a full batch) handed out and not yet used."""
        self._has_loader = False
        self._is_used = False
        """Whether a forward pass of this iteration was seen."""
        self._used = 0
        self._weighed = 0
        self._nominal = 0.0

    def hand_out(self, num_samples: int, nominal: float) -> None:
        """It counts once it is used; the batches of an evaluation never are."""
        self._handed_out = num_samples, nominal
        self._has_loader = True

    def use(self, num_samples: int) -> None:
        """A forward pass, of so many samples where the script has batches of its own: they count,
        and do not weigh."""
        self._is_used = True
        self._used += self._handed_out[0] if self._has_loader else num_samples
        self._weighed += self._handed_out[0]
        self._nominal += self._handed_out[1]
        self._handed_out = 0, 0.0

    def use_unseen(self) -> None:
        """The iteration ends: without a forward pass that was seen it has used what was handed
        out. Else that is of the next one, fetched ahead."""
        if not self._is_used:
            self.use(0)

    @property
    def weight(self) -> float:
        """Of the iteration, in full batches of one worker, if it ended now."""
        weighed, nominal = (self._weighed, self._nominal) if self._is_used else self._handed_out
        return weighed / nominal if nominal else 1.0

    def end_iteration(self) -> None:
        self.samples += self._used
        self._used = self._weighed = 0
        self._nominal = 0.0
        self._is_used = False
