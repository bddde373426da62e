"""Parts of a server's loop: its checkpoints, changes of all its parameter sets at once, and the
coordinator, on server 0.

    seat = CoordinatorSeat(coordinator, reports)
    loop = plain_loop(transport, make_core, options, ShardStore(TensorShard), seats=[seat])

Each set changes at a round or clock of its own. The server answers the coordinator once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from psdist.codecs.wire import Wire
from psdist.errors import ProtocolError
from psdist.protocol.control import (
    FOR_COORDINATOR,
    AdmitWorker,
    CommitMode,
    Departed,
    Leave,
    ModeProposed,
    ProposeMode,
)
from psdist.protocol.events import ControlArrived, Event, PeerLost
from psdist.protocol.ids import COORDINATOR, describe_peer, is_spare, is_worker, worker_id
from psdist.servers.loop import Decided, ServerLoop, ServerPart, ShardSets
from psdist.servers.protocol.actions import AdmitGroup, ChangeCodecs, ChangeMode, SendControl
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorAction
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import BuiltSet, ServerOptions, ShardStore
from psdist.servers.shard.regions import Keeper
from psdist.transport import Sender, Transport


def plain_loop(
    transport: Transport,
    make_core: Callable[[int, int], ServerCore],
    options: ServerOptions,
    store: ShardStore,
    *,
    seats: Sequence[ServerPart] = (),
    make_set: Callable[..., SetLoop] = SetLoop,
) -> ServerLoop:
    """Return the loop of a server whose shard has no replica. ``seats``: further parts, such as the
    coordinator; ``make_set``: for spans, and for tests that break a server on purpose. See
    :class:`ShardSets`."""
    served = ShardSets(transport, make_core, options, make_store=store.of_set, make_set=make_set)
    parts = (CheckpointCopies(store.keeper, transport), *seats, ModeSwitches(), Admissions())
    return ServerLoop(transport, served, parts)


class CheckpointCopies(ServerPart):
    def __init__(self, keeper: Keeper, sender: Sender) -> None:
        """``sender`` sends the coordinator the outcome of each file."""
        self._keeper = keeper
        self._sender = sender

    def go_on(self) -> bool:
        """Report the outcome of the last file, once it is known. Then reserve memory for the first
        checkpoint, or copy a chunk for the next, or begin to write its file. True if a chunk was
        copied or the file begun."""
        keeper = self._keeper
        if keeper.is_busy and (told := keeper.outcome()) is not None:
            self._sender.send_control(COORDINATOR, told)
        if keeper.is_reserving:
            any(each.reserve_snapshot(keeper.memory) for each in self.loop.sets)
        return keeper.go_on()

    @property
    def is_over(self) -> bool:
        return not self._keeper.is_busy


class ModeSwitches(ServerPart):
    """Changes of the mode, and of the level of codecs, in every set."""

    TAKES = (ProposeMode, CommitMode)

    def __init__(self) -> None:
        self._last: list[ChangeMode] = []
        """The last change of the mode, for sets that are added later; nothing before it."""

    def go_on_from(self, modes: Sequence[ChangeMode]) -> None:
        """Continue a failed server, whose sets have changed to these modes."""
        self._last = [each._replace(round=0) for each in modes if each.number][-1:]

    def on_set(self, each: SetLoop) -> None:
        for change in self._last:
            each.do(each.core.handle(change))

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, ControlArrived)
        message, sets, me = event.message, self.loop.sets, self.loop.transport.me
        if isinstance(message, ProposeMode):
            _check(self.loop, event)
            decided: Decided = [(each, each.hold_rounds()) for each in sets]
            rounds = [each.core.highest_sent for each in sets]
            answer = ModeProposed(number=message.number, server=me, rounds=rounds)
            return [*decided, (sets[0], [SendControl(event.peer, answer)])]
        assert isinstance(message, CommitMode)
        # A set that the coordinator does not know begins later.
        _check(self.loop, event, message.rounds[: len(sets)])
        change: ChangeMode | ChangeCodecs = ChangeCodecs(message.number, 0, message.level)
        if message.level < 0:
            change = ChangeMode(0, message.mode, message.staleness, message.number)
            self._last = [change]
        return [
            (each, each.core.handle(change._replace(round=start)))
            for each, start in zip(sets, message.rounds, strict=False)
        ]


class Admissions(ServerPart):
    """Workers that join the running job."""

    TAKES = (AdmitWorker,)

    def handle(self, event: Event) -> Decided:
        """Admit a substitute in every set. Resumed confirms it to the coordinator."""
        assert isinstance(event, ControlArrived)
        message, sets = event.message, self.loop.sets
        assert isinstance(message, AdmitWorker)
        _check(self.loop, event, message.clocks)
        return [
            (each, each.core.handle(AdmitGroup(message.worker, clock)))
            for each, clock in zip(sets, message.clocks, strict=True)
        ]


class Departures(ServerPart):
    """Leaves that workers had sent only to the failed server that this loop continues."""

    TAKES = (Departed,)

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, ControlArrived)
        message, sets = event.message, self.loop.sets
        assert isinstance(message, Departed)
        worker = worker_id(message.worker)
        group = sets[0].core.group_of(worker)
        _check(self.loop, event, message.left if group is not None else ())
        return [
            (each, each.decide(ControlArrived(worker, Leave(group=group or 0, clock=clock), index)))
            for index, (each, clock) in enumerate(zip(sets, message.left, strict=True))
        ]


def _check(loop: ServerLoop, event: ControlArrived, clocks: Sequence[int] | None = None) -> None:
    """Raise :class:`ProtocolError` if another rank than the coordinator sent the message, or if
    it does not have one clock for each set."""
    num_sets = len(loop.sets)
    if event.peer == COORDINATOR and (clocks is None or len(clocks) == num_sets):
        return
    raise ProtocolError(
        f"{describe_peer(loop.transport.me)}: {describe_peer(event.peer)} sent "
        f"{type(event.message).__name__} for {len(clocks or ())} parameter sets; "
        f"{describe_peer(COORDINATOR)} sends it, and there are {num_sets}"
    )


class CodecSizes(ServerPart):
    """The bytes of each codec level, for the coordinator that chooses the level."""

    def __init__(self, wire: Wire, know: Callable[[list[int]], None], num_known: int) -> None:
        """``num_known``: sets whose sizes the coordinator has."""
        self._wire = wire
        self._know = know
        self._num_known = num_known

    def on_built(self, built: BuiltSet) -> None:
        if built.set_index >= self._num_known:
            self._know(self._wire.sizes(built.partition))


def codec_sizes(
    wire: Wire, know: Callable[[list[int]], None], *, num_known: int = 0
) -> Sequence[ServerPart]:
    """Return the part that sends ``know`` the sizes; nothing if no level is chosen."""
    return [CodecSizes(wire, know, num_known)] if wire.is_ladder else []


class Reports:
    """Files and output of a coordinator and its standby. This class writes none."""

    def on_action(self, action: CoordinatorAction) -> None:
        """The coordinator of this process has decided this."""

    def note(self, action: CoordinatorAction) -> None:
        """The coordinator has done this; its standby is here."""

    def succeed(self, undone: Sequence[CoordinatorAction]) -> None:
        """The coordinator has failed and continues here; it may not have done ``undone``."""

    def to_snapshot(self) -> bytes:
        """Return what users have been told, for the next standby."""
        return b""


class CoordinatorSeat(ServerPart):
    """The coordinator of the job. psdist.servers.protocol.coordinator decides; ``reports`` (of
    psdist.ranks.reporter) writes files and output."""

    TAKES: ClassVar[Sequence[type | int]] = FOR_COORDINATOR
    outlasts_shard = True

    def __init__(self, coordinator: Coordinator | CoordinatorLog, reports: Reports) -> None:
        self.coordinator = coordinator
        self._reports = reports

    def on_start(self) -> None:
        """Take note of ranks that failed before the job began: spares, and workers that were to
        wait for a place."""
        for peer, who in self.loop.transport.lost.items():
            if is_spare(peer) or is_worker(peer):
                self.on_lost(PeerLost(peer, who))

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, ControlArrived)
        self.do(self.coordinator.handle(event.peer, event.message))
        return ()

    def on_lost(self, event: PeerLost) -> None:
        coordinator = self.coordinator
        lost = coordinator.on_lost if is_worker(event.peer) else coordinator.on_server_lost
        self.do(lost(event.peer, event.who))

    def know_sizes(self, sizes: list[int]) -> None:
        """``sizes``: by codec level, the bytes of one exchange of a parameter set."""
        self.do(self.coordinator.know_sizes(sizes))

    def do(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, SendControl):
                self.loop.transport.send_control(action.peer, action.message)
            else:
                self._do_here(action)
            if isinstance(action, self.coordinator.LAST):
                self.loop.finish()

    def _do_here(self, action: CoordinatorAction) -> None:
        self._reports.on_action(action)
