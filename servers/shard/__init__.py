"""The execution of a server's actions on memory: parameters, sums of gradients, optimizers.

``executor`` is the seam. ``tensors`` holds the chunks' parameters and does the arithmetic, with
``chunk_optimizer`` to run any torch optimizer on a chunk. Imports psdist/protocol and the actions
of psdist.servers.protocol; decides nothing about consistency.

The seam of features between the wire and the optimizer on a server: a list of stages.

The executor (psdist.servers.shard.tensors) runs all stages of its list around each step and each
reply, in order, and does not know which features are on.

    before_step     change the gradient: compensate its delay               given
    after_step      encode the step's change once for all readers           replies
    before_reply    keep the values that the reader will compute on         given
    on_load, saved, restore     follow values that are set, or come from a checkpoint

Before the first stage a gradient is read from its slot, raw or decoded. The optimizer
applies the lr scale and frozen moments (``chunk_optimizer``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who imports a module of this room need not have torch
    import torch

    from psdist.servers.protocol.actions import Reply, Step
    from psdist.servers.shard.chunk_memory import ChunkMemory


class ShardStage:
    """A feature's part in steps and replies; each method does nothing here."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the stage keeps for readers."""
        return 0

    def before_step(self, step: Step, memory: ChunkMemory, gradient: torch.Tensor) -> None:
        """Change ``gradient`` (1-D, the server's dtype) in place."""

    def after_step(self, step: Step, memory: ChunkMemory) -> None:
        """``memory.values`` (1-D, the server's dtype) have been stepped."""

    def before_reply(self, reply: Reply, memory: ChunkMemory) -> None:
        """A reply is about to read ``memory``."""

    def on_load(self, chunk: int) -> None:
        """The chunk's values were set."""

    def saved(self, memory: ChunkMemory) -> Mapping[str, torch.Tensor]:
        """Return by key what a checkpoint contains in addition to values and optimizer state:
        1-D, one element for each of ``values``, views of the memory itself."""
        del memory
        return {}

    def restore(
        self, memory: ChunkMemory, saved: Sequence[tuple[slice, Mapping[str, torch.Tensor]]]
    ) -> None:
        """Take what :meth:`saved` has given, by stretches; ``memory.values`` are restored."""
