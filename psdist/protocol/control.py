"""The control messages: what ranks tell one another beside parameters and gradients.

Each travels as a header (:mod:`psdist.protocol.header`) followed by one msgpack map. Nothing
received is ever unpickled, imported or executed: a message is decoded with limits into one of the
frozen classes below, which pydantic checks: a field of another type is an error at the sender, too.

    data = encode_control(Leave(group=2, clock=17))
    decode_control(data)                  # raises ProtocolError on anything malformed

Longer than other modules: every message, with what it means, in one place.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeAlias

import msgpack
from pydantic import ConfigDict, FailFast, ValidationError
from pydantic.dataclasses import dataclass

from psdist.errors import InvariantError, ProtocolError
from psdist.mode_names import Mode

CONTROL_LIMIT_BYTES = 64 * 2**20
NOTE_BYTES = 4096
"""So much larger may be what carries another message (:class:`Append`)."""
_NOTE_BEGINS = b"\xa4type\xa5Noted"

# One error is told, so a list of millions of wrong items must not become millions of errors.
_Numbers: TypeAlias = Annotated[list[int], FailFast()]
_Payloads: TypeAlias = Annotated[list[bytes], FailFast()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """Base of the control messages; fields may be int, float, str, bytes, bool, lists and maps.

    Each is checked when it is made, by the sender as by the receiver: a value of another type is a
    pydantic.ValidationError (to the receiver of bytes a ProtocolError).
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup(Control):
    """Chief to every server: how parameters are cut and which optimizer runs
    (psdist.protocol.partition). ``max_norm``: to which servers clip the joint gradient of every
    iteration, where they sum it (sync); 0 for none. ``state``: what the optimizer's state
    holds that servers go on with (psdist.protocol.optimizer_state), nothing for a fresh one; its
    elements follow as :class:`StateValues`. ``order``: the set's chunks in the order in which all
    groups send them (psdist.protocol.send_order); none of them for ascending. ``restore``: the
    checkpoint that values and state come from, nothing where the chief sends them."""

    partition: bytes
    optimizer: str
    hyper: bytes
    max_norm: float = 0.0
    state: bytes = b""
    order: _Numbers = dataclasses.field(default_factory=list)
    restore: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateValues(Control):
    """Chief to a server: the optimizer state of a part of a chunk, the elements from ``start`` on.
    One at a time: the next one follows :class:`StateTaken`."""

    chunk: int
    start: int
    values: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTaken(Control):
    """A server's answer to :class:`StateValues`."""

    chunk: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWanted(Control):
    """Chief to a server, one at a time: the optimizer state of a part of a chunk, please.
    ``number`` counts how often the chief has begun to ask for the state of the whole set."""

    number: int
    chunk: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeld(Control):
    """The answer to :class:`StateWanted`: what the state of the chunk's pieces holds, and the
    elements of the part."""

    number: int
    chunk: int
    start: int
    described: bytes
    values: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Register(Control):
    """A group's leader to every server: from now on this group has a clock, which stands at
    ``clock``: 0, or where the checkpoint has it that the job goes on from."""

    group: int
    workers: _Numbers
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered(Control):
    """A server's answer to :class:`Register`; tells where the group's clock stands there."""

    group: int
    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Control):
    """A worker to a server, before the first push made under it.

    ``hyper``: the packed hyperparameters of all optimizer groups (psdist.protocol.optimizers);
    ``absent``: pieces without a gradient in the pushes that name this version.
    """

    version: int
    hyper: bytes
    absent: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspend(Control):
    """A group's leader to every server: the group waits in collective ``seq``; others need not
    wait for its iterations from ``clock`` on."""

    group: int
    clock: int
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume(Control):
    """Coordinator to every server: all workers have entered collective ``seq``; its groups count
    again. ``checkpoint``: first keep what this checkpoint contains."""

    seq: int
    checkpoint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Control):
    """A server's answer to :class:`Resume`."""

    seq: int
    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Written(Control):
    """A server or worker to the coordinator: my file of this checkpoint is on the disk."""

    checkpoint: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteFailed(Control):
    """A server or worker to the coordinator: there is no such file of mine, and why."""

    checkpoint: str
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SumsOfSquares(Control):
    """A server to every other one that holds chunks of the set: all of its chunks are held.
    ``round``: how many rounds were over here before; ``values``: of each block of its chunks, in
    their order, the sum of the squares of the weighted mean (float64, little-endian)."""

    round: int
    values: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRound(Control):
    """Where groups may miss rounds, the server that decides to every other one that holds chunks of
    the set: decision ``number`` (0, 1, 2 ...) is that ``round`` is stepped with the updates of
    ``groups``, ascending, without those of ``missed``."""

    number: int
    round: int
    groups: _Numbers
    missed: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Control):
    """A group's leader to every server: the group's script has finished after ``clock``
    iterations."""

    group: int
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Enter(Control):
    """A worker to the coordinator: I have come to collective number ``seq``, called ``name``.

    ``payload`` is compared with what others bring, ``values`` (float64, little-endian) are summed.
    """

    worker: int
    seq: int
    name: str
    payload: bytes
    values: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected(Control):
    """Coordinator to every worker: what all brought to collective ``seq``, or why it failed.

    Different payloads once each, in the order of the workers that brought them first, and no more
    than a few: a message does not grow with the workers. ``runs``: workers from 0 on, as pairs of
    an index into ``payloads`` (len(payloads) for one that is not told) and for how many workers on
    end. ``values``: the sums in worker order, where all payloads were equal.
    """

    seq: int
    payloads: _Payloads
    runs: _Numbers
    values: bytes
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Control):
    """Worker to coordinator: my script has finished. ``statistics``: for summary.json. ``left``:
    from the leader of a group, with replication, the iterations of the group by set."""

    worker: int
    statistics: dict[str, Any]
    left: _Numbers = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics(Control):
    """Worker to coordinator: one line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Control):
    """A worker to the coordinator: where it stands. A few times a second, for displays of progress,
    and always before :class:`Enter` and :class:`Done`, which are judged by it. Counts that are not
    known are 0.

    The iterations before ``loader_until`` were made of batches of psdist loaders with
    ``loader_batches`` batches in a pass: all iterations while ``loader_until`` is ``clock``.
    """

    worker: int
    clock: int
    samples: int
    loader_batches: int = 0
    loader_until: int = 0
    epoch: int = 0
    """Pass over the training data, counted from 1; ``epochs``: how many there will be."""
    epochs: int = 0
    batch: int = 0
    """Batches of this pass that were used; ``batches``: how many it has."""
    batches: int = 0
    staleness: int = 0
    """Of what it uses next, at its stalest."""
    waited_s: float = 0.0
    """Seconds that it has waited for servers in ``optimizer.step()``."""
    first_round: int = 0
    own_us: _Numbers = dataclasses.field(default_factory=list)
    """Of a group's leader where psdist chooses the mode: what each round from ``first_round`` on
    has taken, of the first set, without waiting for servers, in microseconds;"""
    waits_us: _Numbers = dataclasses.field(default_factory=list)
    """and that waiting."""
    errors_ppm: _Numbers = dataclasses.field(default_factory=list)
    """Of a group's leader where psdist chooses the codecs: ||p - C(p)|| / ||p|| of what it has
    pushed in each of these rounds, in millionths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish(Control):
    """Coordinator to every server: all workers are done. Send your statistics and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Control):
    """Answer to :class:`Finish`."""

    server: int
    statistics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Control):
    """Coordinator to every worker: the job is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Control):
    """Any rank to coordinator: I have failed with this text. Print it once and end the job."""

    heading: str
    text: str
    exit_status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Control):
    """Who ends the job to everybody, where MPI's Abort ends nobody else: people know why; end
    now."""

    exit_status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WhoIsMissing(Control):
    """A worker that has waited long, to a server: whom does this chunk wait for?"""

    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing(Control):
    """The answer to :class:`WhoIsMissing`: groups whose updates the chunk waits for."""

    chunk: int
    groups: _Numbers
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class WhoIsAbsent(Control):
    """Worker to coordinator: I have waited long in collective ``seq``."""

    worker: int
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent(Control):
    """Answer to :class:`WhoIsAbsent`: the first workers that have not come, and how many there
    are."""

    seq: int
    workers: _Numbers
    num_absent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Held(Control):
    """Worker to coordinator: I wait at an iteration boundary in pause ``number``, for ``what``.
    ``clocks``: finished iterations by parameter set. ``hold``: how often this worker has held in
    the job."""

    worker: int
    number: int
    hold: int
    what: str
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked(Control):
    """Worker to coordinator, while a pause is requested: in this iteration of this set I may wait
    for other workers before I reach a boundary."""

    worker: int
    number: int
    set_index: int
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseRequest(Control):
    """Coordinator to a worker: hold at your next iteration boundary, in pause ``number``."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Proceed(Control):
    """Coordinator to a worker: others wait for you. Continue, and hold at your next boundary."""

    number: int
    hold: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused(Control):
    """Coordinator to every worker: all workers hold. Do now what the pause is for."""

    number: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseAborted(Control):
    """Coordinator to a worker: some worker cannot hold any more. Continue."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOver(Control):
    """Coordinator to the replica of a failed server: serve its shard in its place."""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver(Control):
    """Answer to :class:`TakeOver`: I serve the shard from now on."""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepCopy(Control):
    """Coordinator to a server or spare: the shard of ``server`` has no replica. Keep its
    ``number``-th one; the replica at the start is number 1."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepsCopy(Control):
    """Answer to :class:`KeepCopy`: I take log entries of that shard from now on."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FillCopy(Control):
    """Coordinator to the process that serves ``server``: send a snapshot of that shard to
    ``keeper``, which keeps the ``number``-th replica."""

    server: int
    keeper: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFilled(Control):
    """Answer to :class:`FillCopy`: the replica is complete. From now on nothing is acknowledged
    that it lacks."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLost(Control):
    """Coordinator to the process that serves ``server``: the spare with its replica has failed.
    Continue without a replica. (For a failed server, :class:`Moved` says so.)"""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved(Control):
    """Coordinator to every rank: ``server`` has failed. Send what is for it to ``host``, a server
    or spare that has taken its place."""

    server: int
    host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Departed(Control):
    """Coordinator to the process that serves a failed server's shard: ``worker`` has failed after
    its :class:`Done`. ``left``: as there. The failed server may have had its leave."""

    worker: int
    left: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Control):
    """Worker to coordinator: my script has called psdist.init with these ``settings``, for job
    ``job`` of this world, counted from 1."""

    worker: int
    job: int
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Control):
    """Coordinator to every rank: every worker has called and the job begins. With an error, to the
    workers that have called: why it does not."""

    job: int
    settings: dict[str, Any]
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone(Control):
    """Worker to coordinator: my process ends, outside of any job."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End(Control):
    """Coordinator to every other server: the process of the last worker ends. End, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evict(Control):
    """Coordinator to every server: in view ``generation`` the workers ``dead``, all that have
    failed in the job, are evicted. Answered with :class:`EvictAck`."""

    generation: int
    dead: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictAck(Control):
    """Server to coordinator: the groups of evicted workers are out of every chunk's clocks, and
    their pushes that had arrived are decided. ``reached``: by set and, within it, by worker in
    :class:`Evict`, the most updates of its group that a chunk contains or will contain."""

    generation: int
    server: int
    reached: _Numbers = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipChanged(Control):
    """Coordinator to every worker: all servers have evicted ``dead`` (as in :class:`Evict`).
    ``chief``: the worker with the chief's duties. The other workers of their groups are out of the
    job, too, unless groups shrink (``on_group_death``)."""

    generation: int
    dead: _Numbers
    chief: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup(Control):
    """Worker to coordinator: my group has lost ``num_lost`` workers. ``standing``: the group
    operations that this worker has finished, and what others need to reduce with it again
    (psdist.workers.reforming)."""

    worker: int
    num_lost: int
    standing: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped(Control):
    """Coordinator's answer to :class:`Regroup` when all workers that are left have sent it: what
    each sent, by place."""

    num_lost: int
    standings: _Payloads


@dataclass(frozen=True, kw_only=True, slots=True)
class TakePlace(Control):
    """Coordinator to a spare worker: run the script and join the job in place of ``worker``, which
    has failed."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReady(Control):
    """Answer to :class:`TakePlace`, from ``worker``: my script has prepared ``num_sets`` parameter
    sets, and I can join."""

    worker: int
    num_sets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitWorker(Control):
    """Coordinator to every server, while all workers wait in a collective, before its
    :class:`Resume`: the group of ``worker`` has clocks from now on, which begin at ``clocks`` (by
    set)."""

    worker: int
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinAccepted(Control):
    """Coordinator to a spare worker, when all servers have taken :class:`AdmitWorker`: you are in
    the job and continue at ``clocks`` (by set). ``seq``: number of the last collective;
    ``generation``, ``dead``, ``chief``: as in :class:`MembershipChanged`; ``meeting``: number of
    the last pause; ``state``: name of the state from which the script continues."""

    worker: int
    clocks: _Numbers
    state: str
    seq: int
    generation: int
    dead: _Numbers
    chief: int
    meeting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposeMode(Control):
    """Coordinator to every server: the mode is to change for the ``number``-th time. Hold what is
    for rounds after the last round whose parameters you have sent."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeProposed(Control):
    """Answer to :class:`ProposeMode`: by parameter set, the last round whose parameters this server
    has sent, -1 for none."""

    number: int
    server: int
    rounds: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMode(Control):
    """Coordinator to every server: this mode rules from the round in ``rounds`` on (by set; later
    sets from the start). ``staleness``: 0 except in ssp. ``level``: the codec level from then on,
    -1 if codecs do not change."""

    number: int
    rounds: _Numbers
    mode: Mode
    staleness: int
    level: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginCodecs(Control):
    """A server to every worker, before the first parameters for this round: pushes and replies of
    this round and later ones have the codecs of this level, by the run's ``number``-th change."""

    number: int
    round: int
    level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTook(Control):
    """Group leader to coordinator, before it pushes this round: microseconds of each local step."""

    worker: int
    round: int
    step_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReported(Control):
    """Worker to coordinator, before it asks for the steps of ``round``: the script has reported
    ``count`` losses with sum ``total`` since the last such message."""

    worker: int
    round: int
    count: int
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AskSteps(Control):
    """Worker to coordinator: how many local steps does each group make in this term
    (psdist.controller.steps)? Sent once for each term. All workers get the same
    :class:`StepsFixed`."""

    worker: int
    loader: int
    number: int
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsFixed(Control):
    """Answer to :class:`AskSteps`: local steps, by group."""

    loader: int
    number: int
    block: int
    steps: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(Control):
    """Coordinator to standby: the next log entry, a ``message`` of ``peer``, or (without a message)
    the failure of ``peer``, described by ``who``. Actions that follow leave after
    :class:`AppendAck`. ``done``: files and output are done up to this entry."""

    number: int
    peer: int
    message: bytes
    who: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendAck(Control):
    """Standby's answer to :class:`Append`: I have stored the entry."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardUpTo(Control):
    """Coordinator to a rank: the standby has stored the first ``count`` of your messages. You need
    not send them again (psdist.protocol.coordinator_line)."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedUpTo(Control):
    """Rank to coordinator: I have the first ``count`` of your messages."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Nominate(Control):
    """Coordinator to every rank: ``standby`` is to be the next standby. It becomes that with
    :class:`Entrust`, which follows when every rank has received this."""

    deputy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrust(Control):
    """Coordinator to the nominee: a part of the coordinator's snapshot, as of log entry ``number``.
    The last part is answered with :class:`AppendAck`. ``told``: what users have been told
    (psdist.ranks.reporting)."""

    number: int
    part: int
    num_parts: int
    state: bytes
    told: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderChanged(Control):
    """Standby to every rank: the coordinator has failed. From now on it runs in the process of
    ``host``, which is this one. ``heard``: number of your messages that the new coordinator has.
    ``is_over``: the job was complete, which makes this a :class:`Stop`. ``generation``, ``dead``,
    ``chief``: as in :class:`MembershipChanged`, for a worker that was out and may not have received
    it."""

    heard: int
    is_over: bool
    host: int
    generation: int = 0
    dead: _Numbers = dataclasses.field(default_factory=list)
    chief: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoined(Control):
    """Answer to :class:`LeaderChanged`, before anything else: number of the coordinator's messages
    that this rank has received."""

    received: int


_SENT_AS = {
    "Append": "Noted",
    "AppendAck": "NotedToo",
    "Nominate": "Appoint",
    "LeaderChanged": "Succeeds",
    "Rejoined": "Follows",
    "Evict": "Bury",
    "EvictAck": "Buried",
    "MembershipChanged": "Survive",
    "TakePlace": "Replace",
    "JoinReady": "Ready",
    "AdmitWorker": "Admit",
    "JoinAccepted": "Welcome",
    "PauseRequest": "Propose",
    "Blocked": "Busy",
    "Proceed": "Release",
    "Paused": "Commit",
    "PauseAborted": "Cancel",
}
"""Names of types on the wire, where they are not those of the classes."""
_NAMES = {cls: _SENT_AS.get(cls.__name__, cls.__name__) for cls in Control.__subclasses__()}
_TYPES = {name: cls for cls, name in _NAMES.items()}


def encode_control(message: Control) -> bytes:
    """One msgpack map: {"type": ..., field: value, ...}."""
    body: dict[str, Any] = {"type": _NAMES[type(message)]}
    for field in dataclasses.fields(message):
        body[field.name] = getattr(message, field.name)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    if len(packed) > (limit := _limit(packed)):
        raise InvariantError(
            f"control message {body['type']} of {len(packed)} bytes, limit {limit}"
        )
    return packed


def decode_control(data: bytes | bytearray | memoryview) -> Control:
    """The message, or :class:`ProtocolError`: unknown type, missing, extra or mistyped field."""
    if len(data) > (limit := _limit(data)):
        raise ProtocolError(f"control message of {len(data)} bytes, limit {limit}")
    try:
        # msgpack bounds every length by that of the data; the data was bounded above.
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"control message that is not msgpack: {error}") from error
    name = body.pop("type", None) if isinstance(body, dict) else None
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"control message of unknown type {name!r}")
    try:
        return cls(**body)
    except ValidationError as error:
        raise ProtocolError(f"control message {name}: {_first_fault(error)}") from None
    except TypeError:
        raise ProtocolError(f"control message {name}: a field that has no name") from None


def _limit(data: bytes | bytearray | memoryview) -> int:
    """Of a message that begins like this."""
    is_note = bytes(data[1 : 1 + len(_NOTE_BEGINS)]) == _NOTE_BEGINS
    return CONTROL_LIMIT_BYTES + NOTE_BYTES * is_note


def _first_fault(error: ValidationError) -> str:
    """``field workers.1 must be a valid integer``, on one line whatever was received."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"]))[:80]
    if not where.isprintable():
        where = repr(where)
    if fault["type"] == "missing":
        return f"field {where} is missing"
    if fault["type"] == "unexpected_keyword_argument":
        return f"field {where} is unknown"
    return f"field {where} {fault['msg'].replace('Input should be', 'must be', 1)}"
