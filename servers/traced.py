"""Spans of a server: ``SetLoop`` with a tracer, for ``--trace``.

plain_loop(..., make_set=partial(TracedSetLoop, tracer=tracer))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from psdist.protocol.events import Arrived, ControlArrived, Offered, PeerLost
from psdist.protocol.ids import is_worker, worker_of
from psdist.servers.protocol.actions import Accept, Action, Fold, Hold, Reply, StartSum, Step
from psdist.servers.set_loop import ReplyFrame, SetLoop
from psdist.tracing import NONE, Lane, Span
from psdist.tracing.tracer import Tracer


class TracedSetLoop(SetLoop):
    def __init__(self, *arguments: Any, tracer: Tracer, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tracer = tracer
        for action in (StartSum, Fold, Hold):
            self._execute[action] = partial(self._fold_and_add, self._execute[action])

    def decide(self, event: Offered | Arrived | ControlArrived | PeerLost) -> Iterable[Action]:
        if isinstance(event, Arrived) and event.frame is not None:
            header = event.header
            self._tracer.end(
                ("receive", id(event.frame)),
                clock=header.clock,
                chunk=header.chunk,
                other=_worker(event.peer),
                num_bytes=header.length,
            )
        return super().decide(event)

    def take_back(self, frame: ReplyFrame) -> Iterable[Action]:
        self._tracer.end(("reply", id(frame)))
        return super().take_back(frame)

    def _accept(self, action: Accept) -> None:
        key = ("receive", id(action.slot))
        self._tracer.begin(key, Span.RECEIVE, lane=Lane.SERVER, set_index=self.set_index)
        super()._accept(action)

    def _fold_and_add(self, execute: Callable[[Any], None], action: Any) -> None:
        began_ns = self._tracer.now()
        execute(action)
        self._add(Span.FOLD, began_ns, action.chunk)

    def _step(self, action: Step) -> None:
        began_ns = self._tracer.now()
        super()._step(action)
        brought = action.contributions
        group = brought[0].group if len(brought) == 1 else NONE
        self._add(Span.APPLY, began_ns, action.chunk, clock=brought[0].clock, other=group)

    def _add(
        self, kind: Span, began_ns: int, chunk: int, *, clock: int = NONE, other: int = NONE
    ) -> None:
        self._tracer.add(
            kind,
            began_ns,
            self._tracer.now(),
            clock=clock,
            chunk=chunk,
            other=other,
            lane=Lane.SERVER,
            set_index=self.set_index,
        )

    def _reply_frame(self, key: tuple[int, int]) -> ReplyFrame:
        # Only this method has the frame of the reply.
        frame = super()._reply_frame(key)
        self._frame = frame
        return frame

    def _reply(self, action: Reply) -> None:
        began_ns = self._tracer.now()
        super()._reply(action)
        self._tracer.begin(
            ("reply", id(self._frame)),
            Span.REPLY,
            began_ns=began_ns,
            clock=action.clock,
            chunk=action.token.chunk,
            other=_worker(action.token.peer),
            num_bytes=self._frame.capacity,
            lane=Lane.SERVER,
            set_index=self.set_index,
        )


def _worker(peer: int) -> int:
    return worker_of(peer) if is_worker(peer) else NONE
