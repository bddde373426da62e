"""The contents of a run's messages: the codec of each direction, and how it is used.

wire = Wire(push=codec, reply=RAW, seed=config.seed)     # or RAW_WIRE
codings = wire.pushes(partition)                         # for both ends; None where they are raw
codings.at(clock)                                        # of messages of this round
wire = wire.of_set(); wire.turns.begin(1, 900, 2)        # of a ladder: as the coordinator says
rule = payload_rule(codings, partition)                  # for the receiver's state machine
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from psdist.codecs import RAW, Codec, Raw
from psdist.codecs.checks import NO_CHECKS, Checks
from psdist.codecs.layout import CodecOf
from psdist.config.codec_specs import Skip
from psdist.protocol.partition import DTYPE_CODES, Partition
from psdist.protocol.payloads import PayloadRule
from psdist.protocol.rounds import Burst, Turns

if TYPE_CHECKING:
    from psdist.codecs.chunks import ChunkCodings


@dataclass(frozen=True, kw_only=True)
class WireFrom:
    """The wire from this round on. A direction that has a codec in some rounds has
    :class:`psdist.codecs.schemes.plain.Exact` in the others."""

    round: int
    push: Codec | Raw
    reply: Codec | Raw
    skip: Skip | None = None
    burst: int = 0
    exact_in_pushes: tuple[str, ...] = ()
    exact_in_replies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Initial values are always raw. The codecs, ``skip``, ``burst`` and exact pieces are those of
    round 0."""

    push: Codec | Raw
    reply: Codec | Raw
    seed: int
    """The run's seed: a repeated run has the same random encodings."""
    checks: Checks = NO_CHECKS
    has_feedback: bool = True
    """True if a worker adds the residual of a codec to its next push."""
    is_relative: bool = False
    """True if a reply encodes the change since the reply before; else it encodes the parameters."""
    has_copies: bool = False
    """True if servers keep a copy for each reader of relative replies, because groups have received
    different ones (ssp, async); in sync all have received the same."""
    skip: Skip | None = None
    """Which pushes are skipped."""
    burst: int = 0
    """One round in this many has pushes without a codec; 0: no round. Not with a ladder."""
    later: tuple[WireFrom, ...] = ()
    """Changes within the run, ascending; with a ladder its levels after the first one, whose rounds
    have no meaning."""
    is_ladder: bool = False
    """True if the coordinator decides which of them rules which rounds."""
    starts: tuple[tuple[int, int], ...] = ((0, 0),)
    """With a ladder: (round, level), the rounds of each level when the job begins."""
    turns: Turns | None = None
    """With a ladder: the same of one parameter set (:meth:`of_set`)."""
    encode_on: Literal["auto", "host", "device"] = "host"
    """Where workers encode pushes of gradients that lie on a device: there, unless "host". With
    "auto" gradients on the host are encoded on the host."""
    compare_every: int = 64
    """One relative reply in this many has the checksum of the values that its reader then holds."""
    exact_in_pushes: tuple[str, ...] = ()
    """Pieces that the codec leaves alone (psdist.codecs.layout.exact_pieces)."""
    exact_in_replies: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether relative replies are one encoding for all readers."""
        return self.is_relative and not self.has_copies

    def of_set(self) -> Wire:
        """Return the wire of one end of one parameter set, which has its own rounds."""
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
    """Return the payloads that a receiver takes; ``codings``: None for raw."""
    first = _rule_of(codings, partition, is_relative=is_relative)
    if codings is None or codings.turns is None:
        return first
    # If codecs change within the run, rounds without a codec keep no versions, either.
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
