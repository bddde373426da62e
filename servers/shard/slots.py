"""Receive slots: memory that the network fills, and the gradients in them.

On the CPU a gradient is computed with in the slot itself. With a shard on a device each slot has a
mirror there, a copy of its content; sums are made in mirrors.

    slots = Slots(transfers, num_bytes)
    frames = slots.make(8)
    slots.received(frame, "float32", 1024)     # what has arrived; on the device
    slots.sums(frame, "float32", 1024)         # where a sum lies that was begun there
    slots.settle(frame)                        # before the network fills it again
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from psdist.codecs.chunks import ChunkCoding, ChunkCodings
from psdist.codecs.layout import filled
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.memory import as_bytes, as_tensor, torch_dtype
from psdist.protocol.partition import Chunk, master_dtype
from psdist.transfers import DONE, Copy, Mark, Transfers


class _Slot:
    """A frame's owner."""

    def __init__(self, frame: Frame, transfers: Transfers) -> None:
        self._frame = frame
        self._transfers = transfers
        self._views: dict[tuple[str, int], torch.Tensor] = {}
        self._mirrors: dict[tuple[str, int], torch.Tensor] = {}
        self._mirror: torch.Tensor | None = None
        self.copy: Copy = DONE
        """To the mirror."""
        self.used: Mark | None = None
        """After all that was computed with the mirror."""

    def host(self, dtype: str, num_elements: int) -> torch.Tensor:
        """Chunks have few lengths, so each view is made once."""
        key = (dtype, num_elements)
        view = self._views.get(key)
        if view is None:
            assert self._frame.payload is not None
            view = self._views[key] = as_tensor(self._frame.payload, dtype, num_elements)
        return view

    def mirror(self, dtype: str, num_elements: int) -> torch.Tensor:
        key = (dtype, num_elements)
        view = self._mirrors.get(key)
        if view is None:
            if self._mirror is None:
                self._mirror = self._transfers.device_memory(
                    "float64", -(-self._frame.capacity // 8)
                )
            view = self._mirror.view(torch_dtype(dtype))[:num_elements]
            self._mirrors[key] = view
        return view


class Slots:
    def __init__(self, transfers: Transfers, num_bytes: int) -> None:
        """``num_bytes`` of each."""
        self._transfers = transfers
        self._num_bytes = num_bytes
        self._staging: torch.Tensor | None = None
        """Where what was encoded is decoded."""
        self._staged: Copy = DONE

    @property
    def has_mirrors(self) -> bool:
        """True if the shard computes on a device, where each slot has a mirror."""
        return self._transfers.has_mirrors

    def make(self, count: int) -> list[Frame]:
        return [Frame(self._transfers.allocate(self._num_bytes)) for _ in range(count)]

    def host(self, frame: Frame, dtype: str, num_elements: int) -> torch.Tensor:
        """The network's own memory."""
        return self._of(frame).host(dtype, num_elements)

    def received(self, frame: Frame, dtype: str, num_elements: int) -> torch.Tensor:
        """Return the arrived values on the computing device; once for each arrival."""
        slot = self._of(frame)
        host = slot.host(dtype, num_elements)
        if not self.has_mirrors:
            return host
        return self._uploaded(slot, host, slot.mirror(dtype, num_elements))

    def decoded(
        self,
        frame: Frame,
        dtype: str,
        num_elements: int,
        decode: Callable[[memoryview, torch.Tensor], None],
    ) -> torch.Tensor:
        """As :meth:`received`, of what ``decode`` makes of the payload; valid until the next call
        of this or of :meth:`aside`."""
        assert frame.payload is not None
        host = self._staged_as(dtype, num_elements)
        decode(frame.payload[: frame.num_received], host)
        if not self.has_mirrors:
            return host
        slot = self._of(frame)
        target = self._uploaded(slot, host, slot.mirror(dtype, num_elements))
        self._staged, slot.copy = slot.copy, DONE
        return target

    def aside(self, frame: Frame, num_bytes: int) -> memoryview:
        """Return a copy of what has arrived, so that the slot's memory can take a sum."""
        assert frame.payload is not None
        memory = as_bytes(self._staged_as("float64", -(-num_bytes // 8)))[:num_bytes]
        memory[:] = frame.payload[:num_bytes]
        return memory

    def _staged_as(self, dtype: str, num_elements: int) -> torch.Tensor:
        """Memory of the host that is used again: new pages would cost more than the decoding."""
        if self._staging is None:
            memory = self._transfers.allocate(filled(self._num_bytes))
            self._staging = as_tensor(memory, "float64", len(memory) // 8)
        self._staged.wait()
        return self._staging.view(torch_dtype(dtype))[:num_elements]

    def sums(self, frame: Frame, dtype: str, num_elements: int) -> torch.Tensor:
        """Where a sum lies, or is to be made of what :meth:`received` gave."""
        slot = self._of(frame)
        if self.has_mirrors:
            return slot.mirror(dtype, num_elements)
        return slot.host(dtype, num_elements)

    def settle(self, frame: Frame) -> None:
        """Nothing reads this slot any more, so the network may fill it. The next content is copied
        to its mirror after all computations until now."""
        if self.has_mirrors:
            slot = self._of(frame)
            slot.copy.wait()
            slot.copy, slot.used = DONE, self._transfers.mark()

    def _uploaded(self, slot: _Slot, host: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        marks = [] if slot.used is None else [slot.used]
        slot.copy = self._transfers.begin([(host, target)], after=marks)
        slot.copy.join()
        return target

    def _of(self, frame: Frame) -> _Slot:
        if frame.owner is None:
            frame.owner = _Slot(frame, self._transfers)
        slot: _Slot = frame.owner
        return slot


class RawGradients:
    """The gradients that slots contain as they were pushed."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def read(self, slot: Frame, chunk: Chunk, clock: int) -> torch.Tensor:  # noqa: ARG002 - raw
        """Return the gradient of a push in round ``clock``, 1-D, the server's dtype: the slot's own
        memory if it has that dtype. Valid until the next call."""
        gradient = self._slots.received(slot, chunk.dtype, chunk.length)
        is_master = master_dtype(chunk.dtype) == chunk.dtype
        return gradient if is_master else gradient.to(dtype=torch.float32)

    def start(self, slot: Frame, chunk: Chunk, clock: int) -> torch.Tensor:
        """Turn the gradient into a sum in the same slot, and return the sum."""
        gradient, total = self.read(slot, chunk, clock), self.sum(slot, chunk)
        if gradient is not total:
            total.copy_(gradient)
        return total

    def add(
        self, slot: Frame, chunk: Chunk, clock: int, total: torch.Tensor, weight: float
    ) -> None:
        """Add the gradient times ``weight`` to ``total`` (1-D, the server's dtype)."""
        total.add_(self.read(slot, chunk, clock), alpha=weight)

    def sum(self, slot: Frame, chunk: Chunk) -> torch.Tensor:
        """Return the sum that was started in the slot."""
        return self._slots.sums(slot, master_dtype(chunk.dtype), chunk.length)


class CodedGradients(RawGradients):
    """The gradients that slots contain in the form of a codec."""

    def __init__(self, slots: Slots, codings: ChunkCodings) -> None:
        from psdist.codecs.host_kernels import kernels_for  # compiles; only for a codec

        super().__init__(slots)
        self.codings = codings
        self._kernels = kernels_for(codings.codecs)

    def read(self, slot: Frame, chunk: Chunk, clock: int) -> torch.Tensor:
        """Raise :class:`ProtocolError` if the codec decodes other values than at the sender."""
        coding = self.codings.at(clock)[chunk.index]
        return self._slots.decoded(
            slot, master_dtype(chunk.dtype), chunk.length, partial(self._decode, coding)
        )

    def _decode(self, coding: ChunkCoding, payload: memoryview, into: torch.Tensor) -> None:
        if self._kernels is not None and self._kernels.decode(coding, payload, into):
            return
        content = coding.read(payload)
        if not content.is_as_sent:
            raise ProtocolError(
                f"chunk {coding.chunk.index}: codec {coding.codec.name} decodes other values here "
                "than where they were encoded; do all hosts have the same version of it?"
            )
        into.zero_()
        content.set(into)

    def start(self, slot: Frame, chunk: Chunk, clock: int) -> torch.Tensor:
        if self._slots.has_mirrors:
            return super().start(slot, chunk, clock)
        total, payload = self.sum(slot, chunk), self._slots.aside(slot, slot.num_received)
        self._decode(self.codings.at(clock)[chunk.index], payload, total)
        return total

    def add(
        self, slot: Frame, chunk: Chunk, clock: int, total: torch.Tensor, weight: float
    ) -> None:
        kernels, payload = self._kernels, slot.payload
        assert payload is not None
        if (
            kernels is None
            or self._slots.has_mirrors
            or not kernels.add(
                self.codings.at(clock)[chunk.index], payload[: slot.num_received], total, weight
            )
        ):
            super().add(slot, chunk, clock, total, weight)
