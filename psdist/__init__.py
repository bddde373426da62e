"""psdist: sharded parameter servers over MPI for PyTorch.

    import psdist
    job = psdist.init()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

Attributes load on first use (PEP 562), so that ``psdist --help`` imports neither torch nor MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from psdist.version import VERSION

if TYPE_CHECKING:
    from psdist.errors import BuriedError as BuriedError
    from psdist.errors import CheckpointError as CheckpointError
    from psdist.errors import CodecError as CodecError
    from psdist.errors import CollectiveError as CollectiveError
    from psdist.errors import ConfigError as ConfigError
    from psdist.errors import GroupReformedError as GroupReformedError
    from psdist.errors import HistoryError as HistoryError
    from psdist.errors import HostLostError as HostLostError
    from psdist.errors import HyperparameterError as HyperparameterError
    from psdist.errors import InvariantError as InvariantError
    from psdist.errors import JobEndedError as JobEndedError
    from psdist.errors import LaunchError as LaunchError
    from psdist.errors import MemberLostError as MemberLostError
    from psdist.errors import ModelError as ModelError
    from psdist.errors import NonFiniteGradientError as NonFiniteGradientError
    from psdist.errors import OptimizerRefusedError as OptimizerRefusedError
    from psdist.errors import PeerLostError as PeerLostError
    from psdist.errors import PlacementError as PlacementError
    from psdist.errors import ProtocolError as ProtocolError
    from psdist.errors import PsdistError as PsdistError
    from psdist.errors import ServersLostError as ServersLostError
    from psdist.errors import TraceError as TraceError
    from psdist.errors import TransportError as TransportError
    from psdist.errors import UsageError as UsageError
    from psdist.errors import UserError as UserError
    from psdist.errors import WaitTimeoutError as WaitTimeoutError
    from psdist.job import Job as Job
    from psdist.joining import init as init
    from psdist.tables.optimizers import FTRL as FTRL
    from psdist.tables.optimizers import LazyAdam as LazyAdam
    from psdist.tables.optimizers import RowAdagrad as RowAdagrad
    from psdist.tables.optimizers import RowSGD as RowSGD
    from psdist.tables.optimizers import RowWiseAdagrad as RowWiseAdagrad
    from psdist.workers.model.optimizer import ServedOptimizer as ServedOptimizer
    from psdist.workers.tables.modules import Embedding as Embedding
    from psdist.workers.tables.modules import EmbeddingBag as EmbeddingBag

__version__ = VERSION
__all__ = [
    "FTRL",
    "BuriedError",
    "CheckpointError",
    "CodecError",
    "CollectiveError",
    "ConfigError",
    "Embedding",
    "EmbeddingBag",
    "GroupReformedError",
    "HistoryError",
    "HostLostError",
    "HyperparameterError",
    "InvariantError",
    "Job",
    "JobEndedError",
    "LaunchError",
    "LazyAdam",
    "MemberLostError",
    "ModelError",
    "NonFiniteGradientError",
    "OptimizerRefusedError",
    "PeerLostError",
    "PlacementError",
    "ProtocolError",
    "PsdistError",
    "RowAdagrad",
    "RowSGD",
    "RowWiseAdagrad",
    "ServedOptimizer",
    "ServersLostError",
    "TraceError",
    "TransportError",
    "UsageError",
    "UserError",
    "WaitTimeoutError",
    "__version__",
    "init",
]

_MODULES: Final = {
    "Job": "psdist.job",
    "init": "psdist.joining",
    "ServedOptimizer": "psdist.workers.model.optimizer",
    "FTRL": "psdist.tables.optimizers",
    "LazyAdam": "psdist.tables.optimizers",
    "RowAdagrad": "psdist.tables.optimizers",
    "RowSGD": "psdist.tables.optimizers",
    "RowWiseAdagrad": "psdist.tables.optimizers",
    "Embedding": "psdist.workers.tables.modules",
    "EmbeddingBag": "psdist.workers.tables.modules",
}
"""Where a name is that is no error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'psdist' has no attribute {name!r}")
    if name not in _MODULES:
        return getattr(import_module("psdist.errors"), name)
    from psdist.ranks.loading import uncollected

    with uncollected():
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
