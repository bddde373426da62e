"""The pipeline of a worker's pushes of one parameter set: from a header and a gradient to a frame.

The pipeline is a list of transforms. Each one takes the header and the frame of a push, and returns
the header with its own fields and flags. Raw pushes without checksums have no transform.

    EncodePush       error feedback, skipped pushes and the codec (psdist.codecs.feedback)
    ChecksumPush     the CRC-32 of the payload

Before it come unscaling, the sum of the group and clipping (psdist.workers.reduction).

    pushes = pushes_of(core, partition, frames, wire=wire, on_device=None)
    empty = pushes.skipped(clock=7, hyper=packed, weight=1.0, empty=())
    transport.send(peer, pushes.frame(header))                    # of a SendPush

The state machine (psdist.workers.protocol.core) decides which push leaves when, and
psdist.workers.loop sends it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from psdist.codecs.checks import NO_CHECKS, Checks, stamped
from psdist.codecs.chunks import ChunkCodings
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
_AGAIN = Flag.AGAIN


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
    """A stage of the pipeline; each method does nothing here."""

    bytes_before_coding = 0
    """Bytes of all pushes that were encoded or skipped, without a codec."""

    def apply(self, header: Header, frame: Frame) -> Header:
        """Return the header of a push that leaves now; its payload may be written."""
        del frame
        return header

    def skipped(
        self, *, clock: int, hyper: bytes, weight: float, empty: Collection[int]
    ) -> set[int]:
        """Return the chunks, none of those in ``empty``, whose push is skipped."""
        del clock, hyper, weight, empty
        return set()


class EncodePush(PushTransform):
    def __init__(
        self,
        encoder: PushEncoder,
        core: WorkerCore,
        frames: ChunkFrames,
        *,
        on_device: DeviceGradients | None,
        has_skips: bool,
    ) -> None:
        self.encoder = encoder
        self._core = core
        self._memory = frames
        self._on_device = on_device
        self.is_on_device = on_device is not None
        self._has_skips = has_skips
        self._frames: dict[int, EncodingFrame] = {}
        self._rates: dict[bytes, list[float]] = {}
        """Packed hyperparameters -> lr of each optimizer group."""

    def frame_of(self, chunk: Chunk) -> Frame:
        """Return the frame in which pushes of ``chunk`` leave."""
        if self._on_device is None:
            values = values_of(chunk, self._memory.gradient_frame(chunk))
            frame = EncodingFrame(self.encoder, chunk, values)
        else:
            memory = self._on_device.transfers.allocate
            values = self._on_device.gradient_part(chunk)
            frame = EncodingFrame(self.encoder, chunk, values, memory)
        self._frames[chunk.index] = frame
        return frame

    def apply(self, header: Header, frame: Frame) -> Header:
        if not header.length:
            return header
        assert isinstance(frame, EncodingFrame)
        self.bytes_before_coding += header.length
        clock, is_again = header.clock, bool(header.flags & _AGAIN)
        hyper, absent = self._core.settings_of(header.settings)
        terms = PushTerms(self._lr(hyper, frame.chunk) * header.weight, absent)
        num_bytes = frame.encode(clock=clock, terms=terms, is_again=is_again)
        self._core.count_coded(num_bytes - header.length)
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
    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def apply(self, header: Header, frame: Frame) -> Header:
        if self._checks.carries(header.chunk, header.clock):
            return stamped(header, frame.payload)
        return header


def pushes_of(
    core: WorkerCore,
    partition: Partition,
    frames: ChunkFrames,
    *,
    wire: Wire,
    on_device: DeviceGradients | None = None,
) -> Pushes:
    """Return the pipeline of the slice that ``core`` has taken. ``wire``: of the set
    (:meth:`Wire.of_set`); ``on_device``: gradients that are encoded where they lie."""
    transforms: list[PushTransform] = []
    encoding: EncodePush | None = None
    codings = ChunkCodings.of(wire.pushes(partition))
    if codings is not None:
        coder = HostCoder() if on_device is None else DeviceCoder(on_device.transfers)
        encoder = PushEncoder(
            codings,
            mine=core.mine,
            seed=wire.seed,
            group=core.seat.group,
            has_feedback=wire.has_feedback,
            skips=wire.skips,
            coder=coder,
        )
        encoding = EncodePush(
            encoder, core, frames, on_device=on_device, has_skips=bool(wire.skips)
        )
        transforms.append(encoding)
    if wire.checks != NO_CHECKS:
        transforms.append(ChecksumPush(wire.checks))
    return Pushes(partition.chunks, core.mine, frames, transforms, encoding)


class Pushes:
    def __init__(
        self,
        chunks: Sequence[Chunk],
        mine: Collection[int],
        frames: ChunkFrames,
        transforms: Sequence[PushTransform],
        encoding: EncodePush | None,
    ) -> None:
        """``chunks``: of the model; ``mine``: the slice; ``encoding``: the transform that encodes,
        None for raw pushes."""
        self._chunks = chunks
        self._frame_of = frames.gradient_frame if encoding is None else encoding.frame_of
        self._transforms = transforms
        self._apply = tuple(each.apply for each in transforms)
        self._encoding = encoding
        self._frames: dict[int, Frame] = {}
        for index in mine:
            self.add(index)

    def add(self, index: int) -> None:
        """Push this chunk, too, from now on."""
        self._frames[index] = self._frame_of(self._chunks[index])

    def frame(self, header: Header) -> Frame:
        """Return the frame to send of the push with this header, which is packed into it."""
        frame = self._frames[header.chunk]
        if header.flags & _AGAIN:  # the network may still have the frame that was sent first
            frame = self._frames[header.chunk] = frame.again()
        for apply in self._apply:
            header = apply(header, frame)
        header.pack_into(frame.header)
        return frame

    def skipped(
        self, *, clock: int, hyper: bytes, weight: float, empty: Collection[int]
    ) -> set[int]:
        """Return the chunks of the slice whose push is skipped: they are to be pushed without
        bytes. ``empty``: chunks without a gradient. Gradients lie where pushes take them."""
        found: set[int] = set()
        for each in self._transforms:
            found |= each.skipped(clock=clock, hyper=hyper, weight=weight, empty=empty)
        return found

    @property
    def encoder(self) -> PushEncoder | None:
        """The encoder of pushes; None for raw pushes."""
        return None if self._encoding is None else self._encoding.encoder

    @property
    def on_device(self) -> EncodePush | None:
        """The transform that encodes pushes on a device; None if none does."""
        encoding = self._encoding
        return encoding if encoding is not None and encoding.is_on_device else None

    @property
    def bytes_before_coding(self) -> int:
        """Bytes of all pushes that were encoded or skipped, without a codec."""
        return sum(each.bytes_before_coding for each in self._transforms)
