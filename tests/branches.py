"""Which branches of the protocol's state machines seeded schedules and hostile messages reach.

Owns the generators whose reach is counted together, and the report. What it counts are the lines
and branches of servers/protocol and workers/protocol; a branch whose only purpose is to raise
InvariantError is left out, because no run of correct code can reach it.

    python -m tests.branches                               # 2,000 small schedules and others
    python -m tests.branches --play small=500 large=0
    python -m tests.branches --at-least 98                 # exit status 1 below 98 %

Needs the package ``coverage`` (extra ``dev``). Another generator enters itself in
:data:`GENERATORS`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

import coverage

MEASURED = ("psdist.servers.protocol", "psdist.workers.protocol")
CANNOT_HAPPEN = r"raise InvariantError\("


def _play_small(seed: int) -> None:
    from tests.support.virtual.job import play
    from tests.support.virtual.proof import prove
    from tests.support.virtual.schedule import Schedule

    prove(play(Schedule.from_seed(seed)))


def _play_large(seed: int) -> None:
    from tests.support.virtual.job import play
    from tests.support.virtual.proof import prove
    from tests.support.virtual.schedule import Schedule

    prove(play(Schedule.from_seed(seed, size="large")))


def _play_encoded(seed: int) -> None:
    """Codecs both ways."""
    from tests.protocol.codecs.test_codecs import BOTH_WAYS, Thirds
    from tests.support.virtual.job import play
    from tests.support.virtual.proof import prove
    from tests.support.virtual.schedule import Schedule

    prove(play(Schedule.from_seed(seed), wire=BOTH_WAYS, make_worker=Thirds))


def _play_one_by_one(seed: int) -> None:
    """Chunks of two iterations under way at a time."""
    from tests.protocol.test_one_by_one import play, prove, schedule_of

    prove(play(schedule_of(seed)))


def _send_hostile(seed: int) -> None:
    """1,000 messages that are well-formed and wrong, to each kind of machine."""
    from tests.protocol.test_hostile import victims

    for victim in victims(seed):
        for _ in range(1000):
            victim.step()


GENERATORS: dict[str, tuple[Callable[[int], None], int]] = {
    "small": (_play_small, 2000),
    "large": (_play_large, 20),
    "encoded": (_play_encoded, 50),
    "one-by-one": (_play_one_by_one, 100),
    "hostile": (_send_hostile, 10),
}
"""By name: what plays a seed, and how many are played where nothing is said."""


def measure(counts: dict[str, int]) -> coverage.Coverage:
    """Play so many seeds of each generator, from 0 on. The machines must not have been imported
    before: their first lines are counted, too."""
    measured = coverage.Coverage(
        branch=True, source_pkgs=list(MEASURED), data_file=None, config_file=False
    )
    measured.exclude(CANNOT_HAPPEN)
    with measured.collect():
        for name, count in counts.items():
            play, _ = GENERATORS[name]
            for seed in range(count):
                play(seed)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--play", nargs="+", default=[], metavar="NAME=COUNT")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    options = parser.parse_args()
    counts = {name: count for name, (_, count) in GENERATORS.items()}
    for each in options.play:
        name, _, count = each.partition("=")
        if name not in GENERATORS or not count.isdigit():
            parser.error(f"--play {each}: NAME=COUNT, of {', '.join(GENERATORS)}")
        counts[name] = int(count)
    logging.getLogger("psdist").addHandler(logging.NullHandler())
    percent = measure(counts).report(show_missing=True, skip_covered=True, precision=1)
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + " schedules")
    return 0 if percent >= options.at_least else 1


if __name__ == "__main__":
    raise SystemExit(main())
