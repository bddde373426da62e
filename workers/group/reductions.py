"""A group by the back end's own reduce-scatter and all-gather: NCCL's, by ``group_tier = nccl``.

NCCL adds while it receives, or lets the switches between GPUs add. **It chooses the order of
addition**: results differ in their last bits from those of the other tiers.

Both calls need the same size on every worker. So slices are laid out in order, by dtype, and padded
to the longest.

    channel = ReducingChannel.like(over)

Agreements, broadcasts and exchanges are those of :class:`ProcessGroupChannel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from psdist.protocol.partition import Span
from psdist.workers.group.channel import KnownSlices, Pending, Slices
from psdist.workers.group.process_group import ProcessGroupChannel, Works, begun


class ReducingChannel(ProcessGroupChannel):
    """A worker's end of its group, of at least two workers, with the back end's sums."""

    def __init__(self, **of: Any) -> None:
        super().__init__(**of)
        self._rows_of = KnownSlices(_rows)

    def _operate_once(self) -> None:
        super()._operate_once()
        all_of_it = torch.zeros(self.size, device=self.device)
        _REDUCE(all_of_it[:1].clone(), all_of_it, group=self._group)
        _GATHER(all_of_it, all_of_it[:1].clone(), group=self._group)

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        totals = dict(
            zip(
                slices[self.place],
                [_part(flats, span) for span in slices[self.place]] if sums is None else sums,
                strict=True,
            )
        )
        works: list[dist.Work] = []
        received: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for rows in self._rows_of.of(flats, slices):
            given, taken = _staging(flats, rows, self.size)
            for row, spans in zip(given, rows.spans, strict=True):
                _lay_out([_part(flats, span) for span in spans], row)
            works += begun(_REDUCE, taken, given.view(-1), group=self._group)
            received.append(([totals[span] for span in rows.spans[self.place]], taken))

        def finish() -> None:
            for parts, taken in received:
                _take_apart(taken, parts)

        return Works("reduce-scatter", works, flats, finish)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        works: list[dist.Work] = []
        received: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for rows in self._rows_of.of(flats, slices):
            taken, given = _staging(flats, rows, self.size)
            _lay_out([_part(flats, span) for span in rows.spans[self.place]], given)
            works += begun(_GATHER, taken.view(-1), given, group=self._group)
            received += [
                ([_part(flats, span) for span in spans], row)
                for place, (row, spans) in enumerate(zip(taken, rows.spans, strict=True))
                if place != self.place
            ]

        def finish() -> None:
            for parts, row in received:
                _take_apart(row, parts)

        return Works("all-gather", works, flats, finish)


class _Rows(NamedTuple):
    """The slices of all workers in flats of one dtype."""

    spans: list[list[Span]]
    """By place."""
    longest: int
    """Elements of the largest slice."""


def _rows(flats: Sequence[torch.Tensor], slices: Slices) -> list[_Rows]:
    """Return the rows in the order of the flats, which is the same on all workers."""
    rows = []
    for dtype in dict.fromkeys(flat.dtype for flat in flats):
        spans = [[span for span in its if flats[span.buffer].dtype == dtype] for its in slices]
        longest = max(sum(span.stop - span.start for span in its) for its in spans)
        if longest:
            rows.append(_Rows(spans, longest))
    return rows


def _staging(
    flats: Sequence[torch.Tensor], rows: _Rows, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [size, longest] and [longest]. The padding is reduced, too, and never read."""
    flat = next(flats[span.buffer] for spans in rows.spans for span in spans)
    return flat.new_zeros((size, rows.longest)), flat.new_empty(rows.longest)


def _part(flats: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    return flats[span.buffer][span.start : span.stop]


def _lay_out(parts: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Copy ``parts`` into ``row``, in order."""
    if parts:
        targets = torch.split(row[: sum(map(len, parts))], list(map(len, parts)))
        torch._foreach_copy_(targets, list(parts))


def _take_apart(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if parts:
        sources = torch.split(row[: sum(map(len, parts))], list(map(len, parts)))
        torch._foreach_copy_(list(parts), sources)


def _named(new: str, old: str) -> Any:
    """torch 2.13 has given some collectives other names, and warns of the old ones."""
    return getattr(dist, new, None) or getattr(dist, old)


_REDUCE = _named("reduce_scatter_single", "reduce_scatter_tensor")
_GATHER = _named("all_gather_single", "all_gather_into_tensor")
