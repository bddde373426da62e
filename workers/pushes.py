"""A worker's pushes of one parameter set, from its gradients to frames for the network: raw, or
encoded by the push codec, on the host or on the device where the gradients lie; with a checksum
where there is to be one.

    pushes = pushes_of(core, partition, frames, wire=wire, on_device=None)
    transport.send(peer, pushes.frame(header))         # of a SendPush: encoded now, header packed
    pushes.left_for_later(clock=7, hyper=packed, weight=1.0, empty=())

On a device encoding may begin before (``DevicePushes.begin``). What is pushed, and when, the state
machine decides (psdist.workers.protocol.core); psdist.workers.loop sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from psdist.codecs.checks import NO_CHECKS, Checks, stamped
from psdist.codecs.chunks import ChunkCodings
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.frames import DeviceFrame, EncodingFrame
from psdist.codecs.on_device import DevicePushEncoder
from psdist.codecs.wire import Wire
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header
from psdist.protocol.memory import as_tensor
from psdist.protocol.optimizers import lr_of_groups
from psdist.protocol.partition import Chunk, Partition
from psdist.transfers import Copy, Mark, Transfers
from psdist.workers.protocol.core import WorkerCore

if TYPE_CHECKING:
    from torch import Tensor

_MOST_RATES: Final = 64
_AGAIN = Flag.AGAIN


class ChunkFrames(Protocol):
    """Frames over a worker's flat memory on the host, chunk by chunk."""

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """A new frame, whose payload is what a push of ``chunk`` sends."""
        ...

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """A new frame, whose payload is where a reply about ``chunk`` lands."""
        ...


class DeviceGradients(Protocol):
    """Gradients on a device that encodes them."""

    @property
    def transfers(self) -> Transfers: ...

    def gradient_part(self, chunk: Chunk) -> Tensor:
        """Of ``chunk``, where pushes take it."""
        ...


def pushes_of(
    core: WorkerCore,
    partition: Partition,
    frames: ChunkFrames,
    *,
    wire: Wire,
    on_device: DeviceGradients | None = None,
) -> Pushes:
    """Those of the slice that ``core`` has taken. ``wire``: of the set (:meth:`Wire.of_set`);
    ``on_device``: gradients that are encoded where they lie; their pushes are not raw, and none is
    left for later."""
    common: dict[str, Any] = {"core": core, "frames": frames, "checks": wire.checks}
    codings = ChunkCodings.of(wire.pushes(partition))
    if codings is None:
        return Pushes(partition.chunks, **common)
    options: dict[str, Any] = {
        "mine": core.mine,
        "seed": wire.seed,
        "group": core.seat.group,
        "has_feedback": wire.has_feedback,
    }
    if on_device is None:
        encoder = PushEncoder(codings, skips=wire.skips, **options)
        return Pushes(partition.chunks, encoder=encoder, has_skip=bool(wire.skips), **common)
    on_it = DevicePushEncoder(codings, copies=on_device.transfers, **options)
    return DevicePushes(partition.chunks, encoder=on_it, gradients=on_device, **common)


class Pushes:
    """Raw, or encoded on the host."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        core: WorkerCore,
        frames: ChunkFrames,
        checks: Checks,
        encoder: PushEncoder | None = None,
        has_skip: bool = False,
    ) -> None:
        """``has_skip``: whether any may be left for later."""
        self._chunks = chunks
        self._core = core
        self._memory = frames
        self._checks = checks
        self.encoder = encoder
        """Of pushes that are not raw."""
        self._has_skip = has_skip
        self._is_plain = encoder is None and checks == NO_CHECKS
        self._rates: dict[bytes, list[float]] = {}
        """Packed hyperparameters -> lr of each optimizer group."""
        self.bytes_before_coding = 0
        """What all that was encoded, or left for later, would be without a codec."""
        self._frames: dict[int, Frame] = {}
        for index in core.mine:
            self.add(index)

    def add(self, index: int) -> None:
        """This chunk is pushed, too, from now on."""
        self._frames[index] = self._new_frame(self._chunks[index])

    def _new_frame(self, chunk: Chunk) -> Frame:
        values = self._memory.gradient_frame(chunk)
        return values if self.encoder is None else EncodingFrame(self.encoder, chunk, values)

    @property
    def num_bytes_to_host(self) -> int:
        """Copied from a device that encodes."""
        return 0

    # -- when one leaves -----------------------------------------------------------------------

    def frame(self, header: Header) -> Frame:
        """What the network is to send of the push with this header, which is packed into it."""
        frame = self._frames[header.chunk]
        if header.flags & _AGAIN:  # the network may still have the frame that was sent first
            frame = frame.again() if isinstance(frame, EncodingFrame) else Frame(frame.payload)
            self._frames[header.chunk] = frame
        if not self._is_plain:
            header = self._altered(header, frame)
        header.pack_into(frame.header)
        return frame

    def _altered(self, header: Header, frame: Frame) -> Header:
        """``header`` of a push whose payload is encoded now, or is given a checksum."""
        if isinstance(frame, EncodingFrame) and header.length:
            self.bytes_before_coding += header.length
            clock = header.clock
            terms = self._terms(header, frame.chunk.optimizer_group)
            is_again = bool(header.flags & _AGAIN)
            num_bytes = frame.encode(clock=clock, terms=terms, is_again=is_again)
            self._core.count_coded(num_bytes - header.length)
            header = header._replace(codec=frame.coding(clock).codec.code, length=num_bytes)
        if self._checks.carries(header.chunk, header.clock):
            header = stamped(header, frame.payload)
        return header

    def _terms(self, header: Header, optimizer_group: int) -> PushTerms:
        """Under which this push was made."""
        hyper, absent = self._core.settings_of(header.settings)
        return PushTerms(self._lr(hyper)[optimizer_group] * header.weight, absent)

    def _lr(self, hyper: bytes) -> list[float]:
        """Of each optimizer group."""
        rates = self._rates.get(hyper)
        if rates is None:
            if len(self._rates) > _MOST_RATES:  # a schedule that never repeats
                self._rates.clear()
            rates = self._rates[hyper] = lr_of_groups(hyper)
        return rates

    # -- before an iteration leaves ------------------------------------------------------------

    def left_for_later(
        self, *, clock: int, hyper: bytes, weight: float, empty: Collection[int]
    ) -> set[int]:
        """Of the slice's chunks, without those in ``empty``, the ones whose push is left for later
        (``skip``): they are to be pushed without bytes. Gradients lie where pushes take them."""
        if not self._has_skip:
            return set()
        assert self.encoder is not None
        found: set[int] = set()
        for index in self._core.mine:
            chunk = self._chunks[index]
            frames = self._memory.gradient_frame(chunk), self._memory.parameter_frame(chunk)
            gradient, parameters = (
                as_tensor(each.payload, chunk.dtype, chunk.length) if each.payload else None
                for each in frames
            )
            if index in empty or gradient is None or parameters is None:
                continue
            lr = self._lr(hyper)[chunk.optimizer_group]
            rate = lr * weight
            if self.encoder.leaves(index, gradient, parameters, clock=clock, lr=lr, rate=rate):
                found.add(index)
                self.bytes_before_coding += chunk.num_bytes
        return found


class DevicePushes(Pushes):
    """Encoded where the gradients lie: no mirror of them is needed on the host."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        encoder: DevicePushEncoder,
        gradients: DeviceGradients,
        **common: Any,
    ) -> None:
        self._on_device = encoder
        self._gradients = gradients
        super().__init__(chunks, encoder=encoder, **common)

    def _new_frame(self, chunk: Chunk) -> Frame:
        gradients = self._gradients
        part, memory = gradients.gradient_part(chunk), gradients.transfers.allocate
        return DeviceFrame(self._on_device, chunk, part, memory)

    @property
    def num_bytes_to_host(self) -> int:
        return self._on_device.num_bytes_to_host

    def begin(
        self,
        chunk: int,
        *,
        clock: int,
        hyper: bytes,
        weight: float,
        absent: Collection[int],
        after: Iterable[Mark],
    ) -> Copy:
        """Encode a push that is to leave under these terms, and copy what is encoded to the host;
        the chunk's gradient is complete ``after`` these. What was begun before and has not left is
        of no account. A push whose encoding was not begun, or under other terms, is encoded when it
        leaves, which waits for the device."""
        frame = self._frames[chunk]
        assert isinstance(frame, DeviceFrame)
        rate = self._lr(hyper)[frame.chunk.optimizer_group] * weight
        return frame.begin(clock=clock, terms=PushTerms(rate, absent), after=after)

    def is_finite(self, chunk: int) -> bool:
        """Whether the gradient is that :meth:`begin` has copied, encoded."""
        return self._on_device.is_finite(chunk)
