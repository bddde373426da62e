"""Which version of the settings a push is made under, and when servers must hear of a new one.

Hyperparameters and absent pieces change seldom: they travel once per change, ahead of the first
push that was made under them, and every push names their version.

    settings = SettingsVersions()
    settings.update(hyper, absent=[])     # Settings(version=1, ...): tell the servers
    settings.update(hyper, absent=[])     # None: nothing has changed
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.protocol.control import Settings


class SettingsVersions:
    def __init__(self) -> None:
        self.version = 0
        """Of the settings that are current; 0 before the first push."""
        self._current: tuple[bytes, tuple[int, ...]] | None = None

    def update(self, hyper: bytes, absent: Sequence[int]) -> Settings | None:
        """Make these the current settings; the message to send first if they are new ones."""
        settings = (hyper, tuple(absent))
        if settings == self._current:
            return None
        self._current = settings
        self.version += 1
        return Settings(version=self.version, hyper=hyper, absent=list(absent))
