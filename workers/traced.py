"""A worker's spans with ``--trace``: the loop, the group's channel and the model's passes, each
with a tracer.

    loop = TracedLoop(transport, core, waiting=waiting, tracer=tracer)
    channel = TracedChannel(channel, tracer)
    handles = Passes(tracer, clock=lambda: job.clock).attach(model)
    step = traced(tracer, Span.STEP, clock=lambda: trainer.clock)(trainer.step)

Without a tracer nothing here is called. Under torch.compile forward and backward passes have no
spans: a clock has no place in a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd import Variable

from psdist.protocol.collected import Brought
from psdist.protocol.events import Arrived, Event
from psdist.protocol.header import Kind
from psdist.tracing import COLLECTIVES, NONE, Lane, Span
from psdist.tracing.tracer import Tracer
from psdist.transport.waiting import Waiting
from psdist.workers.group.channel import GroupChannel, Pending, Slices
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.protocol.actions import SendPull, SendPush

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


class TracedLoop(WorkerLoop):
    def __init__(self, *arguments: Any, tracer: Tracer, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tracer = tracer

    def next_set(self) -> WorkerLoop:
        core = self.core.next_set()
        return TracedLoop(
            self.transport,
            core,
            waiting=self._waiting,
            now_s=self.now_s,
            sets=self.sets,
            tracer=self._tracer,
        )

    def _send_push(self, action: SendPush) -> None:
        began_ns = self._tracer.now()
        super()._send_push(action)
        self._begin(Span.PUSH, action, began_ns)

    def _send_pull(self, action: SendPull) -> None:
        began_ns = self._tracer.now()
        super()._send_pull(action)
        self._begin(Span.PULL, action, began_ns)

    def _begin(self, kind: Span, action: SendPush | SendPull, began_ns: int) -> None:
        header = action.header
        self._tracer.begin(
            (header.set_index, header.chunk, header.clock, header.pull_number),
            kind,
            began_ns=began_ns,
            clock=header.clock,
            chunk=header.chunk,
            other=action.peer,
            num_bytes=header.length,
            set_index=header.set_index,
        )

    def _take(self, event: Event) -> None:
        if not isinstance(event, Arrived) or event.header.kind != Kind.REPLY:
            super()._take(event)
            return
        began_ns = self._tracer.now()
        super()._take(event)
        header = event.header
        self._tracer.end(
            (header.set_index, header.chunk, header.clock, header.pull_number),
            took_ns=self._tracer.now() - began_ns,
        )

    def carry_on(self, wait: Wait, waiting: Waiting | None = None) -> None:
        if wait.is_done():
            return
        key = ("wait", id(wait))
        self._tracer.begin(key, wait.span)
        try:
            super().carry_on(wait, waiting)
        finally:
            self._tracer.end(key)

    def collective(self, name: str, payload: bytes = b"", *, values: bytes = b"") -> Brought:
        began_ns = self._tracer.now()
        try:
            return super().collective(name, payload, values=values)
        finally:
            other = COLLECTIVES.index(name) if name in COLLECTIVES else NONE
            self._tracer.add(Span.COLLECTIVE, began_ns, self._tracer.now(), other=other)


class TracedChannel:
    """A group's channel whose operations are spans, each from its call until it is seen done."""

    def __init__(self, channel: GroupChannel, tracer: Tracer, lane: Lane = Lane.GROUP) -> None:
        self._channel = channel
        self._tracer = tracer
        self._lane = lane

    @property
    def place(self) -> int:
        return self._channel.place

    @property
    def size(self) -> int:
        return self._channel.size

    def allocate(self, num_bytes: int) -> memoryview:
        return self._channel.allocate(num_bytes)

    def duplicate(self) -> GroupChannel:
        return TracedChannel(self._channel.duplicate(), self._tracer, Lane.EARLY)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return self._traced(Span.AGREE, lambda: self._channel.agree(call, values))

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        return self._traced(Span.REDUCE, lambda: self._channel.reduce_scatter(flats, slices, sums))

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        return self._traced(Span.GATHER, lambda: self._channel.all_gather(flats, slices))

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._traced(Span.BROADCAST, lambda: self._channel.broadcast(tensor, place))

    def _traced(self, kind: Span, begin: Callable[[], Pending[T]]) -> Pending[T]:
        began_ns = self._tracer.now()
        pending = begin()
        if self.size == 1:
            return pending
        key = ("group", self._lane)  # an end has one operation under way
        self._tracer.begin(key, kind, began_ns=began_ns, lane=self._lane)
        return _TracedPending(pending, lambda: self._tracer.end(key))


class _TracedPending(Pending[T]):
    def __init__(self, pending: Pending[T], on_done: Callable[[], None]) -> None:
        self._pending = pending
        self._on_done: Callable[[], None] | None = on_done

    def is_done(self) -> bool:
        is_done = self._pending.is_done()
        if is_done and self._on_done is not None:
            self._on_done()
            self._on_done = None
        return is_done

    def wait(self, at_most_s: float) -> None:
        self._pending.wait(at_most_s)

    def result(self) -> T:
        self.is_done()
        return self._pending.result()


def traced(
    tracer: Tracer, kind: Span, *, clock: Callable[[], int], set_index: int = 0
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A span of ``kind`` for each call, stamped with ``clock()`` as it is before."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> R:
            began_ns, at = tracer.now(), clock()
            try:
                return function(*arguments, **keywords)
            finally:
                tracer.add(kind, began_ns, tracer.now(), clock=at, set_index=set_index)

        return call

    return decorate


def span_of_call(
    kind: Span, tracer_of: Callable[[S], Tracer | None]
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """A method whose calls are spans, where its object has a tracer."""

    def decorate(
        method: Callable[Concatenate[S, P], R],
    ) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(self: S, /, *arguments: P.args, **keywords: P.kwargs) -> R:
            tracer = tracer_of(self)
            if tracer is None:
                return method(self, *arguments, **keywords)
            began_ns = tracer.now()
            try:
                return method(self, *arguments, **keywords)
            finally:
                tracer.add(kind, began_ns, tracer.now())

        return call

    return decorate


class Passes:
    """Forward and backward passes of a worker's models."""

    def __init__(self, tracer: Tracer, *, clock: Callable[[], int]) -> None:
        self._tracer = tracer
        self._clock = clock
        self._forward_ns: list[int] = []
        self._backward_ns: int | None = None

    def attach(self, model: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            model.register_forward_pre_hook(_BeforeForward(self), prepend=True),
            # Also of a pass that raises: else the next one would be taken to lie within it.
            model.register_forward_hook(_AfterForward(self), always_call=True),
        ]

    def forward_begins(self) -> None:
        self._backward_ns = None  # of one that has raised
        self._forward_ns.append(self._tracer.now())

    def forward_ends(self, outputs: Any) -> None:
        if not self._forward_ns:
            return
        began_ns, now_ns = self._forward_ns.pop(), self._tracer.now()
        kind = Span.FORWARD if torch.is_grad_enabled() else Span.EVALUATION
        self._tracer.add(kind, began_ns, now_ns, clock=self._clock())
        for tensor in _tensors(outputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        if self._backward_ns is None:
            self._backward_ns = self._tracer.now()
            # As FullyShardedDataParallel does: there is no public hook of a backward pass's end.
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        began_ns, self._backward_ns = self._backward_ns, None
        if began_ns is not None:
            self._tracer.add(Span.BACKWARD, began_ns, self._tracer.now(), clock=self._clock())


class _BeforeForward:
    """A copy of the model has hooks that record nothing: see :class:`UseHook`."""

    def __init__(self, passes: Passes | None = None) -> None:
        self._passes = passes

    def __call__(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if self._passes is not None and not torch.compiler.is_compiling():
            self._passes.forward_begins()

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        return type(self), ()


class _AfterForward(_BeforeForward):
    def __call__(self, _module: torch.nn.Module, _inputs: Any, outputs: Any = None) -> None:
        if self._passes is not None and not torch.compiler.is_compiling():
            self._passes.forward_ends(outputs)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
