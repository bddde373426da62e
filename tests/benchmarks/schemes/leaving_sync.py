"""When mode = auto leaves sync: with windows of 20 rounds alone, and with early judging, too.

    python -m tests.benchmarks.schemes.leaving_sync

Four groups on made rounds; each kind is played ``RUNS`` times. It prints how many left sync within
``ROUNDS`` rounds, and after how many rounds in the mean.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Final
from unittest import mock

from psdist.controller import WINDOW, Observation, mode

RUNS: Final = 100
ROUNDS: Final = 200
GROUPS: Final = 4
OWN_US: Final = 100_000

Made = Callable[[random.Random], list[int]]
"""Own times of one round, by group, in microseconds."""


def one_is_slow(share: float) -> Made:
    """In this share of the rounds a group, drawn for each of them, takes ten times as long."""

    def made(draw: random.Random) -> list[int]:
        slow = draw.randrange(GROUPS) if draw.random() < share else -1
        return [OWN_US * (10 if group == slow else 1) for group in range(GROUPS)]

    return made


def differing(deviation: float) -> Made:
    return lambda draw: [round(OWN_US * max(0.1, draw.gauss(1, deviation))) for _ in range(GROUPS)]


def each_at_times(draw: random.Random) -> list[int]:
    return [OWN_US * (10 if draw.random() < 1 / 200 else 1) for _ in range(GROUPS)]


KINDS: Final[dict[str, Made]] = {
    "one, drawn again each round, takes ten times as long": one_is_slow(1),
    "the same in a third of the rounds": one_is_slow(1 / 3),
    "all differ from round to round by a standard deviation of 10 %": differing(0.10),
    "15 %": differing(0.15),
    "20 %": differing(0.20),
    "each takes ten times as long in one round of 200": each_at_times,
}


def left_behind(made: Made, seed: int) -> int | None:
    """Return the round after which sync changed."""
    control, draw = mode.ModeControl(num_groups=GROUPS, staleness=4), random.Random(seed)
    for number in range(1, ROUNDS + 1):
        for group, own_us in enumerate(made(draw)):
            control.observe(Observation(group, number, [own_us], [0]))
        if control.judge() is not None:
            return number
    return None


def main() -> None:
    print("| four groups | windows of 20 | early, too |")
    print("|---|---|---|")
    for name, made in KINDS.items():
        cells = []
        for early in (WINDOW, mode.EARLY):
            with mock.patch.object(mode, "EARLY", early):
                behind = [left_behind(made, seed) for seed in range(RUNS)]
            left = [each for each in behind if each is not None]
            cells.append(f"{len(left)}, {statistics.fmean(left):.0f}" if left else "0")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
