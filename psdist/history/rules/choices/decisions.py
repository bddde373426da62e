"""Whether psdist's own changes of mode or codecs follow from its observations.

Owns the last part of rule 8 of docs/reference/history.md: the recorded observations go through
:mod:`psdist.controller` again. Pure.

    check_decisions(run, read_choices(run_dir, DecisionLine), changes, findings, is_complete=True)

Longer than other modules: each kind of line, what it does to a controller, what it may not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from psdist.controller import Controller, Decision, Observation
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptModes, TuningState
from psdist.controller.loss_steps import counts_nonfinite
from psdist.controller.mode import ModeControl
from psdist.controller.observed import GroupCame, LevelsSized, LossHeard, ModeObserved
from psdist.history import EventKind, ServerLog, code_of, joined_at
from psdist.history.lines import DECISION_LINES, Changed, DecisionLine, KeptLine
from psdist.history.rules.choices.replayed import Risen, judge_summary
from psdist.history.rules.choices.resumed import begins_with, goes_on, may_go_on_with_modes
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import CodecsSince, RunRecord
from psdist.history.summary import Summary


class Members(NamedTuple):
    """The groups of the job, by a server's log."""

    dead: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    joined: Mapping[int, int] = {}
    """First round of each substitute."""
    num_leaders_lost: Mapping[int, int] = {}
    """How often a group that continued had lost its first worker."""

    @classmethod
    def of(cls, run: RunRecord, log: ServerLog) -> Members:
        def of_kind(kind: EventKind) -> frozenset[int]:
            return frozenset(log.events[log.events["kind"] == kind]["group"].tolist())

        dead, left = of_kind(EventKind.DEATH), of_kind(EventKind.LEAVE)
        return cls(dead, left, joined_at(run, log.events), _leaders_lost(run, log))


def _leaders_lost(run: RunRecord, log: ServerLog) -> Mapping[int, int]:
    living = [list(workers) for workers in run.groups]
    lost: Counter[int] = Counter()
    reforms = log.events[log.events["kind"] == EventKind.REFORM]
    for group, worker in zip(reforms["group"].tolist(), reforms["weight"].tolist(), strict=True):
        if group < len(living) and worker in living[group]:
            lost[group] += worker == living[group][0]
            living[group].remove(worker)
    return +lost


def check_decisions(
    run: RunRecord,
    lines: list[DecisionLine],
    changes: tuple[tuple[int, int], ...],
    findings: Findings,
    *,
    is_complete: bool,
    members: Members | None = None,
    summary: Summary | None = None,
) -> None:
    """Require that each change follows from the observations before it, and no change is missing.
    ``changes``: the changes of the mode in the first set's log; ``members``: those of that log."""
    if wrong := judge_summary((line.rolled_back for line in lines), summary):
        findings[Rule.MODES].add(f"{DECISION_LINES}: {wrong}")
    checking = _Checking(run, findings)
    checking.where = f"{DECISION_LINES}, line 1"
    resumed = lines[0].resumed if lines else None
    if not checking.go_on(resumed):
        return
    for number, line in enumerate(lines, start=1):
        if number == 1 and resumed is not None:
            continue
        checking.where = f"{DECISION_LINES}, line {number}"
        if not checking.take(line):
            return
    if is_complete:
        checking.compare(changes, members or Members())


class _Checking:
    """A controller that replays the lines."""

    def __init__(self, run: RunRecord, findings: Findings) -> None:
        self._run, self._findings = run, findings
        self._control = _controller(run)
        self._risen = Risen(run.rollback)
        self._decided: Decision | None = None
        self._modes = None if run.ladder else begins_with(run)
        self._made: list[tuple[int, int]] = []
        self._gone: set[int] = set()
        self._came: dict[int, int] = {}
        self._led_anew: Counter[int] = Counter()
        self._begins: GroupCame | None = None
        """The line before, if it announces that another worker reports for a group."""
        self.where = ""

    def take(self, line: DecisionLine) -> bool:
        """Take in a line. Return False if later lines cannot be judged."""
        if wrong := self._risen.judge(line.rolled_back):
            self._refuse(wrong)
        if line.sized is not None:
            return self._take_sizes(line.sized)
        if line.changed is not None:
            return self._take_change(line.changed)
        if line.reported is not None:
            self._take_loss(line.reported)
        elif line.observed is not None:
            self._take_rounds(line.observed)
        elif line.gone is not None:
            self._lose(line.gone.group)
        elif line.came is not None:
            self._admit(line.came)
        elif line.kept is not None:
            self._compare_kept(line.kept)
        elif line.resumed is not None:
            self._refuse(
                "names the choices that the run continued with; only the first line does that"
            )
        return True

    def go_on(self, resumed: KeptLine | None) -> bool:
        """Begin with the choices of a checkpoint, or as every run does. Return False if no line can
        be judged."""
        run = self._run
        first_round = int(run.first[: run.first_substitute].max())
        starts: tuple[tuple[int, int], ...] = ((0, 0),)
        if resumed is not None:
            control, codecs = self._control, resumed.fidelity.codecs
            is_of_run = goes_on(run, resumed) and resumed.fidelity.steps is None
            if is_of_run and codecs is None and self._take_over(resumed.fidelity.modes):
                return True
            if codecs is None or not is_of_run or not isinstance(control, CodecControl):
                self._refuse("of another checkpoint than run.json says, or of other choices")
                return False
            try:
                control.go_on(codecs, first_round)
                self._risen.go_on(resumed.fidelity.rise, first_round)
            except ValueError as error:
                self._refuse(f"the run continued with choices {error}")
                return False
            starts = codecs.starts
        else:
            self._risen.go_on(None, first_round)
            if isinstance(self._control, ModeControl | BoundControl):
                self._control.go_on(None, first_round)
        if run.ladder:
            levels = [(start, run.ladder[level].model_dump()) for start, level in starts]
            begins = tuple(CodecsSince(round=start, **level) for start, level in levels)
            if run.codecs[: len(begins)] != begins:
                self._refuse(f"the run begins with other codecs than {starts}, by round and level")
        return True

    def _take_over(self, modes: KeptModes | None) -> bool:
        """Resume the modes of a checkpoint. Return False if this run cannot."""
        control = self._control
        is_of_run = modes is not None and may_go_on_with_modes(self._run, modes)
        if modes is None or not is_of_run or not isinstance(control, ModeControl | BoundControl):
            return False
        control.go_on(modes, int(self._run.first[: self._run.first_substitute].max()))
        self._modes = modes
        self._made = [
            (each.start(0), code_of(each.mode, each.staleness)) for each in modes.starts[1:]
        ]
        return True

    def _compare_kept(self, kept: KeptLine) -> None:
        control, step = self._control, int(kept.checkpoint.removeprefix("step-") or -1)
        now = control.kept(step) if isinstance(control, CodecControl) and step >= 0 else None
        expected = TuningState(codecs=now, modes=self._modes, rise=self._risen.kept())
        is_kept = now is not None or self._modes is not None
        if not is_kept or step < 0 or kept.fidelity != expected:
            self._refuse(f"{kept.checkpoint} has other choices than follow from what was observed")

    def _refuse(self, why: str) -> None:
        self._findings[Rule.MODES].add(f"{self.where}: {why}")

    def _take_sizes(self, sized: LevelsSized) -> bool:
        if len(sized.sizes) != len(self._run.ladder):
            self._refuse("not of the codecs of this run")
            return False
        self._control.know_sizes(sized.sizes)
        return True

    def _take_loss(self, loss: LossHeard) -> None:
        control = self._control
        is_asked = self._risen.is_asked
        may_be = loss.is_of(self._run.num_workers, **({"least": 0.0} if is_asked else {}))
        is_read = isinstance(control, CodecControl) and (control.reads_losses or is_asked)
        if not isinstance(control, CodecControl) or not is_read or not may_be:
            self._refuse("of no worker of this run, or not asked for")
            return
        if control.reads_losses and not (is_asked and counts_nonfinite(loss.total)):
            control.report(loss.count, loss.total)
        self._risen.report(loss, lossiest_since=control.lossiest_since, names=control.names)

    def _take_rounds(self, seen: ModeObserved) -> None:
        begins, self._begins = self._begins, None
        if begins is not None and (begins.group, begins.first_round + 1) != (
            seen.group,
            seen.first_round,
        ):
            self._refuse(f"after a line in which group {begins.group} reports the next round")
        is_whole = len(seen.own_us) == len(seen.waits_us)
        if not is_whole or len(seen.errors_ppm) not in (0, len(seen.own_us)):
            self._refuse("not as much of each round")
        elif seen.group not in self._control.groups:
            self._refuse("of no group of this run, or of one that is not in it then")
        else:
            told = (seen.first_round, seen.own_us, seen.waits_us, seen.errors_ppm)
            self._control.observe(Observation(seen.group, *told))
            self._decided = (self._control.judge() if seen.is_judged else None) or self._decided

    def _lose(self, group: int) -> None:
        if self._control.groups <= {group} or group not in self._control.groups:
            self._refuse(f"group {group} is gone, which is not in the run then, or the last one")
            return
        self._control.lose(group)
        self._gone.add(group)

    def _admit(self, came: GroupCame) -> None:
        if came.group in self._control.groups and came.group < self._run.first_substitute:
            self._control.admit(came.group, came.first_round)
            self._led_anew[came.group] += 1
            self._begins = came
            return
        is_substitute = self._run.first_substitute <= came.group < len(self._run.groups)
        if not is_substitute or came.group in self._came:
            self._refuse(f"group {came.group} has come, which is no substitute, or has come before")
            return
        self._control.admit(came.group, came.first_round)
        self._came[came.group] = came.first_round

    def _take_change(self, change: Changed) -> bool:
        run, decided = self._run, self._decided
        if not -1 <= change.level < len(run.ladder) or (change.level >= 0) != bool(run.ladder):
            self._refuse("to codecs that are none of this run")
            return False
        said = Decision(change.mode, change.staleness, change.why, change.level)
        if decided != said:
            self._refuse(
                f"changed to {_words(run, said)} ({said.why}); what was observed calls for "
                f"{_words(run, decided) if decided else 'no change'}"
                + (f" ({decided.why})" if decided else "")
            )
        self._control.committed(said, change.rounds[0])
        self._decided = None
        if change.level < 0:
            self._made.append((change.rounds[0], code_of(change.mode, change.staleness)))
        if self._modes is not None:
            self._modes = self._modes.then(tuple(change.rounds), change.mode, change.staleness)
        return True

    def compare(self, changes: tuple[tuple[int, int], ...], members: Members) -> None:
        """Compare the replay with the servers' records, at the end of a whole run."""
        self.where, decided = DECISION_LINES, self._decided
        if wrong := self._risen.judge_end():
            self._refuse(wrong)
        if decided is not None:
            self._refuse(f"{_words(self._run, decided)} was never set, although: {decided.why}")
        if tuple(self._made) != changes:
            self._findings[Rule.MODES].add(
                f"{DECISION_LINES} tells of {len(self._made)} changes, the log of server 0 of "
                f"{len(changes)}, or of others"
            )
        if not members.dead <= self._gone <= members.dead | members.left:
            self._refuse(
                f"groups {sorted(self._gone)} are gone; by the log of server 0 groups "
                f"{sorted(members.dead)} have failed"
            )
        for group, times in self._led_anew.items():
            if times > (lost := members.num_leaders_lost.get(group, 0)):
                self._refuse(
                    f"group {group} has come {times} times, led by another worker; by the log of "
                    f"server 0 it has lost the one that led it {lost} times"
                )
        if self._came != dict(members.joined):
            self._refuse(
                f"groups {self._came} have come, by their first rounds; by the log of server 0 "
                f"{dict(members.joined)}"
            )


def with_decided_codecs(run: RunRecord, lines: list[DecisionLine]) -> RunRecord:
    """Return ``run`` with the codecs that psdist has chosen for each round. A line with a wrong
    level or round is left out; :func:`check_decisions` reports it."""
    codecs = [*run.codecs]
    for change in (line.changed for line in lines if line.changed is not None):
        is_later = bool(codecs) and change.rounds[0] > codecs[-1].round
        if is_later and 0 <= change.level < len(run.ladder):
            level = run.ladder[change.level].model_dump()
            codecs.append(CodecsSince(round=change.rounds[0], **level))
    return run.model_copy(update={"codecs": tuple(codecs)})


def _controller(run: RunRecord) -> Controller:
    if run.mode == "ssp" and run.auto_staleness is not None:
        lowest, highest = run.staleness or 0, run.auto_staleness
        return BoundControl(num_groups=run.first_substitute, lowest=lowest, highest=highest)
    if not run.ladder:
        return ModeControl(num_groups=run.first_substitute, staleness=run.auto_staleness or 0)
    return CodecControl(
        num_groups=run.first_substitute,
        names=[each.name for each in run.ladder],
        mode=run.mode,
        staleness=run.staleness or 0,
        error_budget=run.error_budget,
        loss_patience=run.loss_patience,
        freeze_step=run.freeze_step,
    )


def _words(run: RunRecord, decision: Decision) -> str:
    return run.ladder[decision.level].name if decision.level >= 0 else decision.mode
