"""A few elements of every parameter, for writes that torch does not see: ``p.data``, numpy.

    samples = ValueSamples(partition, flats)
    samples.take()                             # the parameters are as they should be
    samples.changed()                          # pieces that are others since then

In the first iterations alone: a script that writes so does it from the beginning, as where weights
are clipped behind every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from psdist.protocol.partition import Partition
from psdist.workers.model.bits import as_bits

_TIMES: Final = 4
"""How often they are taken: when a model is prepared, and after each of three iterations."""
_OF_EACH: Final = 16
"""Elements of a piece."""


class ValueSamples:
    def __init__(self, partition: Partition, flats: Sequence[torch.Tensor]) -> None:
        """``flats``: the flat parameters of each buffer."""
        self._flats = flats
        self._pieces: list[list[int]] = []
        """By buffer: of which piece each element is."""
        self._places: list[torch.Tensor] = []
        for buffer, flat in zip(partition.buffers, flats, strict=True):
            pieces: list[int] = []
            places: list[int] = []
            for piece, start in buffer.piece_starts:
                num = math.prod(partition.pieces[piece].shape)
                some = range(start, start + num, max(1, num // _OF_EACH))
                places += some
                pieces += [piece] * len(some)
            self._pieces.append(pieces)
            self._places.append(torch.tensor(places, device=flat.device))
        self._taken: list[torch.Tensor] = []
        self._num_left = _TIMES

    def take(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self._taken = self._now()
        else:
            self._taken = []

    def changed(self) -> list[int]:
        """Pieces of which an element is another one, ascending; none once they are not taken any
        more."""
        if not self._taken:
            return []
        found: set[int] = set()
        for pieces, before, now in zip(self._pieces, self._taken, self._now(), strict=True):
            places = (as_bits(before) != as_bits(now)).nonzero().view(-1).tolist()
            found.update(pieces[place] for place in places)
        return sorted(found)

    def _now(self) -> list[torch.Tensor]:
        return [flat[places] for flat, places in zip(self._flats, self._places, strict=True)]
