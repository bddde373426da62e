"""The control messages: what ranks send one another besides parameters and gradients.

Each travels as a header (:mod:`psdist.protocol.header`) followed by one msgpack map.

    data = encode_control(Leave(group=2, clock=17))
    decode_control(data)                  # raises ProtocolError on anything malformed

Longer than other modules: every message, with what it means, in one place.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

from psdist.mode_names import Mode
from psdist.protocol.messages import Message, Numbers, Payloads

CONTROL_LIMIT_BYTES: Final = 64 * 2**20
NOTE_BYTES: Final = 4096
"""Maximum bytes of :class:`Append` without the message that it carries."""


class Control(Message, sent_as=None):
    """Base of the control messages."""

    WHAT: ClassVar[str] = "control message"
    MOST_BYTES: ClassVar[int] = CONTROL_LIMIT_BYTES


class ForCoordinator(Control, sent_as=None):
    """Base of the messages for the coordinator. Other messages to its id are for the shard of
    server 0."""


class SaidToCoordinator(ForCoordinator, sent_as=None):
    """Base of the messages to the coordinator that are counted and kept until the standby has them
    (psdist.protocol.coordinator_line)."""


class SaidByCoordinator(Control, sent_as=None):
    """Base of the messages of the coordinator that are counted and kept until they are received."""


def encode_control(message: Control) -> bytes:
    """Return the message as bytes."""
    return message.encode()


def decode_control(data: bytes | bytearray | memoryview) -> Control:
    """Return the message. Raises :class:`ProtocolError` for anything else."""
    return Control.decode(data)


class Setup(Control):
    """Chief to every server: how parameters are cut and which optimizer runs
    (psdist.protocol.partition). ``max_norm``: limit to which servers clip the joint gradient of
    every iteration, where they sum it (sync); 0 for none. ``state``: the optimizer state with which
    servers begin (psdist.protocol.optimizer_state), empty for a fresh one; its elements follow as
    :class:`StateValues`. ``order``: the set's chunks in the order in which all groups send them
    (psdist.protocol.send_order); empty for ascending. ``restore``: the checkpoint that values and
    state come from, nothing where the chief sends them. ``tables``: the tables whose rows the set
    has instead of values (psdist.tables.specs); empty for parameters."""

    partition: bytes
    optimizer: str
    hyper: bytes
    max_norm: float = 0.0
    state: bytes = b""
    order: Numbers = dataclasses.field(default_factory=list)
    restore: str = ""
    tables: bytes = b""


class StateValues(Control):
    """Chief to a server: the optimizer state of a part of a chunk, the elements from ``start`` on.
    One at a time: the next one follows :class:`StateTaken`."""

    chunk: int
    start: int
    values: bytes


class StateTaken(Control):
    """A server's answer to :class:`StateValues`."""

    chunk: int
    start: int


class StateWanted(Control):
    """Chief to a server, one at a time: the optimizer state of a part of a chunk, please.
    ``number`` counts how often the chief has begun to ask for the state of the whole set."""

    number: int
    chunk: int
    start: int


class StateHeld(Control):
    """The answer to :class:`StateWanted`: what the state of the chunk's pieces holds, and the
    elements of the part."""

    number: int
    chunk: int
    start: int
    described: bytes
    values: bytes


class Register(Control):
    """A group's leader to every server: from now on this group has a clock, which begins at
    ``clock``: 0, or the clock in the checkpoint from which the job resumes."""

    group: int
    workers: Numbers
    clock: int


class Registered(Control):
    """A server's answer to :class:`Register`; tells where the group's clock stands there."""

    group: int
    server: int


class Settings(Control):
    """A worker to a server, before the first push made under it.

    ``hyper``: the packed hyperparameters of all optimizer groups (psdist.protocol.optimizers);
    ``absent``: pieces without a gradient in the pushes that name this version.
    """

    version: int
    hyper: bytes
    absent: Numbers


class Suspend(Control):
    """A group's leader to every server: the group waits in collective ``seq``; others need not
    wait for its iterations from ``clock`` on."""

    group: int
    clock: int
    seq: int


class Resume(SaidByCoordinator):
    """Coordinator to every server: all workers have entered collective ``seq``; its groups count
    again. ``checkpoint``: first keep what this checkpoint contains."""

    seq: int
    checkpoint: str = ""


class Resumed(SaidToCoordinator):
    """A server's answer to :class:`Resume`."""

    seq: int
    server: int


class Written(SaidToCoordinator):
    """A server or worker to the coordinator: my file of this checkpoint is on the disk."""

    checkpoint: str
    num_bytes: int
    crc32: int


class WriteFailed(SaidToCoordinator):
    """A server or worker to the coordinator: there is no such file of mine, and why."""

    checkpoint: str
    problem: str


class SumsOfSquares(Control):
    """A server to every other one that holds chunks of the set: all of its chunks are held.
    ``round``: how many rounds were over here before; ``values``: of each block of its chunks, in
    their order, the sum of the squares of the weighted mean (float64, little-endian)."""

    round: int
    values: bytes


class CloseRound(Control):
    """Where groups may miss rounds, the server that decides to every other one that holds chunks of
    the set: decision ``number`` (0, 1, 2 ...) is that ``round`` is stepped with the updates of
    ``groups``, ascending, without those of ``missed``."""

    number: int
    round: int
    groups: Numbers
    missed: Numbers


class Leave(Control):
    """A group's leader to every server: the group's script has finished after ``clock``
    iterations."""

    group: int
    clock: int


class Enter(SaidToCoordinator):
    """A worker to the coordinator: I have come to collective number ``seq``, called ``name``.

    ``payload`` is compared with what others bring, ``values`` (float64, little-endian) are summed.
    """

    worker: int
    seq: int
    name: str
    payload: bytes
    values: bytes = b""


class Collected(SaidByCoordinator):
    """Coordinator to every worker: what all brought to collective ``seq``, or why it failed.

    Different payloads once each, in the order of the workers that brought them first, and no more
    than a few: a message does not grow with the workers. ``runs``: workers from 0 on, as pairs of
    an index into ``payloads`` (len(payloads) for one that is not told) and for how many workers on
    end. ``values``: the sums in worker order, where all payloads were equal.
    """

    seq: int
    payloads: Payloads
    runs: Numbers
    values: bytes
    error: str


class Done(SaidToCoordinator):
    """Worker to coordinator: my script has finished. ``statistics``: for summary.json. ``left``:
    from the leader of a group, with replication, the iterations of the group by set."""

    worker: int
    statistics: dict[str, Any]
    left: Numbers = dataclasses.field(default_factory=list)


class Metrics(SaidToCoordinator):
    """Worker to coordinator: one line for metrics.jsonl."""

    line: dict[str, Any]


class Progress(SaidToCoordinator):
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
    """Staleness of the parameters that it uses next, at most."""
    waited_s: float = 0.0
    """Seconds that it has waited for servers in ``optimizer.step()``."""
    first_round: int = 0
    own_us: Numbers = dataclasses.field(default_factory=list)
    """From a group's leader where psdist chooses the mode: time of each round from ``first_round``
    on, of the first set, without waiting for servers, in microseconds."""
    waits_us: Numbers = dataclasses.field(default_factory=list)
    """Time of that waiting, in microseconds."""
    errors_ppm: Numbers = dataclasses.field(default_factory=list)
    """From a group's leader where psdist chooses the codecs: ||p - C(p)|| / ||p|| of its pushes in
    each of these rounds, in millionths."""


class Finish(SaidByCoordinator):
    """Coordinator to every server: all workers are done. Send your statistics and end."""


class Finished(SaidToCoordinator):
    """Answer to :class:`Finish`."""

    server: int
    statistics: dict[str, Any]


class Stop(SaidByCoordinator):
    """Coordinator to every worker: the job is complete."""


class Failure(ForCoordinator):
    """Any rank to coordinator: I have failed with this text. Print it once and end the job."""

    heading: str
    text: str
    exit_status: int


class Ended(Control):
    """The rank that ends the job to every other rank, where MPI's Abort ends only itself: the error
    is printed already; end now."""

    exit_status: int


class WhoIsMissing(Control):
    """A worker that has waited long, to a server: whom does this chunk wait for?"""

    chunk: int


class Missing(Control):
    """The answer to :class:`WhoIsMissing`: groups whose updates the chunk waits for."""

    chunk: int
    groups: Numbers
    clocks: Numbers


class WhoIsAbsent(ForCoordinator):
    """Worker to coordinator: I have waited long in collective ``seq``."""

    worker: int
    seq: int


class Absent(Control):
    """Answer to :class:`WhoIsAbsent`: the first workers that have not come, and how many there
    are."""

    seq: int
    workers: Numbers
    num_absent: int


class Held(SaidToCoordinator):
    """Worker to coordinator: I wait at an iteration boundary in pause ``number``, for ``what``.
    ``clocks``: finished iterations by parameter set. ``hold``: how often this worker has held in
    the job."""

    worker: int
    number: int
    hold: int
    what: str
    clocks: Numbers


class Blocked(SaidToCoordinator, sent_as="Busy"):
    """Worker to coordinator, while a pause is requested: in this iteration of this set I may wait
    for other workers before I reach a boundary."""

    worker: int
    number: int
    set_index: int
    clock: int


class PauseRequest(SaidByCoordinator, sent_as="Propose"):
    """Coordinator to a worker: hold at your next iteration boundary, in pause ``number``."""

    number: int


class Proceed(SaidByCoordinator, sent_as="Release"):
    """Coordinator to a worker: others wait for you. Continue, and hold at your next boundary."""

    number: int
    hold: int


class Paused(SaidByCoordinator, sent_as="Commit"):
    """Coordinator to every worker: all workers hold. Do now what the pause is for."""

    number: int
    what: str


class PauseAborted(SaidByCoordinator, sent_as="Cancel"):
    """Coordinator to a worker: some worker cannot hold any more. Continue."""

    number: int


class TakeOver(SaidByCoordinator):
    """Coordinator to the replica of a failed server: serve its shard instead."""

    server: int


class TakenOver(SaidToCoordinator):
    """Answer to :class:`TakeOver`: I serve the shard from now on."""

    server: int


class KeepCopy(SaidByCoordinator):
    """Coordinator to a server or spare: the shard of ``server`` has no replica. Keep its
    ``number``-th one; the replica at the start is number 1."""

    server: int
    number: int


class KeepsCopy(SaidToCoordinator):
    """Answer to :class:`KeepCopy`: I take log entries of that shard from now on."""

    server: int
    number: int


class FillCopy(SaidByCoordinator):
    """Coordinator to the process that serves ``server``: send a snapshot of that shard to
    ``keeper``, which keeps the ``number``-th replica."""

    server: int
    keeper: int
    number: int


class CopyFilled(SaidToCoordinator):
    """Answer to :class:`FillCopy`: the replica is complete. From now on nothing is acknowledged
    that it lacks."""

    server: int
    number: int


class CopyLost(SaidByCoordinator):
    """Coordinator to the process that serves ``server``: the spare with its replica has failed.
    Continue without a replica. (For a failed server, :class:`Moved` says so.)"""

    server: int


class Moved(SaidByCoordinator):
    """Coordinator to every rank: ``server`` has failed. Send what is for it to ``host``, a server
    or spare that has taken its place."""

    server: int
    host: int


class Departed(SaidByCoordinator):
    """Coordinator to the process that serves a failed server's shard: ``worker`` has failed after
    its :class:`Done`. ``left``: as there. The failed server may have had its leave."""

    worker: int
    left: Numbers


class Begin(Control):
    """Worker to coordinator: my script has called psdist.init with these ``settings``, for job
    ``job`` of this world, counted from 1."""

    worker: int
    job: int
    settings: dict[str, Any]


class Begun(Control):
    """Coordinator to every rank: every worker has called and the job begins. With an error, to the
    workers that have called: why it does not."""

    job: int
    settings: dict[str, Any]
    error: str = ""


class Gone(Control):
    """Worker to coordinator: my process ends, outside of any job."""

    worker: int


class End(Control):
    """Coordinator to every other server: the process of the last worker ends. End, too."""


class Evict(SaidByCoordinator, sent_as="Bury"):
    """Coordinator to every server: in view ``generation`` the workers ``dead``, all that have
    failed in the job, are evicted. Answered with :class:`EvictAck`."""

    generation: int
    dead: Numbers


class EvictAck(SaidToCoordinator, sent_as="Buried"):
    """Server to coordinator: the groups of evicted workers are out of every chunk's clocks, and
    their pushes that had arrived are decided. ``reached``: by set and, within it, by worker in
    :class:`Evict`, the most updates of its group that a chunk contains or will contain."""

    generation: int
    server: int
    reached: Numbers = dataclasses.field(default_factory=list)


class MembershipChanged(SaidByCoordinator, sent_as="Survive"):
    """Coordinator to every worker: all servers have evicted ``dead`` (as in :class:`Evict`).
    ``chief``: the worker with the chief's duties. The other workers of their groups are out of the
    job, too, unless groups shrink (``on_group_death``)."""

    generation: int
    dead: Numbers
    chief: int


class Regroup(SaidToCoordinator):
    """Worker to coordinator: my group has lost ``num_lost`` workers. ``standing``: the group
    operations that this worker has finished, and what others need to reduce with it again
    (psdist.workers.shrinking)."""

    worker: int
    num_lost: int
    standing: bytes


class Regrouped(SaidByCoordinator):
    """Coordinator's answer to :class:`Regroup` when all workers that are left have sent it: what
    each sent, by place."""

    num_lost: int
    standings: Payloads


class TakePlace(SaidByCoordinator, sent_as="Replace"):
    """Coordinator to a spare worker: run the script and join the job instead of ``worker``, which
    has failed."""

    worker: int


class JoinReady(SaidToCoordinator, sent_as="Ready"):
    """Answer to :class:`TakePlace`, from ``worker``: my script has prepared ``num_sets`` parameter
    sets, and I can join."""

    worker: int
    num_sets: int


class AdmitWorker(SaidByCoordinator, sent_as="Admit"):
    """Coordinator to every server, while all workers wait in a collective, before its
    :class:`Resume`: the group of ``worker`` has clocks from now on, which begin at ``clocks`` (by
    set)."""

    worker: int
    clocks: Numbers


class JoinAccepted(SaidByCoordinator, sent_as="Welcome"):
    """Coordinator to a spare worker, when all servers have taken :class:`AdmitWorker`: you are in
    the job and continue at ``clocks`` (by set). ``seq``: number of the last collective;
    ``generation``, ``dead``, ``chief``: as in :class:`MembershipChanged`; ``meeting``: number of
    the last pause; ``state``: name of the state for the script to load."""

    worker: int
    clocks: Numbers
    state: str
    seq: int
    generation: int
    dead: Numbers
    chief: int
    meeting: int


class ProposeMode(SaidByCoordinator):
    """Coordinator to every server: the mode is to change for the ``number``-th time. Hold what is
    for rounds after the last round whose parameters you have sent."""

    number: int


class ModeProposed(SaidToCoordinator):
    """Answer to :class:`ProposeMode`: by parameter set, the last round whose parameters this server
    has sent, -1 for none."""

    number: int
    server: int
    rounds: Numbers


class CommitMode(SaidByCoordinator):
    """Coordinator to every server: this mode rules from the round in ``rounds`` on (by set; later
    sets from the start). ``staleness``: 0 except in ssp. ``level``: the codec level from then on,
    -1 if codecs do not change."""

    number: int
    rounds: Numbers
    mode: Mode
    staleness: int
    level: int = -1


class BeginCodecs(Control):
    """A server to every worker, before the first parameters for this round: pushes and replies of
    this round and later ones have the codecs of this level, by the run's ``number``-th change."""

    number: int
    round: int
    level: int


class RoundTook(SaidToCoordinator):
    """Group leader to coordinator, before it pushes this round: microseconds of each local step."""

    worker: int
    round: int
    step_us: int


class LossReported(SaidToCoordinator):
    """Worker to coordinator, before it requests the steps of ``round``: the script has reported
    ``count`` losses with sum ``total`` since the last such message."""

    worker: int
    round: int
    count: int
    total: float


class AskSteps(SaidToCoordinator):
    """Worker to coordinator: how many local steps does each group make in this term
    (psdist.controller.steps)? Sent once for each term. All workers get the same
    :class:`StepsFixed`."""

    worker: int
    loader: int
    number: int
    block: int


class StepsFixed(SaidByCoordinator):
    """Answer to :class:`AskSteps`: local steps, by group."""

    loader: int
    number: int
    block: int
    steps: Numbers


class Append(Control, sent_as="Noted"):
    """Coordinator to standby: the next log entry, a ``message`` of ``peer``, or (without a message)
    the failure of ``peer``, described by ``who``. Actions that follow leave after
    :class:`AppendAck`. ``done``: files and output are done up to this entry."""

    MOST_BYTES: ClassVar[int] = CONTROL_LIMIT_BYTES + NOTE_BYTES

    number: int
    peer: int
    message: bytes
    who: str
    done: int


class AppendAck(ForCoordinator, sent_as="NotedToo"):
    """Standby's answer to :class:`Append`: I have stored the entry."""

    number: int


class StandbyAck(Control, sent_as="HeardUpTo"):
    """Coordinator to a rank: the standby has stored the first ``count`` of your messages. You need
    not send them again (psdist.protocol.coordinator_line)."""

    count: int


class Ack(ForCoordinator, sent_as="ReceivedUpTo"):
    """Rank to coordinator: I have the first ``count`` of your messages."""

    count: int


class Nominate(SaidByCoordinator, sent_as="Appoint"):
    """Coordinator to every rank: ``standby`` is to be the next standby. It becomes that with
    :class:`InstallSnapshot`, which follows when every rank has received this."""

    deputy: int


class InstallSnapshot(Control, sent_as="Entrust"):
    """Coordinator to the nominee: a part of the coordinator's snapshot, as of log entry ``number``.
    The last part is answered with :class:`AppendAck`. ``told``: what users have been told
    (psdist.ranks.reporting)."""

    number: int
    part: int
    num_parts: int
    state: bytes
    told: bytes = b""


class LeaderChanged(Control, sent_as="Succeeds"):
    """Standby to every rank: the coordinator has failed. From now on it runs in the process of
    ``host``, which is this one. ``heard``: number of your messages that the new coordinator has.
    ``is_over``: the job was complete, which makes this a :class:`Stop`. ``generation``, ``dead``,
    ``chief``: as in :class:`MembershipChanged`, for a worker that was out and may not have received
    it."""

    heard: int
    is_over: bool
    host: int
    generation: int = 0
    dead: Numbers = dataclasses.field(default_factory=list)
    chief: int = 0


class Rejoined(ForCoordinator, sent_as="Follows"):
    """Answer to :class:`LeaderChanged`, before anything else: number of the coordinator's messages
    that this rank has received."""

    received: int


FOR_COORDINATOR: Final = tuple(
    each for each in Control.SENT.values() if issubclass(each, ForCoordinator)
)
"""Classes of the messages for the coordinator."""
