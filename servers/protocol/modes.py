"""Changing the mode of a run: the coordinator's machine of proposals; pure.

Every server decides by itself what it sends, so all must agree on the first round of a new mode.
It takes two phases. *Propose*: each server answers, for each parameter set, the highest
round for which it has sent parameters, and from then on keeps back what is for later rounds.
*Commit*: the new mode rules from the round after the highest of these. So no server has sent
parameters of such a round under the old rule, nor judges those of an earlier one by the new rule.

    modes = ModeChanges(num_servers=2)
    modes.propose(Decision("ssp", 3, why="the script"))           # ProposeMode for every server
    modes.on_proposed(0, ModeProposed(number=1, server=0, rounds=[7]))
    modes.on_proposed(1, ModeProposed(number=1, server=1, rounds=[9]))
                                                                  # CommitMode from round 10 on

One change at a time; servers get the messages of one before those of the next. Where psdist chooses
the codecs they change in the same way, and the mode stays. The history of modes is part of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from psdist.controller import Decision
from psdist.controller.kept import KeptModes, TuningState
from psdist.controller.observed import LevelsSized
from psdist.controller.snapshots import Fields, Nested
from psdist.errors import ProtocolError
from psdist.mode_names import Mode
from psdist.protocol.collected import SET_MODE, unpack_mode
from psdist.protocol.control import CommitMode, Control, ModeProposed, Progress, ProposeMode
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.collectives import Collective
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart, refuse
from psdist.servers.protocol.round_control import RoundControl
from psdist.servers.protocol.snapshots import OnWire


@dataclass(frozen=True, slots=True)
class ModeChanged:
    """The mode is another one, for each set from this round on."""

    rounds: tuple[int, ...]
    mode: Mode
    staleness: int
    why: str
    level: int = -1
    """Which codecs rule from there on, where psdist chooses them: then the mode is the same."""


class ModeChanges(CoordinatorPart):
    NAME = "modes"
    TAKES = (ModeProposed,)
    COMPLETES = (SET_MODE,)
    STATE = Fields(
        {
            KeptModes | None: "kept",
            int: "_number",
            Decision | None: "_proposed",
            dict[int, list[int]]: "_highest",
            Annotated[CommitMode, OnWire] | None: "_committed",
            int | None: "_collective",
            Nested: "_control",
        }
    )

    def __init__(
        self,
        *,
        num_servers: int,
        begins: KeptModes | None = None,
        takes_set_mode: bool = False,
        control: RoundControl | None = None,
    ) -> None:
        """``begins``: the modes with which the run begins, if it may change them;
        ``takes_set_mode``: True if scripts may change the mode; ``control``: changes the mode or
        the codecs if scripts do not."""
        self._num_servers = num_servers
        self._takes_set_mode = takes_set_mode
        self._control = control
        self.kept = begins
        """For a checkpoint that is made now, while no change is under way."""
        self._number = 0
        self._proposed: Decision | None = None
        self._highest: dict[int, list[int]] = {}
        """By server what it has answered, set by set."""
        self._committed: CommitMode | None = None
        """The last one."""
        self._collective: int | None = None
        """Number of the collective that ends when the mode has changed."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, ModeProposed)
        job.require_server(peer, message.server, message)
        actions: Actions = [*self.on_proposed(message.server, message)]
        if self.is_settling:
            return actions
        changed = actions[-1]
        assert isinstance(changed, ModeChanged)
        if self._control is not None:
            self._control.committed(changed.rounds[0])
        # After CommitMode: the servers have the mode before any rank receives what follows.
        if self._collective is not None:
            actions += job.resume(self._collective)
            self._collective = None
        return actions + job.retry_all()

    def complete(self, seq: int, collective: Collective, job: Coordinator) -> Actions:
        """Propose the mode for which every worker has called set_mode."""
        asked = {enter.payload for enter in collective.entered.values()}
        if len(asked) > 1:
            words = ", ".join(sorted(payload.decode(errors="replace")[:40] for payload in asked))
            return job.fail(
                seq,
                f"workers called set_mode with different modes: {words}; every worker must ask for "
                "the same one",
            )
        found = unpack_mode(asked.pop())
        if found is None or not self._takes_set_mode:
            refuse(
                worker_id(min(collective.entered)),
                "asked for a mode that there is not, or in a run whose mode no script may change",
            )
        collective.is_complete = True
        self._collective = seq
        mode, staleness = found
        return [*self.propose(Decision(mode, staleness, f"the script, in collective {seq}"))]

    def may_change(self, job: Coordinator) -> bool:
        """True if the mode may change now, without a collective: every worker trains."""
        return job.is_ready and not self.is_settling and not job.done

    @property
    def reads_round_times(self) -> bool:
        return self._control is not None

    def on_progress(self, message: Progress, job: Coordinator) -> Actions:
        if self._control is None or not message.own_us:
            return []
        may_change = self.may_change(job)
        observed, decision = self._control.observe(message, may_change=may_change)
        return [*observed, *(self.propose(decision) if decision is not None else ())]

    def on_evicted(self, worker: int, job: Coordinator) -> Actions:
        control = self._control
        return [] if control is None else [*control.lose(worker, job.membership.out)]

    def on_joined(self, worker: int, clocks: Sequence[int]) -> Actions:
        return [] if self._control is None else [*self._control.admit(worker, clocks[0])]

    def keep(self, tuning_state: TuningState, clock: int) -> TuningState:
        if self._control is not None:
            tuning_state = self._control.keep(tuning_state, clock)
        return tuning_state if self.kept is None else replace(tuning_state, modes=self.kept)

    def know_sizes(self, sizes: list[int]) -> Actions:
        if self._control is None:
            return []
        self._control.know_sizes(sizes)
        return [LevelsSized(sizes)]

    @property
    def is_settling(self) -> bool:
        """Whether some server has still to answer."""
        return self._proposed is not None

    def propose(self, decided: Decision) -> list[SendControl]:
        """No other change is under way."""
        assert self._proposed is None
        self._number += 1
        self._proposed = decided
        message = ProposeMode(number=self._number)
        return [SendControl(server_id(server), message) for server in range(self._num_servers)]

    def ask_again(self, server: int, job: Coordinator) -> Actions:
        """Repeat the last change, which changes nothing if it is known, and ask for the answer that
        was not given."""
        told = [] if self._committed is None else [self._committed]
        peer, number = server_id(server), self._number
        actions: Actions = [SendControl(peer, each) for each in told]
        if self.is_settling and server not in self._highest:
            actions.append(SendControl(peer, ProposeMode(number=number)))
        return actions

    def on_proposed(self, server: int, message: ModeProposed) -> list[SendControl | ModeChanged]:
        """A server keeps later rounds back; with the last one all are told the round."""
        is_wrong = message.number != self._number or self._proposed is None
        is_damaged = not message.rounds or min(message.rounds) < -1
        if is_wrong or is_damaged or server in self._highest:
            raise ProtocolError(
                f"the coordinator: server {server} sent ModeProposed {message.number} of rounds "
                f"{message.rounds[:8]} in change {self._number}, unasked, twice or damaged"
            )
        self._highest[server] = message.rounds
        if len(self._highest) < self._num_servers:
            return []
        assert self._proposed is not None
        decided = self._proposed
        answers = list(self._highest.values())
        num_sets = max(map(len, answers))
        rounds = tuple(
            1 + max(answer[index] for answer in answers if index < len(answer))
            for index in range(num_sets)
        )
        self._proposed = None
        self._highest.clear()
        self._committed = commit = CommitMode(
            number=self._number,
            rounds=list(rounds),
            mode=decided.mode,
            staleness=decided.staleness,
            level=decided.level,
        )
        told = [SendControl(server_id(each), commit) for each in range(self._num_servers)]
        if self.kept is not None:
            self.kept = self.kept.then(rounds, decided.mode, decided.staleness)
        change = ModeChanged(rounds, decided.mode, decided.staleness, decided.why, decided.level)
        return [*told, change]
