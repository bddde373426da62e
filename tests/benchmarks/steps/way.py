"""The modules that a gradient crosses, from ``optimizer.step()`` to the parameters in place.

    python -m tests.benchmarks.steps.way

Plays a job of one worker and one server in sync over the virtual network and watches the calls of
one step. A module is crossed if one of its functions is given the gradient or what stands for it: a
tensor, a frame, a header, a message about a chunk, a chunk or its number, the reduced gradient, its
row or its terms. Constructors of messages do not count, nor do modules that only look on.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from psdist.job import Job
from psdist.protocol.events import Arrived, Frame, Offered
from psdist.protocol.header import Header
from psdist.protocol.partition import Chunk
from psdist.servers.protocol import actions as of_servers
from psdist.workers.protocol import actions as of_workers
from psdist.workers.reduction import Reduced, Row, Terms
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

_NAMES = {"chunk", "chunks", "mine", "reduced", "scale", "table", "terms"}
_KINDS = (torch.Tensor, memoryview, Arrived, Chunk, Frame, Header, Offered, Reduced, Row, Terms)
_ACTIONS = tuple(
    each
    for module in (of_servers, of_workers)
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__
)
_WATCHED = 5


def _carries(value: Any) -> bool:
    parts = value[:4] if isinstance(value, list | tuple) else ()
    return isinstance(value, _KINDS + _ACTIONS) or any(
        isinstance(each, _KINDS + _ACTIONS) for each in parts
    )


class Way:
    def __init__(self) -> None:
        self.is_on = False
        self.modules: dict[str, None] = {"psdist.workers.model.optimizer": None}

    def look(self, frame: FrameType, event: str, _argument: object) -> None:
        """A profile function."""
        if not self.is_on or event != "call":
            return
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if not module.startswith(("psdist.workers", "psdist.servers", "psdist.transport")):
            return
        if code.co_name == "__init__" or module in self.modules:
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(name in _NAMES or _carries(frame.f_locals.get(name)) for name in given[1:]):
            self.modules[module] = None

    def script(self, job: Job, _stage: Stage) -> Result:
        model = nn.Linear(4, 4)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(_WATCHED + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            self.is_on = step == _WATCHED
            optimizer.step()
            self.is_on = False
        return {}


def main() -> None:
    way = Way()
    threading.setprofile(way.look)
    sys.setprofile(way.look)
    settings = {"mode": "sync", "overlap": "off"}
    case = Case(name="way", script=way.script, groups=((0,),), servers=1, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        run_virtually(case, Path(folder) / "run")
    sys.setprofile(None)
    print(*way.modules, f"{len(way.modules)} modules", sep="\n")


if __name__ == "__main__":
    main()
