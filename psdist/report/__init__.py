"""Reports of a run: logs by rank, progress, the run directory and its files.

Here are the packets between ranks and their parent, ``psdist run -n N``, on a socket. ``meter``
turns them into words, and ``progress`` shows these if no parent does.

A packet is one JSON object of at most PACKET_BYTES. psdist.commands.launch is the parent's end,
psdist.ranks.parent_link a rank's. Descriptors (of pipes, of the parent's standard input) travel
together with a packet, but are no part of it.

    data = encode(PhaseReached(phase="placing"))
    decode_fact(data)                # raises ProtocolError on anything malformed
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from psdist.errors import InvariantError, ProtocolError

PACKET_BYTES: Final = 16384
MAX_VALUES: Final = 8
"""Logged values that are shown; a display has no room for more."""

PARENT_VARIABLE: Final = "PSDIST_INTERNAL_PARENT"
"""The path of the parent's socket."""
KERNEL_VARIABLE: Final = "PSDIST_INTERNAL_PARENT_KERNEL"
"""The boot id of the parent's host: elsewhere the path means nothing."""

Phase: TypeAlias = Literal[
    "connecting", "placing", "importing", "starting", "preparing", "training"
]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Phases before training, in order. A server skips ``starting`` (the script's own beginning) and
``preparing``, and reports ``training`` once it serves."""

Role: TypeAlias = Literal["worker", "server", "registrar", "spare"]
"""The coordinator is a server, too."""

_T = TypeVar("_T")
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Name = Annotated[str, Field(max_length=64)]


class _Packet(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# -- from a rank to the parent -----------------------------------------------------------------


class Hello(_Packet):
    """A rank has started."""

    kind: Literal["hello"] = "hello"
    rank: _Count


class PhaseReached(_Packet):
    kind: Literal["phase"] = "phase"
    phase: Phase


class RoleTaken(_Packet):
    """The ranks have agreed on who does what; from now on this one can be asked to end the job."""

    kind: Literal["role"] = "role"
    who: str = Field(max_length=512)
    """For messages: "worker 1 (rank 3 on n2)"."""
    role: Role


class InputWanted(_Packet):
    """The chief is about to run the script, which may read standard input."""

    kind: Literal["input"] = "input"


class Training(_Packet):
    """How the job stands, from the coordinator, a few times a second. Counts that are not known
    are 0."""

    kind: Literal["training"] = "training"
    at_s: float
    """Seconds since the coordinator started."""
    mode: _Name
    behind: _Count
    ahead: _Count
    """Iterations finished by the groups that have finished fewest and most."""
    samples: _Count
    epoch: _Count = 0
    """The epoch of the slowest worker, counted from 1."""
    epochs: _Count = 0
    batch: _Count = 0
    """Batches of that epoch that this worker has used."""
    batches: _Count = 0
    """Batches of one epoch."""
    staleness: _Count = 0
    """The greatest that a worker has last seen."""
    slowest: _Count | None = None
    """The group that others wait for, or run ahead of."""
    others_wait: float = Field(default=0.0, ge=0.0, le=1.0)
    """Part of their time that the other groups spend waiting more than it."""
    last: dict[_Name, _Name] = Field(default_factory=dict, max_length=MAX_VALUES)
    """The chief's last value of every logged name."""


class Failed(_Packet):
    """This rank ends the job with this status; it has printed the reason."""

    kind: Literal["failed"] = "failed"
    status: Annotated[int, Field(ge=0, le=255)]


class Finished(_Packet):
    """This rank has done its part; it needs its parent no more."""

    kind: Literal["finished"] = "finished"


class RankSurvived(_Packet):
    """From the coordinator: this rank has failed, and the job continues."""

    kind: Literal["survived"] = "survived"
    rank: _Count


# -- from the parent to a rank -----------------------------------------------------------------


class Welcome(_Packet):
    """The answer to Hello, with pipes that replace standard output and error."""

    kind: Literal["welcome"] = "welcome"


class SignalCame(_Packet):
    """The parent got this signal: the script gets it, once."""

    kind: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, le=64)]


class EndNow(_Packet):
    """To the coordinator: workers have not ended the job, so end it, interrupted by this signal."""

    kind: Literal["end"] = "end"
    number: Annotated[int, Field(ge=1, le=64)]


class InputGiven(_Packet):
    """The answer to InputWanted, with the parent's standard input if it has one."""

    kind: Literal["input"] = "input"


Fact: TypeAlias = (
    Hello | PhaseReached | RoleTaken | InputWanted | Training | Failed | Finished | RankSurvived
)
Order: TypeAlias = Welcome | SignalCame | EndNow | InputGiven

_FACTS: Final[TypeAdapter[Fact]] = TypeAdapter(Annotated[Fact, Field(discriminator="kind")])
_ORDERS: Final[TypeAdapter[Order]] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


def encode(packet: Fact | Order) -> bytes:
    data = packet.model_dump_json().encode()
    if len(data) > PACKET_BYTES:
        raise InvariantError(f"a packet of {len(data)} bytes, limit {PACKET_BYTES}: {data[:80]!r}")
    return data


def decode_fact(data: bytes) -> Fact:
    """Return a rank's packet. Raises ProtocolError for anything else."""
    return _decode(_FACTS, data)


def decode_order(data: bytes) -> Order:
    """Return the parent's packet. Raises ProtocolError for anything else."""
    return _decode(_ORDERS, data)


def _decode(adapter: TypeAdapter[_T], data: bytes) -> _T:
    if len(data) > PACKET_BYTES:
        raise ProtocolError(f"a packet of more than {PACKET_BYTES} bytes")
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"a packet that is none: {data[:80]!r}") from error
