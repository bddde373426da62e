"""The parameters in this worker's memory: which versions they are, which of them each iteration
has used, and how new ones come in.

    values = Values(group, flat, loop, Uses())     # or RecordedUses(group, flat, ...) of a history
    values.record_use(clock)                   # a forward pass reads what is in memory
    values.look_for_writes()                   # before a push or a pull
    yield from values.take_new("pull", move)   # replies have landed: into place, in the group
    values.place([3], {0, 1}, move)            # of some chunks, without a group
    values.commit(clock)                       # the iteration counts
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psdist.errors import GroupReformedError, UsageError
from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER, Flag, Header
from psdist.workers.group.channel import GroupChannel, Pending, Slices
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.reduction import WorkerGroup, in_group

IntArray = npt.NDArray[np.int64]


class Uses:
    """The staleness of what the forward passes of an iteration have found in memory."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        """Chunk uses of finished iterations, by staleness."""
        self._is_new = True
        """True if no pass has used the values in memory yet."""
        self._open: list[Counter[int]] = []

    def record(self, staleness: Callable[[], Counter[int]]) -> None:
        """Note a forward pass; passes over the same values are one use."""
        if self._is_new:
            self._is_new = False
            self._open.append(staleness())
            self._record_versions()

    def values_changed(self) -> None:
        """Other versions are in memory: the next use is another one."""
        self._is_new = True

    def commit(self, clock: int) -> None:  # noqa: ARG002 - recorded uses need it
        """Iteration ``clock`` has ended: its uses count."""
        for each in self._open:
            self.staleness.update(each)
        self._open.clear()
        self._is_new = True

    # -- what a history records besides --------------------------------------------------------

    def note(self, chunks: Sequence[int], versions: Mapping[int, Header]) -> None:
        """These versions of ``chunks`` are in place."""

    def record_push(self, clock: int, own: float, weight: float, empty: Collection[int]) -> None:
        """Iteration ``clock`` is pushed: with weight ``own`` of this worker, ``weight`` of its
        group, ``empty`` chunks without a gradient."""

    def check_as_values_land(self) -> None:
        """Take checksums when values land, not when they are used: at the use this worker's own
        steps may have moved them, or the next values land where they would be read."""

    def flats(self) -> list[Tensor]:
        """Return what a group gathers besides the parameters."""
        return []

    def spans(self, group: WorkerGroup) -> Slices:
        """Return the spans that a group gathers, by place."""
        return group.spans

    def spans_of(self, group: WorkerGroup, by_place: Sequence[Sequence[int]]) -> Slices:
        """Return the spans of these chunks, by place."""
        return group.spans_of(by_place)

    def _record_versions(self) -> None: ...


class _Versions(NamedTuple):
    """The versions that one use has found, by chunk."""

    positions: IntArray
    replies: IntArray
    has_crc: npt.NDArray[np.bool_]
    crcs: IntArray


class RecordedUses(Uses):
    """As :class:`Uses`, and with the versions and checksums that a history records."""

    def __init__(
        self,
        group: WorkerGroup,
        flat: FlatModel,
        owners: Sequence[int],
        history: WorkerHistory,
    ) -> None:
        super().__init__()
        num_chunks = len(group.partition.chunks)
        self._versions = torch.zeros((num_chunks, 2), dtype=torch.int64)
        """By chunk in memory: position; twice the clock of the reply, and 1 more if the reply has
        a checksum."""
        self._numbers = self._versions.numpy()  # now: not within a transformation of torch.func
        self._group = group
        self._flat = flat
        self._owners = np.asarray(owners, dtype=np.int64)
        self._history = history
        self._open_versions: list[_Versions] = []
        self._landed: IntArray | None = None
        """crc32 by chunk of the newest values, if checksums are taken as values land."""

    def note(self, chunks: Sequence[int], versions: Mapping[int, Header]) -> None:
        for chunk in chunks:
            version = versions[chunk]
            self._versions[chunk, 0] = version.position
            self._versions[chunk, 1] = 2 * version.clock + bool(version.flags & Flag.RECORDED)

    def _record_versions(self) -> None:
        positions, stamps = self._numbers.T.copy()
        has_crc, landed = stamps & 1 != 0, self._landed
        crcs = self._checksums(np.flatnonzero(has_crc)) if landed is None else landed
        self._open_versions.append(_Versions(positions, stamps >> 1, has_crc, crcs))

    def _checksums(self, chunks: IntArray) -> IntArray:
        """Return the crc32 of the memory that the forward pass reads, 0 for other chunks."""
        crcs = np.zeros(len(self._numbers), dtype=np.int64)
        if len(chunks):
            self._flat.values_to_host()
        for chunk in chunks:
            crcs[chunk] = zlib.crc32(
                self._flat.parameter_bytes(self._group.partition.chunks[chunk])
            )
        return crcs

    def check_as_values_land(self) -> None:
        self._landed = np.zeros(len(self._numbers), dtype=np.int64)

    def values_changed(self) -> None:
        super().values_changed()
        if self._landed is not None:
            self._landed = self._checksums(np.flatnonzero(self._numbers[:, 1] & 1))

    def commit(self, clock: int) -> None:
        super().commit(clock)
        chunks = np.arange(len(self._numbers))
        for use in self._open_versions:
            self._history.uses(clock, chunks, self._owners, *use)
        self._open_versions.clear()

    def record_push(self, clock: int, own: float, weight: float, empty: Collection[int]) -> None:
        self._history.push(clock, own, weight, empty, len(self._group.mine))

    def flats(self) -> list[Tensor]:
        return [self._versions.view(-1)]

    def spans(self, group: WorkerGroup) -> Slices:
        return group.recorded_spans

    def spans_of(self, group: WorkerGroup, by_place: Sequence[Sequence[int]]) -> Slices:
        return group.recorded_spans_of(by_place)


class Values:
    def __init__(self, group: WorkerGroup, flat: FlatModel, loop: WorkerLoop, uses: Uses) -> None:
        self.uses = uses
        self._group = group
        self._flat = flat
        self._loop = loop
        self._min_done: dict[int, int] = {}
        """By chunk of this worker's slice, of the version in place."""
        self._is_shown = False
        """True if values to evaluate with are in place; no gradient may be computed from them."""

    def _flats(self) -> list[Tensor]:
        return [*self._flat.values, *self.uses.flats()]

    def give(self, channel: GroupChannel, giver: int) -> Pending[None]:
        """Begin to copy all values in place at place ``giver`` of ``channel`` to all its places."""
        whole: list[Sequence[int]] = [[] for _ in range(channel.size)]
        whole[giver] = range(len(self._group.partition.chunks))
        return channel.all_gather(self._flats(), self.uses.spans_of(self._group, whole))

    def show(self, pieces: Sequence[Tensor]) -> None:
        """Put these in place, as if the script had written them, until :meth:`take_new`."""
        with torch.no_grad():
            for parameter, piece in zip(self._flat.parameters, pieces, strict=True):
                parameter.copy_(piece)
        self._is_shown = True

    def record_use(self, clock: int) -> None:
        """Iteration ``clock`` reads the values. Raises :class:`UsageError` after :meth:`show`."""
        if self._is_shown:
            raise UsageError(
                f"iteration {clock}: a gradient is made of the parameters that "
                "job.pull(exact=True) has brought, which are there to evaluate with, under "
                "torch.no_grad(); call job.pull() before training continues"
            )
        self.uses.record(lambda: Counter(self._staleness_of_chunks(clock)))

    def commit(self, clock: int) -> None:
        """Iteration ``clock`` has ended: its uses count."""
        self.uses.commit(clock)

    def _staleness_of_chunks(self, clock: int) -> list[int]:
        """Return the staleness of each chunk; of a chunk taken over from a failed worker it is not
        known until its next reply."""
        min_done = self._min_done
        return [max(0, clock - min_done.get(chunk, NEVER)) for chunk in self._group.mine]

    def staleness(self, clock: int) -> int:
        """Return the largest staleness of the values in memory."""
        return max(self._staleness_of_chunks(clock), default=0)

    def look_for_writes(self) -> None:
        """Forget the versions of what the script has written: the next reply replaces it. From
        here on replies may land."""
        self._flat.wait_until_landed()
        if written := set(self._flat.written_by_others()):
            chunks = self._group.partition.chunks
            self._loop.core.transfers.held.forget(
                chunk
                for chunk in self._group.mine
                if any(segment.piece in written for segment in chunks[chunk].segments)
            )

    def take_new(
        self, call: str, move: Callable[[Sequence[int]], None]
    ) -> Generator[Wait, None, None]:
        """Bring replies that have landed into place (``move(chunks)``), gather the slices of the
        group, tell autograd. All workers of a group use the same version of a chunk, that of its
        slice's owner."""
        group = self._group
        while True:
            move(group.mine)
            self._note(group.mine)
            if group.channel.size == 1:
                break
            gathered = group.channel.all_gather(self._flats(), self.uses.spans(group))
            try:
                yield from in_group(gathered, call)
                break
            except GroupReformedError:  # this worker's slice has become larger
                yield self._loop.wait_for_replies()
        self._flat.samples.take()
        self._flat.values_changed()
        self.uses.values_changed()
        self._is_shown = False

    def place(
        self,
        chunks: Sequence[int],
        pieces: Collection[int],
        move: Callable[[Sequence[int]], None],
    ) -> None:
        """As :meth:`take_new`, of some chunks of a worker that is alone in its group, after
        :meth:`commit`: no use is open. ``pieces``: the pieces with a part in ``chunks``."""
        if not chunks:
            return
        move(chunks)
        self._note(chunks)
        self._flat.samples.take(chunks)
        self._flat.values_changed(pieces)

    def _note(self, chunks: Sequence[int]) -> None:
        """The newest versions of ``chunks`` are in place."""
        versions = self._loop.core.versions
        self._min_done.update({chunk: versions[chunk].min_done for chunk in chunks})
        self.uses.note(chunks, versions)
