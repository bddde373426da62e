"""What psdist decides within a run by what workers tell of it: the mode or the bound, the codecs,
and how many local steps groups make; the registrar's, pure.

Who decides is one of psdist.controller's. This takes in what it is told, refuses what was not asked
for, and says for the record what a decision follows from.

    decided = Decided(num_workers=4, groups=[(0, 1), (2, 3)], mode="sync", control=control)
    observed, decision = decided.observe(progress, may_change=True)
    decided.committed(120)                      # the decision rules from this round on
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.decisions import Controller, Decision, Observation
from psdist.controller.kept import Fidelity, Rollback, rolled_back
from psdist.controller.loss_steps import LossStepControl, counts_nonfinite
from psdist.controller.mode import ModeControl
from psdist.controller.rollback import RiseGuard
from psdist.controller.steps import StepControl
from psdist.errors import ProtocolError
from psdist.protocol.control import AskSteps, LossReported, Progress, RoundTook
from psdist.protocol.ids import describe_peer, worker_id
from psdist.servers.protocol.modes import GroupCame, GroupGone, LevelsSized, ModeObserved
from psdist.servers.protocol.steps import FixedSteps, LossHeard, StepsAction, is_loss


class Decided:
    TAKES = (*FixedSteps.TAKES, LossReported)

    def __init__(
        self,
        *,
        num_workers: int,
        groups: Sequence[Sequence[int]],
        mode: str,
        control: Controller | None = None,
        steps: StepControl | LossStepControl | None = None,
        rollback: float | None = None,
        fidelity: Fidelity | None = None,
        first_round: int = 0,
    ) -> None:
        """``control``: of the mode or the codecs; ``steps``: of local steps; None where nobody
        decides that; ``rollback``: so many times the least loss is too much. ``fidelity``: what a
        checkpoint of ``first_round`` rounds, of the group that had made most, from which the run
        goes on, has of them; None where nothing, or where the run goes on without. The others are
        the registrar's. Raises ValueError where that is of other choices."""
        self._control = control
        self._decision: Decision | None = None
        """Of ``control``, while servers are being told."""
        self._group_led_by = {workers[0]: group for group, workers in enumerate(groups)}
        self._group_of = {
            worker: group for group, workers in enumerate(groups) for worker in workers
        }
        self._led_anew: set[int] = set()
        """Groups that another worker leads, which has told nothing yet."""
        self._steps: FixedSteps | None = None
        if steps is not None:
            self._steps = FixedSteps(
                steps,
                num_workers=num_workers,
                leaders=self._group_led_by,
                # Where groups make rounds together anyway, what is decided of them depends on no
                # order of arrival.
                waits=mode == "sync" and isinstance(steps, LossStepControl),
                keeps_passes=mode != "sync" and isinstance(steps, StepControl),
            )
        self._guard = RiseGuard(rollback) if rollback is not None else None
        if fidelity is not None or first_round:
            self._go_on(fidelity or Fidelity(), first_round)

    # -- from attempt to attempt ----------------------------------------------------------------

    def kept(self, clock: int) -> Fidelity | None:
        """For a checkpoint of ``clock`` rounds of the slowest group, made while no change is under
        way; None where nothing is chosen that it could keep."""
        control, steps = self._control, self._steps
        codecs = control.kept(clock) if isinstance(control, CodecControl) else None
        kept_steps = steps.kept(clock) if steps is not None else None
        paces = steps.kept_paces() if steps is not None else None
        if codecs is None and kept_steps is None and paces is None:
            return None
        rise = self._guard.kept() if self._guard is not None else None
        return Fidelity(codecs=codecs, steps=kept_steps, paces=paces, rise=rise)

    @property
    def good(self) -> int | None:
        """A checkpoint of so many rounds or fewer is of before the loss rose, if it rises; None
        where nobody looks."""
        return self._guard.kept().good if self._guard is not None else None

    def _go_on(self, fidelity: Fidelity, first_round: int) -> None:
        control, steps = self._control, self._steps
        if fidelity.codecs is not None and isinstance(control, CodecControl):
            control.go_on(fidelity.codecs, first_round)
        if isinstance(control, ModeControl | BoundControl):
            control.go_on(fidelity.modes, first_round)
        if fidelity.steps is not None and steps is not None:
            steps.go_on(fidelity.steps)
        if fidelity.paces is not None and steps is not None:
            steps.go_on_at_pace(fidelity.paces)
        if self._guard is not None and (fidelity.rise is not None or first_round):
            self._guard.go_on(fidelity.rise, first_round)

    # -- the mode, or the codecs ---------------------------------------------------------------

    def observe(
        self, message: Progress, *, may_change: bool
    ) -> tuple[list[GroupCame | ModeObserved], Decision | None]:
        """What rounds of a group have taken; the second is to be proposed to servers, at once."""
        control, group = self._control, self._group_led_by.get(message.worker)
        own_us, waits_us, errors_ppm = message.own_us, message.waits_us, message.errors_ppm
        is_damaged = (
            len(own_us) != len(waits_us)
            or len(errors_ppm) not in (0, len(own_us))
            or min(message.first_round, *own_us, *waits_us, *errors_ppm) < 0
        )
        if control is None or group is None or is_damaged:
            _refuse(message.worker, "told what rounds took, unasked or damaged")
        first_round = message.first_round
        came: list[GroupCame] = []
        if group in self._led_anew:
            self._led_anew.remove(group)
            came = self.admit(message.worker, first_round - 1)
        control.observe(Observation(group, first_round, own_us, waits_us, errors_ppm))
        observed = ModeObserved(group, first_round, own_us, waits_us, may_change, errors_ppm)
        decision = control.judge() if may_change else None
        if decision is not None:
            self._decision = decision
        return [*came, observed], decision

    def committed(self, round_number: int) -> None:
        """What was proposed last rules from this round on; nothing where it was a script's."""
        if self._control is not None and self._decision is not None:
            self._control.committed(self._decision, round_number)
            self._decision = None

    def lose(self, worker: int, out: Collection[int]) -> list[GroupGone]:
        """It is declared dead. Where its group is ``out`` of the job, what that has told is
        dropped, and it is waited for no more. What was decided stays, and so does what servers are
        being told: they alone answer that."""
        if self._control is None:
            return []
        group = self._group_of[worker]
        if not all(each in out for each, its in self._group_of.items() if its == group):
            return []
        self._control.lose(group)
        self._led_anew.discard(group)
        return [GroupGone(group)]

    def go_on(self, members: Sequence[int]) -> None:
        """A group goes on with these. Where another one leads it now, nobody tells what the one
        before has not told: what has been told of the group is dropped when that one begins to."""
        leader, group = members[0], self._group_of[members[0]]
        if self._group_led_by.get(leader) != group:
            led = {each: its for each, its in self._group_led_by.items() if its != group}
            self._group_led_by = {**led, leader: group}
            self._led_anew.add(group)

    def admit(self, worker: int, first_round: int) -> list[GroupCame]:
        """A substitute joins, whose group makes this round first."""
        if self._control is None:
            return []
        group = self._group_of[worker]
        self._control.admit(group, first_round)
        return [GroupCame(group, first_round)]

    def know_sizes(self, sizes: list[int]) -> list[LevelsSized]:
        """The model is known, and with it how many bytes an exchange takes at each level."""
        if self._control is None:
            return []
        self._control.know_sizes(sizes)
        return [LevelsSized(sizes)]

    # -- local steps, and the loss -------------------------------------------------------------

    def on_told(
        self, message: RoundTook | AskSteps | LossReported, away: Collection[int]
    ) -> list[StepsAction | LossHeard | Rollback]:
        """``away``: workers that are done, or wait in a collective."""
        if isinstance(message, LossReported):
            return [self._on_loss(message), *self._judge_rise(message)]
        if self._steps is None:
            _refuse(message.worker, f"sent {type(message).__name__}, unasked")
        if isinstance(message, RoundTook):
            return [*self._steps.on_took(message)]
        return [*self._steps.on_ask(message, away)]

    def fix_steps(self, away: Collection[int]) -> list[StepsAction]:
        """Somebody has gone who had still to ask for the steps of a term."""
        return [] if self._steps is None else self._steps.fix(away)

    def _on_loss(self, message: LossReported) -> LossHeard:
        """For what is decided by it: local steps, or the codecs."""
        worker, count, total = message.worker, message.count, message.total
        control, steps = self._control, self._steps
        if not is_loss(message):
            _refuse(worker, f"reported {count} losses of {total}, which is damaged")
        is_held_back = self._guard is not None and counts_nonfinite(total)
        if isinstance(control, CodecControl) and control.reads_losses:
            if not is_held_back:
                control.report(count, total)
        elif isinstance(control, CodecControl) and self._guard is not None:
            pass  # it alone reads them
        elif steps is None or not (is_held_back or steps.report(message)):
            _refuse(worker, "sent LossReported, unasked or damaged")
        return LossHeard(worker, message.round, count, total)

    def _judge_rise(self, message: LossReported) -> list[Rollback]:
        """Whether the loss has blown up."""
        guard, control, steps = self._guard, self._control, self._steps
        if guard is None:
            return []
        rise = guard.report(message.round, message.count, message.total)
        if rise is None:
            return []
        if isinstance(control, CodecControl):
            lossiest = control.lossiest_since(rise.good)
            return [rolled_back(message.round, rise, lossiest, names=control.names)]
        assert steps is not None
        return [rolled_back(message.round, rise, steps.most_since(rise.good))]


def _refuse(worker: int, why: str) -> NoReturn:
    raise ProtocolError(f"the registrar: {describe_peer(worker_id(worker))} {why}")
