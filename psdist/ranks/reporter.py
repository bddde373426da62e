"""The coordinator's reports to users: the log, metrics, progress, status.json and summary.json.

    reporter = Reporter(context, coordinator)
    reporter.on_action(action), reporter.on_idle()          # as the job runs

psdist.ranks.reporting.run_status has the model that the reports are made from. psdist.report and
psdist.history write the files. psdist.ranks.coordinating decides which rank reports.

Longer than other modules: all reports are made from one state of the job.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import msgpack

from psdist.config.codec_rounds import has_codecs
from psdist.config.compatibility import uncounted
from psdist.controller.kept import Rollback
from psdist.errors import ConfigError
from psdist.history.writers import (
    history_folder,
    write_run,
)
from psdist.protocol.control import Setup
from psdist.protocol.ids import COORDINATOR, describe_peer, server_id
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.files import CheckpointAction, CheckpointFiles
from psdist.ranks.checkpointing.rollbacks import Record, add_rollback, in_words, read_rollbacks
from psdist.ranks.checkpointing.ruling import line_of_modes
from psdist.ranks.failure import is_interruption, is_requeue, requeue
from psdist.ranks.reporting.lines import (
    different_clocks_line,
    empty_servers_line,
    lost_metrics,
    report_lines,
)
from psdist.ranks.reporting.progress import GroupPaces
from psdist.ranks.reporting.rank_reports import OpenCall, RankReports
from psdist.ranks.reporting.recording import ChoiceLines
from psdist.ranks.reporting.run_status import Notice, RunStatus, holder_of
from psdist.ranks.reporting.status import StatusFile
from psdist.ranks.reporting.summary import BuiltSet, counts_of_run
from psdist.ranks.run_json import promise
from psdist.ranks.session import JobSession
from psdist.report import RankSurvived, Training
from psdist.report.progress import ProgressDisplay, Style
from psdist.servers.parts import Reports
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.coordinator import Complete, Coordinator, EndJob, WriteMetrics
from psdist.servers.protocol.failover.coordinator_log import (
    CoordinatorLog,
    LogAction,
    StandbyInstalled,
)
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.losses import Losses
from psdist.servers.protocol.takeovers import ServerDeath, SpareDeath
from psdist.servers.protocol.views import Death

logger = logging.getLogger("psdist")

_SHOW_EVERY_S = 0.25


def write_files_when_terminated(context: JobSession) -> None:
    """On the coordinator: on SIGTERM write how far the job has come, then end. Launchers send it
    when a user ends the job or another rank has failed."""

    def write_and_end(number: int, _frame: FrameType | None) -> None:
        context.exit.write_last_files(f"ended by {signal.Signals(number).name}", 128 + number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, write_and_end)


class Reporter(Reports):
    """The reports of one job. On the standby it is silent until the coordinator fails."""

    def __init__(
        self,
        context: JobSession,
        coordinator: Coordinator,
        *,
        coordinator_log: CoordinatorLog | None = None,
        is_active: bool = True,
        contained: Callable[[], list[list[int]]] = list,
    ) -> None:
        """``contained()``: by set and group, the iterations that the chunks of this server
        contain."""
        self._context = context
        self._contained = contained
        self._is_active = is_active
        self._coordinator = coordinator
        self._coordinator_log = coordinator_log
        self._built: list[BuiltSet] = []
        self._files = CheckpointFiles(context)
        losses = coordinator.part(Losses)
        self._files.good_rounds = lambda: None if losses is None else losses.good
        self._has_looked_for_empty_servers = False
        if is_active:
            context.exit.on_failure(self._on_abort)
        restored, tuning_state = context.restored, context.tuning_state
        why = "rollback" if restored is None else f"checkpoint {restored.checkpoint.name}"
        self._status = RunStatus(
            context.config,
            context.roles,
            coordinator.progress,
            tuning_state=tuning_state,
            why=why if tuning_state is not None else "",
        )
        self._choice_lines = ChoiceLines(context.config, context.run_directory)
        self._status_file = StatusFile(context.run_directory)
        self._paces = GroupPaces(context.roles.group_of_worker)
        self._shown_s = 0.0
        self._display = ProgressDisplay(style=self._style(), stream=sys.stderr)

    def _style(self) -> Style:
        """Return how this process shows progress: not at all if a parent does; a line can be
        rewritten only on a terminal of this process."""
        setting = self._context.config.progress
        if setting == "off" or self._context.exit.parent is not None:
            return "off"
        return "live" if setting != "lines" and sys.stderr.isatty() else "lines"

    def on_built(
        self,
        set_index: int,
        partition: Partition,
        owners: tuple[int, ...],
        setup: Setup,
    ) -> None:
        """The chief has described a parameter set: write its run.json."""
        context = self._context
        empty = sorted(set(range(context.roles.num_servers)) - set(owners))
        if self._is_active and not set_index:
            self._record_resumed()
        promised = None
        if context.config.record:
            promised = promise(context, self._status, set_index, partition, owners, setup)
            if self._is_active:
                write_run(history_folder(context.run_directory.path, set_index), promised)
        self._built.append(
            BuiltSet(
                partition=partition,
                empty_servers=empty,
                uncounted=uncounted(context.config),
                promised=promised,
                is_of_tables=bool(setup.tables),
            )
        )
        self._files.add_set(partition, setup)

    def _look_for_empty_servers(self) -> None:
        """Warn of servers without a chunk, once, when training has begun: then all sets are
        known."""
        if self._has_looked_for_empty_servers or not self._built:
            return
        self._has_looked_for_empty_servers = True
        empty = set.intersection(*(set(each.empty_servers) for each in self._built))
        if empty:
            largest = max(self._built, key=lambda each: each.partition.num_bytes).partition
            weights = self._context.roles.shard_weights
            logger.warning("%s", empty_servers_line(largest, weights, sorted(empty)))

    def _record_resumed(self) -> None:
        """Report psdist's own choices with which the job begins, before any other choice."""
        restored, tuning_state = self._context.restored, self._context.tuning_state
        kept = self._context.kept_tuning_state
        if kept is not None and kept.modes is not None:
            is_taken = tuning_state is not None and tuning_state.modes is not None
            say = logger.info if is_taken else logger.warning
            say("%s", line_of_modes(self._context.config, kept.modes))
        if tuning_state is not None:
            name = "" if restored is None else restored.checkpoint.name
            self._choice_lines.resume(name, tuning_state)

    # -- the standby -------------------------------------------------------------------------------

    def to_snapshot(self) -> bytes:
        """Return what users have been told so far, for the coordinator's next standby."""
        state: bytes = msgpack.packb(
            [
                self._status.to_snapshot(),
                self._files.standing(),
                list(self._context.joined.items()),
            ]
        )
        return state

    def from_snapshot(self, state: bytes) -> None:
        """Take in what the coordinator has told users."""
        status, files, joined = msgpack.unpackb(state)
        self._status.from_snapshot(status)
        self._files.go_on(files)
        self._context.joined.update(joined)

    def note(self, action: LogAction) -> None:
        """On the standby: the coordinator has done this."""
        self._update(action)
        if isinstance(action, CheckpointAction):
            self._files.note(action)

    def _update(self, action: LogAction) -> Notice | None:
        if isinstance(action, Joined):
            self._context.joined[action.worker] = action.place
        return self._status.update(action, time.monotonic() - self._context.started_s)

    def succeed(self, undone: Sequence[LogAction]) -> None:
        """This rank replaces the failed coordinator. ``undone``: actions that the coordinator may
        not have done."""
        context = self._context
        self._is_active = True
        context.exit.on_failure(self._on_abort)
        write_files_when_terminated(context)
        if context.exit.parent is not None:
            context.exit.parent.take_role(context.rank.who, "registrar")
        lines = [each.line for each in undone if isinstance(each, WriteMetrics)]
        for line in context.run_directory.missing("metrics.jsonl", lines):
            context.run_directory.append_metrics(line)
        self._status.reach(self._behind)
        written = {id(each) for each in self._choice_lines.written(undone)}
        for each in undone:
            is_done = isinstance(each, CheckpointAction) and self._files.has_done(each)
            if id(each) in written or is_done:
                self.note(each)
            elif isinstance(each, Complete) and self._has_completed():
                context.run_directory.close()
            elif not isinstance(each, WriteMetrics):
                self.on_action(each)

    @property
    def _behind(self) -> int:
        """Clock of the slowest group."""
        return self._paces.behind(self._coordinator.progress, self._coordinator.out)

    def _has_completed(self) -> bool:
        """True if summary.json has this run as completed."""
        try:
            text = (self._context.run_directory.path / "summary.json").read_text(encoding="utf-8")
            summary = json.loads(text)
        except (OSError, ValueError):
            return False
        known = summary.get("exit"), summary.get("attempts")
        return known == ("completed", self._context.attempt)

    def on_action(self, action: LogAction) -> None:
        self._choice_lines.append(action)
        if notice := self._update(action):
            _log([notice])
        self._tell_parent_of_death(action)
        if isinstance(action, WriteMetrics):
            self._context.run_directory.append_metrics(action.line)
        elif isinstance(action, Warn):
            logger.warning("%s", action.text)
        elif isinstance(action, StandbyInstalled):
            logger.warning(
                "the coordinator, in %s, has a standby again: %s",
                describe_peer(self._coordinator_at),
                describe_peer(action.standby),
            )
        elif isinstance(action, CheckpointAction):
            self._files.do(action)
        elif isinstance(action, Rollback):
            self._roll_back(action)
        elif isinstance(action, EndJob):
            self._display.close()
            failure = action.failure
            self._context.exit.abort(failure.heading, failure.text, failure.exit_status)
        elif isinstance(action, Complete):
            self._complete()

    def _complete(self) -> None:
        self._display.close()
        self._look_for_empty_servers()
        directory = self._context.run_directory
        summary = self._write_end("completed")
        directory.close()
        for each in summary["sets"]:
            if line := different_clocks_line(each["clocks"]):
                logger.warning("%s", line)
        lines = report_lines(summary, self._status.words, str(directory.path))
        if lost := directory.num_lost:
            lines.append(f"  lost           {lost_metrics(lost, directory.why_lost)}")
        if self._context.tracer is not None:
            lines.append(f"  trace          psdist trace {directory.path}")
        for line in lines:
            print(line, flush=True)

    @property
    def _coordinator_at(self) -> int:
        return (
            COORDINATOR if self._coordinator_log is None else self._coordinator_log.coordinator_at
        )

    @property
    def _standby(self) -> int | None:
        return None if self._coordinator_log is None else self._coordinator_log.standby

    @property
    def coordinator_line(self) -> str:
        """Return where they are; "" while coordinator and standby are those of the start."""
        at, standby = self._coordinator_at, self._standby
        buddies = self._context.rank.bootstrap.buddies
        if not buddies or (at, standby) == (COORDINATOR, server_id(buddies[0])):
            return ""
        has = "without a standby" if standby is None else f"its standby is {describe_peer(standby)}"
        return f"in {describe_peer(at)}, {has}"

    def _roll_back(self, rollback: Rollback) -> None:
        """End the job, because the loss has blown up. A launcher starts it again if psdist has less
        lossy choices left."""
        context, words = self._context, in_words(rollback)
        self._display.close()
        # Also without less lossy choices: a run with another learning rate must resume from before
        # the rise. Once, because an earlier coordinator may have added it.
        known = [each.attempt for each in read_rollbacks(context.run_directory.path)]
        if context.attempt not in known:
            add_rollback(context.run_directory.path, Record(context.attempt, rollback))
        text, status = f"error: {words}", ConfigError.exit_status
        if rollback.allowed >= 0:
            text, status = requeue(f"the loss has blown up: --resume continues, {words}")
        context.exit.abort(f"psdist: {context.rank.who}", text, status)

    def _tell_parent_of_death(self, action: LogAction) -> None:
        roles, parent = self._context.roles, self._context.exit.parent
        ranks: list[int] = []
        match action:
            case ServerDeath(server):
                ranks = [roles.server_ranks[server]]
            case SpareDeath(spare):
                ranks = [roles.spare_ranks[spare]]
            case SubstituteDeath(worker):
                ranks = [roles.worker_ranks[worker]]
            case Death(worker, left=left):
                ranks = [roles.worker_ranks[each] for each in (worker, *left)]
        for rank in ranks:
            if parent is not None:
                parent.tell(RankSurvived(rank=rank))

    def _on_abort(self, text: str, status: int) -> None:
        lines = text.strip().splitlines()
        outcome = lines[-1] if lines else "failed"
        if is_interruption(text, status):
            outcome = "interrupted"
        elif is_requeue(text, status):
            outcome = "requeue"
        self._write_end(outcome)

    def _write_end(self, outcome: str) -> dict[str, Any]:
        """Write summary.json and the last status.json. Log a warning if the disk is full, because
        the job has trained."""
        summary = self._summary(outcome)
        try:
            self._context.run_directory.write_json("summary.json", summary)
        except OSError as error:
            logger.warning("summary.json was not written: %s", error.strerror or error)
        self._write_status(outcome=outcome)
        return summary

    def on_idle(self) -> None:
        if not self._is_active:
            return
        self._context.exit.check()
        now_s = time.monotonic()
        if now_s - self._shown_s < _SHOW_EVERY_S:
            return
        self._shown_s = now_s
        training = self._show(now_s)
        if self._status_file.is_due:
            self._write_status(training)

    def _write_status(self, training: Training | None = None, *, outcome: str = "") -> None:
        """Write status.json; ``outcome``: how the job has ended, "" before."""
        if not self._context.rank.is_alone:
            self._status_file.write(
                self._status, self._reports(), training=training, outcome=outcome
            )

    def _show(self, now_s: float) -> Training | None:
        """Update the display. Return its report, None before training has begun."""
        coordinator, parent = self._coordinator, self._context.exit.parent
        if not any(each.clock for each in coordinator.progress.values()):
            return None
        self._look_for_empty_servers()
        _log(self._status.reach(self._behind))
        training = self._paces.training(
            now_s - self._context.started_s,
            mode=self._status.mode,
            progress=coordinator.progress,
            last=coordinator.last,
            out=coordinator.out,
        )
        self._display.update(training)
        if parent is not None:
            parent.tell(training)
        return training

    def _reports(self) -> RankReports:
        coordinator = self._coordinator
        return RankReports(
            roles=self._context.roles,
            workers=coordinator.done,
            servers=coordinator.servers,
            progress=coordinator.progress,
            contained=self._contained(),
            out=coordinator.out,
            not_joined=frozenset(coordinator.membership.waiting),
            calls=[OpenCall(*each) for each in coordinator.open_collectives()],
            num_idle_spares=coordinator.num_idle_spares,
            coordinator_line=self.coordinator_line,
        )

    def _summary(self, outcome: str) -> dict[str, Any]:
        """Return summary.json. After a failure, a value that is not known is null."""
        context, restored, standby = self._context, self._context.restored, self._standby
        return {
            **counts_of_run(self._status, self._reports(), self._built),
            "predicted_exchange_s": self._predicted_exchange_s(),
            "wall_s": round(time.monotonic() - context.started_s, 3),
            "exit": outcome,
            "last": dict(self._coordinator.last),
            "replication": context.config.replication,
            "attempts": context.attempt,
            "resumed_from": restored.checkpoint.name if restored is not None else None,
            "rollbacks": self._rollbacks(),
            "checkpoints": self._files.num_complete,
            "checkpoints_failed": self._files.num_failed,
            "metrics_lost": context.run_directory.num_lost,
            "registrar": holder_of(self._coordinator_at),
            "deputy": None if standby is None else holder_of(standby),
        }

    def _rollbacks(self) -> list[dict[str, Any]]:
        """Return the attempts that ended with a rollback, and why."""
        if self._context.config.rollback is None:
            return []
        records = read_rollbacks(self._context.run_directory.path)
        return [{"attempt": each.attempt, "why": in_words(each.rollback)} for each in records]

    def _predicted_exchange_s(self) -> float | None:
        """Return the plan's time of this model on the slowest link; None if no link is crossed, or
        if codecs or replicas change the bytes that the plan counts."""
        plan, config = self._context.rank.bootstrap.plan, self._context.config
        if plan is None or not plan.links or not self._built:
            return None
        if config.replication != "none" or has_codecs(config):
            return None
        num_bytes = sum(each.partition.num_bytes for each in self._built)
        return plan.cost_s * num_bytes / plan.model_bytes


def _log(notices: Iterable[Notice]) -> None:
    for each in notices:
        logger.log(each.level, "%s", each.text)
