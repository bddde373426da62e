"""What a server holds back until its buddy has it, too; pure.

A server tells its buddy of every change of its shard, in order (*records*, numbered from 1). What
it says to anybody else after a change says, or may say, that there was that change: so it is held
until the buddy has told that it holds all records up to there. Then two servers have what was
acknowledged. Outputs leave in the order in which they were made.

When the buddy is lost, nothing leaves until the coordinator has said so, too (``go_alone``): a
server that is cut off from its buddy may itself have been declared dead, and another one serve its
shard.

Alone it may be told to fill another copy (``begin_fill``). Until all of the shard is on its way
nothing is held; from ``end_fill`` on everything is, as before.

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
    def __init__(self, *, server: int, buddy: int | None) -> None:
        """``buddy``: its stable id; None where there is none yet."""
        self._server = server
        self.buddy = buddy
        self._former: set[int] = set()
        """Buddies that have died."""
        self.has_lost_buddy = buddy is None
        """Whether the network has said so: nothing more is told to it."""
        self.is_alone = buddy is None
        """Whether the coordinator has said so: there is one copy, and nothing is held any more."""
        self.is_filling = False
        """Whether another copy is made, and a part of the shard is not on its way yet."""
        self.num_recorded = 0
        self.num_held = 0
        """Records that the buddy holds."""
        self._outputs: deque[tuple[int, Any]] = deque()
        """What must not leave before the buddy holds so many records."""

    @property
    def is_told(self) -> bool:
        """Whether nothing is held, and nothing is on its way to the buddy."""
        is_at_rest = self.is_alone and not self.is_filling
        return not self._outputs and (is_at_rest or self.num_held == self.num_recorded)

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
        if peer in self._former:
            return []  # its last words
        if peer != self.buddy or not self.num_held < number <= self.num_recorded:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} says that it holds {number} "
                f"records; {self._describe_buddy()} has been sent {self.num_recorded} and held "
                f"{self.num_held}"
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
        """The coordinator has declared the buddy dead, and this server not: all that was held."""
        self.has_lost_buddy = self.is_alone = True
        self.is_filling = False
        free = [output for _, output in self._outputs]
        self._outputs.clear()
        return free

    def begin_fill(self, buddy: int) -> None:
        """The coordinator has found another one, which knows nothing yet: it is told of the shard,
        and of changes of what it knows, with numbers from 1 on."""
        if not self.is_alone or self.is_filling:
            raise InvariantError(f"server {self._server} was told to fill a second copy twice")
        if self.buddy is not None:
            self._former.add(self.buddy)
        self.buddy, self.has_lost_buddy, self.is_filling = buddy, False, True
        self.num_recorded = self.num_held = 0

    def end_fill(self) -> None:
        """It has been told of everything: from now on what is said waits for it."""
        if not self.is_filling:
            raise InvariantError(f"server {self._server} has filled what it had not begun")
        self.is_filling = self.is_alone = False

    def _describe_buddy(self) -> str:
        return "nobody" if self.buddy is None else describe_peer(self.buddy)

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
