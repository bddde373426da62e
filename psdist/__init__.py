"""psdist: sharded parameter servers over MPI for PyTorch.

    import psdist
    job = psdist.init()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

Attributes load on first use (PEP 562), so that ``psdist --help`` imports neither torch nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psdist.version import VERSION

if TYPE_CHECKING:
    from psdist.errors import PsdistError as PsdistError
    from psdist.job import Job as Job
    from psdist.job import init as init

__version__ = VERSION
__all__ = ["Job", "PsdistError", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name in ("init", "Job"):
        from psdist import job

        return getattr(job, name)
    if name == "PsdistError":
        from psdist.errors import PsdistError

        return PsdistError
    raise AttributeError(f"module 'psdist' has no attribute {name!r}")
