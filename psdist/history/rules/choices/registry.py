"""The rules on psdist's own choices, and the fields of run.json that turn each on; pure.

    for rule in rules_of(run):
        rule.check(choices, findings)       # choices: Choices, with the lines that the rule needs

To add a rule, add an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from psdist.history import ServerLog
from psdist.history.lines import (
    ChoiceLine,
    DecisionLine,
    HandLine,
    LengthLine,
    PassLine,
    StepLine,
    WorkerLine,
    WorkerLines,
)
from psdist.history.rules.choices.decisions import Members, check_decisions
from psdist.history.rules.choices.hands import check_hands
from psdist.history.rules.choices.lengths import check_lengths, check_passes
from psdist.history.rules.findings import Findings
from psdist.history.rules.log.modes import changes_of
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The records of an attempt that have psdist's own choices."""

    run: RunRecord
    """The promises of the first parameter set."""
    log: ServerLog
    """The log of its first server."""
    summary: Summary | None
    is_complete: bool
    observed: Mapping[type[ChoiceLine], list[Any]]
    """Lines of the coordinator, by kind."""
    of_workers: Mapping[type[WorkerLine], Sequence[WorkerLines[Any]]]
    """Lines of each worker, by kind."""


class ChoiceRule(NamedTuple):
    fields: Sequence[str]
    """Fields of run.json: the rule is on if one has another value than its default."""
    check: Callable[[Choices, Findings], None]
    observed: type[ChoiceLine] | None = None
    """Lines of the coordinator that the rule needs."""
    of_workers: Sequence[type[WorkerLine]] = ()
    """Lines of workers that the rule needs."""
    name: str = ""
    """Name of these in notes."""


def _decisions(of: Choices, findings: Findings) -> None:
    changes = changes_of(ServerReplay(of.run, of.log))
    check_decisions(
        of.run,
        of.observed[DecisionLine],
        changes,
        findings,
        is_complete=of.is_complete,
        members=Members.of(of.run, of.log),
        summary=of.summary,
    )


def _hands(of: Choices, findings: Findings) -> None:
    check_hands(of.run, of.of_workers[HandLine], of.observed[StepLine], findings)


def _lengths(of: Choices, findings: Findings) -> None:
    steps = of.observed[StepLine]
    check_lengths(of.run, of.of_workers[LengthLine], steps, of.summary, findings)


def _passes(of: Choices, findings: Findings) -> None:
    lengths, passes = of.of_workers[LengthLine], of.of_workers[PassLine]
    check_passes(of.run, lengths, passes, of.summary, findings)


RULES: Final = (
    ChoiceRule(["auto_staleness", "ladder"], _decisions, DecisionLine),
    ChoiceRule(["local_steps_by_speed"], _hands, StepLine, [HandLine], "hands"),
    ChoiceRule(["local_steps_by_loss"], _lengths, StepLine, [LengthLine], "rounds"),
    ChoiceRule(["has_rounds_by_pass"], _passes, None, [LengthLine, PassLine], "rounds"),
)


def rules_of(run: RunRecord) -> list[ChoiceRule]:
    """Return the rules that the fields of run.json turn on."""
    default = {key: field.default for key, field in RunRecord.model_fields.items()}
    return [rule for rule in RULES if any(getattr(run, key) != default[key] for key in rule.fields)]
