"""The parameters in this worker's memory: which versions they are, and how new ones come in.

values = Values(partition, owners, flat, loop, group, history, slices=slices)
values.record_use(clock)                   # a forward pass reads what is in memory
values.look_for_writes()                   # before a push or a pull
yield from values.take_new("pull", move)   # replies have landed: into place, in the group
values.place([3], {0, 1}, move)            # of some chunks, without a group
values.commit(clock)                       # the iteration counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence

from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER
from psdist.protocol.partition import Partition, Span, runs_of
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.step_table import in_group
from psdist.workers.uses import Uses


class Values:
    def __init__(
        self,
        partition: Partition,
        owners: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        group: GroupChannel,
        history: WorkerHistory | None,
        *,
        slices: Sequence[Sequence[int]],
    ) -> None:
        """``slices``: the chunks of each worker of the group, ascending."""
        self._partition = partition
        self._flat = flat
        self._loop = loop
        self._group = group
        self._mine = slices[group.place]
        self._index_of = {chunk: index for index, chunk in enumerate(self._mine)}
        self._min_done = [NEVER] * len(self._mine)
        self._spans = [partition.spans(chunks) for chunks in slices]
        """The slice of every worker of the group."""
        # With the versions behind the parameters.
        num_flats = len(flat.values)
        self._recorded_spans = [
            (*spans, *(Span(num_flats, 2 * run.start, 2 * run.stop) for run in runs_of(chunks)))
            for spans, chunks in zip(self._spans, slices, strict=True)
        ]
        self._is_recorded = history is not None
        self._uses = Uses(partition, flat, owners, history)

    def record_use(self, clock: int) -> None:
        """Iteration ``clock`` reads them."""
        self._uses.record(lambda: self._staleness_by_chunk(clock))

    def commit(self, clock: int) -> None:
        """Iteration ``clock`` has ended: what it has read counts."""
        self._uses.commit(clock)

    def _staleness_by_chunk(self, clock: int) -> Counter[int]:
        return Counter(max(0, clock - min_done) for min_done in self._min_done)

    def staleness(self, clock: int) -> int:
        """Of what is in memory, at its stalest."""
        return max((max(0, clock - min_done) for min_done in self._min_done), default=0)

    @property
    def staleness_seen(self) -> Counter[int]:
        """Of all chunk uses of finished iterations."""
        return self._uses.staleness

    def look_for_writes(self) -> None:
        """What the script has written is no version of a server's: the next one replaces it. From
        here on replies may land."""
        self._flat.wait_until_landed()
        if written := set(self._flat.written_by_others()):
            chunks = self._partition.chunks
            self._loop.core.forget_values(
                chunk
                for chunk in self._mine
                if any(segment.piece in written for segment in chunks[chunk].segments)
            )

    def take_new(
        self, call: str, move: Callable[[Sequence[int]], None]
    ) -> Generator[Wait, None, None]:
        """Replies have landed: ``move(chunks)`` brings into place what has landed aside, or on the
        host of a device; gather the group's, tell autograd.

        All workers of a group use the same version of a chunk, that of its slice's owner.
        """
        move(self._mine)
        self._note(self._mine)
        flats, spans = self._flat.values, self._spans
        if self._is_recorded:
            flats, spans = [*flats, self._uses.versions.view(-1)], self._recorded_spans
        yield from in_group(self._group.all_gather(flats, spans), call)
        self._flat.values_changed()
        self._uses.values_changed()

    def place(
        self,
        chunks: Sequence[int],
        pieces: Collection[int],
        move: Callable[[Sequence[int]], None],
    ) -> None:
        """As :meth:`take_new`, of some of its chunks, on a worker that is alone in its group, after
        :meth:`commit`: no use is open that these could make another one. ``pieces``: those that
        have a part there."""
        if not chunks:
            return
        move(chunks)
        self._note(chunks)
        self._flat.values_changed(pieces)

    def _note(self, chunks: Sequence[int]) -> None:
        """The newest versions of ``chunks`` lie in place."""
        for chunk in chunks:
            version = self._loop.core.versions[chunk]
            self._min_done[self._index_of[chunk]] = version.min_done
            if self._is_recorded:
                self._uses.versions[chunk, 0] = version.position
                self._uses.versions[chunk, 1] = 2 * version.clock + version.is_checksummed
