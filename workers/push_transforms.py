"""The transforms of a worker's pushes: each is an object in one list (psdist.workers.pushes).

    RawPush          nothing: the payload is the gradient's memory
    EncodePush       error feedback, skipped pushes and the codec (psdist.codecs.feedback)
    ChecksumPush     the CRC-32 of the payload

Before them come unscaling, the sum of the group and clipping (psdist.workers.reduction).

    encoding, transforms = transforms_of(core, partition, frames, wire=wire, on_device=None)
    frame = encoding.frame_of(chunk)
    for each in transforms:
        header = each.apply(header, frame)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from psdist.codecs.checks import NO_CHECKS, Checks, stamped
from psdist.codecs.coders import DeviceCoder, HostCoder
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.frames import EncodingFrame, values_of
from psdist.codecs.wire import Wire
from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header
from psdist.protocol.optimizers import lr_of_groups
from psdist.protocol.partition import Chunk, Partition
from psdist.transfers import Copy, Mark, Transfers
from psdist.workers.protocol.core import WorkerCore

if TYPE_CHECKING:
    from torch import Tensor

_MOST_RATES: Final = 64
_RETRANSMIT = Flag.RETRANSMIT


class ChunkFrames(Protocol):
    """Frames over a worker's flat memory on the host, chunk by chunk."""

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """Return a new frame with the payload of a push of ``chunk``."""
        ...

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """Return a new frame with the memory where a reply about ``chunk`` lands."""
        ...


class DeviceGradients(Protocol):
    """Gradients on a device that encodes them."""

    @property
    def transfers(self) -> Transfers: ...

    def gradient_part(self, chunk: Chunk) -> Tensor:
        """Return the gradient of ``chunk`` where pushes take it: 1-D, the workers' dtype."""
        ...


class PushTransform:
    """A stage of the pipeline; it does nothing here."""

    is_of_values = False
    """True if initial values, and values that are set, pass through it, too."""

    def apply(self, header: Header, frame: Frame) -> Header:
        """Return the header of a push that leaves now; its payload may be written."""
        del frame
        return header


class RawPush(PushTransform):
    """The gradient's own memory is the payload."""

    encoder: PushEncoder | None = None
    on_device: EncodePush | None = None
    """This transform if it encodes on a device."""
    bytes_before_coding = 0
    """Bytes of all pushes that were encoded or skipped, without a codec."""

    def __init__(self, frames: ChunkFrames) -> None:
        self._memory = frames

    def frame_of(self, chunk: Chunk) -> Frame:
        """Return the frame in which pushes of ``chunk`` leave."""
        return self._memory.gradient_frame(chunk)

    def skipped(
        self, *, clock: int, hyper: bytes, weight: float, empty: Collection[int]
    ) -> set[int]:
        """Return the chunks of the slice whose push is skipped: they are to be pushed without
        bytes. ``empty``: chunks without a gradient. Gradients lie where pushes take them."""
        del clock, hyper, weight, empty
        return set()


class EncodePush(RawPush):
    encoder: PushEncoder

    def __init__(
        self,
        encoder: PushEncoder,
        core: WorkerCore,
        frames: ChunkFrames,
        *,
        on_device: DeviceGradients | None,
        has_skips: bool,
    ) -> None:
        super().__init__(frames)
        self.encoder = encoder
        self._core = core
        self._gradients = on_device
        if on_device is not None:
            self.on_device = self
        self._has_skips = has_skips
        self._frames: dict[int, EncodingFrame] = {}
        self._rates: dict[bytes, list[float]] = {}
        """Packed hyperparameters -> lr of each optimizer group."""

    def frame_of(self, chunk: Chunk) -> Frame:
        if self._gradients is None:
            values = values_of(chunk, self._memory.gradient_frame(chunk))
            frame = EncodingFrame(self.encoder, chunk, values)
        else:
            memory = self._gradients.transfers.allocate
            values = self._gradients.gradient_part(chunk)
            frame = EncodingFrame(self.encoder, chunk, values, memory)
        self._frames[chunk.index] = frame
        return frame

    def apply(self, header: Header, frame: Frame) -> Header:
        if not header.length:
            return header
        assert isinstance(frame, EncodingFrame)
        self.bytes_before_coding += header.length
        clock, is_retransmit = header.clock, bool(header.flags & _RETRANSMIT)
        hyper, absent = self._core.settings_of(header.settings)
        terms = PushTerms(self._lr(hyper, frame.chunk) * header.weight, absent)
        num_bytes = frame.encode(clock=clock, terms=terms, is_retransmit=is_retransmit)
        self._core.transfers.count_coded(num_bytes - header.length)
        return header._replace(codec=frame.coding(clock).codec.code, length=num_bytes)

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
        """Encode a push of ``chunk`` that is to leave under these terms, and copy the payload to
        the host; the gradient is complete after these marks. A push that was begun before and has
        not left is dropped. A push that was not begun, or under other terms, is encoded when it
        leaves, which waits for the device."""
        frame = self._frames[chunk]
        terms = PushTerms(self._lr(hyper, frame.chunk) * weight, absent)
        return frame.begin(clock=clock, terms=terms, after=after)

    def is_finite(self, chunk: int) -> bool:
        """Return True if the gradient that was begun is finite; its copy is done."""
        return self.encoder.is_finite(chunk)

    def skipped(
        self, *, clock: int, hyper: bytes, weight: float, empty: Collection[int]
    ) -> set[int]:
        found: set[int] = set()
        for index in self._core.mine if self._has_skips else ():
            chunk, gradient = self._frames[index].chunk, self._frames[index].values
            parameters = values_of(chunk, self._memory.parameter_frame(chunk))
            if index in empty or gradient is None or parameters is None:
                continue
            lr = self._lr(hyper, chunk)
            rate = lr * weight
            if self.encoder.leaves(index, gradient, parameters, clock=clock, lr=lr, rate=rate):
                found.add(index)
                self.bytes_before_coding += chunk.num_bytes
        return found

    def _lr(self, hyper: bytes, chunk: Chunk) -> float:
        rates = self._rates.get(hyper)
        if rates is None:
            if len(self._rates) > _MOST_RATES:  # a schedule that never repeats
                self._rates.clear()
            rates = self._rates[hyper] = lr_of_groups(hyper)
        return rates[chunk.optimizer_group]


class ChecksumPush(PushTransform):
    is_of_values = True

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def apply(self, header: Header, frame: Frame) -> Header:
        if self._checks.carries(header.chunk, header.clock):
            return stamped(header, frame.payload)
        return header


def transforms_of(
    core: WorkerCore,
    partition: Partition,
    frames: ChunkFrames,
    *,
    wire: Wire,
    on_device: DeviceGradients | None = None,
) -> tuple[RawPush, list[PushTransform]]:
    """Return the transform that makes payloads, and all transforms of pushes. ``wire``: of the set
    (:meth:`Wire.of_set`); ``on_device``: gradients that are encoded where they lie."""
    codings = wire.pushes(partition)
    checksums: list[PushTransform] = []
    if wire.checks != NO_CHECKS:
        checksums.append(ChecksumPush(wire.checks))
    if codings is None:
        return RawPush(frames), checksums
    encoder = PushEncoder(
        codings,
        mine=core.mine,
        seed=wire.seed,
        group=core.seat.group,
        has_feedback=wire.has_feedback,
        skips=wire.skips,
        coder=HostCoder.compiled(codings)
        if on_device is None
        else DeviceCoder.of(on_device.transfers, codings, partition),
    )
    encoding = EncodePush(encoder, core, frames, on_device=on_device, has_skips=bool(wire.skips))
    return encoding, [encoding, *checksums]
