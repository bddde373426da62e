"""When mode = auto leaves sync: with whole windows of 20 rounds alone, and as it does.

    python -m tests.benchmarks.schemes.leaving_sync

Four groups on made rounds; each kind is played ``RUNS`` times. It prints how many left sync within
6 and within ``ROUNDS`` rounds, and the median of the rounds after which they did.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from psdist.controller import WINDOW, Observation
from psdist.controller.mode import ModeControl

RUNS: Final = 200
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


def each_at_times(share: float, factor: int) -> Made:
    return lambda draw: [OWN_US * (factor if draw.random() < share else 1) for _ in range(GROUPS)]


def one_always(factor: int) -> Made:
    def made(draw: random.Random) -> list[int]:
        own_us = differing(0.1)(draw)
        return [own_us[0] * factor, *own_us[1:]]

    return made


KINDS: Final[dict[str, Made]] = {
    "one, drawn again each round, takes ten times as long": one_is_slow(1),
    "the same in a third of the rounds": one_is_slow(1 / 3),
    "each takes six times as long in a tenth of its rounds": each_at_times(1 / 10, 6),
    "three times as long in a fifth": each_at_times(1 / 5, 3),
    "all differ from round to round by a standard deviation of 10 %": differing(0.10),
    "15 %": differing(0.15),
    "20 %": differing(0.20),
    "10 %, and one takes three times as long in each round": one_always(3),
    "each takes ten times as long in one round of 200": each_at_times(1 / 200, 10),
}


def left_after(made: Made, seed: int, every: int) -> int | None:
    """Return the round after which sync changed, where groups report ``every`` rounds at once."""
    control, draw = ModeControl(num_groups=GROUPS, staleness=4), random.Random(seed)
    for first in range(1, ROUNDS + 1, every):
        for group, own_us in enumerate(zip(*(made(draw) for _ in range(every)), strict=True)):
            control.observe(Observation(group, first, own_us, [0] * every))
        if control.judge() is not None:
            return first + every - 1
    return None


def main() -> None:
    print("| % of the runs | whole windows: ever, median | each round: within 6, ever, median |")
    print("|---|---|---|")
    for name, made in KINDS.items():
        cells = []
        for every in (WINDOW, 1):
            after = [left_after(made, seed, every) for seed in range(RUNS)]
            left = sorted(each for each in after if each is not None)
            shares = [100 * len(left) / RUNS]
            if every == 1:
                shares.insert(0, 100 * sum(each <= 6 for each in left) / RUNS)
            cells.append(
                ", ".join([*map("{:g}".format, shares), *map(str, left[len(left) // 2 :][:1])])
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
