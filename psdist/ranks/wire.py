"""The transfer of a run's chunks by its configuration: codecs, checksums and credits.

wire_of(config)          # the same for servers and workers
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence

from psdist.codecs import Codec, Raw
from psdist.codecs.checks import Checks
from psdist.codecs.schemes import codec_of
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.wire import Wire, WireFrom
from psdist.config.codec_rounds import (
    CodecsFrom,
    coded_by_round,
    has_codecs,
    is_auto,
    ladder_of,
    why_on_host,
)
from psdist.config.codec_specs import CodecSpec, text_of
from psdist.config.modes import judging_mode
from psdist.config.settings import RunConfig
from psdist.history.run_record import CodecsSince, LevelCodecs
from psdist.install.eager import FEWEST_CREDITS, MOST_HELD_BYTES, held_bytes
from psdist.protocol.flow import auto_credits
from psdist.protocol.partition import Partition
from psdist.topology.plan import Plan

logger = logging.getLogger("psdist")


def wire_of(config: RunConfig, levels: Sequence[tuple[int, int]] = ((0, 0),)) -> Wire:
    """Return the wire of a job. ``levels``: (round, level) at the beginning of the job, if psdist
    chooses the codecs."""
    parts = coded_by_round(config)
    if is_auto(config):
        parts = tuple(CodecsFrom(0, *each) for each in ladder_of(config))
    has_feedback = config.feedback == "on"
    is_sync = judging_mode(config) == "sync"
    has_copies = config.pull_copies == "on" and not is_sync
    is_relative = any(not part.pull.is_none for part in parts) and (is_sync or has_copies)
    pushes = _codecs([part.push for part in parts], has_feedback=has_feedback)
    # Later replies bring the values that a relative reply omits, whatever the setting is.
    replies = _codecs([part.pull for part in parts], has_feedback=is_relative)

    def exact(spec: CodecSpec) -> tuple[str, ...]:
        return () if spec.is_cast else config.codec_exact

    first, *later = (
        WireFrom(
            round=start,
            push=pushes[push],
            reply=replies[pull],
            skip=push.skip,
            burst=push.burst,
            exact_in_pushes=exact(push),
            exact_in_replies=exact(pull),
        )
        for start, push, pull in parts
    )
    return Wire(
        push=first.push,
        reply=first.reply,
        seed=config.seed,
        checks=Checks(config.checksum, config.checksum_every),
        has_feedback=has_feedback,
        skip=first.skip,
        burst=first.burst,
        is_relative=is_relative,
        has_copies=has_copies and is_relative,
        exact_in_pushes=first.exact_in_pushes,
        exact_in_replies=first.exact_in_replies,
        later=tuple(later),
        is_ladder=is_auto(config),
        starts=tuple(levels),
        encode_on="host" if why_on_host(config) else config.encode_on,
    )


def codecs_of_rounds(
    config: RunConfig, levels: Sequence[tuple[int, int]] = ((0, 0),)
) -> tuple[CodecsSince, ...]:
    """Return the codecs of every round for run.json; () if no round is coded. If psdist chooses
    them: the codecs at the beginning of the job, with these ``levels`` (round, level)."""
    if not has_codecs(config):
        return ()
    if is_auto(config):
        ladder = codecs_of_ladder(config)
        return tuple(
            CodecsSince(round=start, **ladder[level].model_dump()) for start, level in levels
        )
    return tuple(
        CodecsSince(
            round=start,
            push=text_of(push),
            pull=text_of(pull),
            push_code=code,
            burst=push.burst,
            burst_code=Exact.code if push.burst else 0,
        )
        for (start, push, pull), code in zip(coded_by_round(config), _codes(config), strict=True)
    )


def codecs_of_ladder(config: RunConfig) -> tuple[LevelCodecs, ...]:
    """Return the codecs among which psdist chooses, for run.json; () if it does not choose."""
    if not is_auto(config):
        return ()
    return tuple(
        LevelCodecs(push=text_of(push), pull=text_of(pull), push_code=code)
        for (push, pull), code in zip(ladder_of(config), _codes(config), strict=True)
    )


def _codes(config: RunConfig) -> list[int]:
    """Return the codes of the push codecs in headers."""
    wire = wire_of(config)
    return [wire.push.code, *(each.push.code for each in wire.later)]


def _codecs(specs: Iterable[CodecSpec], *, has_feedback: bool) -> dict[CodecSpec, Codec | Raw]:
    """Return the codecs of one direction; Exact for plain values unless all are plain."""
    made = {spec: codec_of(spec, has_feedback=has_feedback) for spec in specs}
    if not all(isinstance(codec, Raw) for codec in made.values()):
        exact = Exact()
        made = {spec: exact if isinstance(each, Raw) else each for spec, each in made.items()}
    return made


def link_of_chunks(config: RunConfig, plan: Plan | None, max_norm: float = 0.0) -> float:
    """Return the speed of the link (bytes/s) by which chunks are cut; inf for none. With codecs and
    with a joint norm results depend on the chunks, which then are those of the model alone."""
    return math.inf if plan is None or has_codecs(config) or max_norm else plan.link_bytes_per_s


def credits_of(config: RunConfig, num_workers: int, partition: Partition) -> int:
    """Return the maximum number of outstanding pushes of a worker at a server."""
    if config.credits != "auto":
        return config.credits
    count, why = auto_credits(
        num_workers=num_workers,
        offer_bytes=held_bytes(os.environ, partition.max_chunk_bytes),
        most_bytes=MOST_HELD_BYTES,
        fewest=FEWEST_CREDITS,
    )
    logger.info("transfer.credits = %d (auto): %s", count, why)
    return count
