"""Copies between a device and the memory that MPI sees, for workers' models and servers' shards:
the one seam for them.

    transfers = transfers_for(device)
    source, target = transfers.device_memory("float32", 1024), transfers.allocate(4096)
    mark = transfers.mark()                # in the thread whose work the source is
    copy = transfers.begin([(source, as_tensor(target, "float32", 1024))], after=[mark])
    copy.is_done()                         # asked again and again; or
    copy.wait()                            # this thread waits; or
    copy.join()                            # later work of the device runs after it
    transfers.begin_computed(lambda: pairs, after=[mark])      # of what is computed there first

Copies happen in the order in which they were begun, so one that is done proves those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch

from psdist.errors import ModelError
from psdist.protocol.memory import allocate, torch_dtype

Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Sources and targets, of one shape and dtype."""
Mark: TypeAlias = Any
"""A moment in what a thread has asked the device for."""


class Copy:
    """A copy that has begun. Until it is done its sources must stay as they are, and its targets
    must not be used. This one is done."""

    def is_done(self) -> bool:
        """True if the targets hold the sources."""
        return True

    def wait(self) -> None:
        """Wait until it is done."""

    def join(self) -> None:
        """Order what this thread asks the device for from now on after the copy; return at once."""


DONE: Final = Copy()


class Transfers:
    """For a model on the CPU: its memory is what MPI sees, and copies are made at once."""

    has_mirrors = False
    """True if the device's memory is other than what MPI sees."""
    device = torch.device("cpu")
    """The device that computes."""

    def device_memory(self, dtype: str, num_elements: int) -> torch.Tensor:
        """Return zeroed memory of the device."""
        return torch.zeros(num_elements, dtype=torch_dtype(dtype))

    def allocate(self, num_bytes: int) -> memoryview:
        """Return zeroed memory that MPI reads and writes. Copies from it need not wait."""
        return allocate(num_bytes)

    def mark(self) -> Mark:
        """Return the moment after everything that this thread has asked the device for."""
        return None

    def begin(self, pairs: Pairs, *, after: Iterable[Mark]) -> Copy:  # noqa: ARG002 - for devices
        """Copy each source to its target, after ``after``. Any thread may call it."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)
        return DONE

    def begin_computed(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> Copy:
        """As :meth:`begin`, of what ``compute()`` asks the device for. That also comes after
        ``after``, and after all that was begun before."""
        with torch.no_grad():
            pairs = compute()
        return self.begin(pairs, after=after)


class ToGpu(Transfers):
    """Copies on a stream of its own, besides the model's streams; pinned host memory.

    A mark is an event of the stream that is the thread's current one: in a hook of autograd that
    on which the gradient was made.
    """

    has_mirrors = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def device_memory(self, dtype: str, num_elements: int) -> torch.Tensor:
        memory = torch.zeros(num_elements, dtype=torch_dtype(dtype), device=self.device)
        self._stream.wait_event(self.mark())  # it is zeroed before anything is copied there
        return memory

    def allocate(self, num_bytes: int) -> memoryview:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        view: memoryview = memory.numpy().data  # keeps it
        return view

    def mark(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    def begin(self, pairs: Pairs, *, after: Iterable[Mark]) -> Copy:
        return self.begin_computed(lambda: pairs, after=after)

    def begin_computed(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> Copy:
        # A wait sleeps: other threads need the core.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's
        for mark in after:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream), torch.no_grad():
            pairs = compute()
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        done.record(self._stream)
        return _OnStream(self.device, done, pairs)


class _OnStream(Copy):
    """A copy that a stream makes."""

    def __init__(self, device: torch.device, done: torch.cuda.Event, pairs: Pairs) -> None:
        """``pairs`` are kept: memory that is let go may become another tensor's before the stream
        has read it."""
        self._device = device
        self._done = done
        self._pairs: Pairs | None = pairs

    def is_done(self) -> bool:
        if self._pairs is not None and self._done.query():  # type: ignore[no-untyped-call] # torch's
            self._pairs = None
        return self._pairs is None

    def wait(self) -> None:
        self._done.synchronize()
        self._pairs = None

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def transfers_for(device: torch.device) -> Transfers:
    """For a model on ``device``. Raises :class:`ModelError` where psdist trains none."""
    if device.type == "cpu":
        return Transfers()
    if device.type == "cuda":
        return ToGpu(device)
    raise ModelError(
        f"the model is on {device}; psdist trains models on the CPU and on GPUs of CUDA or ROCm: "
        "call model.to(job.device) before job.prepare()"
    )
