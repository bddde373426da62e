"""Seeded schedules with deaths, by the thousand: played on the virtual network, and proved.

    python -m tests.benchmarks.deaths.schedules --times 5000 --first 20000 --json FILE

One seed after the other, of each kind in turn (``KINDS``): tests/protocol has what is played, what
is proved of it, and the seeds that CI plays. A schedule that fails is told with its kind and seed,
and the others continue. Exit status 0 where none has.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

from tests.protocol.deaths import (
    test_both_deaths,
    test_coordinator_deaths,
    test_cuts,
    test_deaths,
    test_mode_deaths,
)
from tests.support.virtual.refills import play_and_prove, play_refills
from tests.support.virtual.spares import play_with_spares

REFILLS = partial(play_and_prove, play_refills)
SPARES = partial(play_and_prove, play_with_spares)
KINDS: dict[str, Callable[[range], Counter[str]]] = {
    "workers": test_deaths.play_and_prove,
    "workers and servers": test_both_deaths.play_and_prove,
    "the coordinator": test_coordinator_deaths.play_and_prove,
    "the coordinator and others": test_coordinator_deaths.play_others_and_prove,
    "server after server": REFILLS,
    "server after server, the coordinator": partial(REFILLS, coordinator_dies=True),
    "servers and spares": SPARES,
    "servers and spares, the coordinator": partial(SPARES, coordinator_dies=True),
    "workers, and the mode changes": test_mode_deaths.play_and_prove,
    "workers and substitutes, and the mode changes": test_mode_deaths.play_and_prove_joins,
    "cuts of the network": test_cuts.play_and_prove,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=400, help="schedules, of all kinds")
    parser.add_argument("--first", type=int, default=20_000, help="the first seed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    num_played, failed = Counter[str](), list[str]()
    met: defaultdict[str, Counter[str]] = defaultdict(Counter)
    begun_s = perf_counter()
    for number, kind in enumerate(islice(cycle(KINDS), given.times)):
        seed = given.first + number // len(KINDS)
        num_played[kind] += 1
        try:
            met[kind] += KINDS[kind](range(seed, seed + 1))
        except Exception as error:  # whatever it is: the next one may show another
            failed.append(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:500]}")
            print(failed[-1], flush=True)
        if (number + 1) % 100 == 0 or number + 1 == given.times:
            seconds = round(perf_counter() - begun_s)
            print(f"{number + 1} played, {len(failed)} failed, {seconds} s", flush=True)
            if given.json:
                told = {"first": given.first, "played": num_played, "met": met, "failed": failed}
                given.json.write_text(json.dumps({**told, "seconds": seconds}, indent=2) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
