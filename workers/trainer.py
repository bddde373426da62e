"""One iteration of a worker, from the gradients in ``p.grad`` to the next parameters in place.

This is what ``optimizer.step()`` runs: collect -> agree in the group -> reduce in the group ->
push this worker's slice and receive it back -> share the slices in the group. Everything leaves
in ``step()``, so accumulation, clipping and looking at gradients behave as in plain PyTorch.

    trainer = Trainer(partition=..., flat=..., loop=..., group=..., ...)
    trainer.step(gradient_scale=1.0, is_skipped=False)

It decides nothing about consistency: a reply that the mode does not allow yet does not come.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER
from psdist.protocol.partition import Partition
from psdist.workers.group.group import Group
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.flat import FlatModel

logger = logging.getLogger("psdist")

CALLS = ("optimizer.step", "save", "mean", "barrier", "pull", "prepare", "finish")
"""What workers of a group may meet in; see :meth:`Group.meet`."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatistics:
    """A snapshot; ``staleness`` counts this worker's chunk uses by staleness."""

    clock: int
    samples: int
    bytes_pushed: int
    bytes_pulled: int
    max_staleness_seen: int
    staleness: dict[int, int]

    @classmethod
    def of_nothing(cls) -> WorkerStatistics:
        """Of a worker that trained no model."""
        return cls(
            clock=0,
            samples=0,
            bytes_pushed=0,
            bytes_pulled=0,
            max_staleness_seen=0,
            staleness={},
        )


IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Use:
    """What one forward pass found in memory, by chunk (the arrays only when recording)."""

    staleness: Counter[int]
    positions: IntArray
    has_crc: npt.NDArray[np.bool_] | IntArray
    crcs: IntArray
    is_outdated: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """What a worker of the group brings to an iteration."""

    weight: float
    is_skipped: bool
    is_finite: bool
    absent: frozenset[int]


class Trainer:
    def __init__(
        self,
        *,
        worker: int,
        partition: Partition,
        owners: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        group: Group,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        hyperparameters: Callable[[], bytes],
        on_nonfinite: Literal["error", "skip"],
        history: WorkerHistory | None,
        on_iteration: Callable[[], None] = lambda: None,
    ) -> None:
        """``frozen``: parameters, with their names, that must stay so; ``hyperparameters()``:
        the optimizer's, packed, as they are now."""
        self.clock = 0
        self._worker = worker
        self._partition = partition
        self._owners = np.asarray(owners, dtype=np.int64)
        self._flat = flat
        self._loop = loop
        self._group = group
        self._frozen = tuple(frozen)
        self._has_warned_of_writes = False
        self._hyperparameters = hyperparameters
        self._on_nonfinite = on_nonfinite
        self._history = history
        self._on_iteration = on_iteration
        self._slices = partition.slices(group.size)
        self._mine = self._slices[group.index]
        self._my_servers = sorted({owners[chunk] for chunk in self._mine})
        self._batch = (0, 0)
        """(samples, samples of a full batch) handed out and not yet used."""
        self._samples_in_iteration = 0
        self._nominal_in_iteration = 0
        self._samples = 0
        self._staleness: Counter[int] = Counter()
        # What is in memory now. Not what the client's core says: a save pulls newer versions, but
        # into memory of its own.
        self._min_done = [NEVER] * len(self._mine)
        # By chunk: position, and 1 where its bytes are to be checksummed.
        self._versions = torch.zeros((len(partition.chunks), 2), dtype=torch.int64)
        self._uses: list[_Use] = []

    # -- the iteration -------------------------------------------------------------------------

    def on_batch(self, num_samples: int, nominal: int) -> None:
        """The loader hands out a batch: a short one weighs less. It counts once a forward pass
        with gradients (or the step) follows; the batches of an evaluation do not."""
        self._batch = num_samples, nominal

    def note_use(self) -> None:
        """A forward pass uses the parameters that are in memory now. It counts when the iteration
        ends in a step; passes over the same parameters are one use."""
        self._samples_in_iteration += self._batch[0]
        self._nominal_in_iteration += self._batch[1]
        self._batch = 0, 0
        if self._uses and not self._uses[-1].is_outdated:
            return
        staleness = Counter(max(0, self.clock - min_done) for min_done in self._min_done)
        positions = has_crc = crcs = np.empty(0, dtype=np.int64)
        if self._history is not None:
            positions = self._versions[:, 0].numpy().copy()
            has_crc = self._versions[:, 1].numpy() != 0
            crcs = self._checksums(np.flatnonzero(has_crc))
        self._uses.append(_Use(staleness, positions, has_crc, crcs))

    def _checksums(self, chunks: IntArray) -> IntArray:
        """crc32 of the memory that the forward pass reads, 0 for chunks not asked for."""
        crcs = np.zeros(len(self._partition.chunks), dtype=np.int64)
        if len(chunks):
            self._flat.values_to_host()
        for chunk in chunks:
            crcs[chunk] = zlib.crc32(self._flat.parameter_bytes(self._partition.chunks[chunk]))
        return crcs

    def step(self, gradient_scale: float, is_skipped: bool) -> None:
        """End iteration ``clock``: push, and bring the parameters for the next one.

        ``gradient_scale`` multiplies the gradients; ``is_skipped``: this worker has none to give
        (GradScaler found an overflow). Raises :class:`NonFiniteGradientError`, and
        :class:`UsageError` where the model is not any more what was prepared.
        """
        self._look_for_changes()
        self.note_use()
        absent = self._flat.collect_gradients(scale=gradient_scale)
        non_finite = [] if is_skipped else self._flat.non_finite()
        nominal = self._nominal_in_iteration
        weight = self._samples_in_iteration / nominal if nominal else 1.0
        table = self._agree(absent, weight, is_skipped=is_skipped, is_finite=not non_finite)
        if non_finite and self._on_nonfinite == "error":
            name = self._partition.pieces[non_finite[0]].name
            more = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
            raise NonFiniteGradientError(
                f"iteration {self.clock}: the gradient of {name}{more} holds NaN or infinity; "
                'nothing was pushed. Lower the learning rate, or set on_nonfinite = "skip" to '
                "leave such iterations out"
            )
        group_weight = sum(row.weight for row in table)
        if any(row.is_skipped or not row.is_finite for row in table):
            if self._on_nonfinite == "error" and any(not row.is_finite for row in table):
                raise NonFiniteGradientError(
                    f"iteration {self.clock}: the gradient of another worker of this group holds "
                    "NaN or infinity"
                )
            group_weight = 0.0
        elif group_weight:
            self._group.reduce(self._flat.gradients, share=weight / group_weight)
            self._flat.gradients_to_host()
        everywhere = set(absent).intersection(*(row.absent for row in table))
        self._push(group_weight, sorted(everywhere))
        self._commit_uses()
        self._samples += self._samples_in_iteration
        self._samples_in_iteration = self._nominal_in_iteration = 0
        self.clock += 1
        self._on_iteration()

    def _look_for_changes(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen in job.prepare and is not any more; servers "
                    "hold what wanted a gradient then: unfreeze it before job.prepare"
                )
        # No error: averages of weights are swapped in for an evaluation, and out again.
        written = [] if self._has_warned_of_writes else self._flat.written_by_others()
        if written:
            self._has_warned_of_writes = True
            logger.warning(
                "the script has written to parameter %s (and %d more) since the servers sent it; "
                "they do not see that, and their next values replace it: load and initialise "
                "models before job.prepare",
                self._partition.pieces[written[0]].name,
                len(written) - 1,
            )

    def _agree(
        self, absent: list[int], weight: float, *, is_skipped: bool, is_finite: bool
    ) -> list[_Row]:
        if self._group.size == 1:
            return [_Row(weight, is_skipped, is_finite, frozenset(absent))]
        self._group.meet(CALLS.index("optimizer.step"), CALLS)
        presence = np.zeros(len(self._partition.pieces))
        presence[absent] = 1.0
        table = self._group.agree([weight, is_skipped, is_finite, *presence])
        return [
            _Row(row[0], bool(row[1]), bool(row[2]), frozenset(np.flatnonzero(row[3:]).tolist()))
            for row in table
        ]

    def _push(self, weight: float, absent: list[int]) -> None:
        gone = set(absent)
        chunks = self._partition.chunks
        empty = {
            chunk
            for chunk in self._mine
            if not weight or (gone and all(s.piece in gone for s in chunks[chunk].segments))
        }
        settings = self._loop.settings(self._hyperparameters(), absent, self._my_servers)
        self._loop.push(clock=self.clock, settings=settings, weight=weight, empty=empty)
        self._new_values()

    def pull(self) -> None:
        """The freshest parameters that the mode allows; every worker of the group calls it.

        Those in memory are allowed, so this waits for nobody, but for groups that were suspended
        in a collective while this one went on: they count again, and the next use is of these.
        """
        self._group.meet(CALLS.index("pull"), CALLS)
        self._loop.pull(clock=self.clock, chunks=self._mine, is_fresh=False)
        self._new_values()

    def _new_values(self) -> None:
        """Replies have landed on the host: share them in the group, tell the device and autograd.

        All workers of a group use the same version of a chunk, that of its slice's owner.
        """
        self._flat.host_to_device()
        for index, chunk in enumerate(self._mine):
            version = self._loop.core.versions[chunk]
            self._min_done[index] = version.min_done
            if self._history is not None:
                self._versions[chunk, 0] = version.position
                self._versions[chunk, 1] = version.is_checksummed
        if self._group.size > 1:
            for place, part in enumerate(self._slices):
                for flat in self._flat.ranges(part):
                    self._group.share_from(flat, place)
                if self._history is not None and len(part):
                    self._group.share_from(self._versions[part.start : part.stop], place)
        self._flat.values_changed()
        for use in self._uses:
            use.is_outdated = True

    def _commit_uses(self) -> None:
        chunks = np.arange(len(self._partition.chunks))
        for use in self._uses:
            self._staleness.update(use.staleness)
            if self._history is not None:
                self._history.uses(
                    self.clock, chunks, self._owners, use.positions, use.has_crc, use.crcs
                )
        self._uses.clear()

    @property
    def num_samples(self) -> int:
        """Samples in this worker's finished iterations."""
        return self._samples

    def statistics(self) -> WorkerStatistics:
        core = self._loop.core
        return WorkerStatistics(
            clock=self.clock,
            samples=self._samples,
            bytes_pushed=core.bytes_pushed,
            bytes_pulled=core.bytes_pulled,
            max_staleness_seen=max(self._staleness, default=0),
            staleness=dict(sorted(self._staleness.items())),
        )
