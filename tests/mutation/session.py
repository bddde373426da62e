"""A session: mutants drawn by a seed, each played against its tests, and what survived.

Owns the draw, the runs and the verdict. Mutants that compile to the very same code are passed over
while drawing; those listed as equivalent are drawn, not played and counted apart.

    result = Session(HOUSE, cache=folder, at_once=2).play(draw(mutants, sources, seed=1, count=300))
    result.score, result.survivors
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tests.mutation import inside
from tests.mutation.children import Job, Outcome, run_all
from tests.mutation.coverage_map import CoverageMap
from tests.mutation.mutants import Key, Mutant, is_same_program
from tests.mutation.neighbours import Neighbours
from tests.mutation.operators import mutants_of
from tests.mutation.scope import Scope

START_S = 60.0
"""For a child to start; its tests have limits of their own."""


@dataclass
class Result:
    killed: dict[Mutant, str] = field(default_factory=dict)
    """By which test."""
    survivors: list[Mutant] = field(default_factory=list)
    unreached: list[Mutant] = field(default_factory=list)
    """Of the survivors, those that no test reaches."""
    equivalent: list[Mutant] = field(default_factory=list)
    """Listed, hence not played."""

    def take(self, later: Result) -> None:
        """Of the survivors, played again by more tests."""
        self.killed |= later.killed
        self.survivors, self.unreached = later.survivors, later.unreached

    @property
    def score(self) -> float:
        """Share killed of those that are not listed as equivalent."""
        num_played = len(self.killed) + len(self.survivors)
        return len(self.killed) / num_played if num_played else 1.0

    @property
    def share_equivalent(self) -> float:
        total = len(self.killed) + len(self.survivors) + len(self.equivalent)
        return len(self.equivalent) / total if total else 0.0


def read_sources(scope: Scope) -> dict[str, str]:
    return {path: (scope.root / path).read_text("utf-8") for path in scope.subject_files()}


def all_mutants(scope: Scope, sources: Mapping[str, str]) -> list[Mutant]:
    """Every mutant of every file, in order."""
    neighbours = Neighbours.of(sources.values())
    return [
        mutant
        for path, text in sorted(sources.items())
        for mutant in mutants_of(path, text, neighbours, leave_out=scope.for_people.get(path, ()))
    ]


def draw(
    mutants: Sequence[Mutant], sources: Mapping[str, str], *, seed: int, count: int | None
) -> list[Mutant]:
    """``count`` mutants, or all, none of which compiles to what was there before. The first n of a
    seed are the same for every count, and an edit of the code changes the draw only where a mutant
    comes or goes: CI's sample stays what it was."""

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(repr((seed, mutant.key)).encode()).digest()

    drawn: list[Mutant] = []
    for mutant in sorted(mutants, key=lot):
        if count is not None and len(drawn) == count:
            break
        text = sources[mutant.path]
        if not is_same_program(text, mutant.applied_to(text)):
            drawn.append(mutant)
    return drawn


@dataclass(kw_only=True)
class Session:
    scope: Scope
    sources: Mapping[str, str]
    coverage: CoverageMap
    at_once: int
    listed: Mapping[Key, str]
    only_tests: str = ""
    """How node ids begin of the tests that are played; the others are never."""
    tell: Callable[[str], None] = print

    def play(self, mutants: Sequence[Mutant]) -> Result:
        result = Result()
        for outcome in run_all(self._jobs(mutants, result), at_once=self.at_once):
            mutant: Mutant = outcome.what
            verdict = self._verdict(outcome)
            if verdict is None:
                result.survivors.append(mutant)
            else:
                result.killed[mutant] = verdict
            how = f"killed by {verdict}" if verdict else "SURVIVED"
            self.tell(f"{outcome.took_s:6.1f} s  {mutant}\n          {how}")
        result.survivors.sort()
        return result

    def _jobs(self, mutants: Sequence[Mutant], result: Result) -> Iterator[Job]:
        for mutant in mutants:
            reaching = self.coverage.tests_of(mutant)
            tests = [test for test in reaching if test.startswith(self.only_tests)]
            if mutant.key in self.listed:
                result.equivalent.append(mutant)
            elif not tests:
                result.survivors.append(mutant)
                result.unreached.append(mutant)
                self.tell(f"{0:6.1f} s  {mutant}\n          SURVIVED: no test reaches it")
            else:
                seconds = sum(self.coverage.seconds[test] for test in tests)
                limit_s = START_S + 2 * inside.TIMES * seconds
                yield Job(mutant, _player(self, mutant, tests), limit_s)

    def run_tests(self, mutant: Mutant, tests: Sequence[str], say_to: int, scratch: str) -> int:
        """In a child."""
        sys.dont_write_bytecode = True
        path = self.scope.root / mutant.path
        text = mutant.applied_to(self.sources[mutant.path])
        code = compile(text, str(path), "exec", dont_inherit=True)
        inside.install(self.scope.module_of(mutant.path), str(path), code)
        stage = inside.Stage(
            said_to=say_to,
            order={test: place for place, test in enumerate(tests)},
            seconds=self.coverage.seconds,
            patience_s=self.scope.patience_s,
        )
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return inside.run(self.scope, files, stage, scratch=scratch)

    def _verdict(self, outcome: Outcome) -> str | None:
        """What killed it. Without the fault these tests pass: whatever went wrong is its doing."""
        if outcome.status == 0:
            return None
        if outcome.status == int(pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"{outcome.what}: its tests were not found\n{outcome.printed}")
        last = next((said["test"] for said in reversed(outcome.said) if "test" in said), "")
        if outcome.has_hung:
            return f"{last or 'its import'}, which never ended"
        return last or "its import"


def _player(session: Session, mutant: Mutant, tests: Sequence[str]) -> Callable[[int, str], int]:
    return lambda say_to, scratch: session.run_tests(mutant, tests, say_to, scratch)
