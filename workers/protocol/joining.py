"""How a substitute comes into the running job, in the place of a failed worker; pure.

It registers with no server. It reports when it is ready, for all sets at once, and the coordinator
reports when it has joined.

    membership = membership_of(seat)                    # Substitute: seat.is_substitute
    membership.on_replace(COORDINATOR, TakePlace(worker=1))
    membership.begin_join(num_sets=1)                   # JoinReady, for the coordinator
    membership.on_welcome(COORDINATOR, message)         # message: JoinAccepted
"""

from __future__ import annotations

from psdist.errors import InvariantError
from psdist.protocol.control import JoinAccepted, JoinReady, TakePlace
from psdist.protocol.ids import COORDINATOR
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendControl, Warn
from psdist.workers.protocol.membership import Membership


class Substitute(Membership):
    def __init__(self, seat: Seat, *, set_index: int = 0) -> None:
        super().__init__(seat, set_index=set_index)
        self.place = None
        self.is_outside = True

    def begin_register(self, *, clock: int = 0) -> list[Action]:
        raise InvariantError(
            f"worker {self._seat.worker} registered group {self._seat.group} at {clock}; a "
            "substitute joins the running job instead"
        )

    def on_replace(self, peer: int, message: TakePlace) -> list[Action]:
        if peer != COORDINATOR or self.place is not None:
            return super().on_replace(peer, message)
        self.place = message.worker
        return []

    def begin_join(self, *, num_sets: int) -> list[Action]:
        if self.place is None or self._has_asked:
            return super().begin_join(num_sets=num_sets)
        self._has_asked = True
        return [SendControl(COORDINATOR, JoinReady(worker=self._seat.worker, num_sets=num_sets))]

    def on_welcome(self, peer: int, message: JoinAccepted) -> bool:
        is_ours = self._has_asked and message.worker == self._seat.worker
        if peer != COORDINATOR or not is_ours:
            return super().on_welcome(peer, message)
        if self.welcome is not None:
            self.duplicates += 1
            return False
        self.take_in(message)
        return True

    def take_in(self, welcome: JoinAccepted) -> None:
        self.welcome = welcome
        self.is_outside = False
        self._has_asked = True
        self._registered.update(range(self._seat.num_servers))
        self.generation, self.dead = welcome.generation, frozenset(welcome.dead)
        self.chief = welcome.chief

    @property
    def is_setting_up(self) -> bool:
        return not self.is_outside and super().is_setting_up

    @property
    def may_stop(self) -> bool:
        return self.is_done or self.is_outside

    def describe(self) -> str:
        if self.is_outside:
            return "the workers to come to where a substitute can join"
        return super().describe()

    def describe_joining(self) -> list[Action]:
        if self.is_outside:
            return [Warn("the workers have not come to where a substitute can join")]
        return super().describe_joining()

    def require_in_job(self) -> None:
        if self.is_outside:
            raise InvariantError(f"worker {self._seat.worker} is a substitute and has not joined")
        super().require_in_job()


def membership_of(seat: Seat, *, set_index: int = 0) -> Membership:
    """Return the membership of a worker in one parameter set."""
    make = Substitute if seat.is_substitute else Membership
    return make(seat, set_index=set_index)
