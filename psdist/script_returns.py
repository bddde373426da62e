"""Samples that the dead would have seen, as scripts meet them: all who live hold between two
batches, and the rest of the epoch is dealt to them.

    returns = ScriptReturns(context, loop, loaders, collective=collective)
    if returns.is_due: ...                        # hold for it at the next boundary
    returns.meet(a_pass, clocks)                  # all who live hold: what is left is dealt anew

What is dealt anew the registrar decides (psdist.servers.protocol.returns), and how a pass goes on
then is psdist.workers.data.returned's. Where nothing can go back, training goes on as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from psdist.config.outer import has_rounds
from psdist.errors import ProtocolError
from psdist.protocol.collected import Brought
from psdist.protocol.ids import describe_workers
from psdist.protocol.returns import (
    RETURN,
    Return,
    pack_refusal,
    pack_standing,
    unpack_return,
)
from psdist.ranks.context import RankContext
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.seen import Pass
from psdist.workers.loop import WorkerLoop

logger = logging.getLogger("psdist")


class ScriptReturns:
    def __init__(
        self,
        context: RankContext,
        loop: WorkerLoop,
        loaders: Loaders,
        *,
        collective: Callable[[str, bytes], Brought],
    ) -> None:
        self._loop = loop
        self._loaders = loaders
        self._collective = collective
        self._config = context.config
        # A spare has a dead one's part; what was unseen before it came stays so.
        self.is_on = (
            context.survives_workers
            and context.config.samples_of_dead == "return"
            and not context.roles.num_substitutes
        )
        """Whether samples of the dead go back at all."""
        self._settled: frozenset[int] = frozenset()
        """Of the dead, of whom was decided."""

    @property
    def _dead(self) -> frozenset[int]:
        return frozenset(self._loop.core.dead) - self._settled

    @property
    def is_due(self) -> bool:
        """Whether somebody has died of whom nothing was decided."""
        return self.is_on and bool(self._dead)

    def wait_for_deaths(self) -> None:
        """Where this worker's pass would be over: until it knows of each death of which a server
        knew that has answered. Whose loop it is must be clear."""
        self._loop.wait_for_deaths()

    def give_up(self) -> None:
        """Somebody's script has finished: there is no meeting any more."""
        if self.is_due:
            self._tell("a worker's script has finished")
            self._settled |= self._dead

    def meet(self, a_pass: Pass | None, clocks: Sequence[int]) -> None:
        """All who live hold, this worker before the next batch of this pass, or between two."""
        found = self._loaders.standing(a_pass, clock=clocks[0])
        if len(clocks) > 1:
            found = "the job has several optimizers"
        elif has_rounds(self._config):
            found = "a round of local steps takes several batches"
        payload = pack_refusal(found) if isinstance(found, str) else pack_standing(found)
        brought = self._collective(RETURN, payload)
        told = unpack_return(brought.payloads[0]) if len(brought.payloads) == 1 else None
        if told is None:
            raise ProtocolError("the registrar answered a return with what is none")
        if isinstance(told, str):
            self._tell(told)
            self._settled |= self._dead
            return
        dead = self._dead - set(told.living)
        self._settled |= dead
        self._loaders.deal_anew(told, a_pass)
        self._tell_return(told, a_pass, dead)

    def _tell_return(self, told: Return, a_pass: Pass | None, dead: frozenset[int]) -> None:
        if not self._is_chief or not dead:
            return
        who, num = describe_workers(dead), len(told.living)
        lost = ""
        if told.lost:
            lost = f"; {told.lost} batches of passes that somebody had ended are lost"
        others = f"{num} worker{'s' * (num != 1)}"
        if told.dataset is not None and a_pass is not None and a_pass.is_cut_anew:
            logger.warning(
                "what %s had not brought of epoch %d goes back to it: all that is left behind "
                "batch %d is dealt to %s%s",
                who,
                a_pass.epoch,
                told.at,
                others,
                lost,
            )
        else:
            logger.warning(
                "%s had brought its part of the epoch: from the next one on all is dealt to %s%s",
                who,
                others,
                lost,
            )

    def _tell(self, why: str) -> None:
        if self._is_chief and self._dead:
            logger.warning(
                "what %s would have seen nobody sees: %s", describe_workers(self._dead), why
            )

    @property
    def _is_chief(self) -> bool:
        return self._loop.core.chief == self._loop.core.seat.worker
