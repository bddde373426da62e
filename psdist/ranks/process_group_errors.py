"""Errors of torch for scripts that make, use or end the default process group themselves.

    explain_process_group(ValueError("trying to initialize the default process group twice!"))

torch's own advice is to call init_process_group, which is wrong here: psdist.init() does that.
Reads the text of the error, so that torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psdist.errors import UsageError

_EXPLANATIONS: Final[Mapping[str, str]] = {
    "trying to initialize the default process group twice": "dist.init_process_group() was called "
    "by the script: psdist.init() has already created the group; remove this call",
    "Error initializing torch.distributed using env://": "dist.init_process_group() was called by "
    "the script: psdist.init() creates the group; remove this call",
    "Default process group has not been initialized": "torch.distributed has no process group: "
    "psdist.init() creates it and job.close() ends it; use it only in between, and remove "
    "dist.destroy_process_group() from the script",
}


def explain_process_group(error: BaseException) -> UsageError | None:
    """Return the mistake of the script that has led to this error of torch; None for others."""
    if not isinstance(error, ValueError):
        return None
    message = str(error)
    return next((UsageError(text) for part, text in _EXPLANATIONS.items() if part in message), None)
