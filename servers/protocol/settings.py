"""The settings that workers' pushes are made under; pure.

A worker sends ``Settings(version, hyper, absent)`` before its first push under that version.
Messages between two peers arrive in order (psdist.transport). A push with an unknown version
is therefore an error of its sender.

    settings = SettingsOfWorkers(server=0, pipeline=0)
    settings.describe_model(num_pieces=8, num_optimizer_groups=1)
    settings.learn(peer, message)
    settings.of(peer, version)
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.control import Settings
from psdist.protocol.ids import describe_peer
from psdist.protocol.optimizers import unpack_hyperparameters


class PushSettings(NamedTuple):
    """The settings of a push."""

    hyper: bytes
    """Packed hyperparameters."""
    absent: frozenset[int]
    """The pieces that had no gradient."""


class SettingsOfWorkers:
    def __init__(self, *, server: int, pipeline: int) -> None:
        self._server = server
        # A worker begins iteration c when iteration c - 1 is pushed and iterations up to
        # c - 2 - ``pipeline`` are answered. An iteration has at most two versions: chunks that
        # leave early may have other settings than the rest. The second version is sent only after
        # iterations up to c - 1 - ``pipeline`` are answered.
        self._num_kept = 3 + 2 * pipeline
        self._num_pieces = self._num_optimizer_groups = 0
        self._known: dict[int, dict[int, PushSettings]] = {}  # peer -> version -> settings
        self._newest: dict[int, int] = {}  # peer -> version

    def describe_model(self, *, num_pieces: int, num_optimizer_groups: int) -> None:
        self._num_pieces = num_pieces
        self._num_optimizer_groups = num_optimizer_groups

    def learn(self, peer: int, message: Settings) -> None:
        version = message.version
        newest = self._newest.get(peer, 0)
        known = self._known.setdefault(peer, {})
        settings = PushSettings(message.hyper, frozenset(message.absent))
        if version == newest and known.get(version) == settings:
            return  # a second delivery
        # The first version is any: the server may replace a failed one, and the worker another
        # worker of its group. A push needs settings that were sent, so a gap harms nothing.
        if version < 1 or (newest and version != newest + 1):
            self._refuse(peer, f"sent version {version} of its settings after version {newest}")
        if any(not 0 <= piece < self._num_pieces for piece in message.absent):
            self._refuse(
                peer,
                f"named pieces {min(message.absent)} to {max(message.absent)} as absent; the model "
                f"has {self._num_pieces}",
            )
        try:
            num_groups = len(unpack_hyperparameters(message.hyper))
        except ProtocolError as error:
            self._refuse(peer, f"sent {error}")
        if num_groups != self._num_optimizer_groups:
            self._refuse(
                peer,
                f"sent hyperparameters of {num_groups} optimizer groups; the model has "
                f"{self._num_optimizer_groups}",
            )
        self._newest[peer] = version
        known[version] = settings
        known.pop(version - self._num_kept, None)

    def of(self, peer: int, version: int) -> PushSettings:
        known = self._known.get(peer)
        settings = known.get(version) if known is not None else None
        if settings is None:
            self._refuse(
                peer,
                f"pushed under version {version} of its settings; the newest that it has sent is "
                f"{self._newest.get(peer, 0)}",
            )
        return settings

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")
