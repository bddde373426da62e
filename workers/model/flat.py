"""The parameters that an optimizer holds as flat memory: what the wire reads and writes.

Parameters become parts of flat buffers (so replies land in place); gradients are copied into flat
buffers of the same layout when a step begins. For a model on a GPU the flat buffers live there,
with mirrors on the host for MPI (psdist.transfers).

    flat = FlatModel(partition, parameters)       # parameters[i] is piece i
    absent = flat.collect_gradients(scale=1.0)
    flat.gradients_to_host(chunks)                # before they are pushed
    flat.parameter_bytes(chunk)                   # host memory of a chunk
    flat.host_to_device(chunks)                   # when replies about them have landed there

Longer than other modules: gradients, values and their mirrors lie in one layout, which is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence

import torch

from psdist.errors import ModelError, UsageError
from psdist.protocol.events import Frame
from psdist.protocol.memory import as_bytes, as_tensor
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition
from psdist.transfers import DONE, Copy, Mark, Pairs, Transfers, transfers_for
from psdist.workers.model.samples import ValueSamples, as_bits, same_bits


class _FlatBuffers:
    """One flat tensor per buffer of the partition, and the host memory that MPI sees."""

    def __init__(
        self,
        partition: Partition,
        transfers: Transfers,
        allocate: Callable[[int], memoryview],
        *,
        is_seen_by_mpi: bool = True,
    ) -> None:
        """``allocate(num_bytes)``: memory for MPI."""
        self.on_device: list[torch.Tensor] = []
        self.on_host: list[torch.Tensor] = []
        for buffer in partition.buffers:
            dtype, num_elements = buffer.dtype, buffer.num_elements
            if is_seen_by_mpi or not transfers.has_mirrors:
                memory = allocate(num_elements * ITEM_BYTES[dtype])
                self.on_host.append(as_tensor(memory, dtype, num_elements))
            if transfers.has_mirrors:
                self.on_device.append(transfers.device_memory(dtype, num_elements))
        if not transfers.has_mirrors:
            self.on_device = self.on_host


class FlatModel:
    def __init__(
        self,
        partition: Partition,
        parameters: Sequence[torch.nn.Parameter],
        *,
        allocate: Callable[[int], memoryview] | None = None,
        encodes_there: bool = False,
    ) -> None:
        """Copies the parameters' values and makes each a view of the flat memory.

        ``allocate(num_bytes)``: memory for the gradients of a model on the CPU; ``encodes_there``:
        gradients on a device are encoded there, and have no mirror. Raises :class:`ModelError`
        where the model is on devices that psdist does not train on.
        """
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise ModelError(
                "the model's parameters are on several devices, "
                f"{', '.join(sorted(map(str, devices)))}; all parameters of a worker must be on "
                "one: call model.to(job.device) before job.prepare()"
            )
        (self.device,) = devices
        self._partition = partition
        self._parameters = tuple(parameters)
        self.transfers = transfers = transfers_for(self.device)
        self._landing: Copy = DONE
        """The last copy of replies to the device."""
        self._values = _FlatBuffers(partition, transfers, transfers.allocate)
        if transfers.has_mirrors or allocate is None:
            allocate = transfers.allocate
        self.encodes_there = encodes_there and transfers.has_mirrors
        """True if pushes read gradients on the device: :meth:`gradient_part`."""
        self.num_bytes_to_host = 0
        """Bytes of gradients that were copied to the host for pushes, in the model's dtype."""
        self._gradients = _FlatBuffers(
            partition, transfers, allocate, is_seen_by_mpi=not self.encodes_there
        )
        for buffer in partition.buffers:
            for piece, start in buffer.piece_starts:
                shape = partition.pieces[piece].shape
                stride = partition.pieces[piece].stride
                value = _stretch(self._values.on_device[buffer.index], start, shape, stride)
                value.copy_(parameters[piece].detach())
                parameters[piece].data = value
        self._gradient_views = self._views_of(self._gradients)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self._versions = [parameter._version for parameter in parameters]
        self.samples = ValueSamples(partition, self._values.on_device)
        self._noted: list[tuple[int, int]] = []
        self._pushed: tuple[_FlatBuffers, list[torch.Tensor]] | None = None
        """The flat gradients that are being pushed, while others are collected aside."""
        self._kept: tuple[_FlatBuffers, list[torch.Tensor]] | None = None
        """Memory for gradients aside, kept for the next time."""
        self.values_to_host()

    def _views_of(self, flats: _FlatBuffers) -> list[torch.Tensor]:
        """The pieces in ``flats``."""
        pieces = self._partition.pieces
        views = {
            piece: torch.as_strided(
                flats.on_device[buffer.index], pieces[piece].shape, pieces[piece].stride, start
            )
            for buffer in self._partition.buffers
            for piece, start in buffer.piece_starts
        }
        return [views[piece] for piece in range(len(pieces))]

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """By piece."""
        return self._parameters

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The flat gradient of each buffer, on the model's device."""
        return self._gradients.on_device

    @property
    def values(self) -> list[torch.Tensor]:
        """The flat parameters of each buffer, on the model's device."""
        return self._values.on_device

    def collect_gradients(self, *, scale: float, kept: Container[int] = ()) -> list[int]:
        """Copy every gradient, times ``scale``, into the flat buffers. Return the pieces without a
        gradient; the buffers get zeros for them. The dtype is the gradient's own: a float16 value
        below its range without a GradScaler's factor becomes zero (float32 weights under autocast
        keep it). ``kept`` pieces are there already, unscaled. Raises as :meth:`require_in_place`.
        """
        self.require_in_place()
        absent: list[int] = []
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for piece, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                absent.append(piece)
            if piece in kept:
                continue
            if gradient is None:
                self._gradient_views[piece].zero_()
                continue
            if gradient.layout != torch.strided:
                name = self._partition.pieces[piece].name
                raise ModelError(
                    f"parameter {name} has a sparse gradient ({gradient.layout}); psdist pushes "
                    "dense ones: use psdist.Embedding, or sparse=False"
                )
            views.append(self._gradient_views[piece])
            gradients.append(gradient)
        with torch.no_grad():
            if views:
                torch._foreach_copy_(views, gradients)
            if scale != 1.0:
                for flat in self._gradients.on_device:
                    flat.mul_(scale)
        return absent

    def require_in_place(self) -> None:
        """Raises :class:`UsageError` if the parameters have left the flat memory: the servers'
        values would not reach them."""
        for piece, parameter in enumerate(self._parameters):
            if parameter.data_ptr() != self._addresses[piece]:
                raise UsageError(
                    f"parameter {self._partition.pieces[piece].name} no longer uses the memory "
                    "that job.prepare() assigned to it; instead of `p.data = values` write `with "
                    "torch.no_grad(): p.copy_(values)`, and move or convert the model (.to(), "
                    ".half()) before job.prepare()"
                )

    def take_gradient(self, piece: int) -> tuple[int, int] | None:
        """Copy this gradient into its flat buffer and return its :meth:`identity`. Return None,
        without a copy, if there is no dense gradient."""
        gradient = self._parameters[piece].grad
        if gradient is None or gradient.layout != torch.strided:
            return None
        with torch.no_grad():
            self._gradient_views[piece].copy_(gradient)
        return _identity(gradient)

    def identity(self, piece: int) -> tuple[int, int]:
        """Return an identity of the piece's gradient. It changes with each write that torch
        sees."""
        return _identity(self._parameters[piece].grad)

    def holds_gradient(self, piece: int) -> bool:
        """True if the flat buffer has the current bits of this gradient."""
        gradient, view = self._parameters[piece].grad, self._gradient_views[piece]
        return gradient is not None and same_bits(gradient.detach().to(view.dtype), view)

    def unlike_flat(self, pieces: Iterable[int]) -> set[int]:
        """Return the pieces whose gradient differs from the flat buffer."""
        pieces = list(pieces)
        if not self.transfers.has_mirrors:
            return {piece for piece in pieces if not self.holds_gradient(piece)}
        there = [piece for piece in pieces if self._parameters[piece].grad is not None]
        unlike = set(pieces).difference(there)
        if there:  # one wait for the device
            are_other = [self._is_other(piece) for piece in there]
            flags = torch.stack(are_other).tolist()
            unlike.update(piece for piece, is_other in zip(there, flags, strict=True) if is_other)
        return unlike

    def _is_other(self, piece: int) -> torch.Tensor:
        gradient, view = self._parameters[piece].grad, self._gradient_views[piece]
        assert gradient is not None
        return (as_bits(gradient.detach().to(view.dtype)) != as_bits(view)).any()

    def gradient_part(self, chunk: Chunk) -> torch.Tensor:
        """The flat gradient in ``chunk``."""
        return _part(self.gradients, chunk)

    def divert_gradients(self) -> None:
        """Collect gradients in memory aside until :meth:`rejoin_gradients`, because the flat
        gradients are being pushed."""
        if self._pushed is None:
            self._pushed = self._gradients, self._gradient_views
            kept, self._kept = self._kept, None
            if kept is None:
                aside = _FlatBuffers(
                    self._partition, self.transfers, self.transfers.allocate, is_seen_by_mpi=False
                )
                kept = aside, self._views_of(aside)
            self._gradients, self._gradient_views = kept

    @property
    def is_diverted(self) -> bool:
        return self._pushed is not None

    def rejoin_gradients(self, *, keeps: bool = False) -> list[torch.Tensor]:
        """Use the flat gradients again; return the gradients that were collected aside.
        ``keeps``: reuse that memory the next time."""
        assert self._pushed is not None
        aside = self._gradients.on_device
        if keeps:
            self._kept = self._gradients, self._gradient_views
        (self._gradients, self._gradient_views), self._pushed = self._pushed, None
        return aside

    @property
    def is_without_gradients(self) -> bool:
        """True if no parameter has a gradient."""
        return all(parameter.grad is None for parameter in self._parameters)

    def note_gradients(self) -> None:
        """Note the gradients that are used now, for :meth:`gradients_changed`."""
        self._noted = [_identity(parameter.grad) for parameter in self._parameters]

    def gradients_changed(self) -> bool:
        """True if a gradient was replaced or written since :meth:`note_gradients`."""
        return self._noted != [_identity(parameter.grad) for parameter in self._parameters]

    def clear_gradients(self) -> None:
        """Set all flat gradients to zero."""
        for flat in self._gradients.on_device:
            flat.zero_()

    def clear_gradient(self, piece: int) -> None:
        """Set the flat gradient of a piece to zero."""
        self._gradient_views[piece].zero_()

    def give_gradients(self, absent: Container[int]) -> None:
        """Copy the flat gradients into every parameter's ``grad``, except ``absent`` pieces."""
        with torch.no_grad():
            for piece, parameter in enumerate(self._parameters):
                if piece not in absent:
                    gradient = parameter.grad
                    parameter.grad = torch.empty_like(parameter) if gradient is None else gradient
                    parameter.grad.copy_(self._gradient_views[piece])

    def note_values(self) -> None:
        """Accept the current parameters: :meth:`written_by_others` begins here."""
        self._versions = [parameter._version for parameter in self._parameters]

    def written_by_others(self, pieces: Collection[int] | None = None) -> list[int]:
        """Pieces (of these) whose parameter torch has seen written since :meth:`values_changed`."""
        return [
            piece
            for piece in (range(len(self._parameters)) if pieces is None else pieces)
            if self._parameters[piece]._version != self._versions[piece]
        ]

    def is_finite(self, chunk: Chunk) -> bool:
        """True if the gradient in ``chunk`` has neither NaN nor infinity."""
        return _is_finite(_part(self._gradients.on_host, chunk))

    def non_finite_in(self, chunks: Collection[Chunk]) -> list[int]:
        """As :meth:`non_finite`, of the pieces in these chunks."""
        return sorted(
            {
                segment.piece
                for chunk in chunks
                if not _is_finite(self.gradient_part(chunk))
                for segment in chunk.segments
                if not torch.isfinite(self._gradient_views[segment.piece]).all()
            }
        )

    def non_finite(self) -> list[int]:
        """Pieces whose collected gradient holds NaN or infinity; one pass if there are none."""
        suspicious = [
            buffer
            for buffer, flat in zip(self._partition.buffers, self.gradients, strict=True)
            if not torch.isfinite(flat.sum(dtype=_sum_dtype(flat)))
        ]
        # The sum of finite values may overflow, so look at each piece.
        return [
            piece
            for buffer in suspicious
            for piece, _ in buffer.piece_starts
            if not torch.isfinite(self._gradient_views[piece]).all()
        ]

    # -- between the device and what MPI sees --------------------------------------------------

    def mark(self) -> Mark:
        """Return a mark after this thread's work on the device so far, for
        :meth:`begin_to_host`."""
        return self.transfers.mark()

    def begin_to_host(self, chunk: Chunk, *, after: Iterable[Mark]) -> Copy:
        """Begin to copy the gradient in ``chunk`` to the host for a push. It is complete
        ``after`` these marks."""
        if not self.transfers.has_mirrors:
            return DONE
        pair = self.gradient_part(chunk), _part(self._gradients.on_host, chunk)
        self.num_bytes_to_host += chunk.num_bytes
        return self.transfers.begin([pair], after=after)

    def gradients_to_host(self, chunks: Iterable[Chunk]) -> None:
        """As :meth:`begin_to_host`, for gradients of this thread; waits for the copies."""
        copies = [self.begin_to_host(chunk, after=[self.mark()]) for chunk in chunks]
        for copy in copies[-1:]:
            copy.wait()

    def values_to_host(self) -> None:
        """Copy all parameters to the host memory for MPI."""
        if self.transfers.has_mirrors:
            pairs = list(zip(self._values.on_device, self._values.on_host, strict=True))
            self.transfers.begin(pairs, after=[self.mark()]).wait()

    def host_to_device(self, chunks: Iterable[Chunk]) -> None:
        """Copy ``chunks``, for which replies have landed in host memory, to the device."""
        if self.transfers.has_mirrors:
            host, device = self._values.on_host, self._values.on_device
            self.land([(_part(host, chunk), _part(device, chunk)) for chunk in chunks])

    def land(self, pairs: Pairs) -> None:
        """Copy values into place from host memory, which must not change until
        :meth:`wait_until_landed` returns."""
        if pairs:
            self._landing = self.transfers.begin(pairs, after=[self.mark()])
            self._landing.join()

    def wait_until_landed(self) -> None:
        """Wait for the last copy of :meth:`land`."""
        self._landing.wait()

    def values_changed(self, pieces: Collection[int] | None = None) -> None:
        """Report writes by MPI to autograd, for these ``pieces`` or all. A backward pass through
        the old values then raises, as after any optimizer's step."""
        chosen = range(len(self._parameters)) if pieces is None else pieces
        torch.autograd.graph.increment_version([self._parameters[piece] for piece in chosen])
        for piece in chosen:
            self._versions[piece] = self._parameters[piece]._version

    def parameter_bytes(self, chunk: Chunk) -> memoryview:
        """Host memory of a chunk's parameters."""
        return as_bytes(_part(self._values.on_host, chunk))

    def gradient_bytes(self, chunk: Chunk) -> memoryview:
        """Host memory of a chunk's gradient."""
        return as_bytes(_part(self._gradients.on_host, chunk))

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`parameter_bytes`."""
        return Frame(self.parameter_bytes(chunk))

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`gradient_bytes`."""
        return Frame(self.gradient_bytes(chunk))


def _stretch(
    flat: torch.Tensor, start: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a dense part of ``flat``, the same memory, with its own storage: torch.save writes a
    tensor's whole storage, and that of a view is all of the flat memory."""
    item_bytes = flat.element_size()
    first = (flat.storage_offset() + start) * item_bytes
    storage = flat.untyped_storage()[first : first + math.prod(shape) * item_bytes]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, shape, stride)


def _identity(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _part(flats: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
    return flats[chunk.buffer][chunk.start : chunk.start + chunk.length]


def _is_finite(part: torch.Tensor) -> bool:
    is_summable = torch.isfinite(part.sum(dtype=_sum_dtype(part)))
    return bool(is_summable) or bool(torch.isfinite(part).all())


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Shadow:
    """The newest values of some chunks that servers have sent."""

    def __init__(
        self,
        partition: Partition,
        flat: FlatModel,
        *,
        chunks: Collection[int],
        newest: Sequence[torch.Tensor],
    ) -> None:
        """``newest``: the servers' newest values of each buffer, flat: the parameters, or a copy
        if local steps have changed these since."""
        self._flat = flat
        self._aside: dict[int, torch.Tensor] = {}
        self._in_place: dict[int, torch.Tensor] = {}
        # One allocation: many would lie in holes of the heap that autograd's gradients have left.
        memory = flat.transfers.allocate(sum(partition.chunks[index].num_bytes for index in chunks))
        start, pairs = 0, []
        for index in chunks:
            chunk = partition.chunks[index]
            stop = start + chunk.num_bytes
            aside = as_tensor(memory[start:stop], chunk.dtype, chunk.length)
            start = stop
            stretch = slice(chunk.start, chunk.start + chunk.length)
            self._aside[index] = aside
            self._in_place[index] = flat.values[chunk.buffer][stretch]
            pairs.append((newest[chunk.buffer][stretch], aside))
        flat.transfers.begin(pairs, after=[flat.mark()]).wait()

    def parameter_frame(self, chunk: Chunk) -> Frame:
        return Frame(as_bytes(self._aside[chunk.index]))

    def move(self, chunks: Collection[int]) -> None:
        """Copy the landed values of ``chunks`` into the parameters."""
        self._flat.land([(self._aside[chunk], self._in_place[chunk]) for chunk in chunks])
