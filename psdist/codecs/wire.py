"""What a run's messages carry: the codec of each direction, and how it is used.

wire = Wire(push=codec, reply=RAW, seed=config.seed)     # or RAW_WIRE
codings = wire.pushes(partition)                         # for both ends; None where they are raw
codings.at(clock)                                        # of messages of this round
wire = wire.of_set(); wire.turns.begin(1, 900, 2)        # of a ladder: as the coordinator says
rule = payload_rule(codings, partition)                  # for the receiver's state machine
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from psdist.codecs.base import Codec
from psdist.codecs.checks import NO_CHECKS, Checks
from psdist.codecs.layout import CodecOf
from psdist.codecs.schemes.raw import RAW, Raw
from psdist.config.codec_specs import Skip
from psdist.protocol.partition import DTYPE_CODES, Partition
from psdist.protocol.payloads import PayloadRule
from psdist.protocol.rounds import Burst, Turns

if TYPE_CHECKING:
    from psdist.codecs.chunks import ChunkCodings


@dataclass(frozen=True, kw_only=True)
class WireFrom:
    """What messages of this round and later ones carry. A direction that has a codec in some rounds
    has :class:`psdist.codecs.schemes.plain.Exact` in those without."""

    round: int
    push: Codec | Raw
    reply: Codec | Raw
    skip: Skip | None = None
    burst: int = 0
    exact_in_pushes: tuple[str, ...] = ()
    exact_in_replies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Initial values are always raw. The codecs, ``skip``, ``burst`` and what is exact are of round
    0."""

    push: Codec | Raw
    reply: Codec | Raw
    seed: int
    """The run's: whatever is random in an encoding is the same when the run is repeated."""
    checks: Checks = NO_CHECKS
    has_feedback: bool = True
    """Whether a worker adds what a codec has left out to its next push."""
    is_relative: bool = False
    """Whether a reply is what has changed since the one before; else each encodes the parameters
    themselves."""
    has_copies: bool = False
    """Of relative replies: whether servers keep what each reader holds, since groups have had
    different ones (ssp, async); else all have had the same (sync)."""
    skip: Skip | None = None
    """Which pushes are left for later."""
    burst: int = 0
    """Every so many rounds pushes have no codec; 0: none has. Not of a ladder."""
    later: tuple[WireFrom, ...] = ()
    """What changes within the run, ascending; of a ladder its levels behind the first one, of which
    the rounds mean nothing."""
    is_ladder: bool = False
    """Whether the coordinator says which of them rules which rounds."""
    starts: tuple[tuple[int, int], ...] = ((0, 0),)
    """Of a ladder (round, level): which rule which rounds as the job begins."""
    turns: Turns | None = None
    """Where it does so: of one parameter set (:meth:`of_set`)."""
    encode_on: Literal["auto", "host", "device"] = "host"
    """Where workers encode pushes of gradients that lie on a device: there, unless "host"; "auto":
    those of gradients on the host there."""
    compare_every: int = 64
    """Of relative replies one in so many carries the checksum of what its reader holds then."""
    exact_in_pushes: tuple[str, ...] = ()
    """Pieces that the codec leaves alone (psdist.codecs.layout.exact_pieces)."""
    exact_in_replies: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether relative replies are one encoding for all readers."""
        return self.is_relative and not self.has_copies

    def of_set(self) -> Wire:
        """For one end of one parameter set, whose rounds are its own."""
        return replace(self, turns=Turns(self.starts)) if self.is_ladder else self

    def pushes(self, partition: Partition) -> ChunkCodings | None:
        from psdist.codecs.chunks import ChunkCodings  # imports torch, which sizes do without
        from psdist.codecs.schemes.plain import Exact

        parts = [CodecOf(self.push, self.exact_in_pushes)]
        parts += [CodecOf(each.push, each.exact_in_pushes) for each in self.later]
        exact = Exact()
        parts += [CodecOf(exact) for _ in self._bursts]
        return ChunkCodings.of(parts, partition, self._turns)

    def replies(self, partition: Partition) -> ChunkCodings | None:
        from psdist.codecs.chunks import ChunkCodings

        parts = [CodecOf(self.reply, self.exact_in_replies)]
        parts += [CodecOf(each.reply, each.exact_in_replies) for each in self.later]
        parts += [parts[level] for level in self._bursts]
        return ChunkCodings.of(parts, partition, self._turns)

    @property
    def _bursts(self) -> dict[int, Burst]:
        """By level: those of their rounds have levels of their own, behind all others."""
        every = [self.burst, *(each.burst for each in self.later)]
        with_bursts = [level for level, count in enumerate(every) if count]
        return {
            level: Burst(every[level], len(every) + number)
            for number, level in enumerate(with_bursts)
        }

    @property
    def _turns(self) -> Turns | None:
        bursts = self._bursts
        if self.is_ladder or not (self.later or bursts):
            return self.turns
        starts = [(0, 0), *((each.round, n) for n, each in enumerate(self.later, start=1))]
        return Turns(starts, bursts=bursts)

    def sizes(self, partition: Partition) -> list[int]:
        """By level: bytes of all chunks, both ways, where nothing is left out."""
        found = [0] * (1 + len(self.later))
        for codings in (self.pushes(partition), self.replies(partition)):
            for level in range(len(found)):
                if codings is None:
                    found[level] += sum(chunk.num_bytes for chunk in partition.chunks)
                else:
                    found[level] += sum(each.usual_bytes for each in codings.levels[level])
        return found

    @property
    def skips(self) -> tuple[tuple[int, Skip | None], ...]:
        """By round; nothing where no push is ever left for later."""
        found = (0, self.skip), *((each.round, each.skip) for each in self.later)
        return found if any(skip is not None for _, skip in found) else ()

    def is_compared(self, chunk: int, clock: int) -> bool:
        """Whether a relative reply carries the checksum: chunks take turns."""
        return (chunk + clock) % self.compare_every == 0


RAW_WIRE = Wire(push=RAW, reply=RAW, seed=0)


def payload_rule(
    codings: ChunkCodings | None, partition: Partition, *, is_relative: bool = False
) -> PayloadRule:
    """What a receiver takes; ``codings``: None for raw."""
    first = _rule_of(codings, partition, is_relative=is_relative)
    if codings is None or codings.turns is None:
        return first
    # Of a run whose codecs change no version is kept in the rounds without one, either.
    levels = [_rule_of(each, partition, is_relative=is_relative) for each in codings.levels]
    return replace(first, levels=tuple(levels), turns=codings.turns)


def _rule_of(
    codings: ChunkCodings | None, partition: Partition, *, is_relative: bool
) -> PayloadRule:
    chunks = partition.chunks
    if codings is None:
        sizes = [RAW.sizes(chunk) for chunk in chunks]
    else:
        sizes = [codings[chunk.index].sizes for chunk in chunks]
    codec = RAW if codings is None else codings.codec
    return PayloadRule(
        codec=codec.code,
        name=codec.name,
        dtypes=tuple(int(DTYPE_CODES[chunk.dtype]) for chunk in chunks),
        smallest=tuple(smallest for smallest, _ in sizes),
        largest=tuple(largest for _, largest in sizes),
        keeps_versions=codings is None or is_relative,
    )
