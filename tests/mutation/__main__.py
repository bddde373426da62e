"""The command line; ``python -m tests.mutation --help``.

Owns options, exit status and what is printed. Exit status 0: the score is reached; 1: it is not, or
more of the sample is listed as equivalent than may be; 2: nothing could be measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutation.scope import HOUSE, Scope

if TYPE_CHECKING:
    from tests.mutation.mutants import Mutant

LIST = Path(__file__).with_name("equivalent.toml")
MOST_EQUIVALENT = 0.05
"""Of a sample."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description="Plant small faults in the protocol; say which of them the fast tests miss.",
    )
    parser.add_argument("--seed", type=int, default=1, help="draws the sample (1)")
    parser.add_argument("--count", type=int, default=300, help="mutants in the sample (300)")
    parser.add_argument("--all", action="store_true", help="every mutant: hours")
    parser.add_argument(
        *("--in", "-i"), dest="prefixes", action="append", metavar="PATH",
        help="of files that begin so only; may be given again",
    )  # fmt: skip
    parser.add_argument("--operator", default="", help="of one family of operators only")
    parser.add_argument("--line", type=int, default=0, help="of one line only")
    parser.add_argument(
        "--tests", default="", metavar="PATH", help="by tests that begin so only, as tests/unit"
    )
    parser.add_argument(
        "--near-first", action="store_true",
        help="by tests named after the file first, by all only what those miss: for small samples",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="children at once (2)")
    parser.add_argument(
        "--require", type=float, default=95.0, metavar="PERCENT", help="killed at least (95)"
    )
    parser.add_argument("--list", action="store_true", help="say what would be played")
    parser.add_argument("--quiet", action="store_true", help="survivors and the score only")
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None, *, scope: Scope = HOUSE, list_file: Path = LIST
) -> int:
    asked = parse(arguments)
    scope = replace(scope, begin=asked.tests.partition("::")[0])
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # children end, too
    cache = prepare(scope)
    from tests.mutation import equivalent, libraries, session
    from tests.mutation.coverage_map import BrokenTests, load, measured

    sources = session.read_sources(scope)
    every = session.all_mutants(scope, sources)
    chosen = [
        mutant
        for mutant in every
        if mutant.path.startswith(tuple(asked.prefixes or ("",)))
        and mutant.operator.startswith(asked.operator)
        and asked.line in (0, mutant.line)
    ]
    count = None if asked.all else asked.count
    drawn = session.draw(chosen, sources, seed=asked.seed, count=count)
    if asked.list:
        print(*sorted(drawn), sep="\n")
        return 0

    began_s = time.monotonic()
    libraries.load()
    compile_aside(cache)

    def play(mutants: Sequence[Mutant], near: Sequence[str] = ()) -> session.Result:
        """By these files of tests, or by all."""
        began_s = time.monotonic()
        coverage = (
            measured(scope, near, at_once=asked.jobs)
            if near
            else load(scope, cache, at_once=asked.jobs)
        )
        print(
            f"{len(coverage.seconds)} fast tests pass without a fault in {coverage.total_s:.0f} s "
            f"(with probes); the map took {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        return session.Session(
            scope=scope,
            sources=sources,
            coverage=coverage,
            at_once=asked.jobs,
            listed=listed,
            only_tests=asked.tests,
            tell=(lambda _: None) if asked.quiet else (lambda line: print(line, flush=True)),
        ).play(mutants)

    try:
        listed = equivalent.read(list_file, every)
        near = scope.test_files_near({each.path for each in drawn}) if asked.near_first else []
        result = play(drawn, near)
        if near and result.survivors:
            result.take(play(result.survivors))
    except (equivalent.BadList, BrokenTests) as error:
        print(f"tests.mutation: {error}", file=sys.stderr)
        return 2
    for mutant in result.survivors:
        why = "  (no test reaches it)" if mutant in result.unreached else ""
        print(f"\nsurvived: {mutant}{why}\n{mutant.diff(sources[mutant.path])}")
    for mutant in result.equivalent:
        print(f"\nlisted as equivalent: {mutant}\n  {listed[mutant.key]}")
    families = Counter(mutant.operator for mutant in drawn)
    missed = Counter(mutant.operator for mutant in result.survivors)
    table = ", ".join(f"{name} {missed[name]} of {families[name]}" for name in sorted(families))
    print(
        f"\nsurvived by operator: {table}\n"
        f"{len(result.killed)} killed, {len(result.survivors)} survived, "
        f"{len(result.equivalent)} listed as equivalent, of {len(drawn)} drawn by seed "
        f"{asked.seed} from {len(chosen)}: {result.score:.1%} in {time.monotonic() - began_s:.0f} s"
    )
    if result.share_equivalent > MOST_EQUIVALENT:
        print(f"more than {MOST_EQUIVALENT:.0%} of the sample is listed as equivalent")
        return 1
    return 0 if 100 * result.score >= asked.require else 1


def prepare(scope: Scope) -> Path:
    """The folder for the map and for what hypothesis would write beside the code. To be called
    before it is asked for anything; one thread in each child is set here, too."""
    cache = scope.root / ".mutation"
    cache.mkdir(exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(cache / "hypothesis")
    os.chdir(scope.root)
    return cache


def compile_aside(cache: Path) -> None:
    """From now on, what Python writes beside the code goes there as well. Behind the libraries:
    what is compiled of those is in nobody's way, and everybody's."""
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(cache / "compiled")
    sys.dont_write_bytecode = False


if __name__ == "__main__":
    sys.exit(main())
