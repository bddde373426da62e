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
"""So much larger may be what carries another message (:class:`Noted`)."""
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
    """Registrar to every server: collective ``seq`` is over, its groups count again.
    ``checkpoint``: before they do, keep what there is for the checkpoint of this name."""

    seq: int
    checkpoint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Control):
    """A server's answer to :class:`Resume`."""

    seq: int
    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Written(Control):
    """A server or worker to the registrar: my file of this checkpoint is on the disk."""

    checkpoint: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteFailed(Control):
    """A server or worker to the registrar: there is no such file of mine, and why."""

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
    """A worker to the registrar: I have come to collective number ``seq``, called ``name``.

    ``payload`` is compared with what others bring, ``values`` (float64, little-endian) are summed.
    """

    worker: int
    seq: int
    name: str
    payload: bytes
    values: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected(Control):
    """Registrar to every worker: what all brought to collective ``seq``, or why it failed.

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
    """A worker to the registrar: my script has finished; ``statistics`` go into summary.json.
    ``left``: where servers have buddies, by set after how many iterations its group has left, of
    which it is the leader."""

    worker: int
    statistics: dict[str, Any]
    left: _Numbers = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics(Control):
    """A worker to the registrar: one line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Control):
    """A worker to the registrar: where it stands. A few times a second, for displays of progress,
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
    """Registrar to every other server: all workers are done; send your statistics and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Control):
    """A server's answer to :class:`Finish`."""

    server: int
    statistics: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Control):
    """Registrar to every worker: the job is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Control):
    """Anybody to the registrar: I have failed with this text; print it once and end the job."""

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
    """A worker that has waited long in collective ``seq``, to the registrar."""

    worker: int
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Absent(Control):
    """The answer to :class:`WhoIsAbsent`: the first of those who have not come, and how many."""

    seq: int
    workers: _Numbers
    num_absent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Held(Control):
    """A worker to the registrar: I wait at a boundary of iterations, after ``clocks`` of each set,
    in meeting ``number``, for ``what``; for the ``hold``-th time in this job."""

    worker: int
    number: int
    hold: int
    what: str
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy(Control):
    """A worker to the registrar, while a meeting is open: I may wait for others in this iteration
    of this set before I come to a boundary."""

    worker: int
    number: int
    set_index: int
    clock: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Propose(Control):
    """Registrar to a worker: hold at your next boundary, in meeting ``number``."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Control):
    """Registrar to a worker: others wait for you; go on, and hold at your next boundary."""

    number: int
    hold: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Control):
    """Registrar to every worker: all hold; do now what the meeting is for."""

    number: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(Control):
    """Registrar to a worker: not everybody can come any more; go on."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOver(Control):
    """Registrar to the buddy of a server that has died: go on with its shard in its place."""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver(Control):
    """The buddy's answer to :class:`TakeOver`: the shard is served here from now on."""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepCopy(Control):
    """Registrar to a server: the shard of ``server`` has one copy left; keep another one, the
    ``number``-th that there is (its buddy's at the start was the first)."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepsCopy(Control):
    """The answer to :class:`KeepCopy`: records of that shard are taken from now on."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FillCopy(Control):
    """Registrar to the process that serves ``server``: fill the ``number``-th copy of that shard,
    which ``keeper``, a server or a spare, keeps."""

    server: int
    keeper: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFilled(Control):
    """The answer to :class:`FillCopy`: the copy is the shard, and nothing is acknowledged any more
    that is not in it."""

    server: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLost(Control):
    """Registrar to the process that serves ``server``: the spare that had the copy of that shard,
    or was to have it, has died; go on alone. (Of a server that has died :class:`Moved` says so.)"""

    server: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved(Control):
    """Registrar to everybody: ``server`` has died, and what is sent to it goes to ``host``, another
    server or a spare, from now on, which has taken its place."""

    server: int
    host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Departed(Control):
    """Registrar to who has taken a dead server's place: ``worker`` was done, with what it said in
    :class:`Done`, and has died; what it had told the dead server nobody else will say again."""

    worker: int
    left: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin(Control):
    """A worker to the registrar: my script has called psdist.init, with these ``settings``, for job
    number ``job`` of this world, counted from 1."""

    worker: int
    job: int
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun(Control):
    """Registrar to everybody: every worker has called, and the job begins; or, to the workers that
    have called, why it does not."""

    job: int
    settings: dict[str, Any]
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone(Control):
    """A worker to the registrar: my process ends, outside of any job."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End(Control):
    """Registrar to every other server: the last worker's process ends; end, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bury(Control):
    """Registrar to every server: from membership generation ``generation`` on these workers are
    dead, all that have died in the job. Answered with :class:`Buried`."""

    generation: int
    dead: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Buried(Control):
    """A server to the registrar: the groups of the dead are out of every chunk's clocks here, and
    what had arrived of them is decided. ``reached``: by set, and in each by those who are dead in
    :class:`Bury`, the most updates of its group that a chunk contains, or will contain."""

    generation: int
    server: int
    reached: _Numbers = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survive(Control):
    """Registrar to every worker: all servers have taken in this generation. ``dead``: as in
    :class:`Bury`; ``chief``: who has the chief's duties now. Whoever is in the group of one of the
    dead is not in the job any more, unless groups re-form (``on_group_death``)."""

    generation: int
    dead: _Numbers
    chief: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup(Control):
    """A worker to the registrar: its group has lost ``num_lost`` workers. ``standing``: the group
    operations that this worker has finished, and what the others need to reduce with it again
    (psdist.workers.reforming)."""

    worker: int
    num_lost: int
    standing: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped(Control):
    """The registrar's answer, when all who are left have told: what each did, by place."""

    num_lost: int
    standings: _Payloads


@dataclass(frozen=True, kw_only=True, slots=True)
class Replace(Control):
    """Registrar to a substitute: run the script, and join the job in place of ``worker``, which has
    died."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready(Control):
    """A substitute's answer to :class:`Replace`, as ``worker``: its script has prepared
    ``num_sets`` parameter sets, and it may join."""

    worker: int
    num_sets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit(Control):
    """Registrar to every server, while all workers wait in a collective, in front of its
    :class:`Resume`: the group of this substitute has clocks from now on, which stand at ``clocks``
    (by set)."""

    worker: int
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(Control):
    """Registrar to a substitute, when all servers have taken :class:`Admit` in: it is a worker of
    the job from now on, which goes on at ``clocks`` (by set). ``seq``: number of the collective
    that is over; ``generation``, ``dead``, ``chief``: as in :class:`Survive`; ``meeting``: number
    of the last one that is over; ``state``: the name of what its script goes on with."""

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
    """Registrar to every server: the mode is to change, for the ``number``-th time. From now on
    keep back what is for rounds later than any for which you have sent parameters."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeProposed(Control):
    """A server's answer to :class:`ProposeMode`: for each parameter set the highest round for which
    it has sent parameters, -1 for none."""

    number: int
    server: int
    rounds: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMode(Control):
    """Registrar to every server: the mode is this one, in each parameter set from the round in
    ``rounds`` on; in sets that come later from the start. ``staleness`` is 0 but for ssp.
    ``level``: where psdist chooses the codecs, which of them rule from there on; -1 elsewhere,
    where they are none of what changes."""

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
    """A group's leader to the registrar, before it pushes this round: what each local step has
    taken, in microseconds."""

    worker: int
    round: int
    step_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReported(Control):
    """A worker to the registrar, before it asks for the steps of round ``round``: its script has
    reported ``count`` losses since the last message of this kind, with the sum ``total``."""

    worker: int
    round: int
    count: int
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AskSteps(Control):
    """A worker to the registrar: how many local steps does each group make in this term
    (psdist.controller.steps)? Once for each term that it comes to; answered with
    :class:`StepsFixed`, alike for all workers."""

    worker: int
    loader: int
    number: int
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsFixed(Control):
    """The registrar's answer to :class:`AskSteps`: by group."""

    loader: int
    number: int
    block: int
    steps: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted(Control):
    """Registrar to its deputy: what it was told, or (no ``message``) that ``peer`` has died, as
    ``who``. What follows from it leaves when :class:`NotedToo` has come. ``done``: what concerns
    files and people has been done up to this number."""

    number: int
    peer: int
    message: bytes
    who: str
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotedToo(Control):
    """The deputy's answer to :class:`Noted`: two ranks know it."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardUpTo(Control):
    """Registrar to a rank: so many of your messages are known to the deputy, too: they need not be
    said again (psdist.protocol.registrar_line)."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedUpTo(Control):
    """A rank to the registrar: so many of your messages are here; likewise."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Appoint(Control):
    """Registrar to everybody: if I die, nobody but ``deputy`` goes on in my place. It does when it
    has been told all that I know (:class:`Entrust`), which is when everybody has received this."""

    deputy: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrust(Control):
    """Registrar to its next deputy: all that it knows (psdist.servers.protocol.succession), as of
    its note ``number``; the answer to the last part is :class:`NotedToo`. ``told``: likewise, what
    people have been told (psdist.ranks.telling)."""

    number: int
    part: int
    num_parts: int
    state: bytes
    told: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Succeeds(Control):
    """Deputy to everybody: the registrar has died, and is found in the process of ``host``, which
    is mine, from now on. ``heard``: so many of your messages are known here. ``is_over``: the job
    was complete, which makes this :class:`Stop`; ``generation``, ``dead``, ``chief``: to a worker
    that was out by then, and may not have heard so, :class:`Survive`."""

    heard: int
    is_over: bool
    host: int
    generation: int = 0
    dead: _Numbers = dataclasses.field(default_factory=list)
    chief: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Follows(Control):
    """A rank's answer to :class:`Succeeds`, before it says anything else: so many messages of the
    registrar have come here."""

    received: int


_TYPES: dict[str, type[Control]] = {cls.__name__: cls for cls in Control.__subclasses__()}


def encode_control(message: Control) -> bytes:
    """One msgpack map: {"type": ..., field: value, ...}."""
    body: dict[str, Any] = {"type": type(message).__name__}
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
