"""A worker's pushes through a codec, and the residuals that they leave.

The *residual* e is what a codec leaves out of one push. It is added to the next push (error
feedback: Seide et al. 2014; Karimireddy et al., arXiv 1901.09847). Its unit is the gradient's. If
the step that a gradient makes has another size now, e is scaled:

    p = g + r e,    r = (lr x weight) before / (lr x weight) now;    sent: C(p);    e = p - C(p)

so that e moves parameters later as far as it would have moved them under its own learning rate.
Exceptions:

- Nothing would move now (lr or weight 0): g is sent as it is, and e stays.
- A piece has no gradient: it is left out of the payload, and its e stays.
- A chunk's push is skipped while its step is small against the parameters (Hsieh et al., Gaia, NSDI
  2017): nothing is sent, e = p.
- A *burst*, a round among others without a codec: g is sent and e stays, because e at once would be
  a step on the gradients of many rounds.
- The codec has changed within the run: the residual of the codec before is *due*. Each push takes a
  portion of it that is not larger than the gradient.

One payload in ``compare_every`` has the CRC-32 of what its sender has decoded. The state that a
codec of matrices starts from is kept with e.

    encoder = PushEncoder(codings, mine=[3], seed=0, group=1, has_feedback=True)
    num_bytes = encoder.encode(3, gradient, frame_memory, clock=7, terms=PushTerms(1e-3, set()))
    encoder.restore(encoder.collect())                   # for checkpoints

Longer than other modules: what a push leaves out, when, and how it is sent later is one algorithm.

On a device (:class:`psdist.codecs.coders.DeviceCoder`) a push begins before it leaves:

    copy = encoder.begin(3, gradient, frame_memory, clock=7, terms=terms, after=[mark])
    copy.is_done()                                       # optional: ``encode`` waits for it

A residual counts from ``encode`` on. A push that was begun and has not left is begun again, from
the same residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from psdist.codecs import seed_of
from psdist.codecs.blocks import norm_of
from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Places, put, taken
from psdist.codecs.coders import HostCoder
from psdist.codecs.layout import num_values
from psdist.codecs.schemes.plain import Exact
from psdist.config.codec_specs import Skip
from psdist.errors import NonFiniteGradientError
from psdist.protocol.memory import as_tensor, torch_dtype
from psdist.protocol.rounds import at_round
from psdist.transfers import DONE, Copy, Mark, Pairs

if TYPE_CHECKING:
    from torch import Tensor


class PushTerms(NamedTuple):
    """The terms of the push of a chunk in an iteration."""

    rate: float
    """lr x weight."""
    absent: Collection[int]
    """Pieces without a gradient."""


class Residual(NamedTuple):
    values: Tensor
    """float32, of the chunk."""
    rate: float
    """lr x weight of the push that left it."""
    skipped: int = 0
    """How many pushes running have been left for later as a whole."""
    codec: str = ""
    """Which has left it."""
    due: Tensor | None = None
    """The chunk's residual of earlier codecs, in the same units, that no push has taken yet."""


class _Wanted(NamedTuple):
    """The values that a push should bring."""

    values: Tensor
    """p, float32."""
    kept: Tensor | None = None
    """e in the units of this push."""
    due: Tensor | None = None
    """The residual that is due after this push, zeros included."""
    portion: Tensor | None = None
    """The residual that was due before; a part of it is in p."""


@dataclass(slots=True)
class _Made:
    """An encoding that has begun."""

    clock: int
    terms: PushTerms
    """Absent are pieces that have a segment in the chunk."""
    places: Places
    is_coded: bool
    """False where the gradient is sent as it is, and the residual stays."""
    copy: Copy = DONE
    number: Callable[[str], float] = field(init=False)
    checked: Tensor | None = None
    """On the host: what was decoded, if the payload carries its checksum."""
    residual: Residual | None = None


_MOST_BINS = 64


class CodingErrors:
    """||p - C(p)||^2 and ||p||^2, summed over chunks and over bins of as many iterations each; so
    few bins that a long run costs no more than a short one."""

    def __init__(self) -> None:
        self.width = 1
        """Iterations in a bin."""
        self.missed: list[float] = []
        self.wanted: list[float] = []
        self._newest = -1, 0.0, 0.0

    def add(self, clock: int, missed: float, wanted: float) -> None:
        before = self._newest[1:] if self._newest[0] == clock else (0.0, 0.0)
        self._newest = clock, before[0] + missed, before[1] + wanted
        while clock // self.width >= _MOST_BINS:
            self.missed, self.wanted = (
                [sum(bins[at : at + 2]) for at in range(0, len(bins), 2)]
                for bins in (self.missed, self.wanted)
            )
            self.width *= 2
        place = clock // self.width
        for bins, square in ((self.missed, missed), (self.wanted, wanted)):
            bins.extend([0.0] * (place + 1 - len(bins)))
            bins[place] += square

    def of_newest(self, clock: int) -> float:
        """||p - C(p)|| / ||p|| of this iteration, if nothing was added of a later one; else 0."""
        newest, missed, wanted = self._newest
        return math.sqrt(missed / wanted) if newest == clock and wanted > 0 else 0.0


class PushEncoder:
    def __init__(
        self,
        codings: ChunkCodings,
        *,
        mine: Collection[int],
        seed: int,
        group: int,
        has_feedback: bool,
        skips: Sequence[tuple[int, Skip | None]] = (),
        compare_every: int = 64,
        coder: HostCoder | None = None,
    ) -> None:
        """``mine``: the chunks of this worker; ``group``: the group of the gradients: groups have
        different seeds; ``skips``: by round, which pushes are skipped (psdist.codecs.wire);
        ``compare_every``: one payload in this many carries a checksum; ``coder``: by default on the
        host."""
        self.codings = codings
        self.coder = HostCoder() if coder is None else coder
        self._mine = frozenset(mine)
        self.errors = CodingErrors()
        self._seed = seed
        self._group = group
        self._has_feedback = has_feedback
        self._skips = skips
        self.num_skipped = 0
        """Pushes that were skipped."""
        self._compare_every = compare_every
        self._made: dict[int, _Made] = {}
        self._residuals: dict[int, Residual] = {}
        self._starts: dict[int, dict[int, Tensor | None]] = {}
        """By chunk and segment, of codecs of matrices."""

    def leaves(
        self,
        chunk: int,
        gradient: Tensor,
        parameters: Tensor,
        *,
        clock: int,
        lr: float,
        rate: float,
    ) -> bool:
        """Return True if the push of ``chunk`` is skipped: the next one brings it as well.
        ``gradient``, ``parameters``: of the chunk, in the workers' dtype. Raises
        :class:`NonFiniteGradientError`."""
        skip, last = at_round(None, self._skips, clock), self._residuals.get(chunk)
        num_before = last.skipped if last is not None else 0
        if skip is None or num_before == skip.most or not self._is_coded(rate, clock):
            return False
        wanted = self._wanted(self.codings.at(clock)[chunk], gradient, rate, ())
        size, held = (float(each.norm(dtype=torch.float64)) for each in (wanted.values, parameters))
        if not math.isfinite(size):
            raise self._non_finite(chunk, clock)
        if not lr * size < skip.threshold * held:
            return False
        self.errors.add(clock, size * size, size * size)
        codec, left = self.codings.at(clock).codec.name, wanted.values.clone()
        due = wanted.due if wanted.due is not None and bool(wanted.due.any()) else None
        self._residuals[chunk] = Residual(left, rate, num_before + 1, codec, due)
        self.num_skipped += 1
        return True

    def begin(
        self,
        chunk: int,
        gradient: Tensor,
        into: memoryview,
        *,
        clock: int,
        terms: PushTerms,
        after: Iterable[Mark],
    ) -> Copy:
        """Begin the payload of a push; one that was begun before and has not left is dropped.

        ``gradient`` (1-D, the workers' dtype) is complete after these marks, and stays as it is
        until the push is answered. Nobody else uses ``into`` meanwhile.
        """
        coding, is_coded = self.codings.at(clock)[chunk], self._is_coded(terms.rate, clock)
        places = coding.places(terms.absent) if is_coded else coding.places_raw()
        made = self._made[chunk] = _Made(clock, _terms_of(coding, terms), places, is_coded)

        def compute() -> Pairs:
            return self._compute(coding, made, gradient, into)

        made.copy = self.coder.begin(compute, after=after)
        return made.copy

    def is_finite(self, chunk: int) -> bool:
        """Return True if the gradient that was begun last is finite; its copy is done."""
        return math.isfinite(self._made[chunk].number("gradient"))

    def encode(
        self, chunk: int, gradient: Tensor, into: memoryview, *, clock: int, terms: PushTerms
    ) -> int:
        """Return the bytes of the payload of a push that leaves now. Waits if the push was begun
        under these terms; else begins it. Raises :class:`NonFiniteGradientError`."""
        coding, begun = self.codings.at(clock)[chunk], self._made.get(chunk)
        if begun is None or (begun.clock, begun.terms) != (clock, _terms_of(coding, terms)):
            now = [self.coder.transfers.mark()]
            self.begin(chunk, gradient, into, clock=clock, terms=terms, after=now)
        made = self._made.pop(chunk)
        made.copy.wait()
        made.places.finish(into)
        if made.is_coded:
            self._settle(coding, made, into)
        return made.places.num_bytes

    def _settle(self, coding: ChunkCoding, made: _Made, into: memoryview) -> None:
        chunk, number = coding.chunk.index, made.number
        # Almost always the sum of squares is finite, and the host need not look for the largest.
        is_finite = math.isfinite(number("missed")) or math.isfinite(number("most missed"))
        if not (is_finite and math.isfinite(number("most exact") + number("most taken"))):
            raise self._non_finite(chunk, made.clock)
        if made.checked is not None:
            coding.add_checksum(into, made.checked)
        self.errors.add(made.clock, number("missed"), number("wanted"))
        residual = made.residual
        if residual is None:
            return
        if residual.due is not None and not number("most due"):
            residual = residual._replace(due=None)
        if residual.due is None and isinstance(coding.codec, Exact) and not number("most left"):
            self._residuals.pop(chunk, None)
        else:
            self._residuals[chunk] = residual

    def _compute(
        self, coding: ChunkCoding, made: _Made, gradient: Tensor, into: memoryview
    ) -> Pairs:
        """Encode where the gradient lies. Return the copies to the payload and of the numbers. A
        device is asked for no answer here."""
        chunk, number = coding.chunk, coding.chunk.index
        absent = [
            slice(segment.offset, segment.offset + segment.length)
            for segment in chunk.segments
            if segment.piece in made.terms.absent
        ]
        if made.is_coded and not absent:
            at_once = self._compute_at_once(coding, made, gradient, into)
            if at_once is not None:
                return at_once
        wanted = _Wanted(gradient)
        if made.is_coded:
            wanted = self._wanted(coding, gradient, made.terms.rate, absent)
        coded, exact, _, _ = made.places.division
        pairs: list[tuple[Tensor, Tensor]] = []
        asked = seen = wanted.values.new_zeros(0)
        if coded:
            asked = taken(wanted.values, coded)
            payload, seen = self.coder.code(
                made.places.division,
                asked,
                seed=seed_of(self._seed, self._group, number, made.clock),
                starts=self._starts.setdefault(number, {}),
            )
            made.places = made.places.sized(len(payload))
            at = made.places.coded_at
            target = torch.frombuffer(into, dtype=torch.uint8, offset=at, count=len(payload))
            pairs.append((payload, target))
            if self._is_compared(number, made.clock):
                made.checked, copies = self.coder.to_host(number, seen)
                pairs += copies
        given = taken(wanted.values, exact).to(torch_dtype(chunk.dtype))
        if exact:
            target = as_tensor(into[made.places.exact_at :], chunk.dtype, len(given))
            pairs.append((given, target))
        missed, left = asked - seen, None
        if made.is_coded and self._has_feedback:
            left = torch.zeros_like(wanted.values)
            put(left, coded, missed)
            if wanted.kept is not None:
                if given.dtype != torch.float32:  # as it is, but rounded
                    put(left, exact, taken(wanted.values, exact) - given)
                for place in absent:
                    left[place] = wanted.kept[place]
            made.residual = Residual(left, made.terms.rate, codec=coding.codec.name, due=wanted.due)
        is_all_exact = isinstance(coding.codec, Exact)
        largest = {
            "most missed": missed,
            "most exact": given if is_all_exact and wanted.kept is not None else None,
            "most taken": wanted.portion,
            "most due": wanted.due,
            "most left": left if is_all_exact else None,
            "gradient": gradient,
        }
        measures = {"missed": partial(_square, missed), "wanted": partial(_square, asked)}
        for name, values in largest.items():
            if values is not None and len(values):
                measures[name] = partial(_most, values)
        made.number, copies = self.coder.numbers(number, measures)
        return [*pairs, *copies]

    def _compute_at_once(
        self, coding: ChunkCoding, made: _Made, gradient: Tensor, into: memoryview
    ) -> Pairs | None:
        """As :meth:`_compute`, in one pass over the values. Return None if no kernel does it, as
        where another codec has left the residual."""
        number, name = coding.chunk.index, coding.codec.name
        last, (coded, exact, _, _) = self._residuals.get(number), made.places.division
        if not coded or (last is not None and (last.due is not None or last.codec != name)):
            return None
        kept, times = None, 1.0
        if last is not None:
            kept, times = last.values, last.rate / made.terms.rate
        seen = torch.empty(num_values(coded)) if self._is_compared(number, made.clock) else None
        division, at = made.places.division, made.places.coded_at
        target = torch.frombuffer(into, dtype=torch.uint8, offset=at, count=made.places.coded_bytes)
        encoded = self.coder.encode_at_once(
            number, division, gradient, kept=kept, times=times, into=target, seen=seen
        )
        if encoded is None:
            return None
        left, pairs = encoded.left, list(encoded.copies)
        if exact:
            wanted = taken(gradient, exact).to(torch.float32)
            if kept is not None:
                wanted = wanted + taken(kept, exact) * times
            given = wanted.to(torch_dtype(coding.chunk.dtype))
            target = as_tensor(into[made.places.exact_at :], coding.chunk.dtype, len(given))
            pairs.append((given, target))
            if given.dtype != torch.float32:
                put(left, exact, wanted - given)
        if self._has_feedback:
            made.residual = Residual(left, made.terms.rate, codec=name)
        made.number, made.checked = encoded.number, seen
        return pairs

    def _is_compared(self, chunk: int, clock: int) -> bool:
        """True if this payload has the checksum of its decoded values."""
        return (chunk + clock) % self._compare_every == 0

    def _wanted(
        self, coding: ChunkCoding, gradient: Tensor, rate: float, absent: Collection[slice]
    ) -> _Wanted:
        """Return the gradient with the residual of this codec, and a portion of what other codecs
        have left that is not larger than the gradient."""
        wanted, chunk = gradient.to(torch.float32), coding.chunk.index
        residual = self._residuals.get(chunk)
        if residual is None:
            return _Wanted(wanted)
        if residual.codec != coding.codec.name:
            self._starts.pop(chunk, None)
            left = residual.values if residual.due is None else residual.values + residual.due
            residual = residual._replace(values=torch.zeros_like(left), due=left)
        scale = residual.rate / rate
        kept, portion = residual.values * scale, None
        due = None if residual.due is None else residual.due * scale
        sent = wanted + kept
        if due is not None:
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
        return _Wanted(sent, kept, due, portion)

    def _is_coded(self, rate: float, clock: int) -> bool:
        return rate > 0 and math.isfinite(rate) and not self.codings.is_burst(clock)

    def _non_finite(self, chunk: int, clock: int) -> NonFiniteGradientError:
        return NonFiniteGradientError(
            f"iteration {clock}: the gradient of chunk {chunk} with what codec "
            f"{self.codings.at(clock).codec.name} has left out before is not finite, and was not "
            "pushed. Lower the learning rate, or choose a codec that leaves out less"
        )

    @property
    def num_residual_bytes(self) -> int:
        """Bytes of residuals, and of what codecs of matrices start from."""
        starts = (each for kept in self._starts.values() for each in kept.values())
        vectors = ((each.values, each.due) for each in self._residuals.values())
        tensors = (*chain.from_iterable(vectors), *starts)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def residuals(self) -> Mapping[int, Residual]:
        """Return the residuals by chunk."""
        return self._residuals

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the residuals for a checkpoint, by chunk, on the host."""
        found: dict[str, dict[str, Any]] = {}
        for chunk, residual in self._residuals.items():
            due = None if residual.due is None else residual.due.cpu()
            told = residual._replace(values=residual.values.cpu(), due=due)._asdict()
            found[str(chunk)] = {key: each for key, each in told.items() if each is not None}
        for chunk, starts in self._starts.items():
            kept = {str(number): start for number, start in starts.items() if start is not None}
            if kept:
                found.setdefault(str(chunk), {})["starts"] = kept
        return found

    def restore(self, collected: Mapping[str, Mapping[str, Any]]) -> bool:
        """Take what :meth:`collect` has given. Return False, and take nothing, if it is of other
        chunks than this worker's."""
        residuals: dict[int, Residual] = {}
        starts: dict[int, dict[int, Tensor | None]] = {}
        device = self.coder.transfers.device
        for text, each in collected.items():
            chunk = int(text)
            if chunk not in self._mine:
                return False
            length = self.codings[chunk].chunk.length
            if "values" in each:
                residual = Residual(**{key: each[key] for key in Residual._fields if key in each})
                due = None if residual.due is None else residual.due.to(device)
                residual = residual._replace(values=residual.values.to(device), due=due)
                vectors = (residual.values, residual.due)
                if any(len(vector) != length for vector in vectors if vector is not None):
                    return False
                residuals[chunk] = residual
            kept = each.get("starts", {})
            starts[chunk] = {int(number): start for number, start in kept.items()}
        self._residuals, self._starts = residuals, starts
        return True


def _square(values: Tensor) -> Tensor:
    values = values.to(torch.float32)
    return torch.dot(values, values)


def _most(values: Tensor) -> Tensor:
    """Return the largest magnitude; NaN if a value is NaN."""
    return values.abs().amax()


def _terms_of(coding: ChunkCoding, terms: PushTerms) -> PushTerms:
    """Return the terms of one chunk: equal ones give equal payloads."""
    pieces = {each.piece for each in coding.chunk.segments} if terms.absent else set()
    return PushTerms(terms.rate, pieces.intersection(terms.absent))
