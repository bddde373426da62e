"""Parts of a coordinator that a test looks at."""

from __future__ import annotations

from psdist.errors import InvariantError
from psdist.servers.protocol.coordinator import Coordinator, Part


def part_of(coordinator: Coordinator, cls: type[Part]) -> Part:
    """Return the part of this class. Raises :class:`InvariantError` if the job has none."""
    found = coordinator.part(cls)
    if found is None:
        raise InvariantError(f"this job has no {cls.__name__}")
    return found
