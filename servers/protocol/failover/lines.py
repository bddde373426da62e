"""The coordinator's ends of its lines to all other ranks; pure.

psdist.protocol.coordinator_line has the other end and says why there are lines. The coordinator and
its standby have these ends in the same state after the same messages.

    lines = Lines()
    lines.hear(worker_id(0))              # 1: its first message
    lines.say(worker_id(0), answer)       # kept until the rank has received it
    lines.on_received(worker_id(0), 1)
    lines.close()                         # on the standby, which replaces the coordinator
    lines.on_follows(worker_id(0), 0)     # [answer]: send this again

A message is kept until its rank has reported its arrival, also without a standby: there may be a
standby later.
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
class _CountedLine:
    num_heard: int = 0
    num_said: int = 0
    kept: deque[Annotated[Control, OnWire]] = field(default_factory=deque)
    """The last messages, which may not have arrived."""
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
            dict[int, _CountedLine]: "_lines",
            bool: "_are_open",
        }
    )

    def __init__(self) -> None:
        self._lines: dict[int, _CountedLine] = {}
        self._are_open = True

    def _of(self, peer: int) -> _CountedLine:
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _CountedLine(is_open=self._are_open)
        return line

    def num_heard(self, peer: int) -> int:
        return self._of(peer).num_heard

    def hear(self, peer: int) -> int:
        """Count a message received from ``peer``. Return their number."""
        line = self._of(peer)
        line.num_heard += 1
        return line.num_heard

    def say(self, peer: int, message: Control) -> None:
        line = self._of(peer)
        line.num_said += 1
        if not line.is_lost:
            line.kept.append(message)

    def is_open(self, peer: int) -> bool:
        """True if messages leave at once."""
        return self._of(peer).is_open

    def on_received(self, peer: int, count: int) -> None:
        """``peer`` has received the first ``count`` messages."""
        line = self._of(peer)
        if not line.is_lost:
            self._forget(peer, line, count)

    def _forget(self, peer: int, line: _CountedLine, count: int) -> None:
        if not line.num_received <= count <= line.num_said:
            raise ProtocolError(
                f"the coordinator: {describe_peer(peer)} has received {count} messages; it was "
                f"sent {line.num_said} and had reported {line.num_received}"
            )
        while line.num_received < count:
            line.kept.popleft()

    def has_received_all(self, peers: Iterable[int]) -> bool:
        """True if each running rank of these has reported that all messages arrived."""
        return not any(self._of(peer).kept for peer in peers)

    def has_told_all(self, peers: Iterable[int]) -> bool:
        """True if all messages for the running ranks of these have left."""
        return all(line.is_open or not line.kept for line in map(self._of, peers))

    def want(self, peer: int) -> None:
        """Remember to wait until ``peer`` has received all messages so far."""
        line = self._of(peer)
        line.num_wanted = line.num_said

    def has_received_wanted(self, peers: Iterable[int]) -> bool:
        """True if each running rank of these has received the messages of :meth:`want`."""
        lines = map(self._of, peers)
        return all(line.is_lost or line.num_received >= line.num_wanted for line in lines)

    def lose(self, peer: int) -> None:
        """``peer`` has failed."""
        line = self._of(peer)
        line.is_lost = True
        line.kept.clear()

    def reset(self, peer: int) -> None:
        """Another process has replaced ``peer`` and begins a new line."""
        self._lines[peer] = _CountedLine(is_open=self._are_open)

    def rename(self, peer: int, now: int) -> None:
        """``peer`` has the id ``now``, and keeps its line."""
        self._lines[now] = self._of(peer)
        del self._lines[peer]

    def close(self) -> None:
        """The coordinator has failed. Hold messages for each rank until it has reported which ones
        it has."""
        self._are_open = False
        for line in self._lines.values():
            line.is_open = False

    def on_follows(self, peer: int, received: int) -> list[Control]:
        """``peer`` follows this coordinator. Return the messages that it lacks."""
        line = self._of(peer)
        if line.is_open:
            raise ProtocolError(
                f"the coordinator: {describe_peer(peer)} sent Rejoined without a failover"
            )
        self._forget(peer, line, received)
        line.is_open = True
        return list(line.kept)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        for peer, line in self._lines.items():
            if line.kept and line.is_lost:
                raise InvariantError(
                    f"messages are kept for {describe_peer(peer)}, which has failed"
                )
