"""``psdist check RUN_DIR``: proves from a recorded history that the mode's rules held.

The rules come from :mod:`psdist.history.rules`; docs/reference/history.md says what is proved and
what cannot be.

    report = check_run(run_dir, read_histories(run_dir))
    report.verdict, report.max_staleness, report.violations

Longer than other modules: the verdict and its words stand together, so that none is printed
which was not reached.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from psdist.commands import print_json
from psdist.errors import HistoryError
from psdist.history import History, Ints, joined_at
from psdist.history.files import history_folder, read_histories
from psdist.history.lines import (
    STEP_LINES,
    ChoiceLine,
    DecisionLine,
    HandLine,
    StepLine,
    WorkerLine,
    WorkerLines,
    read_choices,
    read_worker_lines,
)
from psdist.history.rules.choices.decisions import with_decided_codecs
from psdist.history.rules.choices.hands import Attempt as DealtAttempt
from psdist.history.rules.choices.hands import check_dealt_on
from psdist.history.rules.choices.registry import ChoiceRule, Choices, rules_of
from psdist.history.rules.choices.resumed import Attempt, check_resumed
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.applies import check_applies, check_steps
from psdist.history.rules.log.kept import KeptByServer, check_attempts, check_kept, check_same_cut
from psdist.history.rules.log.loads import check_loads, check_same_loads
from psdist.history.rules.log.memberships import (
    check_membership,
    check_same_joins,
    dead_groups,
    leave_clocks,
    unfinished_groups,
)
from psdist.history.rules.log.missed import (
    Missed,
    check_missed,
    check_same_missed,
    rounds_missed,
)
from psdist.history.rules.log.modes import (
    changes_of,
    check_modes,
    check_same_modes,
    describe_mode,
)
from psdist.history.rules.log.reformed import ToldDeaths, check_same_reforms, lost_workers
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.summaries import (
    Shown,
    ShownServer,
    check_claims,
    check_promises,
    check_sets,
)
from psdist.history.rules.values.checksums import Checksums, check_sampled_replies, check_uses
from psdist.history.rules.values.pushes import Claims, check_num_iterations
from psdist.history.rules.values.uses import Uses, check_bound, check_same_versions, check_worker
from psdist.history.rules.values.weights import check_codecs, check_scales, check_weights
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary, read_summary

_HISTOGRAM_ROWS = 12
_BAR_CELLS = 40


_OF_SET = {
    *("set_index", "slices", "num_chunks", "owners", "begins_with_state", "first_clocks", "cut")
}
"""Promises of run.json that each set of a job has for itself."""
_OF_ROWS = _OF_SET | {
    *("mode", "staleness", "mode_by", "auto_staleness", "schedule", "pipeline", "row_staleness"),
    *("codecs", "ladder", "checksum_every", "has_copies"),
}
"""And a set of tables, in addition."""


class Verdict(Enum):
    """The verdict of a check; the value is its name in ``--json``."""

    PROVED = "proved"
    VIOLATED = "violated"
    INCOMPLETE = "incomplete"
    """No violation, in what there is: the run did not complete."""


EXIT_STATUS = {Verdict.PROVED: 0, Verdict.VIOLATED: 1, Verdict.INCOMPLETE: 3}
"""And 2 where the history cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check. If the run did not complete (``is_complete`` false), it covers the
    recorded part, and ``notes`` name the parts that end early."""

    is_complete: bool
    violations: tuple[str, ...]
    """The first of each rule, in words."""
    num_violations: int
    violations_by_rule: dict[str, int]
    num_uses: int
    num_applies: int
    num_checksums: int
    """Uses whose bytes were compared with the server's."""
    staleness: dict[int, int]
    """Number of uses, by the iterations that they lag the slowest active group."""
    max_staleness: int
    notes: tuple[str, ...]
    changes: tuple[tuple[int, str], ...] = ()
    """(first round, mode) of each change of the mode in the first parameter set."""

    @property
    def verdict(self) -> Verdict:
        if self.num_violations:
            return Verdict.VIOLATED
        return Verdict.PROVED if self.is_complete else Verdict.INCOMPLETE

    @property
    def proved(self) -> bool:
        return self.verdict == Verdict.PROVED

    @property
    def share_stale(self) -> float:
        """Share of uses with a staleness above 0."""
        total = sum(self.staleness.values())
        return 1 - self.staleness.get(0, 0) / total if total else 0.0


def check(
    history: History, *, summary: Summary | None = None, max_listed_per_rule: int = 20
) -> Report:
    """Prove a history, or find where it breaks which rule. ``summary``: summary.json, to be
    compared; None to leave it out."""
    checking = _Checking(history, Findings(max_listed_per_rule=max_listed_per_rule))
    servers = tuple(checking.check_server(server) for server in range(len(history.servers)))
    checking.check_workers()
    if summary is not None:
        check_promises(summary, history.run, checking.findings)
        checking.compare(summary, servers)
    return checking.report()


def check_sets_of(histories: Sequence[History], summary: Summary | None) -> Report:
    """As :func:`check`, for the histories of all parameter sets: one report."""
    reports = []
    for index, history in enumerate(histories):
        is_told = summary is not None and index < max(1, len(summary.sets))
        told = summary.of_set(index) if summary is not None and is_told else None
        reports.append(check(history, summary=told))
    if len(histories) == 1 and (summary is None or not summary.sets):
        return reports[0]
    findings = Findings(max_listed_per_rule=20)
    runs = [history.run for history in histories]
    for run in runs[1:]:
        own = _OF_ROWS if run.is_of_rows else _OF_SET
        if run.model_dump(exclude=own) != runs[0].model_dump(exclude=own):
            findings[Rule.SUMMARY].add(
                f"run.json of set {run.set_index} is of another job than that of set 0"
            )
    if summary is not None:
        check_sets(summary, runs, findings)
    return _joined(reports, findings)


def _joined(
    reports: Sequence[Report], findings: Findings, *, of: Sequence[str] | None = None
) -> Report:
    """Return one report. ``findings``: violations of all parts together; ``of``: prefix of the
    lines of each report, by default its parameter set."""
    of_set = of or [f"set {index}: " if len(reports) > 1 else "" for index in range(len(reports))]
    staleness: Counter[int] = Counter()
    broken: Counter[str] = Counter({rule.value: n for rule, n in findings.counts.items() if n})
    for report in reports:
        staleness.update(report.staleness)
        broken.update(report.violations_by_rule)
    return Report(
        is_complete=all(report.is_complete for report in reports),
        violations=(
            *findings.lines(),
            *(
                where + line
                for where, report in zip(of_set, reports, strict=True)
                for line in report.violations
            ),
        ),
        num_violations=findings.total + sum(report.num_violations for report in reports),
        violations_by_rule=dict(broken),
        num_uses=sum(report.num_uses for report in reports),
        num_applies=sum(report.num_applies for report in reports),
        num_checksums=sum(report.num_checksums for report in reports),
        staleness=dict(sorted(staleness.items())),
        max_staleness=max(staleness, default=0),
        notes=tuple(
            where + note
            for where, report in zip(of_set, reports, strict=True)
            for note in report.notes
        ),
        changes=reports[0].changes,
    )


class _Checking:
    """One check under way: what the rules have found of servers and workers so far."""

    def __init__(self, history: History, findings: Findings) -> None:
        self.history, self.findings = history, findings
        self.notes = list(history.notes)
        self.is_complete = True
        self.uses = Uses.of(history)
        self.claims = Claims.of(history, findings)
        self.is_whole = np.asarray([log.is_complete for log in history.workers])
        self.staleness: Counter[int] = Counter()
        self.staleness_told: Counter[int] = Counter()
        """Uses by staleness of workers that survive in a surviving group, of their first slices."""
        self.most_told = 0
        """The greatest staleness of all uses of surviving groups."""
        self.leaves: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The clocks at which each group left, by server."""
        self.joins: dict[int, dict[int, int]] = {}
        """The clocks at which substitutes joined, by server and group."""
        self.loads: dict[int, tuple[int, ...]] = {}
        """The clocks at which the values of each chunk were set."""
        self.changes: dict[int, tuple[tuple[int, int], ...]] = {}
        """The changes of the mode, by server."""
        self.missed: dict[int, Missed] = {}
        """(group, round) of each missed round, by chunk."""
        self.modes: tuple[tuple[int, str], ...] = ()
        """The mode of every round, by the first server's log."""
        self.kept: list[KeptByServer] = []
        self.dead: set[int] = set()
        self.lost = set[int]().union(*(s for each in lost_workers(history).values() for s in each))
        """Failed workers of groups that continued."""
        self.told: dict[int, ToldDeaths] = {}
        """The records of these failures, by server."""
        self.num_applies = self.num_compared = 0

    def check_server(self, server: int) -> ShownServer:
        run, log, findings = self.history.run, self.history.servers[server], self.findings
        replay = ServerReplay(run, log)
        check_membership(replay, findings)
        self.joins[server] = joined_at(run, log.events)
        check_applies(replay, findings)
        self.loads |= check_loads(replay, findings)
        self.kept.append(check_kept(replay, findings))
        check_steps(replay, findings)
        unsaid = check_weights(replay, self.claims, self.is_whole, findings)
        uses, num_beyond = self.uses.of_server(replay, findings)
        check_scales(replay, uses, findings)
        self.missed |= check_missed(replay, uses, findings)
        check_modes(replay, uses, findings)
        check_codecs(replay, findings)
        self.changes[server] = changes_of(replay)
        self.modes = self.modes or replay.rules.in_words()
        staleness = check_bound(replay, uses, findings)
        sums = Checksums.of(replay, log.checksums, findings)
        check_sampled_replies(sums, findings)
        compared, unknown = check_uses(sums, uses, findings)

        self.num_applies += replay.num_applies
        self.num_compared += compared
        self.staleness += _counts(staleness)
        is_told = ~np.isin(uses.group, sorted(dead_groups(replay)))
        is_own = run.slice_owner(uses.group, uses.chunk) == uses.worker
        is_own |= run.is_of_rows  # each worker counts the rows that it uses
        is_own &= ~np.isin(uses.worker, sorted(self.lost))
        self.staleness_told += _counts(staleness[is_own & is_told])
        self.most_told = max(self.most_told, int(staleness[is_told].max(initial=0)))
        for group, clock in leave_clocks(replay).items():
            self.leaves[group][server] = clock
        if dead := dead_groups(replay):
            self.dead.update(dead)
            self.notes.append(f"server {server} evicted these groups: {sorted(dead)}")
        self.told[server] = ToldDeaths.of(replay, left=leave_clocks(replay), dead=dead)
        if lost := replay.pushers.lost:
            told = "; ".join(
                f"{group} without {sorted(one)}" for group, one in sorted(lost.items())
            )
            self.notes.append(f"server {server} declared that these groups continue: {told}")
        if unsaid:
            self.notes.append(
                f"of {unsaid} updates on server {server} it is not proved what they weighed: the "
                "records of who pushed them end before"
            )
        if not log.is_complete:
            line = f"the log of server {server} ends early, after {replay.num_events} events"
            if num_beyond:
                line += f"; {num_beyond} uses of later versions are not proved"
            if unknown:
                line += f"; {unknown} sampled uses have no checksum to compare"
            self.notes.append(line)
            self.is_complete = False
            if unfinished := unfinished_groups(replay):
                self.notes.append(f"on server {server} these groups never left: {unfinished}")
        return ShownServer.of(replay, len(log.checksums))

    def check_workers(self) -> None:
        run, findings = self.history.run, self.findings
        for group, clocks in self.leaves.items():
            if len(set(clocks.values())) > 1:
                findings[Rule.MEMBERSHIP].add(
                    f"group {group} left different servers at clocks {clocks}"
                )
        check_same_joins(self.joins, findings)
        group_of, first = run.group_of_worker(), self.history.first
        all_missed = frozenset[tuple[int, int]]().union(*self.missed.values())
        for log in self.history.workers:
            group = int(group_of[log.worker])
            has_joined = any(group in each for each in self.joins.values())
            if group >= run.first_substitute and not has_joined and not len(log.uses):
                continue  # no place became free for it
            missed = {clock for each, clock in all_missed if each == group}
            check_worker(
                run, log, self.leaves[group], findings, begin=int(first[group]), missed=missed
            )
            check_num_iterations(log, self.leaves[group], self.claims, findings)
            if log.is_complete:
                continue
            line = f"the records of worker {log.worker} end early, after {len(log.uses)} uses"
            # A failed group's records end at its failure; the run may be complete without it.
            if group in self.dead or log.worker in self.lost:
                line += ": its group failed" if group in self.dead else ": it failed"
            else:
                self.is_complete = False
            self.notes.append(line)
        check_same_versions(self.history, findings)
        check_same_cut(run, self.kept, findings)
        if all(log.is_complete for log in self.history.servers):
            check_same_modes(self.changes, findings)
            check_same_reforms(run, self.told, findings)
            check_same_loads(self.loads, findings)
            check_same_missed(self.missed, findings)

    def compare(self, summary: Summary, servers: tuple[ShownServer, ...]) -> None:
        run = self.history.run
        clocks = tuple(
            next(iter(self.leaves[group].values()), None) for group in range(len(run.groups))
        )
        missed = self.missed[min(self.missed)] if self.missed else frozenset()
        shown = Shown(
            servers=servers,
            clocks=clocks,
            rounds_missed=tuple(rounds_missed(run, missed, clocks).tolist()),
            staleness=self.staleness_told,
            max_staleness=self.most_told,
            knows_staleness=not self.lost,
            modes=self.modes,
        )
        if self.is_complete:
            check_claims(summary, shown, self.findings)
            if self.lost:
                self.notes.append(
                    "summary.json counts uses of a failed worker's chunks as staleness 0 until "
                    "their next replies have come: its staleness is held between bounds only"
                )
        elif summary.max_staleness_seen not in (None, shown.max_staleness):
            # Each may know what the other lost in the crash.
            self.notes.append(
                f"summary.json says max_staleness_seen {summary.max_staleness_seen}, what was "
                f"recorded shows {shown.max_staleness}"
            )

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    def report(self) -> Report:
        num_uses = sum(len(log.uses) for log in self.history.workers)
        if not num_uses:
            self.notes.append("no use was recorded: there is nothing to prove")
        elif not self.num_compared and not self.history.run.is_of_rows:
            self.notes.append("no bytes were compared: no reply had a checksum")
        if self.history.run.begins_with_state:
            self.notes.append(
                "it began with optimizer state of the chief: that servers continued with that "
                "state is not proved, as no values are"
            )
        findings = self.findings
        return Report(
            is_complete=self.is_complete,
            violations=findings.lines(),
            num_violations=findings.total,
            violations_by_rule={
                rule.value: findings.counts[rule] for rule in Rule if findings.counts[rule]
            },
            num_uses=num_uses,
            num_applies=self.num_applies,
            num_checksums=self.num_compared,
            staleness=dict(sorted(self.staleness.items())),
            max_staleness=self.max_staleness,
            notes=tuple(self.notes),
            changes=self.modes[1:],
        )


def _counts(values: Ints) -> Counter[int]:
    found, counts = np.unique(values, return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


# ---------------------------------------------------------------------------------------------
# The command


def main(run_dir: Path, *, as_json: bool = False) -> int:
    """Check ``run_dir`` and print the report; 0 proved, 1 violated, 2 unreadable, 3 incomplete."""
    try:
        histories = read_histories(run_dir)
        report = check_run(run_dir, histories)
    except HistoryError as error:
        Console(stderr=True).print(
            f"psdist check: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return error.exit_status
    if as_json:
        body = {"verdict": report.verdict.value, "proved": report.proved}
        print_json("check", body | dataclasses.asdict(report) | {"share_stale": report.share_stale})
    else:
        _print(Console(), run_dir, [history.run for history in histories], report)
    return EXIT_STATUS[report.verdict]


def check_run(run_dir: Path, histories: Sequence[History]) -> Report:
    """As :func:`check`, for all parameter sets and attempts, with the summary in the run directory.
    A run without a summary did not complete."""
    report = _check_one(run_dir, histories)
    last = histories[0].run.attempt
    if last == 1 or run_dir.name.startswith("attempt-"):
        return report
    return _with_attempts(run_dir, last, report, histories)


def _check_one(run_dir: Path, histories: Sequence[History]) -> Report:
    """Return the report on one attempt."""
    summary, rules = read_summary(run_dir), rules_of(histories[0].run)
    kinds = dict.fromkeys(rule.observed for rule in rules if rule.observed is not None)
    observed: dict[type[ChoiceLine], list[Any]] = {
        kind: read_choices(run_dir, kind) for kind in kinds
    }
    decisions = observed.get(DecisionLine, [])
    # Messages are coded as psdist decided.
    histories = [
        each
        if each.run.is_of_rows
        else dataclasses.replace(each, run=with_decided_codecs(each.run, decisions))
        for each in histories
    ]
    report = check_sets_of(histories, summary)
    report = _with_choices(run_dir, histories[0], rules, observed, summary, report)
    if summary is not None:
        return report
    note = "there is no summary.json: the claims of the run were not compared"
    return dataclasses.replace(report, is_complete=False, notes=(*report.notes, note))


def _with_choices(
    run_dir: Path,
    history: History,
    rules: Sequence[ChoiceRule],
    observed: Mapping[type[ChoiceLine], list[Any]],
    summary: Summary | None,
    report: Report,
) -> Report:
    """Return ``report`` with the rules on psdist's own choices: they follow from the recorded
    observations, and workers followed them."""
    findings, run = Findings(max_listed_per_rule=20), history.run
    has_ended_early = summary is None or not report.is_complete
    kinds = dict.fromkeys(kind for rule in rules for kind in rule.of_workers)
    of_workers = {kind: _read(run_dir, run, kind, may_be_missing=has_ended_early) for kind in kinds}
    choices = Choices(
        run=run,
        log=history.servers[0],
        summary=summary,
        is_complete=report.is_complete,
        observed=observed,
        of_workers=of_workers,
    )
    early: list[str] = []
    for rule in rules:
        rule.check(choices, findings)
        for worker in range(run.num_workers if rule.of_workers else 0):
            if not all(of_workers[kind][worker].is_complete for kind in rule.of_workers):
                early.append(f"the {rule.name} of worker {worker} end early")
    notes = [*report.notes, *early]
    if observed.get(StepLine) == []:
        why = "; the run ended before its first term" * has_ended_early
        notes.append(f"no local steps were fixed: there is no {STEP_LINES}{why}")
    is_complete = report.is_complete and not early
    report = dataclasses.replace(report, is_complete=is_complete, notes=tuple(notes))
    return _joined([report], findings)


def _read(
    run_dir: Path, run: RunRecord, kind: type[WorkerLine], *, may_be_missing: bool
) -> list[WorkerLines[Any]]:
    """Return the lines of one kind, by worker."""
    folder, num_workers = history_folder(run_dir, 0), run.num_workers
    return read_worker_lines(folder, kind, num_workers=num_workers, may_be_missing=may_be_missing)


def _with_attempts(
    run_dir: Path, last: int, report: Report, histories: Sequence[History]
) -> Report:
    """Return ``report``, of the newest attempt, with the earlier attempts; these may end early."""
    reports, attempts, notes = {last: report}, {last: histories}, []
    folders = {last: run_dir}
    for number in range(1, last):
        folder = run_dir / f"attempt-{number}"
        if not (history_folder(folder, 0) / "run.json").exists():
            notes.append(
                f"attempt {number} was not recorded, ended before it had a model, or is not there"
            )
            continue
        attempts[number], folders[number] = read_histories(folder), folder
        reports[number] = _check_one(folder, attempts[number])
    findings = Findings(max_listed_per_rule=20)
    notes += check_attempts(attempts, findings)
    chosen = {
        number: Attempt(
            attempts[number][0].run,
            [*read_choices(each, DecisionLine), *read_choices(each, StepLine)],
        )
        for number, each in folders.items()
    }
    check_resumed(chosen, findings)
    dealt = {
        number: DealtAttempt(run, _read(folders[number], run, HandLine, may_be_missing=True))
        for number, (run, _) in chosen.items()
    }
    check_dealt_on(dealt, findings)
    numbers = sorted(reports)
    joined = _joined(
        [reports[number] for number in numbers],
        findings,
        of=[f"attempt {number}: " for number in numbers],
    )
    return dataclasses.replace(
        joined, is_complete=report.is_complete, notes=(*joined.notes, *notes)
    )


def _print(console: Console, run_dir: Path, runs: Sequence[RunRecord], report: Report) -> None:
    run, num_chunks = runs[0], sum(run.num_chunks for run in runs)

    def say(line: str = "", style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    mode = f"ssp, staleness <= {run.staleness}" if run.mode == "ssp" else run.mode
    if report.changes:
        later = "; ".join(f"{start}: {each}" for start, each in report.changes)
        mode = f"{mode} from iteration 0, then {later}"
    for rows in runs[1:]:
        own = (rows.mode, rows.staleness, rows.row_staleness)
        if rows.is_of_rows and own != (run.mode, run.staleness, 0):
            mode += f"; tables: {describe_mode(rows.mode, rows.staleness)}"
            mode += f", rows kept for {rows.row_staleness} iterations" * bool(rows.row_staleness)
    say(
        f"{run_dir}: {mode}; {len(run.groups)} groups, {run.num_workers} workers, "
        f"{run.num_servers} servers, {num_chunks} chunks"
        + (f" in {len(runs)} parameter sets" if len(runs) > 1 else "")
    )
    say(
        f"{report.num_applies:,} applies replayed, {report.num_uses:,} uses checked, the bytes of "
        f"{report.num_checksums:,} compared"
    )
    if report.staleness:
        say()
        say("staleness: iterations by which a use lags the slowest active group")
        bar = "█" if console.encoding.startswith("utf") else "#"
        console.print(_histogram(report.staleness, bar=bar))
        say(f"max {report.max_staleness}, {report.share_stale:.1%} of the uses above 0")
    if report.notes:
        say()
    for note in report.notes:
        say(f"note: {note}", "yellow")
    say()
    for line in report.violations:
        say(f"violation: {line}", "red")
    if report.num_violations > len(report.violations):
        say(f"... {report.num_violations - len(report.violations):,} more violations", "red")
    for rule, num in report.violations_by_rule.items():
        say(f"broken {num:,} times: {rule}", "red")
    if report.verdict == Verdict.VIOLATED:
        say(f"VIOLATED: {report.num_violations:,} violations of {mode}", "bold red")
    elif report.verdict == Verdict.PROVED:
        say(f"proved: the run kept the rules of {mode}", "bold green")
    else:
        seen = f"what was recorded keeps the rules of {mode}"
        if not report.staleness:
            seen = "no use was recorded that could be checked"
        say(f"incomplete: {seen}; the run did not complete", "bold yellow")


def _histogram(staleness: dict[int, int], *, bar: str) -> Table:
    """Bars of the counts; wide ranges are put into ``_HISTOGRAM_ROWS`` bins of equal width."""
    low, high = min(staleness), max(staleness)
    width = -(-(high - low + 1) // _HISTOGRAM_ROWS)
    bins: Counter[int] = Counter()
    for value, num in staleness.items():
        bins[(value - low) // width] += num
    total, most = sum(bins.values()), max(bins.values())
    table = Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for index in range(max(bins) + 1):
        num, start = bins[index], low + index * width
        label = str(start) if width == 1 else f"{start}..{start + width - 1}"
        # The shortest bar says that there was something.
        length = max(round(num / most * _BAR_CELLS), num > 0)
        table.add_row(label, f"{num:,}", f"{bar * length} {num / total:.1%}")
    return table
