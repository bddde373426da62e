"""A script under plain mpirun, without `psdist run`, that fails as its first argument says.

mpirun -n 3 python -m tests.support.programs.bad_plain raise
"""

from __future__ import annotations

import sys
from types import TracebackType

import psdist


def main(mistake: str) -> None:
    job = psdist.init()
    if mistake == "hook":
        sys.excepthook = _own_hook
    if job.worker == 1:
        raise RuntimeError("lost its data")
    job.barrier()


def _own_hook(
    kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    print(f"a hook of the script's own: {kind.__name__}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
