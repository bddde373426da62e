"""A group of one worker: every operation is done when it is called, and moves nothing."""

# ruff: noqa: ARG002 - the seam's signatures

from __future__ import annotations

from collections.abc import Sequence

import torch

from psdist.protocol.memory import allocate
from psdist.workers.group.channel import Done, Pending, Slices


class AloneChannel:
    place = 0
    size = 1

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return Done([list(values)])

    def beside(self) -> AloneChannel:
        return self

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        if sums is not None:
            for (buffer, start, stop), total in zip(slices[0], sums, strict=True):
                total.copy_(flats[buffer][start:stop])
        return Done(None)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        return Done(None)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return Done(None)
