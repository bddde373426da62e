"""``psdist check RUN_DIR``: proves from a recorded history that the mode's rules held.

Owns the verdict and the report. The counts come from :mod:`psdist.history.replay`, the rules from
:mod:`psdist.history.apply_rules` and :mod:`psdist.history.use_rules`; docs/history.md says what is
proved and what cannot be. Nothing here looks at a clock that the running system computed, except
to compare ``summary.json`` with the history.

    report = check(read_history(run_dir))
    report.proved, report.max_staleness, report.violations
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from psdist.errors import HistoryError
from psdist.history.apply_rules import (
    check_applies,
    check_membership,
    check_steps,
    leave_clocks,
    unfinished_groups,
)
from psdist.history.findings import Findings, Rule
from psdist.history.records import History, read_history
from psdist.history.replay import ServerReplay
from psdist.history.use_rules import (
    Uses,
    check_bound,
    check_checksums,
    check_same_versions,
    check_worker,
    group_of_worker,
)

_SUMMARY_LIMIT_BYTES = 64 * 2**20
_HISTOGRAM_ROWS = 12
_BAR_CELLS = 40


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found.

    ``proved`` speaks for what was recorded; where the run did not complete (``is_complete``
    false) that is a prefix, and ``notes`` say which parts end early. A prefix without any use that
    could be checked proves nothing.
    """

    proved: bool
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
    """How many uses were how many iterations behind the slowest active group."""
    max_staleness: int
    notes: tuple[str, ...]

    @property
    def share_stale(self) -> float:
        """Share of uses with a staleness above 0."""
        total = sum(self.staleness.values())
        return 1 - self.staleness.get(0, 0) / total if total else 0.0


def check(
    history: History,
    *,
    claimed_max_staleness: int | None = None,
    max_listed_per_rule: int = 20,
) -> Report:
    """Prove a history, or say where it breaks which rule.

    ``claimed_max_staleness``: what the run itself says (``summary.json``), to be compared.
    """
    findings = Findings(max_listed_per_rule=max_listed_per_rule)
    notes = list(history.notes)
    uses = Uses.of(history)
    staleness: Counter[int] = Counter()
    leaves: dict[int, dict[int, int]] = {group: {} for group in range(len(history.run.groups))}
    num_applies = num_compared = 0
    is_complete = True

    for log in history.servers:
        replay = ServerReplay(history.run, log)
        num_applies += replay.num_rows
        check_membership(replay, findings)
        check_applies(replay, findings)
        check_steps(replay, findings)
        mine, num_beyond = uses.of_server(replay, findings)
        staleness += check_bound(replay, mine, findings)
        compared, unknown = check_checksums(replay, log.checksums, mine, findings)
        num_compared += compared
        for group, clock in leave_clocks(replay).items():
            leaves[group][log.server] = clock
        if not log.is_complete:
            line = f"the log of server {log.server} ends early, after {replay.num_events} events"
            if num_beyond:
                line += f"; {num_beyond} uses of later versions are not proved"
            if unknown:
                line += f"; {unknown} sampled uses have no checksum to compare"
            notes.append(line)
            is_complete = False
        if unfinished := unfinished_groups(replay):
            notes.append(f"on server {log.server} these groups never left: {unfinished}")
            is_complete = False

    for group, clocks in leaves.items():
        if len(set(clocks.values())) > 1:
            findings.add(
                Rule.MEMBERSHIP, f"group {group} left different servers at clocks {clocks}"
            )
    group_of = group_of_worker(history.run)
    for worker in history.workers:
        group = int(group_of[worker.worker])
        check_worker(history.run, worker, leaves[group], findings)
        if not worker.is_complete:
            notes.append(f"the uses of worker {worker.worker} end early, after {len(worker.uses)}")
            # A dead group's record ends where the group died; the run may be complete without.
            is_complete = is_complete and not leaves[group]
    check_same_versions(history, findings)

    max_staleness = max(staleness, default=0)
    if claimed_max_staleness is not None:
        _compare_claim(claimed_max_staleness, max_staleness, is_complete, findings, notes)
    if not num_compared:
        notes.append("no bytes were compared: no sampled reply has a checksum in this history")
    return Report(
        proved=not findings.total and (is_complete or bool(staleness)),
        is_complete=is_complete,
        violations=findings.lines(),
        num_violations=findings.total,
        violations_by_rule={
            rule.value: findings.counts[rule] for rule in Rule if findings.counts[rule]
        },
        num_uses=len(uses),
        num_applies=num_applies,
        num_checksums=num_compared,
        staleness=dict(sorted(staleness.items())),
        max_staleness=max_staleness,
        notes=tuple(notes),
    )


def _compare_claim(
    claimed: int, seen: int, is_complete: bool, findings: Findings, notes: list[str]
) -> None:
    if claimed == seen:
        return
    line = f"summary.json says max_staleness_seen {claimed}, the history shows {seen}"
    if is_complete:
        findings.add(Rule.SUMMARY, line)
    else:
        # Each may know what the other lost in the crash.
        notes.append(line)


# ---------------------------------------------------------------------------------------------
# The command


def main(run_dir: Path, *, json_path: Path | None = None) -> int:
    """Check ``run_dir`` and print the report; 0 proved, 1 not proved, 2 unreadable."""
    try:
        history = read_history(run_dir)
        report = check(history, claimed_max_staleness=_claimed_max_staleness(run_dir))
        if json_path is not None:
            _write_json(json_path, report)
    except HistoryError as error:
        Console(stderr=True).print(
            f"psdist check: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return error.exit_status
    _print(Console(), run_dir, history, report)
    return 0 if report.proved else 1


def _claimed_max_staleness(run_dir: Path) -> int | None:
    path = run_dir / "summary.json"
    try:
        if not path.exists():
            return None
        if path.stat().st_size > _SUMMARY_LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        summary: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise HistoryError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HistoryError(f"{path} is damaged: not JSON ({error})") from error
    claim = summary.get("max_staleness_seen") if isinstance(summary, dict) else None
    if claim is None or type(claim) is int:
        return claim
    raise HistoryError(f"{path} is damaged: max_staleness_seen is {claim!r}, not a whole number")


def _write_json(path: Path, report: Report) -> None:
    body = dataclasses.asdict(report) | {"share_stale": report.share_stale}
    try:
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise HistoryError(f"cannot write {path}: {error.strerror}") from error


def _print(console: Console, run_dir: Path, history: History, report: Report) -> None:
    def say(line: str = "", style: str | None = None) -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    run = history.run
    mode = f"ssp, staleness <= {run.bound}" if run.mode == "ssp" else run.mode
    say(
        f"{run_dir}: {mode}; {len(run.groups)} groups, {run.num_workers} workers, "
        f"{run.num_servers} servers, {run.num_chunks} chunks"
    )
    say(
        f"{report.num_applies:,} applies replayed, {report.num_uses:,} uses checked, the bytes of "
        f"{report.num_checksums:,} compared"
    )
    if report.staleness:
        say()
        say("staleness: iterations that a use is behind the slowest active group")
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
    if report.num_violations:
        say(f"NOT PROVED: {report.num_violations:,} violations of {mode}", "bold red")
    elif not report.proved:
        say("NOT PROVED: the run did not complete, and no use was recorded to check", "bold red")
    elif report.is_complete:
        say(f"proved: the run kept the rules of {mode}", "bold green")
    else:
        say(
            f"prefix proved: what was recorded kept the rules of {mode}; the run did not complete",
            "bold yellow",
        )


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
