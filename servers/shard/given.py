"""What each worker's gradient was computed on, for the compensation of its delay (DC-ASGD).

A gradient g that was computed on x_then comes to parameters that others have moved to x. With the
outer product of the gradient in place of the Hessian, of which the diagonal is taken, what it would
be there is about

    g + lambda g g (x - x_then)         element by element

(Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
formula 10; lambda constant: DC-ASGD-c). So of every chunk what was sent to each worker that has it
in its slice is kept: the parameters once for each group, in the server's dtype.

    given = Given(strength=0.04)
    given.note(chunk, peer, values)
    given.compensate(chunk, peer, gradient, values)
"""

from __future__ import annotations

import torch


class Given:
    def __init__(self, strength: float) -> None:
        """``strength``: lambda; 0: nothing is kept, and nothing compensated."""
        self.strength = strength
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        """By chunk and peer."""

    def note(self, chunk: int, peer: int, values: torch.Tensor) -> None:
        """A reply brings these to ``peer``, who computes on them from then on."""
        kept = self._values.get((chunk, peer))
        if kept is None:
            self._values[chunk, peer] = values.clone()
        else:
            kept.copy_(values)

    def compensate(
        self, chunk: int, peer: int, gradient: torch.Tensor, values: torch.Tensor
    ) -> None:
        """``gradient`` of ``peer``, in place, as it would be on ``values``."""
        # One factor, so that no square of a large gradient stands alone.
        factor = (values - self._values[chunk, peer]).mul_(gradient).mul_(self.strength).add_(1)
        gradient.mul_(factor)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._values.values())
