"""A worker's pushes, encoded on the device where its gradients lie: what
:class:`psdist.codecs.feedback.PushEncoder` makes on the host, byte for byte.

    encoder = DevicePushEncoder(codings, mine=[3], seed=0, group=1, has_feedback=True, copies=...)
    copy = encoder.begin(3, gradient, frame_memory, clock=7, terms=terms, after=[mark])
    copy.is_done()                                       # asked again and again, or not at all
    num_bytes = encoder.encode(3, gradient, frame_memory, clock=7, terms=terms)

``begin`` asks the device for everything, and for a copy of what the host needs: the encoded bytes
and eight numbers. How it has ended is known when that copy is done. So what is left out counts from
``encode`` on, which whoever pushes calls; what was begun and not pushed is begun again, from the
same residual. Residuals stay on the device, but for checkpoints.

Every operation is one of torch's that rounds each element by itself, as IEEE 754 says, or adds in
an order that is written down (psdist.codecs.blocks): hence the host's bits. Only the squares of
what is left out, of which people are told, are added in the device's own order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from psdist.codecs.base import OnDevice
from psdist.codecs.blocks import norm_of
from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Places, put, taken
from psdist.codecs.feedback import PushEncoder, PushTerms, Residual
from psdist.codecs.layout import num_values
from psdist.codecs.schemes.plain import Exact
from psdist.errors import InvariantError
from psdist.protocol.memory import as_tensor, torch_dtype

_Number = TypeVar("_Number", float, Tensor)
Pairs: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Sources and targets of copies."""


class Begun(Protocol):
    """As :class:`psdist.transfers.Copy`."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def join(self) -> None: ...


class Copies(Protocol):
    """What is needed of :class:`psdist.transfers.Transfers`."""

    @property
    def device(self) -> torch.device: ...
    def allocate(self, num_bytes: int) -> memoryview: ...
    def mark(self) -> Any: ...
    def begin_computed(self, compute: Callable[[], Pairs], *, after: Iterable[Any]) -> Begun: ...


class _Told(NamedTuple, Generic[_Number]):
    """What the device says of an encoding beside the payload."""

    missed: _Number
    """||p - C(p)||^2."""
    wanted: _Number
    """||p||^2."""
    most_missed: _Number
    """Of magnitudes, here and below: NaN or infinity where one is. Of what is left out,"""
    most_given: _Number
    """of what goes as it is, with what was due,"""
    most_taken: _Number
    """of what was due and may be taken along,"""
    most_due: _Number
    """what is still due,"""
    most_left: _Number
    """what is kept of a push that a codec has left alone,"""
    gradient: _Number
    """and the gradient."""

    @property
    def is_sound(self) -> bool:
        """Whether what was to be pushed is finite; of numbers on the host."""
        return all(map(math.isfinite, (self.most_missed, self.most_given, self.most_taken)))


@dataclass(slots=True)
class _Made:
    """An encoding that has begun."""

    clock: int
    rate: float
    absent: frozenset[int]
    """Of the pieces that have a part in the chunk."""
    places: Places
    counts: bool
    """Whether anything of it was coded or kept; else the gradient goes as it is."""
    told: Tensor
    """On the host, of :class:`_Told`."""
    checked: Tensor | None
    """On the host, what the device has decoded, where the payload carries its checksum."""
    copy: Begun = field(init=False)
    residual: Residual | None = None
    """What it leaves, once the device was asked for it."""


class DevicePushEncoder(PushEncoder):
    def __init__(self, codings: ChunkCodings, *, copies: Copies, **options: Any) -> None:
        """``copies``: between the device of the gradients and the memory that MPI sees;
        ``options``: of :class:`PushEncoder`, without ``skips``."""
        super().__init__(codings, **options)
        self._copies = copies
        self._made: dict[int, _Made] = {}
        self._told: dict[int, Tensor] = {}
        self._checked: dict[int, Tensor] = {}
        """By chunk, memory of the host."""
        self.num_bytes_to_host = 0

    def begin(
        self,
        chunk: int,
        gradient: Tensor,
        into: memoryview,
        *,
        clock: int,
        terms: PushTerms,
        after: Iterable[Any],
    ) -> Begun:
        """Begin the payload of a push, in place of one that was begun and has not left. Until the
        push is answered ``gradient``, on the device, stays as it is, once ``after`` these; ``into``
        is nobody's."""
        coding = self.codings.at(clock)[chunk]
        counts = terms.rate > 0 and math.isfinite(terms.rate) and not self.codings.is_burst(clock)
        places = coding.places(terms.absent) if counts else coding.places_raw()
        made = _Made(
            clock,
            terms.rate,
            _absent_in(coding, terms),
            places,
            counts=counts,
            told=self._memory(self._told, chunk, len(_Told._fields)),
            checked=None,
        )
        if counts and places.coded and self._is_compared(chunk, clock):
            made.checked = self._memory(self._checked, chunk, num_values(places.coded))
        before = self._residuals.get(chunk)

        def compute() -> Pairs:
            pairs = self._encoded(coding, made, before, gradient, into)
            self.num_bytes_to_host += sum(source.nbytes for source, _ in pairs)
            return pairs

        made.copy = self._copies.begin_computed(compute, after=after)
        self._made[chunk] = made
        return made.copy

    def is_finite(self, chunk: int) -> bool:
        """Whether the gradient is that was encoded last, whose copy is done."""
        return math.isfinite(_told_in(self._made[chunk]).gradient)

    def encode(
        self, chunk: int, gradient: Tensor, into: memoryview, *, clock: int, terms: PushTerms
    ) -> int:
        """As :meth:`PushEncoder.encode`; what was begun under these terms is waited for."""
        coding, begun = self.codings.at(clock)[chunk], self._made.get(chunk)
        of_now = clock, terms.rate, _absent_in(coding, terms)
        if begun is None or (begun.clock, begun.rate, begun.absent) != of_now:
            after = [self._copies.mark()]
            self.begin(chunk, gradient, into, clock=clock, terms=terms, after=after)
        made = self._made.pop(chunk)
        made.copy.wait()
        made.places.finish(into)
        if not made.counts:
            return made.places.num_bytes
        told = _told_in(made)
        if not told.is_sound:
            raise self._non_finite(chunk, clock)
        if made.checked is not None:
            coding.add_checksum(into, made.checked)
        self.errors.add(clock, told.missed, told.wanted)
        if self._has_feedback:
            self._keep(chunk, made, told, is_exact=isinstance(coding.codec, Exact))
        return made.places.num_bytes

    def _keep(self, chunk: int, made: _Made, told: _Told[float], *, is_exact: bool) -> None:
        residual = made.residual
        assert residual is not None
        if not told.most_due:
            residual = residual._replace(due=None)
        if is_exact and residual.due is None and not told.most_left:
            self._residuals.pop(chunk, None)
        else:
            self._residuals[chunk] = residual

    def leaves(self, *_: Any, **__: Any) -> bool:
        raise InvariantError("whether a push may wait is decided on the host")

    def collect(self) -> dict[str, dict[str, Any]]:
        found = super().collect()
        return {
            chunk: {key: each.cpu() if isinstance(each, Tensor) else each for key, each in its}
            for chunk, its in ((chunk, each.items()) for chunk, each in found.items())
        }

    def restore(self, collected: Mapping[str, Mapping[str, Any]]) -> bool:
        if not super().restore(collected):
            return False
        device = self._copies.device
        for chunk, each in self._residuals.items():
            due = None if each.due is None else each.due.to(device)
            self._residuals[chunk] = each._replace(values=each.values.to(device), due=due)
        return True

    def _memory(self, found: dict[int, Tensor], chunk: int, num: int) -> Tensor:
        """float32, of the host, of this chunk."""
        if chunk not in found or len(found[chunk]) < num:
            found[chunk] = as_tensor(self._copies.allocate(4 * num), "float32", num)
        return found[chunk][:num]

    # -- on the device: nothing is asked for an answer -----------------------------------------

    def _encoded(
        self,
        coding: ChunkCoding,
        made: _Made,
        before: Residual | None,
        gradient: Tensor,
        into: memoryview,
    ) -> Pairs:
        """What is to be copied to the host, and where."""
        places, chunk = made.places, coding.chunk
        absent = [
            slice(segment.offset, segment.offset + segment.length)
            for segment in chunk.segments
            if segment.piece in made.absent
        ]
        wanted, kept, due, portion = gradient, None, None, None
        if made.counts:
            wanted = gradient.to(torch.float32)
            if before is not None:
                now = _of_codec(before, coding.codec.name)
                wanted, kept, due, portion = _with_residual(wanted, now, made.rate, absent)
        pairs: list[tuple[Tensor, Tensor]] = []
        asked = seen = wanted.new_zeros(0)
        if places.coded:
            asked = taken(wanted, places.coded)
            assert isinstance(coding.codec, OnDevice)
            payload, seen = coding.codec.encode_on_device(asked)
            target = torch.frombuffer(
                into, dtype=torch.uint8, offset=places.coded_at, count=len(payload)
            )
            pairs.append((payload, target))
        given = taken(wanted, places.exact).to(torch_dtype(chunk.dtype))
        if places.exact:
            pairs.append((given, as_tensor(into[places.exact_at :], chunk.dtype, len(given))))
        missed, left = asked - seen, None
        is_exact = isinstance(coding.codec, Exact)
        if made.counts and self._has_feedback:
            left = torch.zeros_like(wanted)
            put(left, places.coded, missed)
            if kept is not None:
                if given.dtype != torch.float32:  # as it is, but rounded
                    put(left, places.exact, taken(wanted, places.exact) - given)
                for place in absent:
                    left[place] = kept[place]
            made.residual = Residual(left, made.rate, codec=coding.codec.name, due=due)
        nothing = torch.zeros((), device=gradient.device)
        told = _Told(
            missed=(missed * missed).sum(),
            wanted=(asked * asked).sum(),
            most_missed=_most(missed) if places.coded else nothing,
            most_given=_most(given) if is_exact and kept is not None else nothing,
            most_taken=nothing if portion is None else _most(portion),
            most_due=nothing if due is None else _most(due),
            most_left=_most(left) if is_exact and left is not None else nothing,
            gradient=_most(gradient),
        )
        if made.checked is not None:
            pairs.append((seen, made.checked))
        numbers = torch.stack([each.to(torch.float32) for each in told])
        return [*pairs, (numbers, made.told)]


def _told_in(made: _Made) -> _Told[float]:
    """Once its copy is done."""
    return _Told(*made.told.tolist())


def _most(values: Tensor) -> Tensor:
    """NaN where one is."""
    return values.abs().amax()


def _absent_in(coding: ChunkCoding, terms: PushTerms) -> frozenset[int]:
    return frozenset(each.piece for each in coding.chunk.segments).intersection(terms.absent)


def _of_codec(residual: Residual, codec: str) -> Residual:
    """As :meth:`PushEncoder._of_codec`; what is due may be nothing but zeros."""
    if residual.codec == codec:
        return residual
    due = residual.values if residual.due is None else residual.values + residual.due
    return Residual(torch.zeros_like(due), residual.rate, codec=codec, due=due)


def _with_residual(
    wanted: Tensor, residual: Residual, rate: float, absent: Collection[slice]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As :meth:`PushEncoder._wanted`: what is to be pushed, what is kept and still due in the units
    of now, and what was due, of which a part is taken along."""
    scale = residual.rate / rate
    kept, due, portion = residual.values * scale, None, None
    sent = wanted + kept
    if residual.due is not None:
        due = residual.due * scale
        portion = due.clone()
        for place in absent:
            portion[place].zero_()
        size, most = norm_of(portion), norm_of(wanted)
        times = torch.where(size > most, most / size, torch.ones_like(size))
        taken_along = portion * times.to(torch.float32)
        sent = sent + taken_along
        due = due - taken_along
    for place in absent:
        sent[place] = wanted[place]
    return sent, kept, due, portion
