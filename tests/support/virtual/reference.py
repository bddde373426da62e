"""Every chunk's parameters, computed a second time: the oracle of values.

From a server's log it takes the *order* in which updates were applied, and from the workers what
they drew (gradients, samples, hyperparameters); all arithmetic is done again in float64, by plain
numpy, without a line of psdist's servers or workers. SGD with momentum and weight decay, which is
what schedules train with.

    reference = Reference(is_gathered=lambda _round: False, partition=partition, ...)
    versions = reference.replay(log)          # chunk -> Versions
    versions[3].at(position)                  # what a reply from this position carries

Inputs may be off by rounding alone: differences between any two values that could be
mistaken for one another (a neighbour's weight, another version's lr, another clock's gradient) are
larger than :data:`TOLERANCE` by two orders of magnitude (``virtual_worker`` draws them so,
and tests/protocol/test_values.py plants such mistakes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from psdist.history import EventFlag, EventKind, ServerLog
from psdist.protocol.partition import Chunk, Partition

TOLERANCE = 2e-6
"""Part of the largest value that a chunk has had so far, or of 1 if that is larger."""

Floats = npt.NDArray[np.float64]


class WrongValueError(AssertionError):
    """``error``: how far off it is, in parts of what is tolerated."""

    def __init__(self, text: str, error: float) -> None:
        super().__init__(text)
        self.error = error


@dataclass(frozen=True)
class Draw:
    """One worker's contribution to one iteration."""

    num_samples: int
    full_batch: int
    is_skipped: bool
    hyper: Sequence[Mapping[str, Any]]
    """By optimizer group."""
    gradients: Sequence[npt.NDArray[Any] | None]
    """By piece; None where the worker lacked it."""

    @property
    def weight(self) -> float:
        return self.num_samples / self.full_batch


@dataclass(frozen=True)
class _Update:
    """A group's contribution to one iteration: its mean gradient, by buffer."""

    weight: float
    hyper: Sequence[Mapping[str, Any]]
    absent: frozenset[int]
    mean: Sequence[Floats]

    def is_empty(self, chunk: Chunk) -> bool:
        return not self.weight or all(each.piece in self.absent for each in chunk.segments)


@dataclass
class Versions:
    """A chunk's parameters after each of its steps, and after each time that they were set."""

    positions: list[int]
    """Events in the log with which the version was complete; the first version has 0."""
    values: list[Floats]
    largest: list[float]
    """The largest value that an element has had up to that version."""
    momentum: Floats
    has_momentum: npt.NDArray[np.bool_]
    positions_of_loads: list[int] = field(default_factory=list)
    """Positions of the versions that the chief has set."""
    kept: dict[int, tuple[Floats, npt.NDArray[np.bool_]]] = field(default_factory=dict)
    """By the number of a checkpoint, the momentum then."""

    def add(self, position: int, values: Floats) -> None:
        self.positions.append(position)
        self.values.append(values)
        self.largest.append(max(self.largest[-1], float(np.abs(values).max())))

    def index_at(self, position: int) -> int:
        return bisect_right(self.positions, position) - 1

    def at(self, position: int) -> Floats:
        return self.values[self.index_at(position)]

    @property
    def last(self) -> Floats:
        return self.values[-1]


@dataclass
class Reference:
    is_gathered: Callable[[int], bool]
    """Whether the updates of this round become one step."""
    partition: Partition
    groups: Sequence[Sequence[int]]
    initial: Sequence[npt.NDArray[Any]]
    """The chief's values, by piece."""
    draws: Sequence[Sequence[Draw]]
    """By worker and iteration."""
    pushed: Sequence[Sequence[npt.NDArray[Any]]] = ()
    """The values that the chief has set in the middle, by piece, each time."""
    used: Mapping[tuple[int, int, int], int] | None = None
    """(chunk, group, iteration) -> position of what the update was computed on, where that says
    something of its step."""
    has_stale_lr: bool = False
    """Whether lr is divided by how stale the update is."""
    compensation: float = 0.0
    """lambda of delay compensation."""
    tables: Mapping[tuple[int, int], Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """(group, iteration) -> workers whose gradients its update contains, if not the whole group;
    several times where it was begun again."""
    given_up: Collection[tuple[int, int]] = ()
    """(group, iteration) in which some chunks may have nothing, with no weight."""
    max_norm: float = 0.0
    """To which the joint gradient of an iteration is clipped (sync); 0: it is not."""
    largest_error: float = 0.0
    """Seen so far, in parts of what is tolerated."""
    num_compared: int = 0
    _updates: dict[tuple[int, int, tuple[int, ...]], _Update] = field(default_factory=dict)
    _coefficients: dict[tuple[tuple[int, int], ...], float] = field(default_factory=dict)
    _masks: dict[tuple[int, frozenset[int]], npt.NDArray[np.bool_]] = field(default_factory=dict)

    # -- what a group brings -------------------------------------------------------------------

    def update_of(
        self, group: int, clock: int, chunk: Chunk, *, weight: float, is_empty: bool
    ) -> _Update:
        """Return the update that a server recorded; else the last one that it may have been."""
        update = None
        for workers in reversed(self.tables.get((group, clock), [tuple(self.groups[group])])):
            key = group, clock, workers
            if key not in self._updates:
                self._updates[key] = self._make_update(clock, workers)
            update = self._updates[key]
            if (update.weight, update.is_empty(chunk)) == (weight, is_empty):
                return update
        assert update is not None
        if (group, clock) in self.given_up and is_empty and not weight:
            return _Update(0.0, update.hyper, frozenset(), ())
        return update

    def _make_update(self, clock: int, workers: Sequence[int]) -> _Update:
        draws = [self.draws[worker][clock] for worker in workers]
        hyper = draws[0].hyper
        assert all(draw.hyper == hyper for draw in draws), "workers of a group drew other settings"
        weight = sum(draw.weight for draw in draws)
        if any(draw.is_skipped or not _is_finite(draw) for draw in draws):
            weight = 0.0
        pieces = range(len(self.partition.pieces))
        absent = frozenset(
            piece for piece in pieces if all(draw.gradients[piece] is None for draw in draws)
        )
        mean = [np.zeros(buffer.num_elements) for buffer in self.partition.buffers]
        if weight:
            for draw in draws:
                self._add(mean, draw.gradients, draw.weight / weight)
        return _Update(weight, hyper, absent, mean)

    def _add(
        self, into: Sequence[Floats], pieces: Sequence[npt.NDArray[Any] | None], factor: float
    ) -> None:
        for buffer in self.partition.buffers:
            for piece, start in buffer.piece_starts:
                values = pieces[piece]
                if values is not None:
                    part = into[buffer.index][start : start + len(values)]
                    part += factor * values.astype(np.float64)

    # -- what a server makes of it -------------------------------------------------------------

    def replay(self, log: ServerLog, chunks: Collection[int]) -> dict[int, Versions]:
        """The versions of ``chunks``, those of the server whose log this is. Raises AssertionError
        where the log says something else of an update than the workers."""
        flat = [np.zeros(buffer.num_elements) for buffer in self.partition.buffers]
        self._add(flat, self.initial, 1.0)
        versions = {index: self._first_version(index, flat) for index in chunks}
        active: dict[int, int] = {}
        step: list[tuple[int, int]] = []
        updates: list[_Update] = []
        events = log.events
        rows = zip(
            *(events[name].tolist() for name in ("kind", "chunk", "group", "clock", "flags")),
            events["weight"].tolist(),
            events["lr_scale"].tolist(),
            strict=True,
        )
        for position, (kind, index, group, clock, flags, weight, lr_scale) in enumerate(rows, 1):
            if kind == EventKind.JOIN:
                active[group] = len(self.groups[group])
            elif kind in (EventKind.LEAVE, EventKind.DEATH):
                del active[group]
            elif kind == EventKind.REFORM:
                active[group] -= 1
            elif kind == EventKind.SNAPSHOT:
                momentum = versions[index].momentum.copy(), versions[index].has_momentum.copy()
                versions[index].kept[clock] = momentum
            elif kind == EventKind.LOAD:
                self._set_values(versions[index], self.partition.chunks[index], position)
            if kind != EventKind.APPLY:
                continue
            where = f"server {log.server}, event {position}, chunk {index}, group {group}, {clock}"
            chunk, says_empty = self.partition.chunks[index], bool(flags & EventFlag.EMPTY)
            update = self.update_of(group, clock, chunk, weight=weight, is_empty=says_empty)
            is_empty = update.is_empty(chunk)
            assert weight == update.weight, f"{where}: weight {weight}, drawn {update.weight}"
            assert says_empty == is_empty, f"{where}: empty is {is_empty}"
            step.append((group, clock))
            updates.append(update)
            if not flags & EventFlag.LAST:
                continue
            scale = self._make_step(versions[index], chunk, position, step, updates, active)
            assert scale is None or abs(lr_scale - scale) <= 1e-6 * scale, (
                f"{where}: lr x {lr_scale}, not {scale}"
            )
            step.clear()
            updates.clear()
        return versions

    def _first_version(self, index: int, flat: Sequence[Floats]) -> Versions:
        chunk = self.partition.chunks[index]
        values = flat[chunk.buffer][chunk.start : chunk.start + chunk.length]
        return Versions(
            positions=[0],
            values=[values],
            largest=[max(1.0, float(np.abs(values).max()))],
            momentum=np.zeros(chunk.length),
            has_momentum=np.zeros(chunk.length, dtype=bool),
        )

    def _set_values(self, versions: Versions, chunk: Chunk, position: int) -> None:
        """The momentum stays."""
        flat = [np.zeros(buffer.num_elements) for buffer in self.partition.buffers]
        self._add(flat, self.pushed[len(versions.positions_of_loads)], 1.0)
        values = flat[chunk.buffer][chunk.start : chunk.start + chunk.length]
        versions.positions_of_loads.append(position)
        versions.add(position, values)

    def _make_step(
        self,
        versions: Versions,
        chunk: Chunk,
        position: int,
        contributions: Sequence[tuple[int, int]],
        updates: Sequence[_Update],
        active: Mapping[int, int],
    ) -> float | None:
        """The factor on lr, None where nothing was stepped."""
        full = [update for update in updates if not update.is_empty(chunk)]
        if not full:
            return None
        absent = frozenset.intersection(*(update.absent for update in full))
        if self.is_gathered(contributions[0][1]):
            lr_scale = 1.0
            gradient = _weighted_mean(updates, chunk)
            gradient *= self._coefficient_of(tuple(contributions), updates)
        else:
            ((group, clock),) = contributions
            sharing = sum(active.values()) or len(self.groups[group])  # all have left, or failed
            lr_scale = sum(update.weight for update in updates) / sharing
            (update,) = full
            gradient = update.mean[chunk.buffer][chunk.start : chunk.start + chunk.length].copy()
            if self.used is not None:
                used = versions.index_at(self.used[chunk.index, group, clock])
                if self.has_stale_lr:
                    tau = (len(versions.positions) - 1 - used) / max(1, len(active) - 1)
                    lr_scale /= max(1.0, tau)
                moved = versions.last - versions.values[used]
                gradient += self.compensation * gradient**2 * moved
        hyper = full[0].hyper[chunk.optimizer_group]
        assert all(update.hyper == full[0].hyper for update in full)

        before = versions.last
        is_stepped = self._elements_with_gradient(chunk, absent)
        gradient += hyper["weight_decay"] * before
        if hyper["momentum"]:
            kept = versions.momentum * hyper["momentum"] + gradient
            gradient = np.where(versions.has_momentum, kept, gradient)
            versions.momentum = np.where(is_stepped, gradient, versions.momentum)
            versions.has_momentum |= is_stepped
        values = np.where(is_stepped, before - hyper["lr"] * lr_scale * gradient, before)
        versions.add(position, values)
        return lr_scale

    def _coefficient_of(
        self, contributions: tuple[tuple[int, int], ...], updates: Sequence[_Update]
    ) -> float:
        """By which the weighted mean of these updates, of the whole model, is clipped."""
        if not self.max_norm:
            return 1.0
        known = self._coefficients.get(contributions)
        if known is None:
            means = [_weighted_mean(updates, chunk) for chunk in self.partition.chunks]
            norm = float(np.linalg.norm(np.concatenate(means)))
            known = self._coefficients[contributions] = min(1.0, self.max_norm / (norm + 1e-6))
        return known

    def _elements_with_gradient(
        self, chunk: Chunk, absent: frozenset[int]
    ) -> npt.NDArray[np.bool_]:
        mask = self._masks.get((chunk.index, absent))
        if mask is None:
            mask = self._masks[chunk.index, absent] = np.ones(chunk.length, dtype=bool)
            for segment in chunk.segments:
                if segment.piece in absent:
                    mask[segment.offset : segment.offset + segment.length] = False
        return mask

    # -- comparing -----------------------------------------------------------------------------

    def compare(
        self,
        versions: Versions,
        positions: npt.ArrayLike,
        seen: npt.NDArray[Any],
        what: str,
    ) -> None:
        """``seen`` [n, elements]: what was in memory where the versions of these ``positions`` [n]
        should have been."""
        at = np.searchsorted(versions.positions, positions, side="right") - 1
        expected = np.stack(versions.values)[at]
        tolerated = TOLERANCE * np.asarray(versions.largest)[at]
        errors = np.abs(seen - expected).max(axis=1) / tolerated
        worst = int(errors.argmax())
        # A NaN is larger than nothing.
        if not errors[worst] <= 1:
            element = int(np.abs(seen - expected)[worst].argmax())
            raise WrongValueError(
                f"{what}: element {element} is {seen[worst][element]!r}, must be "
                f"{expected[worst][element]!r} (number {worst}, version {at[worst]} of "
                f"{len(versions.values)})",
                float(errors[worst]),
            )
        self.largest_error = max(self.largest_error, float(errors[worst]))
        self.num_compared += len(errors)


def _weighted_mean(updates: Sequence[_Update], chunk: Chunk) -> Floats:
    """Mean of the chunk over the groups; a group without a contribution counts as zero, with its
    weight."""
    total = sum(update.weight for update in updates)
    mean = np.zeros(chunk.length)
    for update in updates:
        if not update.is_empty(chunk):
            part = update.mean[chunk.buffer][chunk.start : chunk.start + chunk.length]
            mean += update.weight * (1 / total) * part
    return mean


def _is_finite(draw: Draw) -> bool:
    return all(np.isfinite(each).all() for each in draw.gradients if each is not None)
