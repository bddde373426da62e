"""One controller of the mode, the staleness bound or the codecs, fed with what rounds take; pure.

The controllers are psdist.controller's. This checks what workers measure, and reports what each
decision follows from. psdist.servers.protocol.modes takes the decisions to the servers.

    rounds = RoundControl(control, groups=[(0, 1), (2, 3)])
    observed, decision = rounds.observe(progress, may_change=True)
    rounds.committed(120)                       # the decision takes effect in this round
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from psdist.controller import Controller, Decision, Observation
from psdist.controller.codec import CodecControl
from psdist.controller.kept import Rollback, TuningState, rolled_back
from psdist.controller.observed import GroupCame, GroupGone, ModeObserved
from psdist.controller.rollback import Rise
from psdist.controller.snapshots import Fields, HasSnapshot, Nested
from psdist.errors import ProtocolError
from psdist.protocol.control import LossReported, Progress


class RoundControl(HasSnapshot):
    STATE = Fields(
        {
            Nested: "_control",
            Decision | None: "_decision",
            dict[int, int]: "_group_led_by",
            set[int]: "_led_anew",
        }
    )

    def __init__(self, control: Controller, *, groups: Sequence[Sequence[int]]) -> None:
        """``groups``: the workers of each, its leader first."""
        self._control = control
        self._decision: Decision | None = None
        """The decision that servers are being told."""
        self._group_led_by = {workers[0]: group for group, workers in enumerate(groups)}
        self._group_of = {
            worker: group for group, workers in enumerate(groups) for worker in workers
        }
        self._led_anew: set[int] = set()
        """Groups with a new leader that has measured nothing yet."""

    def keep(self, tuning_state: TuningState, clock: int) -> TuningState:
        """Return ``tuning_state`` with the codecs that a checkpoint of ``clock`` rounds keeps."""
        if not isinstance(self._control, CodecControl):
            return tuning_state
        return replace(tuning_state, codecs=self._control.kept(clock))

    # -- rounds --------------------------------------------------------------------------------

    def observe(
        self, message: Progress, *, may_change: bool
    ) -> tuple[list[GroupCame | ModeObserved], Decision | None]:
        """Take in what rounds of a group have taken. The decision, if any, is to be proposed to
        servers at once. Raises :class:`ProtocolError` for measurements that are damaged."""
        control, group = self._control, self._group_led_by.get(message.worker)
        own_us, waits_us, errors_ppm = message.own_us, message.waits_us, message.errors_ppm
        is_damaged = (
            len(own_us) != len(waits_us)
            or len(errors_ppm) not in (0, len(own_us))
            or min(message.first_round, *own_us, *waits_us, *errors_ppm) < 0
        )
        if group is None or is_damaged:
            raise ProtocolError(
                f"the coordinator: worker {message.worker} told what rounds took, unasked or "
                "damaged"
            )
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
        """The last proposal takes effect in this round. Changes nothing if a script made it."""
        if self._decision is not None:
            self._control.committed(self._decision, round_number)
            self._decision = None

    def know_sizes(self, sizes: list[int]) -> None:
        """``sizes``: by codec level, the bytes of one exchange."""
        self._control.know_sizes(sizes)

    # -- membership ----------------------------------------------------------------------------

    def lose(self, worker: int, out: Collection[int]) -> list[GroupGone]:
        """``worker`` is evicted. If its whole group is ``out`` of the job, forget its measurements
        and wait for it no more. Decisions stay: servers alone answer those."""
        group = self._group_of[worker]
        if not all(each in out for each, its in self._group_of.items() if its == group):
            return []
        self._control.lose(group)
        return [GroupGone(group)]

    def go_on(self, members: Sequence[int]) -> None:
        """The group continues with ``members``. The figures of its former leader are kept until the
        new leader reports."""
        leader, group = members[0], self._group_of[members[0]]
        if self._group_led_by.get(leader) != group:
            led = {each: its for each, its in self._group_led_by.items() if its != group}
            self._group_led_by = {**led, leader: group}
            self._led_anew.add(group)

    def admit(self, worker: int, first_round: int) -> list[GroupCame]:
        """A worker joins, whose group makes this round first."""
        group = self._group_of[worker]
        self._control.admit(group, first_round)
        return [GroupCame(group, first_round)]

    # -- the loss ------------------------------------------------------------------------------

    def report(self, message: LossReported) -> bool:
        """Take in losses. False if the codecs do not depend on the loss."""
        control = self._control
        if not isinstance(control, CodecControl) or not control.reads_losses:
            return False
        control.report(message.count, message.total)
        return True

    def rolled_back(self, round_number: int, rise: Rise) -> Rollback:
        """Return what follows from a loss that has blown up in this round."""
        control = self._control
        assert isinstance(control, CodecControl)
        lossiest = control.lossiest_since(rise.good)
        return rolled_back(round_number, rise, lossiest, names=control.names)
