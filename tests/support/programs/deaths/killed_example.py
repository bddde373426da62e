"""One of psdist's examples, of which a worker is killed by SIGKILL behind its N-th step.

psdist run ... -m tests.support.programs.deaths.killed_example digits N [options of the example]
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

from psdist import ServedOptimizer


def main(name: str, die_at: int, arguments: list[str]) -> None:
    step = ServedOptimizer.step
    num_steps = 0

    def step_and_die(self: ServedOptimizer, *given: Any, **more: Any) -> Any:
        nonlocal num_steps
        found = step(self, *given, **more)
        num_steps += 1
        if num_steps == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    ServedOptimizer.step = step_and_die  # type: ignore[method-assign] # of this process
    module = import_module(f"psdist.examples.{name}")
    sys.argv = [str(module.__file__), *arguments]
    module.main()


if __name__ == "__main__":
    name, die_at, *arguments = sys.argv[1:]
    main(name, int(die_at), arguments)
