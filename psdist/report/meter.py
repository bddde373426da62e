"""Progress in words: how far, how fast, how long still. Pure; what it gets is Training facts.

    meter = Meter()
    words = meter.update(training)
    " | ".join(words.all())     # sync | epoch 2 of 5 | iteration 150 of 345 | 43 % | ETA 0:12 | ...

Where the script's loader says nothing of an epoch's length or of the number of epochs, less is
said; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.report.facts import Training
from psdist.report.pace import Pace, format_duration


@dataclass(frozen=True, kw_only=True)
class Words:
    mode: str
    position: tuple[str, ...]
    """``epoch 2 of 5``, ``iteration 150 of 345``."""
    fraction: float | None
    """Of the run where its number of epochs is known, else of the epoch; None if neither is."""
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
        """The job was stopped, and goes on: the pause is no part of its speed."""
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
    # One step for each batch, but for the batch that is being computed; not so where gradients
    # are accumulated, or several loaders are used.
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
