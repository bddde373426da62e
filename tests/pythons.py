"""Fast tests under every other Python 3.11 or newer of this machine: what depends on Python.

Owns: which Pythons there are, an environment for each (``.venv-python-VERSION``), and the choice of
tests: those that read text or speak a protocol and import neither torch nor an MPI. The Python of
the environment that runs this is not among them: tests/run.sh runs all tests under it.

    .venv/bin/python -m tests.pythons      # exit status 0: passed under each; says which

Looked for: python3 and python3.N on PATH, in /usr/bin and /usr/local/bin, and among what pyenv has.
The newest runs them all, others what has differed between Pythons before. Left out: what does not
run (a version manager's command without a version), is older, or is there twice in one version. A
Python of the same ABI uses the packages of this environment; for another, pip installs the few that
these tests need. Under another patch version of the Python of this environment only the tests of
what has differed between such run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
LIMIT_S = 1100.0
"""For one command. It takes a minute: this ends what hangs, also where much else runs beside it."""

FAST = (
    "tests/topology/draw",
    "tests/topology/machine/test_hwloc.py",
    "tests/topology/network",
    "tests/topology/text",
    "tests/unit/commands/test_plan.py",
    "tests/unit/config",
    "tests/unit/history/test_history.py",
    "tests/unit/install/test_launcher.py",
    "tests/unit/protocol/test_messages.py",
    "tests/unit/protocol/test_roles.py",
    "tests/unit/report",
    "tests/unit/test_regular_expressions.py",
)
PATCH_DEPENDENT = ("tests/unit/test_regular_expressions.py",)
"""What has differed between patch versions of one Python: all that runs under those."""
PACKAGES = (
    *("hypothesis", "msgpack", "numpy", "pydantic", "pytest", "pytest-timeout", "pyyaml"),
    *("rich", "typer"),
)

NAME = re.compile(r"python3(?:\.\d+)?")
QUESTION = """\
import json, os, platform, sys, sysconfig
print(json.dumps({
    "path": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "version": platform.python_version(),
    "abi": sysconfig.get_config_var("SOABI") or "",
    "kind": [sys.implementation.name, *sys.version_info[:2]],
}))
"""


@dataclass(frozen=True, kw_only=True)
class Python:
    path: str
    """The interpreter itself, behind links, environments and version managers."""
    version: str
    abi: str

    def __str__(self) -> str:
        return f"{self.version} ({self.path})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    python: Python
    has_passed: bool
    text: str
    """What pytest, venv or pip printed."""
    took_s: float


def this_python() -> Python:
    found = ask(sys.executable)
    if found is None:
        raise RuntimeError(f"{sys.executable} does not say what it is")
    return found


def ask(executable: str) -> Python | None:
    """What it says of itself; None where it does not run, is too old, or is no CPython."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        answer = json.loads(done.stdout)
        name, *numbers = answer.pop("kind")
        python = Python(**answer)
    except (OSError, ValueError, LookupError, TypeError, subprocess.TimeoutExpired):
        return None
    return python if name == "cpython" and tuple(numbers) >= OLDEST else None


def folders(environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("PYENV_ROOT") or Path(environment.get("HOME") or "/") / ".pyenv"
    return [
        *map(Path, filter(None, environment.get("PATH", "").split(os.pathsep))),
        *(Path("/usr/bin"), Path("/usr/local/bin")),
        *sorted(Path(home).glob("versions/*/bin")),
    ]


def find(places: Iterable[Path], known: Python) -> list[Python]:
    """The Pythons in these folders, each version once, but the one that is known; oldest first."""
    files = {
        file.resolve(): file
        for place in places
        if place.is_dir()
        for file in sorted(place.iterdir())
        if NAME.fullmatch(file.name) and os.access(file, os.X_OK)
    }
    found = {known.version: known}
    for file in files.values():
        python = ask(str(file.absolute()))
        if python is not None:
            found.setdefault(python.version, python)
    return sorted(
        (python for python in found.values() if python != known),
        key=lambda python: [int(number) for number in re.findall(r"\d+", python.version)],
    )


def run(*command: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit status, output); as if interrupted where it takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done after {LIMIT_S:.0f} s: {' '.join(command)}"
    return done.returncode, done.stdout


def make(python: Python, folder: Path, known: Python, environment: Mapping[str, str]) -> str:
    """The environment of a Python, new or as it was left; "" or what went wrong."""
    constraints = ROOT / "constraints.txt"
    made_from = json.dumps(
        [
            *(python.path, python.abi, str(ROOT), sys.prefix, PACKAGES),
            hashlib.sha256(constraints.read_bytes()).hexdigest(),
        ]
    )
    stamp = folder / "complete"
    executable = str(folder / "bin" / "python")
    if stamp.is_file() and stamp.read_text("utf-8") == made_from:
        return ""
    # Where pip is needed it is that Python's own: this environment's may be too old to run there.
    is_alike = python.abi == known.abi
    status, text = run(
        *(python.path, "-m", "venv", "--clear", *(["--without-pip"] if is_alike else [])),
        str(folder),
        environment=environment,
    )
    if status:
        return text
    lines = [str(ROOT)]
    if is_alike:
        packages = sysconfig.get_path("purelib")
        lines.append(f"import site; site.addsitedir({packages!r})")
    else:
        status, text = run(
            *(executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--constraint", str(constraints), *PACKAGES),
            environment=environment,
        )
        if status:
            return text
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "psdist.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    stamp.write_text(made_from, encoding="utf-8")
    return ""


def tests_for(python: Python, known: Python, *, newest: Python) -> tuple[str, ...]:
    """The whole suite runs under ``known``, the fast tests under the newest, in which most is
    different; what lies between, and another patch version, has what has differed before."""
    is_patch = python.version.rpartition(".")[0] == known.version.rpartition(".")[0]
    return FAST if python == newest and not is_patch else PATCH_DEPENDENT


def tried(python: Python, known: Python, *, newest: Python) -> Outcome:
    start = time.monotonic()
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    } | {"OMP_NUM_THREADS": "1"}
    folder = ROOT / f".venv-python-{python.version}"
    wrong = make(python, folder, known, environment)
    if wrong:
        text = f"{folder} could not be made: {wrong}"
        return Outcome(python=python, has_passed=False, text=text, took_s=time.monotonic() - start)
    status, text = run(
        *(str(folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-m", "not mpi and not slurm", *tests_for(python, known, newest=newest)),
        environment=environment,
    )
    return Outcome(
        python=python, has_passed=status == 0, text=text, took_s=time.monotonic() - start
    )


def main() -> int:
    known = this_python()
    pythons = find(folders(os.environ), known)
    print(f"tests/pythons.py: the whole suite runs under Python {known}", flush=True)
    if not pythons:
        print("tests/pythons.py: there is no other Python 3.11 or newer on this machine")
        return 0
    num_failed = 0
    for python in pythons:  # one core at most: .ci/run has other work for the rest
        outcome = tried(python, known, newest=pythons[-1])
        last = outcome.text.strip().rpartition("\n")[2]
        if outcome.has_passed:
            said = f"the fast tests passed under Python {outcome.python}: {last}"
        else:
            num_failed += 1
            print(outcome.text, end="")
            said = f"FAILED under Python {outcome.python}"
        print(f"tests/pythons.py: {said} ({outcome.took_s:.0f} s in all)", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
