"""Which installed distributions provide the package ``psdist``, and which of them are in the way.

    for rival in rivals(sys.path, package=Path(psdist.__path__[0])):
        print(rival.problem, rival.remedy)

Another project on PyPI is called psdist and has the same import name; this one was installed as
``psdist``, too, up to version 0.1.0. Only the ``.dist-info`` folders
on a path are read: importlib.metadata takes a hundred times as long, and every rank needs this.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAME: Final = "psdist-mpi"
OLD_NAME: Final = "psdist"
_PACKAGE: Final = b"psdist"
_ENTRY_POINT: Final = b"psdist.commands.cli:main"
# Metadata is read up to this size. The RECORD of torch, one of the largest, has 1.5 MB.
_MAX_BYTES: Final = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A distribution that provides ``psdist`` and is not psdist-mpi.

    ``is_error``: its files and the files of psdist-mpi are mixed in one folder, and what an import
    loads depends on the order in which pip installed them."""

    problem: str
    remedy: str
    is_error: bool


@dataclass(frozen=True, kw_only=True)
class _Installed:
    name: str
    version: str
    folder: Path
    is_own_code: bool
    editable_from: str | None

    @property
    def is_current(self) -> bool:
        return self.name == NAME

    def __str__(self) -> str:
        source = f"editable, {self.editable_from}" if self.editable_from else f"in {self.folder}"
        return f"{self.name} {self.version} ({source})"


def rivals(path: Iterable[str], *, package: Path) -> list[Rival]:
    """Return every other distribution on ``path`` (as sys.path) that provides ``psdist``.

    ``package``: the folder of the running ``psdist`` package.
    """
    found = list(_providers(path))
    is_current_installed = any(each.is_current for each in found)
    return [
        _judge(each, package.parent, is_current_installed) for each in found if not each.is_current
    ]


def _judge(other: _Installed, folder: Path, is_current_installed: bool) -> Rival:
    uninstall = f"pip uninstall {other.name}"
    is_mixed = other.folder == folder and other.editable_from is None
    if other.is_own_code and not is_current_installed:
        source = other.editable_from
        again = f"pip install -e {source}" if source else f"install {NAME}"
        return Rival(
            problem=f"{other} is {NAME} under its old name, and `pip install -U {OLD_NAME}` "
            "replaces it with another project",
            remedy=f"{uninstall}, then {again}",
            is_error=False,
        )
    whose = f"is {NAME} under its old name" if other.is_own_code else "is another project"
    # Uninstalling the old name takes the command psdist along, which both have.
    has_shared_files = is_mixed or other.is_own_code
    effect = (
        f"its files overwrite files of {NAME}"
        if is_mixed
        else "either may be what `import psdist` loads"
    )
    return Rival(
        problem=f"{other} {whose}, and {effect}",
        remedy=f"{uninstall}, then install {NAME} again" if has_shared_files else uninstall,
        is_error=is_mixed,
    )


def _providers(path: Iterable[str]) -> Iterator[_Installed]:
    for folder in dict.fromkeys(os.path.abspath(entry) for entry in path if entry):
        try:
            names = sorted(entry.name for entry in os.scandir(folder))
        except OSError:
            continue  # a zip file, or a folder that is not there
        for name in names:
            if name.endswith(".dist-info") and name.isprintable():
                info = f"{folder}/{name}"
                project, _, version = name.removesuffix(".dist-info").partition("-")
                project = re.sub(r"[-_.]+", "-", project).lower()
                if project in (NAME, OLD_NAME) or _provides(info):
                    yield _Installed(
                        name=project,
                        version=version,
                        folder=Path(folder),
                        is_own_code=_ENTRY_POINT in _contents(f"{info}/entry_points.txt"),
                        editable_from=_editable_from(info),
                    )


def _provides(info: str) -> bool:
    """True if a distribution of another name has files in ``psdist/``."""
    if top_level := _contents(f"{info}/top_level.txt"):
        return _PACKAGE in top_level.split()
    # Not every build tool writes top_level.txt.
    record = _contents(f"{info}/RECORD")
    return record.startswith(_PACKAGE + b"/") or b"\n" + _PACKAGE + b"/" in record


def _editable_from(info: str) -> str | None:
    """The folder of an editable installation, None for any other."""
    # Metadata comes from any project: nothing that it holds may end a job.
    with suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
        direct_url = json.loads(_contents(f"{info}/direct_url.json"))
        if direct_url.get("dir_info", {}).get("editable") is True:
            source = str(direct_url["url"]).removeprefix("file://")
            return source if source.isprintable() else ascii(source)
    return None


def _contents(path: str) -> bytes:
    """Return at most ``_MAX_BYTES`` bytes of a file, unbuffered; b"" if it cannot be read, or is a
    pipe that has no writer."""
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            return file.read(_MAX_BYTES) or b""
    except OSError:
        return b""


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
