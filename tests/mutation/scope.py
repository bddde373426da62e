"""What is mutated, and which tests are to notice: the one place that says so.

Owns both lists (``HOUSE``). What only people read is left out: functions that print or word
something, by name, and texts everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Scope:
    root: Path
    package: str
    """Of the subjects: ``servers/protocol/state.py`` is imported as psdist.servers.protocol.state;
    "" for modules without one."""
    subjects: tuple[str, ...]
    """Patterns below ``root``."""
    for_people: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Functions and constants that are not mutated, by file."""
    tests: tuple[str, ...]
    """Files, and folders of files ``test_*.py``."""
    left_out: tuple[str, ...] = ()
    """Of these files."""
    near: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Subject -> tests that have noticed faults of it that those named after it do not."""
    begin: str = ""
    """How the files begin that are run at all: a smaller map where fewer tests are asked for."""
    options: tuple[str, ...] = ()
    """pytest's, beside the tests."""
    patience_s: float = 3.0
    """Processor seconds that a test may use beside a multiple of its own."""
    sources: tuple[str, ...]
    """Folders and files that the tests' results depend on."""

    def module_of(self, path: str) -> str:
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_inside = not self.package or name.split(".")[0] == self.package
        return name if is_inside else f"{self.package}.{name}"

    def subject_files(self) -> list[str]:
        found = {path for pattern in self.subjects for path in self.root.glob(pattern)}
        return sorted(str(path.relative_to(self.root)) for path in found)

    def test_files(self) -> list[str]:
        found: set[Path] = set()
        for place in self.tests:
            path = self.root / place
            found |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
        names = sorted(str(path.relative_to(self.root)) for path in found)
        return [name for name in names if name not in self.left_out and name.startswith(self.begin)]

    def test_files_near(self, subjects: Iterable[str]) -> list[str]:
        """Those that are named after one of these files or known to notice its faults (``near``);
        where there are none of a file, those that speak of it."""
        every, near = self.test_files(), set[str]()
        for subject in subjects:
            stem = re.escape(Path(subject).stem)
            named = re.compile(rf"(?:^|_){stem}(?:_|$)")
            spoken = re.compile(rf"\b{stem}\b")
            known = {
                file
                for file in every
                if named.search(Path(file).stem) or file in self.near.get(subject, ())
            }
            near |= known or {
                file for file in every if spoken.search((self.root / file).read_text("utf-8"))
            }
        return sorted(near)

    def source_files(self) -> list[Path]:
        found: set[Path] = set()
        for place in self.sources:
            path = self.root / place
            found |= set(path.rglob("*.py")) if path.is_dir() else {path}
        return sorted(found)


HOUSE = Scope(
    root=Path(__file__).resolve().parent.parent.parent,
    package="psdist",
    subjects=(
        "servers/protocol/*.py",
        "servers/protocol/chunks/*.py",
        "servers/protocol/rules/*.py",
        "workers/protocol/*.py",
        "psdist/protocol/header.py",
        "psdist/protocol/control.py",
        "psdist/protocol/payloads.py",
        "psdist/protocol/optimizer_state.py",
        "psdist/protocol/send_order.py",
        "workers/model/optimizer_state.py",
        "servers/shard/optimizer_state.py",
        "psdist/history/rules/**/*.py",
        "psdist/commands/check.py",
    ),
    for_people={
        "psdist/commands/check.py": (
            *("_print", "_histogram", "_write_json", "_HISTOGRAM_ROWS", "_BAR_CELLS"),
        ),
        "psdist/protocol/control.py": ("_first_fault",),
    },
    tests=(
        "tests/unit/protocol",
        "tests/unit/servers",
        "tests/unit/workers",
        "tests/unit/transport",
        "tests/unit/history",
        "tests/unit/codecs",
        "tests/protocol",
    ),
    # Slow, and they reach no line of the protocol that others do not: processes, data, the same
    # schedules once more.
    left_out=(
        "tests/protocol/codecs/test_codecs.py",
        "tests/protocol/deaths/test_lost_peers.py",
        "tests/unit/workers/data/test_loader.py",
        "tests/unit/workers/group/test_channel.py",
    ),
    near={
        "psdist/commands/check.py": ("tests/unit/history/test_modes.py",),
        "psdist/history/rules/values/checksums.py": ("tests/unit/history/test_check.py",),
        "servers/protocol/rules/backup.py": ("tests/unit/servers/chunks/test_backed.py",),
        "servers/protocol/rules/gathering.py": ("tests/unit/servers/test_state.py",),
        "servers/protocol/rules/__init__.py": ("tests/unit/servers/chunks/test_updates.py",),
        "servers/protocol/coordinator.py": ("tests/unit/servers/test_modes_and_deaths.py",),
    },
    options=("--schedules=200", "--large-schedules=1"),
    sources=("psdist", "servers", "workers", "topology", "tests", "constraints.txt", "setup.cfg"),
)
"""psdist's protocol and the check. The tests take well under three minutes together."""
