"""Where pushes are encoded: on the host, or on the device that has the gradients.

The encoder (psdist.codecs.feedback) has the algorithm. A coder runs a codec and brings results to
the host. Both give the same bits: on a device every operation is one of torch's that rounds each
element by itself, as IEEE 754 requires, or adds in a written order (psdist.codecs.blocks). Only
sums of squares, which are reported, use the device's own order.

    encoder = PushEncoder(codings, ..., coder=DeviceCoder(transfers))     # or HostCoder()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from psdist.codecs import MatrixCodec, OnDevice
from psdist.codecs.layout import Division
from psdist.protocol.memory import as_tensor
from psdist.protocol.partition import Partition
from psdist.transfers import Copy, Mark, Pairs, Transfers

if TYPE_CHECKING:
    from psdist.codecs.chunks import ChunkCodings
    from psdist.codecs.device_kernels import DeviceKernels
    from psdist.codecs.host_kernels import HostKernels

_log: Final = logging.getLogger(__name__)

Measures: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""Name of a number -> what computes it: a tensor of one element."""
Starts: TypeAlias = MutableMapping[int, Tensor | None]
"""Segment -> the tensor that a codec of matrices starts from."""


class Encoded(NamedTuple):
    """A push that was encoded in one pass over its values."""

    left: Tensor
    """float32, of the chunk: the new residual of its coded values; zero elsewhere."""
    number: Callable[[str], float]
    """Reads a number by its name, once the copies are done; 0 if it has no measure."""
    copies: Pairs
    """Copies that bring the payload and the numbers to the host."""


class HostCoder:
    """Encodes at once; a number is computed when it is read."""

    def __init__(
        self, transfers: Transfers | None = None, host_kernels: HostKernels | None = None
    ) -> None:
        """``transfers``: to the memory that MPI reads; by default the values lie there;
        ``host_kernels``: encode most pushes in one pass; None: the codecs in torch encode all."""
        self.transfers = Transfers() if transfers is None else transfers
        self.host_kernels = host_kernels
        self.num_bytes_to_host = 0
        """Bytes that were copied from a device."""

    @classmethod
    def compiled(cls, codings: ChunkCodings) -> HostCoder:
        """Return a coder with the kernels of this host for these codecs; compiles them once."""
        from psdist.codecs.host_kernels import kernels_for  # only ranks that encode need it

        return cls(host_kernels=kernels_for(codings.codecs))

    def begin(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> Copy:
        """Call ``compute`` and make its copies, after these marks."""
        return self.transfers.begin_computed(compute, after=after)

    def encode_at_once(
        self,
        chunk: int,
        division: Division,
        gradient: Tensor,
        *,
        kept: Tensor | None,
        times: float,
        into: Tensor,
        seen: Tensor | None = None,
    ) -> Encoded | None:
        """Encode ``gradient`` + ``kept`` x ``times`` in one pass; return None if no kernel does it.
        ``gradient``: of the chunk, in the workers' dtype; ``kept``: float32; ``into``: memory of
        the host for the payload; ``seen``: float32, memory of the host for the decoded values."""
        del chunk
        if self.host_kernels is None:
            return None
        pushed = self.host_kernels.push(division, gradient, kept, times, into, seen=seen)
        return None if pushed is None else Encoded(pushed.left, pushed.number, [])

    def code(
        self, division: Division, values: Tensor, *, seed: int, starts: Starts
    ) -> tuple[Tensor, Tensor]:
        """Return the codec's payload of ``values`` (1-D, float32) and what it is decoded to."""
        codec, segments = division.codec, division.segments
        if isinstance(codec, MatrixCodec):
            last = [starts.get(number) for number in segments]
            payload, newest = codec.encode_from(values, seed=seed, starts=last)
            starts.update(zip(segments, newest, strict=True))
        else:
            payload = codec.encode(values, seed=seed)
        return payload, codec.decode(payload, len(values))

    def numbers(self, chunk: int, measures: Measures) -> tuple[Callable[[str], float], Pairs]:
        """Return how to read a number once the copy is done, 0 if it has no measure, and the copies
        that bring the numbers to the host."""
        del chunk
        return lambda name: float(measures[name]()) if name in measures else 0.0, ()

    def to_host(self, chunk: int, values: Tensor) -> tuple[Tensor, Pairs]:
        """Return memory of the host for ``values`` (1-D, float32), and the copies to it."""
        del chunk
        return values, ()


class DeviceCoder(HostCoder):
    """Asks the device for everything at once, and for no answer before the copy is done."""

    def __init__(self, transfers: Transfers, kernels: DeviceKernels | None = None) -> None:
        """``kernels``: encode most pushes in one pass; None: the codecs in torch encode all."""
        super().__init__(transfers)
        self.kernels = kernels
        self._memory: dict[tuple[str, int], Tensor] = {}
        """Use and chunk -> memory of the host, float32."""

    @classmethod
    def of(cls, transfers: Transfers, codings: ChunkCodings, partition: Partition) -> DeviceCoder:
        """Return a coder with the kernels that a GPU has for these codecs; compiles them."""
        from psdist.codecs.device_kernels import kernels_for  # only ranks with a GPU need it

        dtypes = {chunk.dtype for chunk in partition.chunks}
        if transfers.device.type != "cuda":
            return cls(transfers)
        return cls(transfers, kernels_for(transfers.device, codings.codecs, dtypes))

    def begin(self, compute: Callable[[], Pairs], *, after: Iterable[Mark]) -> Copy:
        def counted() -> Pairs:
            pairs = compute()
            self.num_bytes_to_host += sum(source.nbytes for source, _ in pairs)
            return pairs

        return super().begin(counted, after=after)

    def encode_at_once(
        self,
        chunk: int,
        division: Division,
        gradient: Tensor,
        *,
        kept: Tensor | None,
        times: float,
        into: Tensor,
        seen: Tensor | None = None,
    ) -> Encoded | None:
        if self.kernels is None or kept is None or seen is not None:
            return None
        try:
            pushed = self.kernels.push(division, gradient, kept, times)
        except Exception as error:  # Triton compiles another size now, and its cache is full
            self.kernels = None
            _log.warning("GPU kernels disabled: %s: %s; torch encodes instead",
                         type(error).__name__, error)  # fmt: skip
            return None
        if pushed is None:
            return None
        memory, copies = self._on_host("parts of numbers", chunk, pushed.numbers.view(-1))
        pairs = [(pushed.payload, into), *copies]
        return Encoded(pushed.left, pushed.reader(memory), pairs)

    def code(
        self, division: Division, values: Tensor, *, seed: int, starts: Starts
    ) -> tuple[Tensor, Tensor]:
        del seed, starts  # no codec with a form for devices is random or of matrices
        assert isinstance(division.codec, OnDevice)
        return division.codec.encode_on_device(values)

    def numbers(self, chunk: int, measures: Measures) -> tuple[Callable[[str], float], Pairs]:
        each = torch.stack([measure().to(torch.float32) for measure in measures.values()])
        memory, pairs = self._on_host("numbers", chunk, each)
        names = {name: place for place, name in enumerate(measures)}
        return lambda name: float(memory[names[name]]) if name in names else 0.0, pairs

    def to_host(self, chunk: int, values: Tensor) -> tuple[Tensor, Pairs]:
        return self._on_host("values", chunk, values)

    def _on_host(self, use: str, chunk: int, values: Tensor) -> tuple[Tensor, Pairs]:
        memory, num = self._memory.get((use, chunk)), len(values)
        if memory is None or len(memory) < num:
            memory = as_tensor(self.transfers.allocate(4 * num), "float32", num)
            self._memory[use, chunk] = memory
        return memory[:num], [(values, memory[:num])]
