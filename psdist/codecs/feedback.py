"""A worker's pushes through a codec, and what they have left out so far.

What a codec leaves out of one push, the *residual* e, is added to the next one (error feedback:
Seide et al. 2014; Karimireddy et al., arXiv 1901.09847). It is kept in the gradient's units: where
the step that a gradient makes has another size now, e is as much larger or smaller,

    p = g + r e,    r = (lr x weight) before / (lr x weight) now;    sent: C(p);    e = p - C(p)

so that what was left out under one learning rate moves parameters later by what it would have moved
them then. Where nothing would be moved now (lr or weight 0) the gradient goes as it is and e stays.
Pieces without a gradient are left out of the payload; their e stays. What a codec of matrices goes
on from is kept beside e. A chunk's push may be left for later as a whole (``skip``), while what it
would move is small against the parameters (Hsieh et al., Gaia, NSDI 2017): nothing is sent, e = p.
In a *burst*, a round among others that has no codec, g goes and e stays: e at once would be a step
on many rounds' gradients. Where the codec changes within the run, what others have left out is
*due*: each push takes as much of it along as its gradient is large, so that no step is a sum of
many rounds. One payload in so many carries the CRC-32 of what its sender has decoded.

    encoder = PushEncoder(codings, mine=[3], seed=0, group=1, has_feedback=True)
    num_bytes = encoder.encode(3, gradient, frame_memory, clock=7, terms=PushTerms(1e-3, set()))
    encoder.restore(encoder.collect())                   # for checkpoints
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from psdist.codecs.base import has_only_finite
from psdist.codecs.blocks import norm_of
from psdist.codecs.chunks import ChunkCodings, put, taken
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.seeds import seed_of
from psdist.config.codec_specs import Skip
from psdist.errors import NonFiniteGradientError
from psdist.protocol.rounds import at_round

if TYPE_CHECKING:
    from torch import Tensor


class PushTerms(NamedTuple):
    """What a chunk of an iteration is pushed under."""

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
    """Of the chunk, in the same units: what codecs before this one have left, and no push has taken
    along yet."""


class _Wanted(NamedTuple):
    values: Tensor
    """p, float32."""
    kept: Tensor | None
    """e in the units of now."""
    due: Tensor | None
    """What is still due behind this push."""


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
    ) -> None:
        """``mine``: the chunks of this worker; ``group``: whose gradients these are; different ones
        get different seeds; ``skips``: from which rounds on which pushes are left for later, as
        psdist.codecs.wire has them; ``compare_every``: of so many payloads one carries a checksum.
        """
        self.codings = codings
        self._mine = frozenset(mine)
        self.errors = CodingErrors()
        self._seed = seed
        self._group = group
        self._has_feedback = has_feedback
        self._skips = skips
        self.num_skipped = 0
        """Pushes that were left for later as a whole."""
        self._compare_every = compare_every
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
        """Whether the push of ``chunk`` is left for later: the next one brings it as well.
        ``gradient``, ``parameters``: of the chunk, in the workers' dtype. Raises
        :class:`NonFiniteGradientError`."""
        skip, last = self._skip_at(clock), self._residuals.get(chunk)
        num_before = last.skipped if last is not None else 0
        if skip is None or num_before == skip.most or not rate > 0 or not math.isfinite(rate):
            return False
        if self.codings.is_burst(clock):
            return False
        wanted = self._wanted(chunk, gradient, clock=clock, rate=rate)
        size, held = (float(each.norm(dtype=torch.float64)) for each in (wanted.values, parameters))
        if not math.isfinite(size):
            raise self._non_finite(chunk, clock)
        if not lr * size < skip.threshold * held:
            return False
        self.errors.add(clock, size * size, size * size)
        codec = self.codings.at(clock).codec.name
        left = wanted.values.clone()
        self._residuals[chunk] = Residual(left, rate, num_before + 1, codec, wanted.due)
        self.num_skipped += 1
        return True

    def _skip_at(self, clock: int) -> Skip | None:
        return at_round(None, self._skips, clock)

    def encode(
        self, chunk: int, gradient: Tensor, into: memoryview, *, clock: int, terms: PushTerms
    ) -> int:
        """Make the payload of a push that leaves now; its bytes. ``gradient``: in the workers'
        dtype, unchanged here. Raises :class:`NonFiniteGradientError`."""
        coding, rate = self.codings.at(clock)[chunk], terms.rate
        if not rate > 0 or not math.isfinite(rate) or self.codings.is_burst(clock):
            return coding.encode_raw(gradient, into)
        absent = [
            slice(segment.offset, segment.offset + segment.length)
            for segment in coding.chunk.segments
            if segment.piece in terms.absent
        ]
        wanted, kept, due = self._wanted(chunk, gradient, clock=clock, rate=rate, absent=absent)
        seed = seed_of(self._seed, self._group, chunk, clock)
        starts = self._starts.setdefault(chunk, {})
        num_bytes = coding.encode(
            wanted, into, whole=wanted, seed=seed, absent=terms.absent, starts=starts
        )
        content = coding.read(into[:num_bytes])
        if content.coded and self._is_compared(chunk, clock):
            coding.add_checksum(into[:num_bytes], content.decoded)
        asked = taken(wanted, content.coded)
        missed = asked - content.decoded
        square = float(torch.dot(missed, missed))
        if not math.isfinite(square) and not bool(missed.isfinite().all()):
            raise self._non_finite(chunk, clock)
        is_exact = isinstance(coding.codec, Exact)
        if is_exact and kept is not None and not has_only_finite(content.given):
            raise self._non_finite(chunk, clock)
        self.errors.add(clock, square, float(torch.dot(asked, asked)))
        if self._has_feedback:
            left = torch.zeros(coding.chunk.length, dtype=torch.float32)
            put(left, content.coded, missed)
            if kept is not None:
                if content.given.dtype != torch.float32:  # as it is, but rounded
                    put(left, content.exact, taken(wanted, content.exact) - content.given)
                for place in absent:
                    left[place] = kept[place]
            if is_exact and due is None and not bool(left.any()):
                self._residuals.pop(chunk, None)
            else:
                self._residuals[chunk] = Residual(left, rate, codec=coding.codec.name, due=due)
        return num_bytes

    def _wanted(
        self,
        chunk: int,
        gradient: Tensor,
        *,
        clock: int,
        rate: float,
        absent: Sequence[slice] = (),
    ) -> _Wanted:
        """What is to be pushed: the gradient, what this codec has left out, and of what others had
        left before it a portion that is no larger than the gradient."""
        wanted = gradient.to(torch.float32)
        residual = self._of_codec(chunk, self.codings.at(clock).codec.name)
        if residual is None:
            return _Wanted(wanted, None, None)
        scale = residual.rate / rate
        kept = residual.values * scale
        due = None
        sent = wanted + kept
        if residual.due is not None:
            due = residual.due * scale
            portion = due.clone()
            for place in absent:
                portion[place] = 0
            size, most = (float(norm_of(each)) for each in (portion, wanted))
            if not math.isfinite(size):
                raise self._non_finite(chunk, clock)
            if size > most:
                portion *= most / size
            sent += portion
            due -= portion
            if not bool(due.any()):
                due = None
        for place in absent:
            sent[place] = wanted[place]
        return _Wanted(sent, kept, due)

    def _of_codec(self, chunk: int, codec: str) -> Residual | None:
        """What is left of a chunk; what another codec had left is due."""
        last = self._residuals.get(chunk)
        if last is None or last.codec == codec:
            return last
        self._starts.pop(chunk, None)
        due = last.values if last.due is None else last.values + last.due
        due_now = due if bool(due.any()) else None
        now = Residual(torch.zeros_like(due), last.rate, last.skipped, codec, due_now)
        self._residuals[chunk] = now
        return now

    def _is_compared(self, chunk: int, clock: int) -> bool:
        """Whether its payload carries a checksum of what it is decoded to."""
        return (chunk + clock) % self._compare_every == 0

    def _non_finite(self, chunk: int, clock: int) -> NonFiniteGradientError:
        return NonFiniteGradientError(
            f"iteration {clock}: the gradient of chunk {chunk} with what codec "
            f"{self.codings.at(clock).codec.name} has left out before is not finite; nothing of it "
            "was pushed. Lower the learning rate, or choose a codec that leaves out less"
        )

    @property
    def num_residual_bytes(self) -> int:
        """With what codecs of matrices go on from."""
        starts = (each for kept in self._starts.values() for each in kept.values())
        vectors = ((each.values, each.due) for each in self._residuals.values())
        tensors = (*chain.from_iterable(vectors), *starts)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def residuals(self) -> Mapping[int, Residual]:
        """By chunk."""
        return self._residuals

    def collect(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint: by chunk."""
        found: dict[str, dict[str, Any]] = {}
        for chunk, residual in self._residuals.items():
            told = residual._asdict()
            found[str(chunk)] = {key: each for key, each in told.items() if each is not None}
        for chunk, starts in self._starts.items():
            kept = {str(number): start for number, start in starts.items() if start is not None}
            if kept:
                found.setdefault(str(chunk), {})["starts"] = kept
        return found

    def restore(self, collected: Mapping[str, Mapping[str, Any]]) -> bool:
        """Go on with what :meth:`collect` has told. False where that is of other chunks than this
        worker's: nothing is gone on with."""
        residuals: dict[int, Residual] = {}
        starts: dict[int, dict[int, Tensor | None]] = {}
        for text, each in collected.items():
            chunk = int(text)
            if chunk not in self._mine:
                return False
            length = self.codings[chunk].chunk.length
            if "values" in each:
                residual = Residual(**{key: each[key] for key in Residual._fields if key in each})
                vectors = (residual.values, residual.due)
                if any(len(vector) != length for vector in vectors if vector is not None):
                    return False
                residuals[chunk] = residual
            kept = each.get("starts", {})
            starts[chunk] = {int(number): start for number, start in kept.items()}
        self._residuals, self._starts = residuals, starts
        return True
