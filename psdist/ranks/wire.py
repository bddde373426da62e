"""How a run's chunks travel: what its configuration says of codecs, checksums and credits.

wire_of(config)          # the same for servers and workers
"""

from __future__ import annotations

import logging

from psdist.codecs.checks import Checks
from psdist.codecs.named import codec_of
from psdist.codecs.wire import Wire
from psdist.config.codec_specs import CodecSpec
from psdist.config.modes import judging_mode
from psdist.config.settings import RunConfig, coded
from psdist.protocol.flow import auto_credits

logger = logging.getLogger("psdist")


def wire_of(config: RunConfig) -> Wire:
    push, pull = coded(config)
    has_feedback = config.feedback == "on"

    def exact(spec: CodecSpec) -> tuple[str, ...]:
        return () if spec.is_cast else config.codec_exact

    is_sync = judging_mode(config) == "sync"
    has_copies = config.pull_copies == "on" and not is_sync
    is_relative = not pull.is_none and (is_sync or has_copies)
    return Wire(
        push=codec_of(push, has_feedback=has_feedback),
        # What a relative reply leaves out comes with later ones, whatever the setting says.
        reply=codec_of(pull, has_feedback=is_relative),
        seed=config.seed,
        checks=Checks(config.checksum, config.checksum_every),
        has_feedback=has_feedback,
        skip=push.skip,
        is_relative=is_relative,
        has_copies=has_copies and is_relative,
        exact_in_pushes=exact(push),
        exact_in_replies=exact(pull),
    )


def credits_of(config: RunConfig, num_groups: int) -> int:
    """Pushes that a worker may have outstanding at a server."""
    if config.credits != "auto":
        return config.credits
    count, why = auto_credits(num_groups=num_groups)
    logger.info("credits = %d (auto): %s", count, why)
    return count
