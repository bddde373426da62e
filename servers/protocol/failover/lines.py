"""The coordinator's ends of its lines to all other ranks; pure.

The other end is psdist.protocol.coordinator_line, which says what lines are for. Both the
coordinator and its standby have these, in the same state behind the same messages.

    lines = Lines()
    lines.hear(worker_id(0))              # 1: its first message
    lines.say(worker_id(0), answer)       # kept until it has come there
    lines.on_received(worker_id(0), 1)
    lines.close()                         # at the standby, which takes the coordinator's place
    lines.on_follows(worker_id(0), 0)     # [answer]: say this again

What was said is kept until the other end has told that it is there, also while there is no standby:
there may be another one later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Control
from psdist.protocol.ids import describe_peer
from psdist.servers.protocol.snapshots import OnWire


@dataclass(slots=True)
class _Line:
    num_heard: int = 0
    num_said: int = 0
    kept: deque[Annotated[Control, OnWire]] = field(default_factory=deque)
    """The last that were said: those that may not have come there."""
    num_wanted: int = 0
    """Number of sent messages that must arrive before a nominee is trusted."""
    is_open: bool = True
    is_lost: bool = False

    @property
    def num_received(self) -> int:
        return self.num_said - len(self.kept)


class Lines(HasSnapshot):
    STATE = Fields(
        {
            dict[int, _Line]: "_lines",
            bool: "_are_open",
        }
    )

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._are_open = True

    def _of(self, peer: int) -> _Line:
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line(is_open=self._are_open)
        return line

    def num_heard(self, peer: int) -> int:
        return self._of(peer).num_heard

    def hear(self, peer: int) -> int:
        """Another message of ``peer`` is here: the how manieth."""
        line = self._of(peer)
        line.num_heard += 1
        return line.num_heard

    def say(self, peer: int, message: Control) -> None:
        line = self._of(peer)
        line.num_said += 1
        if not line.is_lost:
            line.kept.append(message)

    def is_open(self, peer: int) -> bool:
        """Whether what is said leaves at once."""
        return self._of(peer).is_open

    def on_received(self, peer: int, count: int) -> None:
        """``peer`` has the first ``count`` messages."""
        line = self._of(peer)
        if not line.is_lost:
            self._forget(peer, line, count)

    def _forget(self, peer: int, line: _Line, count: int) -> None:
        if not line.num_received <= count <= line.num_said:
            raise ProtocolError(
                f"the coordinator: {describe_peer(peer)} has received {count} messages; it was "
                f"sent {line.num_said}, and has told of {line.num_received}"
            )
        while line.num_received < count:
            line.kept.popleft()

    def has_received_all(self, peers: Iterable[int]) -> bool:
        """Whether each of these that lives has told so."""
        return not any(self._of(peer).kept for peer in peers)

    def has_told_all(self, peers: Iterable[int]) -> bool:
        """Whether to each of these that lives all has left that was said."""
        return all(line.is_open or not line.kept for line in map(self._of, peers))

    def want(self, peer: int) -> None:
        """Somebody waits until all that was said to ``peer`` up to now has come there."""
        line = self._of(peer)
        line.num_wanted = line.num_said

    def has_received_wanted(self, peers: Iterable[int]) -> bool:
        """Whether each of these that lives has told so."""
        lines = map(self._of, peers)
        return all(line.is_lost or line.num_received >= line.num_wanted for line in lines)

    def lose(self, peer: int) -> None:
        """``peer`` has died."""
        line = self._of(peer)
        line.is_lost = True
        line.kept.clear()

    def reset(self, peer: int) -> None:
        """Another one has taken the place of ``peer``, and begins from nothing."""
        self._lines[peer] = _Line(is_open=self._are_open)

    def rename(self, peer: int, now: int) -> None:
        """``peer`` has another id from now on, and the same line."""
        self._lines[now] = self._of(peer)
        del self._lines[peer]

    def close(self) -> None:
        """The coordinator has failed. Hold messages for each rank until it has reported which ones
        it has."""
        self._are_open = False
        for line in self._lines.values():
            line.is_open = False

    def on_follows(self, peer: int, received: int) -> list[Control]:
        """``peer`` knows who the coordinator is now: what it has still to be told."""
        line = self._of(peer)
        if line.is_open:
            raise ProtocolError(f"the coordinator: {describe_peer(peer)} follows it, unasked")
        self._forget(peer, line, received)
        line.is_open = True
        return list(line.kept)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        for peer, line in self._lines.items():
            if line.kept and line.is_lost:
                raise InvariantError(f"messages to {describe_peer(peer)} are kept for nobody")
