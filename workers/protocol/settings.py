"""Which version of the settings a push is made under, and when servers must hear of a new one.

Hyperparameters and absent pieces change seldom: they travel once per change, ahead of the first
push that was made under them, and every push names their version. Chunks of an iteration that leave
before all its gradients are there may leave under other absent pieces than the rest.

    settings = SettingsVersions()
    settings.update(hyper, absent=[])     # Settings(version=1, ...): tell the servers
    settings.update(hyper, absent=[])     # None: nothing has changed
    settings.update_absent([3])           # Settings(version=2, ...), with the same hyper
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from psdist.errors import InvariantError
from psdist.protocol.control import Settings

_NUM_KEPT = 8
"""Versions whose pushes may wait for a credit: two iterations are under way, of two versions each,
and with pipeline = 1 another."""


class SettingsVersions:
    def __init__(self) -> None:
        self.version = 0
        """Version of the current settings; 0 before the first push."""
        self._current: tuple[bytes, tuple[int, ...]] | None = None
        self._recent: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.newest: deque[Settings] = deque(maxlen=_NUM_KEPT)
        """That pushes which are not answered may have been made under, in order."""

    def update(self, hyper: bytes, absent: Sequence[int]) -> Settings | None:
        """Make these the current settings; the message to send first if they are new ones."""
        settings = (hyper, tuple(absent))
        if settings == self._current:
            return None
        self._current = settings
        self.version += 1
        self._recent[self.version] = settings
        self._recent.pop(self.version - _NUM_KEPT, None)
        message = Settings(version=self.version, hyper=hyper, absent=list(absent))
        self.newest.append(message)
        return message

    def update_absent(self, absent: Sequence[int]) -> Settings | None:
        """As :meth:`update`, with the hyperparameters that are current."""
        if self._current is None:
            raise InvariantError("absent pieces of an iteration that has no hyperparameters")
        return self.update(self._current[0], absent)

    def of(self, version: int) -> tuple[bytes, tuple[int, ...]]:
        """Hyperparameters and absent pieces of a version under which a push leaves now."""
        return self._recent[version]
