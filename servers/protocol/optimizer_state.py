"""The parts of optimizer state that a server receives from the chief or sends to it; pure.

Setup from the chief announces the parts. The chief then sends them in ascending order, before any
worker pushes. It sends each part after the last answer: a server needs memory for one part only.

    state = StateOfSet(server=0)
    state.expect([StatePart(0, 0, 8192)], lengths=[1024])
    state.take(peer, StateValues(chunk=0, start=0, values=...))     # [LoadState, SendControl]
    state.is_complete
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.control import StateTaken, StateValues, StateWanted
from psdist.protocol.ids import describe_peer
from psdist.protocol.optimizer_state import StatePart, part_starts
from psdist.servers.protocol.actions import Action, LoadState, SendControl, SendState


class StateOfSet:
    def __init__(self, *, server: int) -> None:
        self._server = server
        self._parts: Sequence[StatePart] = ()
        self._num_taken = 0
        self._lengths: Sequence[int] = ()

    def expect(self, parts: Sequence[StatePart], *, lengths: Sequence[int]) -> None:
        """The set is built. ``lengths``: number of elements of each of its chunks."""
        self._parts, self._lengths = parts, lengths

    def take_over(self) -> None:
        """All announced parts are here: the failed server that this one replaces had them."""
        self._num_taken = len(self._parts)

    @property
    def is_complete(self) -> bool:
        """True if all announced parts are here."""
        return self._num_taken == len(self._parts)

    def take(self, peer: int, message: StateValues) -> list[Action]:
        at, num_bytes = (message.chunk, message.start), len(message.values)
        taken = SendControl(peer, StateTaken(chunk=message.chunk, start=message.start))
        if self._num_taken and at == self._parts[self._num_taken - 1][:2]:
            return []  # a second delivery of a part that was answered
        expected = None if self.is_complete else self._parts[self._num_taken]
        if expected is None or (*at, num_bytes) != expected:
            self._refuse(
                peer,
                f"sent {num_bytes} bytes of optimizer state of chunk {message.chunk} from element "
                f"{message.start} on; {_describe(expected)} expected",
            )
        self._num_taken += 1
        return [LoadState(message.chunk, message.start, message.values), taken]

    def tell(self, peer: int, message: StateWanted) -> list[Action]:
        """Send one part of a chunk that this server holds and that no push changes now."""
        chunk, start = message.chunk, message.start
        num_elements = self._lengths[chunk] if chunk < len(self._lengths) else 0
        if not self.is_complete or start not in part_starts(num_elements):
            self._refuse(
                peer,
                f"asks for the optimizer's state of chunk {chunk} from element {start} on, "
                + ("where no part begins" if self.is_complete else "before it has sent all of it"),
            )
        return [SendState(peer, message.number, chunk, start)]

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")


def _describe(part: StatePart | None) -> str:
    if part is None:
        return "no more are"
    return f"{part.num_bytes} bytes of chunk {part.chunk} from element {part.start} on are"
