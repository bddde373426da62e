"""How a run's chunks travel: what its configuration says of codecs and checksums.

wire_of(config)          # the same for servers and workers
"""

from __future__ import annotations

from dataclasses import replace

from psdist.codecs.checks import Checks
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.config.settings import RunConfig


def wire_of(config: RunConfig) -> Wire:
    return replace(RAW_WIRE, checks=Checks(config.checksum, config.checksum_every))
