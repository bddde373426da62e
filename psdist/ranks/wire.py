"""How a run's chunks travel: what its configuration says of codecs, checksums and credits.

wire_of(config)          # the same for servers and workers
"""

from __future__ import annotations

import logging
from dataclasses import replace

from psdist.codecs.checks import Checks
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.config.settings import RunConfig
from psdist.protocol.flow import auto_credits

logger = logging.getLogger("psdist")


def wire_of(config: RunConfig) -> Wire:
    return replace(RAW_WIRE, checks=Checks(config.checksum, config.checksum_every))


def credits_of(config: RunConfig, num_groups: int) -> int:
    """Pushes that a worker may have outstanding at a server."""
    if config.credits != "auto":
        return config.credits
    count, why = auto_credits(num_groups=num_groups)
    logger.info("credits = %d (auto): %s", count, why)
    return count
