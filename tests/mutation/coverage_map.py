"""Which of the fast tests reach which line, and how long each takes.

Owns the map and its file. It is made by running every fast test once, a file of tests in a child,
under coverage.py with the running test for context, and kept in ``.mutation/`` (git-ignored) under
a hash of everything that it depends on. That run is also the proof that the tests pass without a
fault.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import inside
from tests.mutation.children import Job, run_all
from tests.mutation.mutants import Mutant
from tests.mutation.scope import Scope

LIMIT_S = 900.0
"""For one file of tests."""
FORMAT = 1


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
        body = _measured(scope, at_once)
        for old in cache.glob("map-*"):
            old.unlink()
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(body), encoding="utf-8")
        partial.rename(file)
    return _unpacked(json.loads(file.read_text("utf-8")))


def _digest(scope: Scope) -> str:
    digest = hashlib.sha256(f"{FORMAT} {scope}".encode())
    for path in scope.source_files():
        digest.update(f"{path.relative_to(scope.root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _measured(scope: Scope, at_once: int) -> dict[str, Any]:
    # What takes longest first: the last child to end should be a short one.
    files = sorted(scope.test_files(), key=lambda file: "/unit/" in file)
    jobs = (
        Job(
            file, lambda say_to, scratch, file=file: _measure(scope, file, say_to, scratch), LIMIT_S
        )
        for file in files
    )
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[str]]] = {}
    for outcome in run_all(jobs, at_once=at_once):
        if outcome.status not in (0, int(pytest.ExitCode.NO_TESTS_COLLECTED)):
            raise BrokenTests(
                f"{outcome.what} fails without any fault (status {outcome.status}):\n"
                f"{outcome.printed}"
            )
        for said in outcome.said:
            seconds |= said.get("seconds", {})
            for path, by_line in said.get("lines", {}).items():
                for line, tests in by_line.items():
                    lines.setdefault(path, {}).setdefault(line, []).extend(tests)
    return {"seconds": seconds, "lines": lines}


def _measure(scope: Scope, file: str, say_to: int, scratch: str) -> int:
    """In a child: run one file's tests, say what each has reached."""
    os.environ["COVERAGE_CORE"] = "ctrace"  # the others know no contexts
    import coverage

    root = scope.root.resolve()
    subjects = [str(root / path) for path in scope.subject_files()]
    measured = coverage.Coverage(data_file=None, config_file=False, include=subjects)
    stage = inside.Stage(said_to=say_to)
    measured.start()
    try:
        status = inside.run(scope, [file], stage, _Contexts(measured), scratch=scratch)
    finally:
        measured.stop()
    data = measured.get_data()
    lines = {
        str(Path(path).relative_to(root)): {
            line: [test for test in contexts if test]
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    stage.say(seconds=stage.took, lines=lines)
    return status


@dataclass
class _Contexts:
    """A pytest plugin: lines are counted for the test that runs."""

    measured: Any

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.measured.switch_context("")


def _unpacked(body: dict[str, Any]) -> CoverageMap:
    return CoverageMap(
        body["seconds"],
        {
            path: {int(line): frozenset(tests) for line, tests in by_line.items()}
            for path, by_line in body["lines"].items()
        },
    )
