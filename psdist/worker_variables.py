"""The environment variables by which scripts written for torchrun learn their place.

    set_variables({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2})
    restore_variables()            # at job.close(): as they were before

They count workers only. Servers do not get them. MASTER_ADDR and MASTER_PORT are never set:
psdist.init() creates the process group, and with an address a script would create another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger("psdist")

_before: dict[str, str | None] = {}
"""The values that the variables had when they were set."""


def set_variables(variables: Mapping[str, int]) -> None:
    """Replace these variables of the process. A warning names those that had other values."""
    replaced = []
    for name, value in variables.items():
        before = os.environ.get(name)
        _before.setdefault(name, before)
        os.environ[name] = str(value)
        if before not in (None, str(value)):
            replaced.append(f"{name}={before} by {value}")
    if replaced:
        logger.warning(
            "environment variables replaced, since psdist counts workers only: %s",
            ", ".join(replaced),
        )


def restore_variables() -> None:
    """Put back what the variables were before the job."""
    for name, before in _before.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _before.clear()
