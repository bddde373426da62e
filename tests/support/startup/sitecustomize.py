"""Every program that a test starts: torch._dynamo is loaded when it is used.

Python imports this module by its name at every start where its folder is on PYTHONPATH
(``program_environment`` in tests/support/mpirun.py).

The first step of a torch.optim imports torch._dynamo (800 modules, 0.7 s of a core, 0.3 s more at
the end), only to ask that torch.compile breaks its graph there. Here a stand-in answers that, and
gives way to the real module as soon as anything else of it is asked for. The quickstart and a job
script of Slurm are tested without it, as a user starts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def no_break() -> None:
    """As torch._dynamo.graph_break where nothing is compiled."""


def same(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """As torch._dynamo.disable where nothing is compiled."""
    return function


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # whoever looks through all modules
        return getattr(LATER.real(), name)


class Later(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object, **__: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == NAME else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(graph_break=no_break, disable=same)
        module.__class__ = StandIn  # not before: the import itself looks at its attributes

    def real(self) -> ModuleType:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            del sys.modules[NAME]
        return import_module(NAME)


LATER = Later()
sys.meta_path.insert(0, LATER)
