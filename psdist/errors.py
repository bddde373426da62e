"""Every error psdist raises on purpose, in one tree.

PsdistError
├── UserError                 the user can mend it; one line, exit status 2
│   ├── ConfigError           a setting: unknown key, wrong type, out of range
│   ├── CodecError            a codec of the user's own: not importable, or not what it must be
│   ├── LaunchError           the way the job was started does not fit together
│   ├── ModelError            workers disagree about the model, or it cannot be partitioned
│   ├── OptimizerRefusedError this optimizer would be wrong on a parameter server
│   ├── HyperparameterError   groups disagree on hyperparameters of one sync iteration
│   ├── NonFiniteGradientError a gradient held NaN or infinity
│   ├── CollectiveError       save, mean, barrier ... called by some workers only
│   ├── UsageError            the API was called in an order or with values it does not take
│   ├── HistoryError          a recorded history is missing, damaged or not of this version
│   ├── TraceError            spans of a run are missing, damaged or not of this version
│   ├── CheckpointError       a checkpoint that is damaged, missing, or not of this model
│   └── PlacementError        a machine, a cluster or a plan that cannot be read or cannot be had
├── TransportError            the network failed us
│   ├── PeerLostError         a rank of the job has failed
│   ├── HostLostError         a host cannot be reached any more
│   └── WaitTimeoutError      a wait went beyond failures.wait_timeout_s
├── BuriedError               this worker's group is out of the job: its process ends, status 0
├── JobEndedError             another rank has ended the job and said why: this one ends, too
├── ProtocolError             a message that this protocol does not allow
└── InvariantError            a bug in psdist: please report it with the text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PsdistError(Exception):
    """Base of all psdist errors. The message says what, where, the value seen, what to do."""

    exit_status = 1


class UserError(PsdistError):
    """A mistake of the user: one line, exit status 2."""

    exit_status = 2


class ConfigError(UserError):
    """A setting has an unknown name, a wrong type or a value out of range."""


class CodecError(UserError):
    """A codec of the user's own cannot be imported, or breaks a codec's contract."""


class LaunchError(UserError):
    """The ranks were started in a way that psdist cannot run."""


class ModelError(UserError):
    """Workers disagree about the model, or it cannot be partitioned."""


class OptimizerRefusedError(UserError):
    """This optimizer would be wrong on a parameter server."""


class HyperparameterError(UserError):
    """Groups disagree on the hyperparameters of one sync iteration."""


class NonFiniteGradientError(UserError):
    """A gradient held NaN or infinity."""


class CollectiveError(UserError):
    """Some workers called a collective that others did not call."""


class UsageError(UserError):
    """The API was called in a wrong order, or with values that it does not take."""


class HistoryError(UserError):
    """A recorded history is missing, damaged or of another version."""


class TraceError(UserError):
    """The spans of a run are missing, damaged or of another version."""


class CheckpointError(UserError):
    """A checkpoint is damaged, missing, or of another model."""


class PlacementError(UserError):
    """A machine, a cluster or a plan cannot be read or cannot be satisfied."""


class TransportError(PsdistError):
    """The network, a rank or a host has failed."""


class PeerLostError(TransportError):
    def __init__(self, who: str, why: str = "") -> None:
        """``who`` as people know it: "worker 1 (rank 3 on n2)"; ``why``: the reason that the job
        does not continue without it, and what to do."""
        if not why:
            why = (
                "this job does not survive the failure of a rank (failures.max_deaths and "
                "failures.replication do some): restart the job"
            )
        super().__init__(f"{who} has failed; {why}")


class MemberLostError(TransportError):
    """An operation of a worker's group cannot complete, because another worker of the group has
    failed."""


class GroupReformedError(PsdistError):
    """The group continues without a failed worker, and this operation of it has no result."""


class HostLostError(TransportError):
    """A host of the job does not answer any more: it is cut off, or gone."""


class BuriedError(PsdistError):
    """This worker's group is not in the job any more, and the job continues without it. This is no
    error: the process ends with status 0."""

    exit_status = 0


class JobEndedError(PsdistError):
    def __init__(self, exit_status: int) -> None:
        """``exit_status``: of the job, which another rank has ended."""
        super().__init__("the job has ended; another rank has reported the cause")
        self.exit_status = exit_status


class ServersLostError(TransportError):
    def __init__(self, who: str, others: Sequence[str], *, of: str = "a part of the model") -> None:
        """Both copies of something are lost: ``who`` failed last, ``others`` before."""
        super().__init__(
            f"{who} and {', '.join(others)} have failed, and both copies of {of} are lost; restart "
            "the job (psdist run --resume continues from the last checkpoint)"
        )


class WaitTimeoutError(TransportError):
    """A wait exceeded ``failures.wait_timeout_s``."""


class ProtocolError(PsdistError):
    """A message that the protocol does not allow."""


class InvariantError(PsdistError):
    """A bug in psdist: please report it with the text of the error."""
