"""The program of workers: a script's file, or a module as ``python -m`` would run it.

    program = Program(name="train.py", arguments=("--epochs", "5"))
    problem = program.problem()          # a LaunchError where there is nothing to run
    program.run_as_main()

A search for a module does not import it: server ranks and login nodes search, too.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from psdist.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Program:
    """``name`` is the path of a script or, where ``is_module``, the name of a module."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"{'module' if self.is_module else 'script'} {self.name}"

    @property
    def words(self) -> list[str]:
        """Return the words after ``psdist run`` and its options on a command line."""
        # The dashes keep a script whose name begins with one from being read as an option.
        return [*(["-m"] if self.is_module else []), "--", self.name, *self.arguments]

    def problem(self) -> LaunchError | None:
        """Why it cannot be run, as far as that shows before it is."""
        return self._problem_of_module() if self.is_module else self._problem_of_script()

    def run_as_main(self) -> None:
        """Run it as ``__main__``, with sys.argv and sys.path as python itself would set them."""
        sys.argv = [self.name, *self.arguments]
        folder = Path.cwd() if self.is_module else Path(self.name).resolve().parent
        if sys.flags.safe_path:  # the first entry is one of PYTHONPATH, not the place of a program
            sys.path.insert(0, str(folder))
        else:
            sys.path[0] = str(folder)
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.name, run_name="__main__")

    def _problem_of_script(self) -> LaunchError | None:
        try:
            if Path(self.name).is_dir():
                return LaunchError(f"the script {self.name} is a directory; name the file to run")
            with open(self.name, "rb"):
                return None
        except FileNotFoundError:
            return LaunchError(
                f"the script {self.name} does not exist (working directory {Path.cwd()})"
            )
        except (OSError, ValueError) as error:  # not readable; or a null byte in the name
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return LaunchError(f"the script {self.name!r} cannot be read: {reason}")

    def _problem_of_module(self) -> LaunchError | None:
        parts = self.name.split(".")
        if not all(parts) or parts[-1] == "py" or "/" in self.name:
            return LaunchError(
                f"-m {self.name}: not the name of a module, such as package.train; for a file "
                "leave -m out"
            )
        places: Sequence[str] | None = None
        for number in range(1, len(parts) + 1):
            name = ".".join(parts[:number])
            if number > 1 and places is None:
                above = ".".join(parts[: number - 1])
                return LaunchError(f"-m {self.name}: {above} is a module, not a package")
            found = _find(name, places)
            if found is None:
                return LaunchError(
                    f"-m {self.name}: there is no module {name} (working directory {Path.cwd()})"
                )
            locations = found.submodule_search_locations
            places = None if locations is None else list(locations)
        if places is not None and _find(f"{self.name}.__main__", places) is None:
            return LaunchError(
                f"-m {self.name}: a package without __main__.py; name a module in it"
            )
        return None


def _find(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """The spec of module ``name``, in its package's ``places``; importing nothing."""
    where = [str(Path.cwd())] if places is None else places
    # By its last part: the path of a namespace package would be looked up in the package above,
    # which is not imported.
    found = PathFinder.find_spec(name.rpartition(".")[2], where)
    if found is not None:
        return found
    # Built-in modules, and what editable installations bring.
    finders = (each for each in sys.meta_path if places is None or each is not PathFinder)
    specs = (finder.find_spec(name, places) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)
