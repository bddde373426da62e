"""The shard of a server: its part of every parameter set, as the loop serves it.

    served = ShardSets(transport, make_core, options, make_store=store_of(TensorShard))
    loop = ServerLoop(transport, served, parts)

An event of one set goes to that set. The end of a collective and the eviction of workers go to
every set and are acknowledged once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psdist.protocol.control import Evict, EvictAck, Resume, Resumed
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered, PeerLost
from psdist.servers.loop import Decided, Served, ServerLoop
from psdist.servers.protocol.actions import SendControl, WriteSnapshots
from psdist.servers.protocol.sets import SetNumbers
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_loop import ServerOptions, SetLoop
from psdist.servers.set_store import BuiltSet, SetStore
from psdist.transport.base import Sender


class ShardSets(Served):
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
