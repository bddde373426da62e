"""Which codec rules which rounds, where servers announce changes within the run; pure.

levels = CodecLevels(seat)
levels.begin(turns, num_levels=3)                 # the slice is taken
levels.on_begin_codecs(server_id(0), message)
"""

from __future__ import annotations

from psdist.errors import ProtocolError
from psdist.protocol.control import BeginCodecs
from psdist.protocol.ids import describe_peer, is_worker
from psdist.protocol.rounds import Turns
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action


class CodecLevels:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._turns: Turns | None = None
        self._num_levels = 0
        self.early: list[tuple[int, BeginCodecs]] | None = [] if seat.is_substitute else None
        """Messages to a substitute that has not taken its slice yet; None: there are none."""

    def begin(self, turns: Turns | None, num_levels: int) -> None:
        """The slice is taken. ``turns``: which of ``num_levels`` codecs rule which rounds, None if
        servers announce no changes."""
        self._turns, self._num_levels = turns, num_levels
        early, self.early = self.early, None
        for peer, message in early or ():
            self.on_begin_codecs(peer, message)

    def on_begin_codecs(self, peer: int, message: BeginCodecs) -> list[Action]:
        """Every server announces a change before its first parameters for that round. A message may
        be late, after the next change of another server."""
        if self.early is not None:
            self.early.append((peer, message))
            return []
        turns, change = self._turns, (message.number, message.round, message.level)
        is_known = 0 <= message.level < self._num_levels and not is_worker(peer)
        if turns is None or not is_known or not turns.begin(*change):
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent BeginCodecs {change[0]} "
                f"of level {change[2]} from round {change[1]} on; servers do, all the same, of one "
                f"of {self._num_levels} levels, each change after the one before"
            )
        return []
