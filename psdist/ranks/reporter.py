"""The run's files and words to people: metrics, progress, summary, the first failure.

    reporter = Reporter(context, registrar)
    reporter.on_action(action), reporter.on_idle()          # as the job goes

Files go through psdist.report and psdist.history; what is said is put together in
psdist.ranks.telling. Which rank reports, and since when, says psdist.ranks.duty.

Longer than other modules: all of it reads one state of the job, and most methods are a few lines
of what one action means to people.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Literal

import msgpack

from psdist.config.codec_rounds import has_codecs
from psdist.config.modes import mode_by
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.kept import Rollback
from psdist.errors import ConfigError
from psdist.history.writers import (
    RunRecord,
    history_folder,
    slice_places,
    write_run,
)
from psdist.protocol.control import Progress, Setup
from psdist.protocol.ids import REGISTRAR, describe_peer, server_id
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.fidelity import levels_of
from psdist.ranks.checkpointing.files import CheckpointAction, CheckpointFiles
from psdist.ranks.checkpointing.rollbacks import Record, add_rollback, in_words, read_rollbacks
from psdist.ranks.checkpointing.ruling import highest_bound, line_of_modes
from psdist.ranks.context import RankContext
from psdist.ranks.failure import is_interruption, is_requeue, requeue
from psdist.ranks.telling.copies import CopyReports
from psdist.ranks.telling.deaths import DeathReports, told_holder
from psdist.ranks.telling.decisions import Decided, DecisionReports
from psdist.ranks.telling.lines import (
    different_clocks_line,
    empty_servers_line,
    lost_metrics,
    report_lines,
)
from psdist.ranks.telling.standing import Standing
from psdist.ranks.telling.status import OpenCall, StatusWriter
from psdist.ranks.telling.steps import StepReports
from psdist.ranks.telling.summary import BuiltSet, Told, counts_of_set, together
from psdist.ranks.wire import wire_of
from psdist.report.facts import RankSurvived, Training
from psdist.report.progress import ProgressDisplay, Style
from psdist.servers.protocol.checkpoints import KeepFidelity
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.deaths import Death, Survived
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.registrar import (
    Complete,
    EndJob,
    Registrar,
    WriteMetrics,
)
from psdist.servers.protocol.replication.takeovers import (
    ServerDeath,
    ShardAlone,
    ShardWhole,
    SpareDeath,
)
from psdist.servers.protocol.steps import LossHeard, StepsChosen, StepsObserved
from psdist.servers.protocol.succession.office import Entrusted, Office, OfficeAction
from psdist.version import VERSION

logger = logging.getLogger("psdist")

_SHOW_EVERY_S = 0.25


def write_files_when_terminated(context: RankContext) -> None:
    """On the registrar: a launcher that ends the ranks, because somebody has told it to or because
    another rank has died, leaves a moment to write down how far the job had come."""

    def write_and_end(number: int, _frame: FrameType | None) -> None:
        context.write_last_files(f"ended by {signal.Signals(number).name}", 128 + number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, write_and_end)


class Reporter:
    """The registrar's files and words to people: metrics, progress, summary, the first failure. On
    its deputy silent, until that succeeds."""

    def __init__(
        self,
        context: RankContext,
        registrar: Registrar,
        *,
        office: Office | None = None,
        is_active: bool = True,
    ) -> None:
        self._context = context
        self._is_active = is_active
        self._registrar = registrar
        self._office = office
        self._built: list[BuiltSet] = []
        self.contained: Callable[[], list[list[int]]] = list
        """By set, by group: the iterations that the chunks of this server contain."""
        self._files = CheckpointFiles(context)
        self._files.good_rounds = lambda: registrar.good_rounds
        self._deaths = DeathReports(
            registrar.progress, started_s=context.started_s, roles=context.roles
        )
        self._copies = CopyReports(started_s=context.started_s)
        self._has_looked_for_empty_servers = False
        if is_active:
            context.on_abort = self._on_abort
        restored, fidelity = context.restored, context.fidelity
        why = {}
        if fidelity is not None:
            why["why"] = (
                "rollback" if restored is None else f"checkpoint {restored.checkpoint.name}"
            )
        kept = fidelity.steps if fidelity is not None else None
        self._decisions = DecisionReports(
            context.config,
            context.run_directory,
            levels=levels_of(fidelity),
            kept=fidelity.modes if fidelity is not None else None,
            **why,
        )
        self._modes, self._codecs = self._decisions.modes, self._decisions.codecs
        self._steps = StepReports(context.config, context.run_directory, kept=kept, **why)
        mode = self._decisions.now
        self._status = StatusWriter(context.run_directory, roles=context.roles, mode=mode)
        self._standing = Standing(mode=mode, group_of_worker=context.roles.group_of_worker)
        self._shown_s = 0.0
        self._display = ProgressDisplay(style=self._style(), stream=sys.stderr)

    def _style(self) -> Style:
        """A parent draws what it is told; without one a line can only be rewritten on a terminal
        of this process's own."""
        setting = self._context.config.progress
        if setting == "off" or self._context.parent is not None:
            return "off"
        return "live" if setting != "lines" and sys.stderr.isatty() else "lines"

    def on_built(
        self,
        set_index: int,
        partition: Partition,
        owners: tuple[int, ...],
        setup: Setup,
    ) -> None:
        """A parameter set is known: its history can say what was promised."""
        context = self._context
        empty = sorted(set(range(context.roles.num_servers)) - set(owners))
        if self._is_active and not set_index:
            self._record_resumed()
        promised = None
        if context.config.record:
            promised = self._promise(set_index, partition, owners, setup)
        self._built.append(
            BuiltSet(
                partition=partition,
                empty_servers=empty,
                may_miss=context.config.backup > 0,
                promised=promised,
            )
        )
        self._files.add_set(partition, setup)

    def _look_for_empty_servers(self) -> None:
        """Once training has begun all sets are known, and who holds something of one."""
        if self._has_looked_for_empty_servers or not self._built:
            return
        self._has_looked_for_empty_servers = True
        empty = set.intersection(*(set(each.empty_servers) for each in self._built))
        if empty:
            largest = max(self._built, key=lambda each: each.partition.num_bytes).partition
            weights = self._context.roles.shard_weights
            logger.warning("%s", empty_servers_line(largest, weights, sorted(empty)))

    def _promise(
        self,
        set_index: int,
        partition: Partition,
        owners: tuple[int, ...],
        setup: Setup,
    ) -> RunRecord:
        context = self._context
        order = setup.order
        first = context.first_clocks(set_index)
        running: tuple[int, ...] = ()
        if first is not None and context.config.backup:
            none_missed = (0,) * len(context.roles.groups)
            running = first.misses.running if first.misses is not None else none_missed
        begins = self._modes.begins
        promised = RunRecord(
            psdist=VERSION,
            mode=begins.mode,
            staleness=begins.staleness,
            mode_by=mode_by(context.config),
            auto_staleness=highest_bound(context.config),
            schedule=self._modes.schedule,
            codecs=self._codecs.begins,
            ladder=self._codecs.ladder,
            error_budget=context.config.error_budget,
            loss_patience=context.config.loss_patience,
            freeze_step=context.config.freeze_step,
            rollback=context.config.rollback,
            groups=context.roles.groups,
            num_substitutes=context.roles.num_substitutes,
            slices=slice_places(lambda size: partition.slices(size, order), context.roles.groups),
            num_servers=context.roles.num_servers,
            set_index=set_index,
            num_chunks=len(partition.chunks),
            owners=owners,
            checksum_every=context.config.checksum_every,
            pipeline=context.config.pipeline,
            stale_lr=context.config.stale_lr,
            delay_compensation=context.config.delay_compensation,
            local_steps_by_speed=_local_steps_by(context.config, "speed"),
            local_steps_by_loss=_local_steps_by(context.config, "loss"),
            has_rounds_by_pass=context.config.local_steps == "epoch",
            backup=context.config.backup,
            backup_every=context.config.backup_every if context.config.backup else 0,
            has_copies=wire_of(context.config).has_copies,
            begins_with_state=bool(setup.state),
            restored=first.checkpoint if first is not None else "",
            first_clocks=first.clocks if first is not None else (),
            missed_running=running,
            attempt=context.attempt,
            restored_attempt=(
                context.restored.checkpoint.index.attempt if context.restored is not None else 0
            ),
            cut=zlib.crc32(partition.encode()),
        )
        if self._is_active:
            write_run(history_folder(context.run_directory.path, set_index), promised)
        return promised

    def _record_resumed(self) -> None:
        """What the job has begun with of psdist's own choices, before any other is made."""
        restored, fidelity = self._context.restored, self._context.fidelity
        kept = self._context.kept_fidelity
        if kept is not None and kept.modes is not None:
            is_taken = fidelity is not None and fidelity.modes is not None
            say = logger.info if is_taken else logger.warning
            say("%s", line_of_modes(self._context.config, kept.modes))
        if fidelity is not None:
            of = self._steps if fidelity.is_of_steps else self._decisions
            of.resumed("" if restored is None else restored.checkpoint.name, fidelity)

    def standing(self) -> bytes:
        """What people have heard, and ask for again at the end, for the registrar's next deputy."""
        told: bytes = msgpack.packb(
            [
                self._deaths.standing(),
                self._copies.standing(),
                self._files.standing(),
                list(self._context.joined.items()),
                self._decisions.standing(),
            ]
        )
        return told

    def go_on(self, standing: bytes) -> None:
        """On that one, with this."""
        deaths, copies, files, joined, decisions = msgpack.unpackb(standing)
        self._deaths.go_on(deaths)
        self._copies.go_on(copies)
        self._files.go_on(files)
        self._context.joined.update(joined)
        self._decisions.go_on(decisions)

    def note(self, action: OfficeAction) -> None:
        """On the deputy: the registrar has done this."""
        if isinstance(action, ServerDeath):
            self._deaths.taken_over(action, is_news=False)
        elif isinstance(action, SpareDeath):
            self._deaths.spare_lost(action, is_news=False)
        elif isinstance(action, SubstituteDeath):
            self._deaths.substitute_lost(action, is_news=False)
        elif isinstance(action, Joined):
            self._context.joined[action.worker] = action.place
            self._deaths.joined(action, is_news=False)
        elif isinstance(action, ShardAlone):
            self._copies.alone(action, is_news=False)
        elif isinstance(action, ShardWhole):
            self._copies.whole(action, is_news=False)
        elif isinstance(action, Death):
            self._deaths.declared(action, is_news=False)
        elif isinstance(action, Survived):
            self._deaths.survived(action)
        elif isinstance(action, Decided):
            self._decisions.note(action)
        elif isinstance(action, CheckpointAction):
            self._files.note(action)

    def succeed(self, undone: Sequence[OfficeAction]) -> None:
        """The registrar has died, and this rank has its place. ``undone``: what it may not have
        done."""
        context = self._context
        self._is_active = True
        context.on_abort = self._on_abort
        write_files_when_terminated(context)
        if context.parent is not None:
            context.parent.take_role(context.who, "registrar")
        lines = [each.line for each in undone if isinstance(each, WriteMetrics)]
        for line in context.run_directory.missing("metrics.jsonl", lines):
            context.run_directory.append_metrics(line)
        if progress := self._registrar.progress:
            behind = self._standing.behind(progress, self._registrar.out)
            self._modes.reached(behind, is_news=False)
        kept = [each for each in undone if isinstance(each, Decided | KeepFidelity | LossHeard)]
        num_kept = self._decisions.num_kept(kept)
        is_kept = {id(each) for each in kept[:num_kept]}
        for each in undone:
            if isinstance(each, Decided) and id(each) in is_kept:
                self._decisions.note(each)
            elif isinstance(each, KeepFidelity) and id(each) in is_kept:
                self._files.note(each)
            elif isinstance(each, LossHeard) and id(each) in is_kept:
                continue
            elif isinstance(each, CheckpointAction) and self._files.has_done(each):
                self._files.note(each)
            elif isinstance(each, Complete) and self._is_told():
                context.run_directory.close()
            elif not isinstance(each, WriteMetrics):
                self.on_action(each)

    def _is_told(self) -> bool:
        """Whether people know that this run is complete."""
        try:
            text = (self._context.run_directory.path / "summary.json").read_text(encoding="utf-8")
            summary = json.loads(text)
        except (OSError, ValueError):
            return False
        known = summary.get("exit"), summary.get("attempts")
        return known == ("completed", self._context.attempt)

    def on_action(self, action: OfficeAction) -> None:
        if isinstance(action, WriteMetrics):
            self._context.run_directory.append_metrics(action.line)
        elif isinstance(action, Warn):
            logger.warning("%s", action.text)
        elif isinstance(action, ServerDeath):
            self._deaths.taken_over(action)
            self._tell_parent_of_death(self._context.roles.server_ranks[action.server])
        elif isinstance(action, SpareDeath):
            self._deaths.spare_lost(action)
            self._tell_parent_of_death(self._context.roles.spare_ranks[action.spare])
        elif isinstance(action, SubstituteDeath):
            self._deaths.substitute_lost(action)
            self._tell_parent_of_death(self._context.roles.worker_ranks[action.worker])
        elif isinstance(action, Joined):
            self._context.joined[action.worker] = action.place
            self._deaths.joined(action)
        elif isinstance(action, ShardAlone):
            self._copies.alone(action)
        elif isinstance(action, ShardWhole):
            self._copies.whole(action)
        elif isinstance(action, Entrusted):
            logger.warning(
                "the registrar, in %s, has a deputy again: %s",
                describe_peer(self._registrar_at),
                describe_peer(action.deputy),
            )
        elif isinstance(action, CheckpointAction):
            self._files.do(action)
            if isinstance(action, KeepFidelity):
                of = self._steps if action.fidelity.is_of_steps else self._decisions
                of.kept(action)
        elif isinstance(action, Death):
            self._deaths.declared(action)
            for worker in (action.worker, *action.left):
                self._tell_parent_of_death(self._context.roles.worker_ranks[worker])
        elif isinstance(action, Survived):
            self._deaths.survived(action)
        elif isinstance(action, Decided):
            self._decisions.on_action(action)
            self._standing.mode = self._status.mode = self._decisions.now
        elif isinstance(action, StepsObserved):
            self._steps.observed(action)
        elif isinstance(action, LossHeard) and self._context.config.steps_by == "loss":
            self._steps.heard(action)
        elif isinstance(action, LossHeard):
            self._decisions.heard(action)
        elif isinstance(action, StepsChosen):
            self._steps.chosen(action)
        elif isinstance(action, Rollback):
            self._roll_back(action)
        elif isinstance(action, EndJob):
            self._display.close()
            failure = action.failure
            self._context.abort(failure.heading, failure.text, failure.exit_status)
        elif isinstance(action, Complete):
            self._display.close()
            self._look_for_empty_servers()
            summary = self._summary("completed")
            self._write_summary(summary)
            self._tell_status(outcome="completed")
            self._context.run_directory.close()
            for each in summary["sets"]:
                if line := different_clocks_line(each["clocks"]):
                    logger.warning("%s", line)
            run_dir = str(self._context.run_directory.path)
            words = "; ".join(filter(None, (self._decisions.words, self._steps.words)))
            lines = report_lines(summary, words, run_dir)
            if lost := self._context.run_directory.num_lost:
                why = self._context.run_directory.why_lost
                lines.append(f"  lost           {lost_metrics(lost, why)}")
            if self._context.tracer is not None:
                lines.append(f"  trace          psdist trace {run_dir}")
            for line in lines:
                print(line, flush=True)

    @property
    def _registrar_at(self) -> int:
        return REGISTRAR if self._office is None else self._office.registrar_at

    @property
    def _deputy(self) -> int | None:
        return None if self._office is None else self._office.deputy

    def _registrar_line(self) -> str:
        """Nothing while registrar and deputy are those of the start."""
        at, deputy = self._registrar_at, self._deputy
        buddies = self._context.buddies
        if not buddies or (at, deputy) == (REGISTRAR, server_id(buddies[0])):
            return ""
        has = "without a deputy" if deputy is None else f"its deputy is {describe_peer(deputy)}"
        return f"in {describe_peer(at)}, {has}"

    def _roll_back(self, rollback: Rollback) -> None:
        """The loss has blown up: the job ends, to be started again with less lossy choices, if
        there are any."""
        context, words = self._context, in_words(rollback)
        self._display.close()
        (self._decisions if rollback.names else self._steps).rolled_back(rollback)
        # Also where none is left: whoever goes on with another learning rate goes on from before.
        # And once: a registrar that has died since may have done it.
        known = [each.attempt for each in read_rollbacks(context.run_directory.path)]
        if context.attempt not in known:
            add_rollback(context.run_directory.path, Record(context.attempt, rollback))
        text, status = f"error: {words}", ConfigError.exit_status
        if rollback.allowed >= 0:
            text, status = requeue(f"the loss has blown up: --resume goes on, {words}")
        context.abort(f"psdist: {context.who}", text, status)

    def _tell_parent_of_death(self, rank: int) -> None:
        if self._context.parent is not None:
            self._context.parent.tell(RankSurvived(rank=rank))

    def _on_abort(self, text: str, status: int) -> None:
        lines = text.strip().splitlines()
        outcome = lines[-1] if lines else "failed"
        if is_interruption(text, status):
            outcome = "interrupted"
        elif is_requeue(text, status):
            outcome = "requeue"
        self._write_summary(self._summary(outcome))
        self._tell_status(outcome=outcome)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json; log a warning if the disk is full, because the job has trained."""
        try:
            self._context.run_directory.write_json("summary.json", summary)
        except OSError as error:
            logger.warning("summary.json was not written: %s", error.strerror or error)

    def on_idle(self) -> None:
        if not self._is_active:
            return
        self._context.heed_parent()
        self._context.heed_hosts()
        now_s = time.monotonic()
        if now_s - self._shown_s < _SHOW_EVERY_S:
            return
        self._shown_s = now_s
        training = self._show(now_s)
        if self._status.is_due:
            self._tell_status(training)

    def _tell_status(self, training: Training | None = None, *, outcome: str = "") -> None:
        """To `psdist status`; ``outcome``: how the job has ended."""
        if self._context.comm is None:
            return
        registrar = self._registrar
        self._status.training(
            progress=self._last_progress() if outcome else registrar.progress,
            calls=[OpenCall(*each) for each in registrar.open_collectives()],
            done=registrar.done,
            out=registrar.out,
            dead=[each["who"] for each in self._deaths.told()],
            alone=registrar.alone,
            registrar=self._registrar_line(),
            num_idle_spares=registrar.num_idle_spares,
            joined=self._deaths.joined_lines(),
            training=training,
            outcome=outcome,
        )

    def _last_progress(self) -> dict[int, Progress]:
        """Of a job that has ended: workers that were ended by a failure had no time to tell."""
        groups, progress = self._context.roles.group_of_worker, self._registrar.progress
        contained = next(iter(self.contained()), [])
        return {
            worker: replace(each, clock=max([each.clock, *contained[groups[worker] :][:1]]))
            for worker, each in progress.items()
        }

    def _show(self, now_s: float) -> Training | None:
        """On a display, once training has begun."""
        progress, parent = self._registrar.progress, self._context.parent
        if any(each.clock for each in progress.values()):
            self._look_for_empty_servers()
            self._modes.reached(self._standing.behind(progress, self._registrar.out))
            self._standing.mode = self._status.mode = self._decisions.now
            training = self._standing.at(
                now_s - self._context.started_s,
                progress=progress,
                last=self._registrar.last,
                out=self._registrar.out,
            )
            self._display.update(training)
            if parent is not None:
                parent.tell(training)
            return training
        return None

    def _summary(self, outcome: str) -> dict[str, Any]:
        """summary.json; where the run failed, what is known by then and null for what is not."""
        context, registrar = self._context, self._registrar
        told = Told(
            roles=context.roles,
            workers=registrar.done,
            servers=registrar.servers,
            progress=registrar.progress,
            contained=self.contained(),
            out=registrar.out,
            not_joined=registrar.not_joined,
        )
        restored = context.restored
        sets = [counts_of_set(told, built, index) for index, built in enumerate(self._built)]
        sets = sets or [counts_of_set(told, None, 0)]
        sets = [each | {"modes": self._modes.of_set(n)} for n, each in enumerate(sets)]
        is_known, workers = told.all_workers, registrar.done.values()
        samples = sum(each["samples"] for each in workers)
        trained_s = max((each["trained_s"] for each in workers), default=0.0)
        per_s = round(samples / trained_s, 1) if trained_s else 0.0
        return {
            "mode": self._modes.begins.mode,
            "staleness": self._modes.begins.staleness,
            "servers": context.roles.num_servers,
            "workers": context.roles.num_beginning,
            "spares": len(context.roles.waiting_ranks),
            "groups": context.roles.num_groups_beginning,
            **together(sets),
            "codecs": self._codecs.told(),
            "steps_by_loss": self._steps.told(),
            "bytes_sent": told.bytes_sent,
            "predicted_exchange_s": self._predicted_exchange_s(),
            "wall_s": round(time.monotonic() - context.started_s, 3),
            "samples": samples if is_known else None,
            "dropped_samples": told.dropped_samples,
            "samples_per_s": per_s if is_known else None,
            "exit": outcome,
            "last": dict(registrar.last),
            "replication": context.config.replication,
            "attempts": context.attempt,
            "resumed_from": restored.checkpoint.name if restored is not None else None,
            "rollbacks": self._rollbacks(),
            "checkpoints": self._files.num_complete,
            "checkpoints_failed": self._files.num_failed,
            "metrics_lost": context.run_directory.num_lost,
            "deaths": self._deaths.told(),
            "joined": self._deaths.told_of_joined(),
            "alone": self._copies.told(),
            "registrar": told_holder(self._registrar_at),
            "deputy": None if self._deputy is None else told_holder(self._deputy),
            "sets": sets,
        }

    def _rollbacks(self) -> list[dict[str, Any]]:
        """Of all attempts: which one has ended so, and why."""
        if self._context.config.rollback is None:
            return []
        records = read_rollbacks(self._context.run_directory.path)
        return [{"attempt": each.attempt, "why": in_words(each.rollback)} for each in records]

    def _predicted_exchange_s(self) -> float | None:
        """What the plan says of this model on the slowest link; None where no link is crossed, or
        other bytes cross it than the plan counts: codecs' fewer, and those of second copies."""
        plan, config = self._context.plan, self._context.config
        if plan is None or not plan.links or not self._built:
            return None
        if config.replication != "none" or has_codecs(config):
            return None
        num_bytes = sum(each.partition.num_bytes for each in self._built)
        return plan.cost_s * num_bytes / plan.model_bytes


def _local_steps_by(config: RunConfig, rule: Literal["speed", "loss"]) -> int:
    """0 where another rule says how many there are."""
    return counted_steps(config) if config.steps_by == rule else 0
