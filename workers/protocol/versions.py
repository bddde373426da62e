"""The versions of chunks in a worker's memory, and the actions after a reply has arrived.

held = held_by(rule)               # of the payloads that bring parameters
held.number(3)                     # chunk_version for the header of a push or pull
held.landed(header)                # actions after the reply about a chunk has arrived
Aside(held).landed(header)         # the same for a copy: memory and versions stay as they are
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from psdist.errors import InvariantError
from psdist.protocol.control import Settings
from psdist.protocol.header import Flag, Header
from psdist.protocol.payloads import PayloadRule
from psdist.workers.protocol.actions import Action, DecodeReply, RestoreHeld

_UNCHANGED = Flag.UNCHANGED


class HeldVersions:
    """For raw replies, which are received into place: each is a version of the server's."""

    def __init__(self) -> None:
        self.replies: dict[int, Header] = {}
        """Chunk -> the reply whose values lie in place. Its ``chunk_version`` is 0 if the values
        are none of the server's versions."""

    def number(self, chunk: int) -> int:
        """Return the version in place; 0 if a server cannot rely on it."""
        reply = self.replies.get(chunk)
        return reply.chunk_version if reply is not None else 0

    def landed(self, header: Header) -> list[Action]:
        """Note the awaited reply of ``header``, and return what brings its values into place."""
        self.replies[header.chunk] = header
        return []

    def decoded(self, header: Header) -> list[Action]:
        """Return what decodes the reply into the memory that receives it."""
        del header
        return []

    def forget(self, chunks: Iterable[int]) -> None:
        """Others have written to the memory of these chunks: the next replies must bring them."""
        self.drop(chunks)

    def drop(self, chunks: Iterable[int]) -> None:
        """The values of these chunks are none of the server's versions."""
        for chunk in chunks:
            if (reply := self.replies.get(chunk)) is not None:
                self.replies[chunk] = reply._replace(chunk_version=0)


class DecodedVersions(HeldVersions):
    """For coded replies that encode the parameters: decoded values are no version."""

    def landed(self, header: Header) -> list[Action]:
        self.replies[header.chunk] = header._replace(chunk_version=0)
        return self.decoded(header)

    def decoded(self, header: Header) -> list[Action]:
        return [DecodeReply(header.chunk, header.clock)]


class RelativeVersions(DecodedVersions):
    """For replies that are relative to the reply before: their sum lies apart, and stays a version
    when others write to the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._overwritten: set[int] = set()
        """Chunks whose memory others have written to."""

    def landed(self, header: Header) -> list[Action]:
        chunk = header.chunk
        self.replies[chunk] = header
        is_overwritten = chunk in self._overwritten
        self._overwritten.discard(chunk)
        if not header.flags & _UNCHANGED:
            return self.decoded(header)
        return [RestoreHeld(chunk)] if is_overwritten else []

    def forget(self, chunks: Iterable[int]) -> None:
        self._overwritten.update(chunks)


class Aside(HeldVersions):
    """For a copy, which is received into memory aside: it leaves no version."""

    def __init__(self, held: HeldVersions) -> None:
        super().__init__()
        self._held = held

    def landed(self, header: Header) -> list[Action]:
        return self._held.decoded(header)


def held_by(rule: PayloadRule) -> HeldVersions:
    """Return what keeps the versions of replies under this rule."""
    if rule.is_raw:
        return HeldVersions()
    return RelativeVersions() if rule.keeps_versions else DecodedVersions()


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
