"""The settings that workers' pushes were made under, and the chunks that wait for them; pure.

A worker says ``Settings(version, hyper, absent)`` before its first push under that version. Control
messages and data travel apart, so a push may come first: its chunk is noted here and looked at
again when the settings are known.

    settings = SettingsOfWorkers(pipeline=0)
    settings.of(chunk, push)               # None: not known yet
    settings.learn(peer, message)          # [chunk]
"""

from __future__ import annotations

from typing import NamedTuple

from psdist.errors import InvariantError
from psdist.protocol.control import Settings
from psdist.protocol.ids import describe_peer
from psdist.servers.protocol.chunk_state import ChunkState, Push

_LIVE_VERSIONS = 4
"""Versions kept of each worker: it cannot push under a newer one before all its pushes of the
last but (pipeline + 1) iteration are answered."""


class PushSettings(NamedTuple):
    """What a push was made under."""

    hyper: bytes
    """Packed hyperparameters."""
    absent: frozenset[int]
    """The pieces that had no gradient."""


class SettingsOfWorkers:
    def __init__(self, *, pipeline: int) -> None:
        self._num_kept = _LIVE_VERSIONS + pipeline
        self._known: dict[int, dict[int, PushSettings]] = {}  # peer -> version -> settings
        self._waiting: dict[tuple[int, int], list[ChunkState]] = {}  # by (peer, version)

    def of(self, chunk: ChunkState, push: Push) -> PushSettings | None:
        """None if the push overtook them: ``learn`` gives ``chunk`` back when they come."""
        known = self._known.get(push.peer, {}).get(push.settings)
        if known is None:
            waiting = self._waiting.setdefault((push.peer, push.settings), [])
            if chunk not in waiting:
                waiting.append(chunk)
        return known

    def learn(self, peer: int, message: Settings) -> list[ChunkState]:
        """The settings have come; returns the chunks on which pushes wait for them."""
        versions = self._known.setdefault(peer, {})
        versions[message.version] = PushSettings(message.hyper, frozenset(message.absent))
        versions.pop(message.version - self._num_kept, None)
        return self._waiting.pop((peer, message.version), [])

    def check_invariants(self) -> None:
        for peer, version in self._waiting:
            if version in self._known.get(peer, {}):
                raise InvariantError(
                    f"pushes of {describe_peer(peer)} wait for settings {version}, which are known"
                )
