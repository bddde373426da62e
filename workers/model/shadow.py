"""Memory aside for replies, while autograd may still read the parameters in place.

shadow = Shadow(partition, flat, chunks=mine, newest=flat.values)
shadow.parameter_frame(chunk)                      # where a reply lands
shadow.move([3, 4])                                # into place
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from psdist.protocol.events import Frame
from psdist.protocol.memory import as_bytes, as_tensor
from psdist.protocol.partition import Chunk, Partition
from psdist.workers.model.flat import FlatModel


class Shadow:
    """The newest values of some chunks that servers have sent."""

    def __init__(
        self,
        partition: Partition,
        flat: FlatModel,
        *,
        chunks: Collection[int],
        newest: Sequence[torch.Tensor],
    ) -> None:
        """``newest``: the servers' newest values of each buffer, flat: the parameters, or a copy
        if local steps have changed these since."""
        self._flat = flat
        self._aside: dict[int, torch.Tensor] = {}
        self._in_place: dict[int, torch.Tensor] = {}
        # One allocation: many would lie in holes of the heap that autograd's gradients have left.
        memory = flat.transfers.allocate(sum(partition.chunks[index].num_bytes for index in chunks))
        start, pairs = 0, []
        for index in chunks:
            chunk = partition.chunks[index]
            stop = start + chunk.num_bytes
            aside = as_tensor(memory[start:stop], chunk.dtype, chunk.length)
            start = stop
            stretch = slice(chunk.start, chunk.start + chunk.length)
            self._aside[index] = aside
            self._in_place[index] = flat.values[chunk.buffer][stretch]
            pairs.append((newest[chunk.buffer][stretch], aside))
        flat.transfers.begin(pairs, after=[flat.mark()]).wait()

    def parameter_frame(self, chunk: Chunk) -> Frame:
        return Frame(as_bytes(self._aside[chunk.index]))

    def move(self, chunks: Collection[int]) -> None:
        """Copy the landed values of ``chunks`` into the parameters."""
        self._flat.land([(self._aside[chunk], self._in_place[chunk]) for chunk in chunks])
