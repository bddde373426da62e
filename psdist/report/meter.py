"""Progress in words: how far, how fast, how long still. Pure; what it gets is Training facts.

    meter = Meter()
    words = meter.update(training)
    " | ".join(words.all())     # sync | epoch 2 of 5 | iteration 150 of 345 | 43 % | ETA 0:12 | ...

Where the script's loader says nothing of an epoch's length or of the number of epochs, less is
said; nothing is guessed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from psdist.report import Training


class Pace:
    """The speed over the last WINDOW_S seconds: a slow start or a pause is soon forgotten, and one
    slow iteration does not make the estimate jump."""

    WINDOW_S = 20.0
    SHORTEST_S = 1.0
    """Over less than this no speed is told."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, *, at_s: float, done: int) -> None:
        """Note ``done`` at time ``at_s``. A lower count or an earlier time restarts the window."""
        seen = self._seen
        if seen and (done < seen[-1][1] or at_s < seen[-1][0]):
            seen.clear()
        seen.append((at_s, done))
        # The last report outside the window is kept as its edge: with one report a minute there is
        # still a speed.
        while len(seen) > 2 and seen[1][0] <= at_s - self.WINDOW_S:
            seen.popleft()

    def restart(self) -> None:
        """Forget what was seen: time has passed in which the job was stopped."""
        self._seen.clear()

    @property
    def per_s(self) -> float | None:
        """None until there is a second to measure."""
        if not self._seen:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < self.SHORTEST_S:
            return None
        return (last - first) / (last_s - first_s)

    def remaining_s(self, *, total: int) -> float | None:
        """Seconds until ``total`` at this speed; None where nothing moves or nothing is known."""
        speed = self.per_s
        if not speed:
            return None
        return max(0, total - self._seen[-1][1]) / speed


def format_duration(seconds: float) -> str:
    """``0:07``, ``12:00``, ``3:05:00``, ``2 d 4 h``."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@dataclass(frozen=True, kw_only=True)
class Words:
    mode: str
    position: tuple[str, ...]
    """``epoch 2 of 5``, ``iteration 150 of 345``."""
    fraction: float | None
    """Part of the run that is done, if its number of epochs is known, else of the epoch; None if
    neither is known."""
    eta: str
    """``ETA 0:12``, ``epoch ends in 0:12`` or nothing."""
    speed: str
    values: tuple[str, ...]
    """``loss 0.1234``."""
    notes: tuple[str, ...]
    """Staleness, and the slowest group."""

    def all(self) -> list[str]:
        percent = "" if self.fraction is None else f"{100 * self.fraction:.0f} %"
        parts = [self.mode, *self.position, percent, self.eta, self.speed]
        return [part for part in (*parts, " ".join(self.values), *self.notes) if part]


class Meter:
    def __init__(self) -> None:
        self._samples = Pace()
        self._batches = Pace()
        self._iterations = Pace()

    def restart(self) -> None:
        """The job resumes after a stop: the pause is no part of its speed."""
        for pace in (self._samples, self._batches, self._iterations):
            pace.restart()

    def update(self, training: Training) -> Words:
        used = max(0, training.epoch - 1) * training.batches + training.batch
        self._samples.add(at_s=training.at_s, done=training.samples)
        self._batches.add(at_s=training.at_s, done=used)
        self._iterations.add(at_s=training.at_s, done=training.ahead)
        fraction, eta = self._how_far(training, used)
        return Words(
            mode=training.mode,
            position=_position(training, used),
            fraction=fraction,
            eta=eta,
            speed=self._speed(),
            values=tuple(
                f"{name} {value}"
                for name, value in training.last.items()
                if not (name == "epoch" and training.epoch)  # the loader's stands there already
            ),
            notes=_notes(training),
        )

    def _speed(self) -> str:
        """In samples, where the script's loaders count them."""
        samples, iterations = self._samples.per_s, self._iterations.per_s
        if samples:
            return f"{samples:.0f} samples/s"
        return f"{iterations:.3g} iterations/s" if iterations else ""

    def _how_far(self, training: Training, used: int) -> tuple[float | None, str]:
        if not training.batches or not training.epoch:
            return None, ""
        if training.epochs:
            total, what = training.epochs * training.batches, "ETA"
            done = used
        else:
            total, what = training.epoch * training.batches, "epoch ends in"
            done = training.batch
        length = training.epochs * training.batches if training.epochs else training.batches
        remaining_s = self._batches.remaining_s(total=total)
        eta = "" if remaining_s is None else f"{what} {format_duration(remaining_s)}"
        return min(1.0, done / length), eta


def _position(training: Training, used: int) -> tuple[str, ...]:
    is_spread = training.slowest is not None and not training.others_wait
    iteration = f"{training.behind}..{training.ahead}" if is_spread else f"{training.ahead}"
    if not training.epoch:
        return (f"iteration {iteration}",)
    of_epochs = f" of {training.epochs}" if training.epochs else ""
    epoch = f"epoch {training.epoch}{of_epochs}"
    if not training.batches:
        return epoch, f"iteration {iteration}"
    # One step for each batch, except the batch in progress; not if gradients are accumulated, or
    # several loaders are used.
    if training.epochs and 0 <= used - training.behind <= 1:
        return epoch, f"iteration {training.behind} of {training.epochs * training.batches}"
    return epoch, f"batch {training.batch} of {training.batches}", f"iteration {iteration}"


def _notes(training: Training) -> tuple[str, ...]:
    notes = [f"staleness {training.staleness}"] if not training.mode.startswith("sync") else []
    if training.slowest is not None:
        why = (
            f"others wait {100 * training.others_wait:.0f} %"
            if training.others_wait
            else f"{training.ahead - training.behind} behind"
        )
        notes.append(f"slowest: group {training.slowest} ({why})")
    return tuple(notes)
