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
One payload in so many carries the CRC-32 of what its sender has decoded.

    encoder = PushEncoder(codings, mine=[3], seed=0, group=1, has_feedback=True)
    num_bytes = encoder.encode(3, gradient, frame_memory, clock=7, terms=PushTerms(1e-3, set()))
    encoder.restore(encoder.collect())                   # for checkpoints
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from psdist.codecs.base import MatrixCodec
from psdist.codecs.chunks import ChunkCodings, taken
from psdist.codecs.seeds import seed_of
from psdist.config.codec_specs import Skip
from psdist.errors import NonFiniteGradientError

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


_MOST_BINS = 64


class CodingErrors:
    """||p - C(p)||^2 and ||p||^2, summed over chunks and over bins of as many iterations each; so
    few bins that a long run costs no more than a short one."""

    def __init__(self) -> None:
        self.width = 1
        """Iterations in a bin."""
        self.missed: list[float] = []
        self.wanted: list[float] = []

    def add(self, clock: int, missed: float, wanted: float) -> None:
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


class PushEncoder:
    def __init__(
        self,
        codings: ChunkCodings,
        *,
        mine: Collection[int],
        seed: int,
        group: int,
        has_feedback: bool,
        skip: Skip | None = None,
        compare_every: int = 64,
    ) -> None:
        """``mine``: the chunks of this worker; ``group``: whose gradients these are; different ones
        get different seeds; ``compare_every``: of so many payloads one carries a checksum."""
        self.codings = codings
        self._mine = frozenset(mine)
        self.errors = CodingErrors()
        self._seed = seed
        self._group = group
        self._has_feedback = has_feedback
        self._skip = skip
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
        skip, last = self._skip, self._residuals.get(chunk)
        num_before = last.skipped if last is not None else 0
        if skip is None or num_before == skip.most or not rate > 0 or not math.isfinite(rate):
            return False
        wanted = gradient.to(torch.float32)
        if last is not None:
            wanted = wanted + last.values * (last.rate / rate)
        size, held = (float(each.norm(dtype=torch.float64)) for each in (wanted, parameters))
        if not math.isfinite(size):
            raise self._non_finite(chunk, clock)
        if not lr * size < skip.threshold * held:
            return False
        self.errors.add(clock, size * size, size * size)
        self._residuals[chunk] = Residual(wanted.clone(), rate, num_before + 1)
        self.num_skipped += 1
        return True

    def encode(
        self, chunk: int, gradient: Tensor, into: memoryview, *, clock: int, terms: PushTerms
    ) -> int:
        """Make the payload of a push that leaves now; its bytes. ``gradient``: in the workers'
        dtype, unchanged here. Raises :class:`NonFiniteGradientError`."""
        coding, rate = self.codings[chunk], terms.rate
        if not rate > 0 or not math.isfinite(rate):
            return coding.encode_raw(gradient, into)
        wanted = gradient.to(torch.float32)
        residual = self._residuals.get(chunk)
        if residual is not None:
            kept = residual.values * (residual.rate / rate)
            wanted = wanted + kept
        seed = seed_of(self._seed, self._group, chunk, clock)
        starts = self._starts.setdefault(chunk, {})
        # Of exact pieces nothing is left out but by pushes that were left for later.
        whole = gradient if self._skip is None else wanted
        num_bytes = coding.encode(
            wanted, into, whole=whole, seed=seed, absent=terms.absent, starts=starts
        )
        content = coding.read(into[:num_bytes])
        if content.coded and (chunk + clock) % self._compare_every == 0:
            coding.add_checksum(into[:num_bytes], content.decoded)
        asked = taken(wanted, content.coded)
        missed = asked - content.decoded
        square = float(torch.dot(missed, missed))
        if not math.isfinite(square) and not bool(missed.isfinite().all()):
            raise self._non_finite(chunk, clock)
        self.errors.add(clock, square, float(torch.dot(asked, asked)))
        if self._has_feedback:
            left = torch.zeros(coding.chunk.length, dtype=torch.float32)
            at = 0
            for start, stop in content.coded:
                left[start:stop] = missed[at : at + stop - start]
                at += stop - start
            if residual is not None and terms.absent:
                for segment in coding.chunk.segments:
                    if segment.piece in terms.absent:
                        place = slice(segment.offset, segment.offset + segment.length)
                        left[place] = kept[place]
            self._residuals[chunk] = Residual(left, rate)
        return num_bytes

    def _non_finite(self, chunk: int, clock: int) -> NonFiniteGradientError:
        return NonFiniteGradientError(
            f"iteration {clock}: the gradient of chunk {chunk} with what codec "
            f"{self.codings.codec.name} has left out before is not finite; nothing of it was "
            "pushed. Lower the learning rate, or choose a codec that leaves out less"
        )

    @property
    def num_residual_bytes(self) -> int:
        """With what codecs of matrices go on from."""
        starts = (each for kept in self._starts.values() for each in kept.values())
        return sum(each.values.nbytes for each in self._residuals.values()) + sum(
            start.nbytes for start in starts if start is not None
        )

    def residuals(self) -> Mapping[int, Residual]:
        """By chunk."""
        return self._residuals

    def collect(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint: by chunk."""
        found: dict[str, dict[str, Any]] = {}
        for chunk, residual in self._residuals.items():
            found[str(chunk)] = residual._asdict()
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
            if "values" in each:
                skipped = each.get("skipped", 0)
                residuals[chunk] = Residual(each["values"], each["rate"], skipped)
                if len(each["values"]) != self.codings[chunk].chunk.length:
                    return False
            if isinstance(self.codings.codec, MatrixCodec):
                kept = each.get("starts", {})
                starts[chunk] = {int(number): start for number, start in kept.items()}
        self._residuals, self._starts = residuals, starts
        return True
