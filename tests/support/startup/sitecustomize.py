"""Every program that a test starts: parts of torch are loaded when they are used.

Python imports this module by its name at every start where its folder is on PYTHONPATH
(``program_environment`` in tests/support/mpirun.py).

The first step of a torch.optim imports torch._dynamo (800 modules, 0.7 s of a core, 0.3 s more at
the end), only to ask that torch.compile breaks its graph there. torch itself imports torch.export
and torch._meta_registrations, 0.4 s of a core, which only who compiles, exports or computes with
fake tensors has a use for. Here stand-ins answer, and give way to the real modules, all three, as
soon as anything else of one is asked for. The quickstart and a job script of Slurm are tested
without them, as a user starts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def no_break() -> None:
    """As torch._dynamo.graph_break where nothing is compiled."""


def same(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """As torch._dynamo.disable where nothing is compiled."""
    return function


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    # In the order in which they can be loaded.
    "torch._meta_registrations": {},
    "torch.export": {},
    "torch._dynamo": {"graph_break": no_break, "disable": same},
}


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # whoever looks through all modules
        return getattr(LATER.real(self.__name__), name)


class Later(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object, **__: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in STAND_INS else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch._meta_registrations":
            # The one thing behind it that every program needs; no generator can be made before.
            torch_c = import_module("torch._C")
            if hasattr(torch_c, "_set_generator_metaclass"):  # torch 2.11 has none
                opaque = import_module("torch._opaque_base")
                torch_c._set_generator_metaclass(opaque.OpaqueBaseMeta)
        module.__dict__.update(STAND_INS[module.__name__])
        module.__class__ = StandIn  # not before: the import itself looks at its attributes

    def real(self, wanted: str) -> ModuleType:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in STAND_INS:
                sys.modules.pop(name, None)
            for name in STAND_INS:
                import_module(name)  # which puts it in its package as well
        return sys.modules[wanted]


LATER = Later()
sys.meta_path.insert(0, LATER)
