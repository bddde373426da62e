"""What a server holds back until its buddy has it, too; pure.

A server tells its buddy of every change of its shard, in order (*records*, numbered from 1). What
it says to anybody else after a change says, or may say, that there was that change: so it is held
until the buddy has told that it holds all records up to there. Then two servers have what was
acknowledged. Outputs leave in the order in which they were made.

When the buddy is lost, nothing leaves until the registrar has said so, too (``go_alone``): a server
that is cut off from its buddy may itself have been declared dead, and another one serve its shard.

    primary = Primary(server=1, buddy=server_id(2))
    primary.count_record()                # 1: tell the buddy
    primary.hold(output)                  # False: kept here
    primary.on_recorded(server_id(2), 1)  # [output]: may leave now
"""

from __future__ import annotations

from collections import deque
from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.ids import describe_peer


class Primary:
    def __init__(self, *, server: int, buddy: int) -> None:
        """``buddy``: its stable id."""
        self._server = server
        self.buddy = buddy
        self.has_lost_buddy = False
        """Whether the network has said so: nothing more is told to it."""
        self.is_alone = False
        """Whether the registrar has said so: there is one copy, and nothing is held any more."""
        self.num_recorded = 0
        self.num_held = 0
        """Records that the buddy holds."""
        self._outputs: deque[tuple[int, Any]] = deque()
        """What must not leave before the buddy holds so many records."""

    @property
    def is_told(self) -> bool:
        """Whether nothing is held, and nothing is on its way to the buddy."""
        return not self._outputs and (self.is_alone or self.num_held == self.num_recorded)

    def count_record(self) -> int:
        """The number of a change that the buddy must be told of; 0 where there is none to tell."""
        if self.has_lost_buddy:
            return 0
        self.num_recorded += 1
        return self.num_recorded

    def hold(self, output: Any) -> bool:
        """Keep what would leave now; False where it may leave at once."""
        if self.is_alone:
            return False
        if not self.has_lost_buddy and self.num_held == self.num_recorded:
            return False
        self._outputs.append((self.num_recorded, output))
        return True

    def on_recorded(self, peer: int, number: int) -> list[Any]:
        """The buddy holds all records up to ``number``: what may leave now, in order."""
        if peer != self.buddy or not self.num_held < number <= self.num_recorded:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} says that it holds {number} "
                f"records; {describe_peer(self.buddy)} has been sent {self.num_recorded} and "
                f"held {self.num_held}"
            )
        self.num_held = number
        if self.has_lost_buddy:
            return []
        outputs, free = self._outputs, []
        while outputs and outputs[0][0] <= number:
            free.append(outputs.popleft()[1])
        return free

    def on_buddy_lost(self) -> None:
        self.has_lost_buddy = True

    def go_alone(self) -> list[Any]:
        """The registrar has declared the buddy dead, and this server not: all that was held."""
        self.has_lost_buddy = self.is_alone = True
        free = [output for _, output in self._outputs]
        self._outputs.clear()
        return free

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        stamps = [stamp for stamp, _ in self._outputs]
        if stamps != sorted(stamps) or self.num_held > self.num_recorded:
            raise InvariantError(f"outputs wait for records {stamps} of {self.num_recorded}")
        if self.is_alone and stamps:
            raise InvariantError("outputs are held for a buddy that there is not")
        if not self.has_lost_buddy and stamps and stamps[0] <= self.num_held:
            raise InvariantError(
                f"an output waits for record {stamps[0]}; the buddy holds {self.num_held}"
            )
