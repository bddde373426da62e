"""A worker whose group has lost others tells where it stands, and hears where those who are left
do; pure.

    regrouping = Regrouping(seat)
    regrouping.num_lost += 1                  # the registrar has said who is dead
    regrouping.is_due                         # until this worker has told:
    regrouping.tell(standing)                 # Regroup, for the registrar
    regrouping.answer                         # every standing, by place; None until all have told
"""

from __future__ import annotations

from psdist.errors import ProtocolError
from psdist.protocol.control import Regroup, Regrouped
from psdist.protocol.ids import REGISTRAR, describe_peer
from psdist.workers.protocol.actions import Action, SendControl
from psdist.workers.protocol.seat import Seat


class Regrouping:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.num_lost = 0
        """Workers of the group that have died."""
        self._told = 0
        """The same, when this worker told last."""
        self._answer: list[bytes] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the group has lost workers since this one has told where it stands."""
        return self._told < self.num_lost

    def tell(self, standing: bytes) -> list[Action]:
        """Send ``standing``, as :class:`Regroup` describes it."""
        self._told, self._answer = self.num_lost, None
        worker, num_lost = self._seat.worker, self._told
        message = Regroup(worker=worker, num_lost=num_lost, standing=standing)
        return [SendControl(REGISTRAR, message)]

    @property
    def answer(self) -> list[bytes] | None:
        """What all who are left have told, by place; None while some have not, or must again."""
        return None if self.is_due else self._answer

    def on_regrouped(self, peer: int, message: Regrouped) -> list[Action]:
        if peer != REGISTRAR or not 0 < message.num_lost <= self._told:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of a group that "
                f"has lost {message.num_lost}; this worker has told for {self._told}"
            )
        if message.num_lost == self.num_lost:
            if len(message.standings) != len(self._seat.members):
                raise ProtocolError(
                    f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of "
                    f"{len(message.standings)} workers; {len(self._seat.members)} are left"
                )
            self._answer = message.standings
        return []
