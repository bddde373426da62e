"""Layers that imitate an accelerator: they have parameters, take time, and need no core.

model = Sleepers([1024, 1024])
model.seconds = 0.3               # of a step: a third in forward, two thirds in backward
model(torch.zeros(())).backward()
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from psdist.protocol.partition import Partition, Piece
from psdist.ranks.rank import Rank
from psdist.ranks.wire import link_of_chunks


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,  # noqa: ARG004 - its gradient is asked for
        gradient: torch.Tensor,
        seconds: float,
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        _sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _sleep(2 * ctx.seconds)
        return gradients[0], ctx.gradient.clone(), None, None


class SleepingLayer(torch.nn.Module):
    """A matrix of one row, because codecs leave vectors exact. Its gradient is random."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, num_elements))
        self._gradient = torch.randn_like(self.weight) * 1e-3

    def forward(self, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """``seconds`` pass; twice as many in the backward pass."""
        slept: torch.Tensor = _Sleep.apply(  # type: ignore[no-untyped-call] # torch's
            x, self.weight, self._gradient, seconds
        )
        return slept


class Sleepers(torch.nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: elements of each layer, the first first."""
        super().__init__()
        self.layers = torch.nn.ModuleList(SleepingLayer(size) for size in sizes)
        self.seconds = 0.0
        """Time of a step, without communication."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = self.seconds / 3 / len(self.layers)
        for layer in self.layers:
            x = layer(x, each)
        return x


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def layer_sizes(num_bytes: int, layers: int) -> list[int]:
    """Float32 elements of each layer: as even as it goes, one at least."""
    elements = max(num_bytes // 4, layers)
    least, more = divmod(elements, layers)
    return [least + (index < more) for index in range(layers)]


def cut(context: Rank, sizes: Sequence[int]) -> Partition:
    """As ``job.prepare`` cuts the layers."""
    config = context.session.config
    pieces = [
        Piece(
            name=f"layers.{index}.weight",
            shape=(1, size),
            stride=(size, 1),
            dtype="float32",
            optimizer_group=0,
        )
        for index, size in enumerate(sizes)
    ]
    return Partition.cut(
        pieces,
        chunk_bytes=None if config.chunk_bytes == "auto" else config.chunk_bytes,
        link_bytes_per_s=link_of_chunks(config, context.bootstrap.plan),
    )


class Shards:
    """Layers cut as ``job.prepare`` cuts them, and which server has which chunk."""

    def __init__(self, context: Rank, sizes: Sequence[int]) -> None:
        self.partition = cut(context, sizes)
        self.owners = self.partition.shard(context.roles.shard_weights)

    def chunks_of(self, server: int) -> list[int]:
        return [chunk for chunk, owner in enumerate(self.owners) if owner == server]

    def bytes_of(self, server: int) -> int:
        return sum(self.partition.chunks[chunk].num_bytes for chunk in self.chunks_of(server))
