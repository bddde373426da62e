"""What happens inside a child: changed modules in the import system, pytest on some tests.

Owns the stand-in for the import system, and the pytest plugin that puts the tests in order, gives
each its share of processor time and says where it stands. Writes nothing but to the descriptors
that it is given. psdist must not have been imported when a child begins.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import hypothesis
import pytest

from tests.mutation.scope import Scope

TIMES = 4.0
"""A test may use so many times the processor seconds that it took without one."""
LIMIT_S = 60.0
"""And so long by the clock: something may wait without using any."""


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from some code instead of its file."""

    def __init__(self, name: str, path: str, code: CodeType, names: Mapping[str, object]) -> None:
        self._name = name
        self._path = path
        self._code = code
        self._names = names

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        is_package = self._path.endswith("__init__.py")
        spec = importlib.util.spec_from_loader(
            fullname, self, origin=self._path, is_package=is_package
        )
        if spec is not None:
            spec.has_location = True
            if is_package:
                spec.submodule_search_locations = [os.path.dirname(self._path)]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - Python's
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._names)
        # What an import does; the code is of a file of this checkout with our own changes.
        exec(self._code, module.__dict__)


def install(name: str, path: str, code: CodeType, **names: object) -> None:
    """The module ``name`` will be this code, which finds ``names`` among its globals."""
    if name in sys.modules:
        raise RuntimeError(f"{name} was imported before it was changed")
    sys.meta_path.insert(0, Changed(name, path, code, names))


@dataclass(kw_only=True)
class Stage:
    """The pytest plugin: which tests, in which order, how long each may take, what came of it."""

    order: Mapping[str, int] | None = None
    """Node id -> place; the others are not run. None: all, as they come."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of a test without a fault."""
    patience_s: float = 0.0
    said_to: int
    """A file descriptor: a line of JSON for everything that is worth telling."""
    took: dict[str, float] = field(default_factory=dict)

    def say(self, **what: Any) -> None:
        os.write(self.said_to, json.dumps(what).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        """The first failure is enough: nothing is made small, nothing explained."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutation", hypothesis.settings(hypothesis.settings.default, phases=phases)
        )
        hypothesis.settings.load_profile("mutation")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.order is None:
            items[:] = [item for item in items if not is_too_slow(item)]
            return
        order = self.order
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.order is not None:
            may_take = self.patience_s + TIMES * self.seconds.get(item.nodeid, 0.0)
            # Nobody handles the signal, so it ends the process, in the middle of C code as well.
            signal.setitimer(signal.ITIMER_PROF, may_take)
        self.say(test=item.nodeid)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid] = self.took.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.say(failed=report.nodeid)


def is_too_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("mpi", "slurm", "slow"))


def run(scope: Scope, files: Sequence[str], *plugins: object, scratch: str) -> int:
    """pytest in this process, up to the first failure. The exit status."""
    return int(
        pytest.main(
            [
                *(
                    "-x",
                    "-q",
                    "--no-header",
                    "--tb=line",
                    "--assert=plain",
                    "-p",
                    "no:cacheprovider",
                ),
                *("-p", "no:xdist", "--rootdir", str(scope.root), "--basetemp", scratch),
                *(f"--timeout={LIMIT_S:.0f}", *scope.options, *files),
            ],
            plugins=list(plugins),
        )
    )
