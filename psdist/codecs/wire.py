"""What a run's messages carry: the codec of each direction, and how it is used.

wire = Wire(push=codec, reply=RAW, seed=config.seed)     # or RAW_WIRE
layouts = wire.pushes(partition)                         # for both ends; None where they are raw
layouts.at(clock)                                        # of messages of this round
rule = payload_rule(layouts, partition)                  # for the receiver's state machine
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from psdist.codecs.base import Codec
from psdist.codecs.checks import NO_CHECKS, Checks
from psdist.codecs.layout import CodecFrom, Layouts
from psdist.codecs.raw import RAW, Raw
from psdist.config.codec_specs import Skip
from psdist.protocol.partition import DTYPE_CODES, Partition
from psdist.protocol.payloads import PayloadRule


@dataclass(frozen=True, kw_only=True)
class WireFrom:
    """What messages of this round and later ones carry. A direction that has a codec in some rounds
    has :class:`psdist.codecs.exact.Exact` in those without."""

    round: int
    push: Codec | Raw
    reply: Codec | Raw
    skip: Skip | None = None
    exact_in_pushes: tuple[str, ...] = ()
    exact_in_replies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Initial values are always raw. The codecs, ``skip`` and what is exact are of round 0."""

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
    later: tuple[WireFrom, ...] = ()
    """What changes within the run, ascending."""
    compare_every: int = 64
    """Of relative replies one in so many carries the checksum of what its reader holds then."""
    exact_in_pushes: tuple[str, ...] = ()
    """Pieces that the codec leaves alone (psdist.codecs.layout.exact_pieces)."""
    exact_in_replies: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether relative replies are one encoding for all readers."""
        return self.is_relative and not self.has_copies

    def pushes(self, partition: Partition) -> Layouts | None:
        parts = [CodecFrom(0, self.push, self.exact_in_pushes)]
        parts += [CodecFrom(each.round, each.push, each.exact_in_pushes) for each in self.later]
        return Layouts.of(parts, partition)

    def replies(self, partition: Partition) -> Layouts | None:
        parts = [CodecFrom(0, self.reply, self.exact_in_replies)]
        parts += [CodecFrom(each.round, each.reply, each.exact_in_replies) for each in self.later]
        return Layouts.of(parts, partition)

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
    layouts: Layouts | None, partition: Partition, *, is_relative: bool = False
) -> PayloadRule:
    """What a receiver takes; ``layouts``: None for raw."""
    rule = _rule_of(layouts, partition, is_relative=is_relative)
    if layouts is None or not layouts.later:
        return rule
    # Of a run whose codecs change no version is kept in the rounds without one, either.
    later = [
        (start, _rule_of(each, partition, is_relative=is_relative)) for start, each in layouts.later
    ]
    return replace(rule, later=tuple(later))


def _rule_of(layouts: Layouts | None, partition: Partition, *, is_relative: bool) -> PayloadRule:
    chunks = partition.chunks
    if layouts is None:
        sizes = [RAW.sizes(chunk) for chunk in chunks]
    else:
        sizes = [layouts[chunk.index].sizes for chunk in chunks]
    codec = RAW if layouts is None else layouts.codec
    return PayloadRule(
        codec=codec.code,
        name=codec.name,
        dtypes=tuple(int(DTYPE_CODES[chunk.dtype]) for chunk in chunks),
        smallest=tuple(smallest for smallest, _ in sizes),
        largest=tuple(largest for _, largest in sizes),
        keeps_versions=layouts is None or is_relative,
    )
