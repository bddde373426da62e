"""Delay compensation (DC-ASGD): keep the parameters that each worker's gradient was computed on.

A gradient g that was computed on x_then arrives at parameters x that other groups have moved. The
diagonal of the gradient's outer product replaces the Hessian, and the gradient on x is about

    g + lambda g g (x - x_then)         element by element

(Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
formula 10; lambda constant: DC-ASGD-c). So a server keeps, for each chunk and each worker that has
it in its slice, the parameters of the last reply, in the server's dtype: the shard once per group.

    given = Given(strength=0.04)
    given.note(chunk, peer, values)
    given.compensate(chunk, peer, gradient, values)
"""

from __future__ import annotations

import torch

from psdist.protocol.header import Flag
from psdist.servers.protocol.actions import Reply, Step
from psdist.servers.shard import ShardStage
from psdist.servers.shard.chunk_memory import ChunkMemory


class Given(ShardStage):
    def __init__(self, strength: float) -> None:
        """``strength``: lambda, above 0."""
        self.strength = strength
        self._values: dict[tuple[int, int], torch.Tensor] = {}
        """By chunk and peer."""

    def before_step(self, step: Step, memory: ChunkMemory, gradient: torch.Tensor) -> None:
        if step.peer is not None:
            self.compensate(step.chunk, step.peer, gradient, memory.values)

    def before_reply(self, reply: Reply, memory: ChunkMemory) -> None:
        if not reply.flags & Flag.FRESH:  # no worker computes on the copy of a fresh reply
            self.note(reply.token.chunk, reply.token.peer, memory.values)

    def note(self, chunk: int, peer: int, values: torch.Tensor) -> None:
        """``peer`` computes on these from now on: 1-D, the server's dtype."""
        kept = self._values.get((chunk, peer))
        if kept is None:
            self._values[chunk, peer] = values.clone()
        else:
            kept.copy_(values)

    def compensate(
        self, chunk: int, peer: int, gradient: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Change the ``gradient`` of ``peer`` in place to its estimate on ``values``."""
        # One factor, so that no square of a large gradient is computed by itself.
        factor = (values - self._values[chunk, peer]).mul_(gradient).mul_(self.strength).add_(1)
        gradient.mul_(factor)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._values.values())
