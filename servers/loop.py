"""The loop of a server: it passes each event from the transport to the part that takes it.

    a message with a taker           -> that part: replicas, coordinator, changes of the mode
    any other event                  -> the shard: the parameter sets of this server
    its actions                      -> are executed by the set    psdist.servers.set_loop

The loop makes no decision, and does not name the parts. Functions of psdist.servers.parts put
them together:

    loop = plain_loop(transport, make_core, options, make_store=store_of(TensorShard))
    loop.run(waiting)                                     # on a real network
    network.spawn(server_id(0), loop.actor())             # in a virtual one
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeAlias

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Evict, EvictAck, Finish, Finished, Resume, Resumed
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.servers.protocol.actions import Action, Fail, SendControl, WriteSnapshots
from psdist.servers.protocol.sets import SetNumbers
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_loop import ReplyFrame, SetLoop
from psdist.servers.set_store import BuiltSet, ServerOptions, SetStore
from psdist.transport import Sender, Transport
from psdist.transport.waiting import Waiting

Decided: TypeAlias = Sequence[tuple[SetLoop, Iterable[Action]]]
"""Actions to execute, each with the set that executes them."""


class ServerPart:
    """One subject of a server's loop. A method that a part does not need does nothing."""

    TAKES: ClassVar[Sequence[type | int]] = ()
    """Types of control messages and of sent frames, and kinds of data messages, for the part."""
    outlasts_shard: ClassVar[bool] = False
    """True if the loop continues after all groups have left the shard, until :meth:`finish`."""

    loop: ServerLoop

    def begin(self, loop: ServerLoop) -> None:
        """The loop is put together: it has all its parts."""
        self.loop = loop

    def on_start(self) -> None:
        """The loop begins to run on a real network."""

    def handle(self, event: Event) -> Decided:
        """Handle an event of :attr:`TAKES`. Return the actions for the sets."""
        raise InvariantError(f"{type(self).__name__} takes no {type(event).__name__}")

    def takes_loss(self, peer: int) -> bool:  # noqa: ARG002 - for parts that do
        """True if the parameter sets are not told that ``peer`` has failed."""
        return False

    def on_lost(self, event: PeerLost) -> None:
        """A rank has failed, and the sets can continue."""

    def on_set(self, each: SetLoop) -> None:
        """A parameter set begins."""

    def on_built(self, built: BuiltSet) -> None:
        """The chief has described a parameter set."""

    def go_on(self) -> bool:
        """Continue work that has time, between events. True if more is left to do at once."""
        return False

    @property
    def is_over(self) -> bool:
        """True if the job may end for this part."""
        return True

    def close(self) -> None:
        """The loop has finished."""


class Served(ServerPart):
    """The shard of a server (:class:`ShardSets`), or the duties of a spare."""

    sets: Sequence[SetLoop] = ()
    """The parameter sets, by index."""

    def lose(self, event: PeerLost) -> Decided:  # noqa: ARG002 - for a shard
        """A rank has failed: give up what was to come from it."""
        return ()

    def statistics(self) -> list[dict[str, Any]]:
        """Return the counts of each set, for summary.json."""
        raise NotImplementedError


class ServerLoop:
    def __init__(
        self, transport: Transport, served: Served, parts: Sequence[ServerPart] = ()
    ) -> None:
        """``served`` takes the events that no part takes; of two parts that take a message, the
        later takes it. A failure is told to the parts in their order."""
        self.transport = transport
        self.served = served
        self.parts = (*parts, served)
        self.hosted: list[ServerLoop] = []
        """Loops of failed servers that this process has replaced."""
        self._takers = {each: part for part in self.parts for each in part.TAKES}
        self._has_finished = False
        self._is_asked_to_finish = False
        for part in self.parts:
            part.begin(self)

    @property
    def sets(self) -> Sequence[SetLoop]:
        return self.served.sets

    @property
    def is_finished(self) -> bool:
        """True if this server has finished, and so has every failed server that it replaces."""
        return self._has_finished and all(each.is_finished for each in self.hosted)

    def run(self, waiting: Waiting, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """Serve until the job is complete. All messages of this loop have left by then.
        ``on_idle`` is called between events. Waiting never times out, because workers may take any
        time."""
        for part in self.parts:
            part.on_start()
        while not self.is_finished:
            if self.turn():
                waiting.reset()
                if all(each.holds_nothing for each in self.sets):
                    waiting.relax()
            else:
                waiting.idle("messages")
                on_idle()

    def actor(
        self, *, on_idle: Callable[[], None] = lambda: None
    ) -> Generator[float | None, None, None]:
        """As ``run``, for a virtual network: wakes for every message, and sleeps for what an
        action costs before it executes the next, so that replies leave when the work is done."""
        while True:
            found = None if self._has_finished else self._next_event()
            if found is not None:
                loop, event = found
                for each, actions in loop.decide(event):
                    for action in chain(actions, each.follow_up()):
                        each.execute(action)
                        if cost_s := each.take_cost_s():
                            yield cost_s
                continue
            has_more = False
            for loop in self._loops():
                has_more |= loop._go_on()
                if loop._is_asked_to_finish:
                    loop._finish_if_all_is_over()
            if self.is_finished:  # nothing more will arrive and wake it
                return
            if has_more:
                yield sum(each.take_cost_s() for loop in self._loops() for each in loop.sets)
                continue
            on_idle()
            yield None

    def _loops(self) -> Iterator[ServerLoop]:
        return chain((self,), self.hosted)

    def _next_event(self) -> tuple[ServerLoop, Event] | None:
        """Return the next event and the loop that it is for: this loop or a hosted one."""
        for loop in self._loops():
            if (event := loop.transport.poll()) is not None:
                return loop, event
        return None

    def turn(self) -> bool:
        """Handle all events that have arrived; if there are none, let the parts work.
        Return False if there was nothing to do."""
        poll = self.transport.poll
        event = first = poll()
        while event is not None:
            for each, actions in self.decide(event):
                each.do(actions)
            event = None if self._has_finished else poll()
        has_handled = first is not None or self._go_on()
        if self._is_asked_to_finish:
            self._finish_if_all_is_over()
        for hosted in self.hosted:  # each gets a turn, whatever the others return
            has_handled |= hosted.turn()
        return has_handled or self.is_finished

    def _go_on(self) -> bool:
        """Let each part work. Return True if one of them has more to do at once."""
        has_more = False
        for part in self.parts:
            has_more |= part.go_on()
        return has_more

    # -- routing of events ---------------------------------------------------------------------

    def decide(self, event: Event) -> Decided:
        """Pass the event to the part that takes it. Return the actions for the sets."""
        if isinstance(event, Arrived):
            header = event.header
            kind, index = header.kind, header.set_index
        elif isinstance(event, Offered):
            kind, index = event.kind, event.set_index
        elif isinstance(event, Sent):
            return self._take_back(event)
        elif isinstance(event, ControlArrived):
            return self._obey(event)
        else:
            return self._lose(event)
        sets = self.served.sets
        if kind not in self._takers and index < len(sets):  # the most frequent events
            each = sets[index]
            return ((each, each.decide(event)),)
        return self._takers.get(kind, self.served).handle(event)

    def _obey(self, event: ControlArrived) -> Decided:
        message = event.message
        if isinstance(message, Finish):
            return self._on_finish(event.peer)
        taker = self._takers.get(type(message), self.served)
        if event.set_index and taker is not self.served:
            raise ProtocolError(
                f"{describe_peer(self.transport.me)}: {describe_peer(event.peer)} sent "
                f"{type(message).__name__} of set {event.set_index}; it concerns the whole job"
            )
        return taker.handle(event)

    def _take_back(self, event: Sent) -> Decided:
        """The network has returned a frame. The frame may be of a hosted loop."""
        frame = event.frame
        if isinstance(frame, ReplyFrame):
            if frame.token is None:
                return ()
            each = frame.set_loop
            if each not in self.served.sets and not any(each in one.sets for one in self.hosted):
                raise InvariantError("the network gave back a reply of a server before this one")
            return ((each, each.take_back(frame)),)
        taker = self._takers.get(type(frame))
        return () if taker is None else taker.handle(event)

    def _lose(self, event: PeerLost) -> Decided:
        """A rank has failed. The coordinator decides what follows."""
        is_taken = any(part.takes_loss(event.peer) for part in self.parts)
        decided = () if is_taken else self.served.lose(event)
        if not any(isinstance(each, Fail) for _, actions in decided for each in actions):
            for part in self.parts:
                part.on_lost(event)
        return decided

    # -- the end -------------------------------------------------------------------------------

    def _on_finish(self, peer: int) -> Decided:
        if peer != COORDINATOR:
            raise ProtocolError(
                f"{describe_peer(self.transport.me)}: {describe_peer(peer)} sent Finish; "
                f"{describe_peer(COORDINATOR)} says when the job is complete"
            )
        self._is_asked_to_finish = True
        return ()

    def _finish_if_all_is_over(self) -> None:
        # The coordinator's Finish may overtake a worker's Leave. Without this check the Leave would
        # stay unreceived and be missing in the history. The transport may also return a reply's
        # frame long after its worker has continued: the next user of the transport would get a
        # foreign frame.
        if not all(part.is_over for part in self.parts):
            return
        self._is_asked_to_finish = False
        answer = Finished(server=self.transport.me, statistics=self.statistics())
        self.transport.send_control(COORDINATOR, answer)
        if not any(part.outlasts_shard for part in self.parts):
            self.finish()

    def finish(self) -> None:
        """End the loop, and those that it hosts."""
        if self._has_finished:
            return
        for hosted in self.hosted:
            hosted.finish()
        for part in self.parts:
            part.close()
        self._has_finished = True

    def statistics(self) -> dict[str, Any]:
        """Return counts of this process and of each set, for summary.json."""
        return {"bytes_sent": self.transport.bytes_sent, "sets": self.served.statistics()}


class ShardSets(Served):
    """The shard of a server. An event of one set goes to that set. The end of a collective and the
    eviction of workers go to every set and are acknowledged once."""

    sets: list[SetLoop]

    def __init__(
        self,
        sender: Sender,
        make_core: Callable[[int, int], ServerCore],
        options: ServerOptions,
        *,
        make_store: Callable[[int], SetStore],
        make_set: Callable[..., SetLoop] = SetLoop,
    ) -> None:
        """``sender`` sends the messages of the sets; ``make_core(set_index, resumed_up_to)`` and
        ``make_store(set_index)`` are called for every set, the first one at once; ``make_set``
        takes the parameters of :class:`SetLoop`."""
        self.sets = []
        self._sender = sender
        self._make_core = make_core
        self._options = options
        self._make_store = make_store
        self._make_set = make_set
        self._held = [0] * len(options.shard_weights)
        self._numbers = SetNumbers(server=options.server)

    def begin(self, loop: ServerLoop) -> None:
        super().begin(loop)
        self._add_set(resumed_up_to=0)

    def _add_set(self, *, resumed_up_to: int) -> None:
        index = len(self.sets)
        each = self._make_set(
            self._sender,
            self._make_core(index, resumed_up_to),
            self._options,
            set_index=index,
            held=self._held,
            store=self._make_store(index),
            on_built=self._on_built,
        )
        self.sets.append(each)
        for part in self.loop.parts:
            part.on_set(each)

    def _on_built(self, built: BuiltSet) -> None:
        for part in self.loop.parts:
            part.on_built(built)

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, Offered | Arrived | ControlArrived)
        index = self._numbers.of(event)
        if isinstance(event, ControlArrived):
            if isinstance(event.message, Resume):
                return self._resume(event, event.message)
            if isinstance(event.message, Evict):
                return self._evict(event, event.message)
            if index == len(self.sets):
                self._add_set(resumed_up_to=self.sets[0].core.resumed_up_to)
        each = self.sets[index]
        return ((each, each.decide(event)),)

    def _resume(self, event: ControlArrived, message: Resume) -> Decided:
        """End a collective in every set. Answer the coordinator once."""
        decided: Decided = [(each, each.decide(event)) for each in self.sets]
        if message.checkpoint:
            decided = [*decided, (self.sets[0], [WriteSnapshots(message.checkpoint)])]
        resumed = Resumed(seq=message.seq, server=self._options.server)
        return [*decided, (self.sets[0], [SendControl(event.peer, resumed)])]

    def _evict(self, event: ControlArrived, message: Evict) -> Decided:
        """Evict failed workers in every set. Answer the coordinator once."""
        decided = [(each, list(each.decide(event))) for each in self.sets]
        answer = EvictAck(
            generation=message.generation,
            server=self._options.server,
            reached=[clock for each in self.sets for clock in each.core.reached_by(message.dead)],
        )
        return [*decided, (self.sets[0], [SendControl(event.peer, answer)])]

    def lose(self, event: PeerLost) -> Decided:
        """A rank has failed: every set gives up what it was to receive from it."""
        return [(each, each.decide(event)) for each in self.sets]

    @property
    def is_over(self) -> bool:
        return not any(each.core.has_members or each.has_open_replies for each in self.sets)

    def close(self) -> None:
        for each in self.sets:
            each.close_history()

    def statistics(self) -> list[dict[str, Any]]:
        return [each.statistics() for each in self.sets]
