"""Which of the fast tests reach which line, and how long each takes.

Owns the map and its file. It is made by running every fast test once, some files in a child, with
a probe before every statement (:mod:`tests.mutation.probes`), and kept in ``.mutation/``, which is
git-ignored, under a hash of everything that it depends on. That run is also the proof that the
tests pass without a fault.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.mutation import inside
from tests.mutation.children import Job, run_all
from tests.mutation.mutants import Mutant
from tests.mutation.probes import PROBE, Probed
from tests.mutation.scope import Scope

LIMIT_S = 900.0
"""For the files of one child."""
FILES = 6
"""Of tests, in a child: each child imports psdist again."""
FORMAT = 2


class BrokenTests(Exception):
    """The fast tests fail without any fault; the text says which and how."""


@dataclass(frozen=True)
class CoverageMap:
    seconds: Mapping[str, float]
    """Of every fast test, by its node id."""
    tests_at: Mapping[str, Mapping[int, frozenset[str]]]
    """File -> line -> tests."""

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutated lines, the most promising first: those named after the
        file, then the shortest."""
        lines = self.tests_at.get(mutant.path, {})
        if (
            mutant.is_top_level
        ):  # runs at import: for every test of the files that have a use for it
            files = {test.partition("::")[0] for test in _union(lines, lines)}
            found = frozenset(test for test in self.seconds if test.partition("::")[0] in files)
        else:
            found = _union(lines, range(mutant.line, mutant.last_line + 1))
            found = found or _union(lines, range(mutant.statement[0], mutant.statement[1] + 1))
        stem = Path(mutant.path).stem
        return sorted(
            found,
            key=lambda test: (
                stem not in Path(test.partition("::")[0]).stem,
                self.seconds[test],
                test,
            ),
        )

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def _union(lines: Mapping[int, frozenset[str]], wanted: Any) -> frozenset[str]:
    return frozenset().union(*(lines.get(line, frozenset()) for line in wanted))


def load(scope: Scope, cache: Path, *, at_once: int) -> CoverageMap:
    """From the file, or made. Raises :class:`BrokenTests`."""
    file = cache / f"map-{_digest(scope)}.json"
    if not file.exists():
        body = _measured(scope, scope.test_files(), at_once)
        for old in cache.glob("map-*"):
            old.unlink()
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(body), encoding="utf-8")
        partial.rename(file)
    return _unpacked(json.loads(file.read_text("utf-8")))


def measured(scope: Scope, files: Sequence[str], *, at_once: int) -> CoverageMap:
    """By these files of tests alone; it is not kept. Raises :class:`BrokenTests`."""
    return _unpacked(_measured(scope, files, at_once))


def _digest(scope: Scope) -> str:
    digest = hashlib.sha256(f"{FORMAT} {scope}".encode())
    for path in scope.source_files():
        digest.update(f"{path.relative_to(scope.root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _measured(scope: Scope, files: Sequence[str], at_once: int) -> dict[str, Any]:
    # What takes longest first: the last child to end should be a short one.
    files = sorted(files, key=lambda file: "/unit/" in file)
    shares = [files[at : at + FILES] for at in range(0, len(files), FILES)]
    probes = _Probes.of(scope)
    jobs = (
        Job(
            ", ".join(share),
            lambda say_to, scratch, share=share: probes.measure(scope, share, say_to, scratch),
            LIMIT_S,
        )
        for share in shares
    )
    tests: dict[str, float] = {}
    lines: dict[str, dict[str, list[int]]] = {}
    for outcome in run_all(jobs, at_once=at_once):
        if outcome.status not in (0, int(pytest.ExitCode.NO_TESTS_COLLECTED)):
            raise BrokenTests(
                f"{outcome.what}: fails without any fault (status {outcome.status}):\n"
                f"{outcome.printed}"
            )
        for said in outcome.said:
            first = len(tests)
            tests |= said.get("seconds", {})
            for path, by_line in said.get("lines", {}).items():
                for line, reaching in by_line.items():
                    lines.setdefault(path, {}).setdefault(line, []).extend(
                        first + each for each in reaching
                    )
    return {"tests": tests, "lines": lines}


@dataclass
class _Probes:
    """A pytest plugin: what was reached counts for the test that runs."""

    modules: dict[str, CodeType] = field(default_factory=dict)
    """File -> what it becomes with probes."""
    lines: dict[int, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """Probe -> (file, line)."""
    by_test: dict[str, frozenset[int]] = field(default_factory=dict)
    _reached: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, scope: Scope) -> _Probes:
        made, end = cls(), 0
        for path in scope.subject_files():
            place = scope.root / path
            probed = Probed.of(place.read_text("utf-8"), str(place), first=end)
            end = probed.end
            made.modules[path] = probed.code
            for line, probes in probed.lines.items():
                for probe in probes:
                    made.lines[probe].add((path, line))
        return made

    def measure(self, scope: Scope, files: Sequence[str], say_to: int, scratch: str) -> int:
        """In a child: run the tests of some files, say what each has reached."""
        names = {PROBE: self._reached.add}
        for path, code in self.modules.items():
            inside.install(scope.module_of(path), str(scope.root / path), code, **names)
        stage = inside.Stage(said_to=say_to)
        status = inside.run(scope, files, stage, self, scratch=scratch)
        number = {test: place for place, test in enumerate(stage.took)}
        reached: dict[str, dict[int, list[int]]] = {}
        for test, found in self.by_test.items():
            for path, line in set().union(*(self.lines[probe] for probe in found)):
                reached.setdefault(path, {}).setdefault(line, []).append(number[test])
        stage.say(seconds=stage.took, lines=reached)
        return status

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._reached.clear()
        try:
            return (yield)
        finally:
            self.by_test[item.nodeid] = frozenset(self._reached)


def _unpacked(body: dict[str, Any]) -> CoverageMap:
    names = list(body["tests"])
    return CoverageMap(
        body["tests"],
        {
            path: {
                int(line): frozenset(names[test] for test in tests)
                for line, tests in by_line.items()
            }
            for path, by_line in body["lines"].items()
        },
    )
