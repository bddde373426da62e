"""A server rank's life: it waits for a job, runs its state machine and loop, and waits again; on
server 0 also the run's files and report.

    status = serve(context)      # returns when the workers' processes end

It never runs the user's script. Files go through psdist.report and psdist.history, decisions
through psdist.servers.

Longer than other modules: what is told of the job begins and ends with the rank's own waits.
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
from functools import partial
from types import FrameType
from typing import Any, Literal

import msgpack

from psdist.config.codec_rounds import has_codecs, is_auto
from psdist.config.modes import (
    judging_mode,
    least_bound,
    mode_by,
    modes_that_may_come,
    schedule_of,
)
from psdist.config.settings import MIN_CHUNK_BYTES, RunConfig
from psdist.controller.bound import BoundControl
from psdist.controller.decisions import Controller
from psdist.controller.kept import Rollback
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.steps import StepControl
from psdist.errors import ConfigError
from psdist.history.writers import (
    RunRecord,
    ServerHistory,
    history_folder,
    slice_places,
    write_run,
)
from psdist.protocol.control import Progress, Setup
from psdist.protocol.flow import REPLY_WINDOW_BYTES
from psdist.protocol.ids import REGISTRAR, describe_peer, is_spare, server_id
from psdist.protocol.partition import Partition, chunk_bytes_for_all
from psdist.ranks.checkpointing.fidelity import codec_control, levels_of, loss_step_control
from psdist.ranks.checkpointing.files import CheckpointAction, CheckpointFiles, FileKeeper
from psdist.ranks.checkpointing.rollbacks import Record, add_rollback, in_words, read_rollbacks
from psdist.ranks.checkpointing.states import StateSearch
from psdist.ranks.context import RankContext
from psdist.ranks.failure import is_interruption, is_requeue, requeue
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.pairing import hosts_of, racks_of
from psdist.ranks.seats.device import shard_device_of
from psdist.ranks.telling.coding import coding_line
from psdist.ranks.telling.copies import CopyReports
from psdist.ranks.telling.deaths import DeathReports, told_holder
from psdist.ranks.telling.decisions import Decided, DecisionReports
from psdist.ranks.telling.standing import Standing
from psdist.ranks.telling.status import OpenCall, StatusWriter
from psdist.ranks.telling.steps import StepReports
from psdist.ranks.telling.summary import BuiltSet, Told, counts_of_set, share_line, together
from psdist.ranks.wire import wire_of
from psdist.report.facts import RankSurvived, Training
from psdist.report.progress import ProgressDisplay, Style
from psdist.servers.loop import ServerLoop, Standby
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.checkpoints import KeepFidelity
from psdist.servers.protocol.chunks.policy import Changing, Policy, Scheduled, policy_for
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.deaths import Death, Survived
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.lobby import Lobby
from psdist.servers.protocol.rebuilding.rebuilds import ServerRebuilt
from psdist.servers.protocol.registrar import (
    Complete,
    EndJob,
    Registrar,
    WriteMetrics,
)
from psdist.servers.protocol.replication.picture import ShardPicture
from psdist.servers.protocol.replication.takeovers import (
    ServerDeath,
    ShardAlone,
    ShardWhole,
    SpareDeath,
)
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.steps import LossHeard, StepsChosen, StepsObserved
from psdist.servers.protocol.succession.office import Entrusted, Office, OfficeAction
from psdist.servers.rebuilding import RebuildingOptions
from psdist.servers.replication.replication import ReplicationOptions
from psdist.servers.set_loop import ServerOptions
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.spare import SpareLoop
from psdist.servers.traced import TracedSetLoop
from psdist.transfers import transfers_for
from psdist.transport.base import Transport
from psdist.transport.virtual import Actor
from psdist.version import VERSION

logger = logging.getLogger("psdist")

_SHOW_EVERY_S = 0.25


def serve(context: RankContext) -> int:
    """Serve in every job that the workers begin, until their processes end; returns the exit
    status. A spare that is to take a worker's place returns in the job (``context.replace``)."""
    import torch

    torch.set_num_threads(num_threads(context))
    ignore_signals_of_scripts()
    lobby = None
    if context.me == REGISTRAR:
        roles = context.roles
        lobby = Lobby(
            num_workers=roles.num_beginning,
            num_servers=roles.num_servers,
            num_spares=roles.num_spares,
            num_substitutes=roles.num_substitutes,
        )
        write_summary_if_it_fails(context)
        write_files_when_terminated(context)
    context.reach("training")
    while wait_for_job(context, lobby):
        serve_job(context)
        if context.replace is not None:
            return 0
        context.end_job()
        if lobby is not None:
            lobby.admit(context.joined)
    context.close()
    return 0


def serve_job(context: RankContext) -> None:
    """Serve in the job that has begun, until all workers are done with it."""
    loop, duty = build_loop(context, context.transport)
    loop.run(context.waiting(has_deadline=False), on_idle=duty.on_idle)
    if isinstance(loop, SpareLoop) and loop.replace is not None:
        context.go_on_as_worker(loop.replace, loop.heard)


def serve_beside(context: RankContext) -> None:
    """Start the server of a job in one process; where there are ranks that serve, do nothing."""
    if context.network is not None:
        me = server_id(0)
        context.network.spawn(me, server_actor(context, context.network.endpoint(me)))


def write_summary_if_it_fails(context: RankContext) -> None:
    """On the registrar, or in one process: also a run that fails before its job has begun has a
    summary."""
    Reporter(context, _registrar(context))


def ignore_signals_of_scripts() -> None:
    """Launchers forward these to every rank (Slurm's --signal=USR1@60 among them); they are meant
    for scripts, and would end a server."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def write_files_when_terminated(context: RankContext) -> None:
    """On the registrar: a launcher that ends the ranks, because somebody has told it to or because
    another rank has died, leaves a moment to write down how far the job had come."""

    def write_and_end(number: int, _frame: FrameType | None) -> None:
        context.write_last_files(f"ended by {signal.Signals(number).name}", 128 + number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, write_and_end)


def server_actor(context: RankContext, transport: Transport) -> Actor:
    """The server of a job in one process: takes a turn whenever something arrives."""
    loop, duty = build_loop(context, transport)
    return loop.actor(on_idle=duty.on_idle)


def num_threads(context: RankContext) -> int:
    """Threads that torch may use in this rank."""
    threads = context.config.threads
    return max(1, int(context.core_share)) if threads == "auto" else threads


def build_loop(context: RankContext, transport: Transport) -> tuple[ServerLoop, Duty]:
    """The server of the job that has begun, and what it has to report."""
    config, roles, server = context.config, context.roles, transport.me

    restored = context.restored

    def make_core(
        set_index: int,
        resumed_up_to: int,
        number: int = server,
        picture: ShardPicture | None = None,
    ) -> ServerCore:
        return ServerCore(
            server=number,
            policy=policy_of(config),
            changes=[ChangeMode(*each) for each in schedule_of(config)[1:]],
            groups=roles.groups,
            pipeline=config.pipeline,
            resumed_up_to=resumed_up_to,
            first=context.first_clocks(set_index),
            survives_workers=context.survives_workers,
            picture=picture,
            backup=config.backup,
            wait_every=config.backup_every,
            has_stale_lr=config.stale_lr != "off",
            num_substitutes=roles.num_substitutes,
            reforms=context.reforms_groups,
        )

    def make_history(
        set_index: int, number: int = server, copy: int = 0, position: int = 0, rebuilt: int = 0
    ) -> ServerHistory | None:
        if not config.record:
            return None
        folder = history_folder(context.run_directory.path, set_index)
        history = ServerHistory(folder, number, copy=copy, rebuilt=rebuilt, position=position)
        context.flushes.append(history.flush)
        return history

    def make_keeper(number: int) -> FileKeeper:
        return FileKeeper(
            context.folder,
            number,
            restored=restored.checkpoint if restored is not None else None,
            is_behind=context.comm is not None,
            is_keeping=config.checkpoint_memory == "kept",
            is_expecting=config.checkpoint_every is not None and number == server,
        )

    options = ServerOptions(
        server=server,
        shard_weights=roles.shard_weights,
        modes=modes_that_may_come(config),
        receive_buffers=None if config.receive_buffers == "auto" else config.receive_buffers,
        reply_window=REPLY_WINDOW_BYTES if config.overlap == "full" else None,
        extra_optimizers=config.optimizers,
        checksum_every=config.checksum_every,
        wire=wire_of(config, levels_of(context.fidelity)),
        compensation=config.delay_compensation,
        freeze_step=config.freeze_step,
        keeper=make_keeper(server),
        flushes_replies=context.rebuilds_shards and config.record,
    )
    make_executor = partial(TensorShard, transfers=transfers_for(shard_device_of(context)))
    tracer = context.tracer
    make_set = None if tracer is None else partial(TracedSetLoop, tracer=tracer)
    replication = None
    if context.buddies:
        replication = ReplicationOptions(
            buddies=context.buddies,
            num_groups=len(roles.groups),
            num_substitutes=roles.num_substitutes,
            make_core=lambda number, index, resumed, picture: make_core(
                index, resumed, number, picture
            ),
            make_history=lambda number, index, copy, position: make_history(
                index, number, copy, position
            ),
            make_keeper=make_keeper,
            first_clocks=context.first_clocks,
        )
    rebuilding = None
    if context.rebuilds_shards:
        rebuilding = RebuildingOptions(
            groups=roles.groups,
            make_core=lambda number, index, resumed, picture: make_core(
                index, resumed, number, picture
            ),
            make_history=lambda number, index, rebuilt, position: make_history(
                index, number, 0, position, rebuilt
            ),
            make_keeper=make_keeper,
            first_clocks=context.first_clocks,
            find_state=partial(StateSearch, context.folder),
        )
    duty = Duty(context)
    if is_spare(server):
        assert replication is not None
        spare = SpareLoop(
            transport,
            make_core,
            replace(options, keeper=None),
            make_executor=make_executor,
            replication=replication,
            make_standby=duty.make_standby,
            on_built=duty.on_built,
        )
        return spare, duty
    is_deputy = bool(context.buddies) and server == server_id(context.buddies[0])
    registrar: Registrar | Office | None = None
    standby = None
    if is_deputy:
        standby = duty.standby(_office(context, _registrar(context), is_active=False))
    elif server == REGISTRAR:
        registrar = _registrar(context)
        office = _office(context, registrar, is_active=True) if context.buddies else None
        duty.begin(registrar, office, is_active=True)
        registrar = office or registrar
    loop = ServerLoop(
        transport,
        make_core,
        options,
        make_executor=make_executor,
        make_history=make_history,
        registrar=registrar,
        on_registrar=duty.on_action,
        standby=standby,
        what_was_told=duty.what_was_told,
        make_standby=duty.make_standby,
        on_built=duty.on_built,
        make_set=make_set,
        replication=replication,
        rebuilding=rebuilding,
    )
    duty.contained = lambda: [each.core.contained() for each in loop.sets]
    return loop, duty


def _registrar(context: RankContext) -> Registrar:
    roles, first = context.roles, context.first_clocks(0)
    return Registrar(
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        mode=judging_mode(context.config),
        # Replies to iteration c are used in c + 1 + pipeline, so who waits for them waits for as
        # many more of the others' iterations.
        staleness=least_bound(context.config) - context.config.pipeline,
        groups=roles.groups,
        max_deaths=context.config.max_deaths,
        min_groups=context.config.min_groups,
        buddies=context.buddies,
        hosts=hosts_of(roles),
        racks=racks_of(roles),
        num_spares=roles.num_spares,
        rebuilds=context.rebuilds_shards,
        reforms=context.reforms_groups,
        takes_set_mode=context.config.set_mode == "allowed",
        control=_controller(context.config, roles.num_groups_beginning),
        steps=_step_control(context),
        num_substitutes=roles.num_substitutes,
        rollback=context.config.rollback,
        fidelity=context.fidelity,
        first_round=min(first.clocks[: roles.num_groups_beginning]) if first is not None else 0,
    )


def _controller(config: RunConfig, num_groups: int) -> Controller | None:
    if config.staleness_to is not None:
        lowest, highest = config.staleness, config.staleness_to
        return BoundControl(num_groups=num_groups, lowest=lowest, highest=highest)
    if mode_by(config) == "auto":
        return ModeControl(num_groups=num_groups, staleness=config.staleness)
    if is_auto(config):
        return codec_control(config, num_groups)
    return None


def _step_control(context: RankContext) -> StepControl | LossStepControl | None:
    config, roles = context.config, context.roles
    if config.steps_by == "speed":
        sizes = [len(workers) for workers in roles.groups]
        return StepControl(sizes=sizes, local_steps=config.local_steps)
    if config.steps_by == "loss":
        return loss_step_control(
            config, num_workers=roles.num_workers, num_groups=len(roles.groups)
        )
    return None


def _local_steps_by(config: RunConfig, rule: Literal["speed", "loss"]) -> int:
    """0 where another rule says how many there are."""
    return config.local_steps if config.steps_by == rule else 0


def _office(context: RankContext, registrar: Registrar, *, is_active: bool) -> Office:
    roles = context.roles
    return Office(
        registrar,
        deputy=server_id(context.buddies[0]),
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        num_spares=roles.num_spares,
        num_substitutes=roles.num_substitutes,
        is_active=is_active,
    )


def policy_of(config: RunConfig) -> Policy:
    """What servers demand in each round."""
    parts = schedule_of(config)
    if is_auto(config):
        return Changing(policy_for("sync", staleness=0), keeps_mode=True)
    if mode_by(config) in ("script", "auto"):
        return Changing(policy_for(parts[0].mode, staleness=parts[0].staleness))
    if len(parts) == 1:
        return policy_for(parts[0].mode, staleness=parts[0].staleness)
    return Scheduled(
        tuple((part.round, policy_for(part.mode, staleness=part.staleness)) for part in parts)
    )


class Duty:
    """Who reports on this rank: while it is the registrar, or may become it, somebody does."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._reporter: Reporter | None = None
        self._built: list[tuple[int, Partition, tuple[int, ...], Setup]] = []
        self.contained: Callable[[], list[list[int]]] = list
        """By set, by group: the iterations that the chunks of this server contain."""

    def begin(self, registrar: Registrar, office: Office | None, *, is_active: bool) -> Reporter:
        """``office``: where shards have second copies."""
        made = Reporter(self._context, registrar, office=office, is_active=is_active)
        made.contained = lambda: self.contained()
        for each in self._built:
            made.on_built(*each)
        self._reporter = made
        return made

    def standby(self, office: Office, told: bytes = b"") -> Standby:
        """This rank is the deputy; ``told``: what the registrar has told of, if it was one before
        (:meth:`what_was_told`)."""
        reporter = self.begin(office.registrar, office, is_active=False)
        if told:
            reporter.go_on(told)
        return Standby(
            office=office,
            on_done=reporter.note,
            on_succeed=reporter.succeed,
            on_action=reporter.on_action,
            what_was_told=reporter.standing,
        )

    make_standby = standby

    def what_was_told(self) -> bytes:
        assert self._reporter is not None
        return self._reporter.standing()

    def on_built(
        self, set_index: int, partition: Partition, owners: tuple[int, ...], setup: Setup
    ) -> None:
        self._built.append((set_index, partition, owners, setup))
        if self._reporter is not None:
            self._reporter.on_built(set_index, partition, owners, setup)

    def on_action(self, action: OfficeAction) -> None:
        assert self._reporter is not None
        self._reporter.on_action(action)

    def on_idle(self) -> None:
        if self._reporter is not None:
            self._reporter.on_idle()


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
            context.config, context.run_directory, levels=levels_of(fidelity), **why
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
        begins = self._modes.begins
        promised = RunRecord(
            psdist=VERSION,
            mode=begins.mode,
            staleness=begins.staleness,
            mode_by=mode_by(context.config),
            auto_staleness=(
                (context.config.staleness_to or context.config.staleness)
                if mode_by(context.config) == "auto"
                else None
            ),
            schedule=self._modes.schedule,
            codecs=self._codecs.begins,
            ladder=self._codecs.ladder,
            error_budget=context.config.error_budget,
            loss_patience=context.config.loss_patience,
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
            backup=context.config.backup,
            backup_every=context.config.backup_every if context.config.backup else 0,
            has_copies=wire_of(context.config).has_copies,
            begins_with_state=bool(setup.state),
            restored=first.checkpoint if first is not None else "",
            first_clocks=first.clocks if first is not None else (),
            attempt=context.attempt,
            restored_attempt=(
                context.restored.checkpoint.index.attempt if context.restored is not None else 0
            ),
            cut=zlib.crc32(partition.encode()),
        )
        if self._is_active and not set_index:
            self._record_resumed()
        if self._is_active:
            write_run(history_folder(context.run_directory.path, set_index), promised)
        return promised

    def _record_resumed(self) -> None:
        """What the job has begun with of psdist's own choices, before any other is made."""
        restored, fidelity = self._context.restored, self._context.fidelity
        if fidelity is not None:
            of = self._decisions if fidelity.codecs is not None else self._steps
            of.resumed("" if restored is None else restored.checkpoint.name, fidelity)

    def standing(self) -> bytes:
        """What people have heard, and ask for again at the end, for the registrar's next deputy."""
        told: bytes = msgpack.packb(
            [
                self._deaths.standing(),
                self._copies.standing(),
                self._files.standing(),
                list(self._context.joined.items()),
            ]
        )
        return told

    def go_on(self, standing: bytes) -> None:
        """On that one, with this."""
        deaths, copies, files, joined = msgpack.unpackb(standing)
        self._deaths.go_on(deaths)
        self._copies.go_on(copies)
        self._files.go_on(files)
        self._context.joined.update(joined)

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
        for each in undone:
            if isinstance(each, CheckpointAction) and self._files.has_done(each):
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
        elif isinstance(action, ServerRebuilt):
            self._deaths.rebuilt(action)
            self._tell_parent_of_death(self._context.roles.server_ranks[action.process])
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
                of = self._decisions if action.fidelity.codecs is not None else self._steps
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
            self._context.run_directory.write_json("summary.json", summary)
            self._tell_status(outcome="completed")
            self._context.run_directory.close()
            for each in summary["sets"]:
                if line := different_clocks_line(each["clocks"]):
                    logger.warning("%s", line)
            run_dir = str(self._context.run_directory.path)
            words = "; ".join(filter(None, (self._decisions.words, self._steps.words)))
            lines = report_lines(summary, words, run_dir)
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
        self._context.run_directory.write_json("summary.json", self._summary(outcome))
        self._tell_status(outcome=outcome)

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
            "samples_per_s": per_s if is_known else None,
            "exit": outcome,
            "last": dict(registrar.last),
            "replication": context.config.replication,
            "attempts": context.attempt,
            "resumed_from": restored.checkpoint.name if restored is not None else None,
            "rollbacks": self._rollbacks(),
            "checkpoints": self._files.num_complete,
            "checkpoints_failed": self._files.num_failed,
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


def different_clocks_line(clocks: Sequence[int]) -> str:
    """That some groups made fewer iterations than others; nothing where all made as many."""
    least, most = min(clocks, default=0), max(clocks, default=0)
    if least == most:
        return ""
    fewer = [group for group, clock in enumerate(clocks) if clock < most]
    shown = ", ".join(map(str, fewer[:8])) + (f" and {len(fewer) - 8} more" * (len(fewer) > 8))
    return (
        f"group{'s' * (len(fewer) > 1)} {shown} made fewer iterations (from {least}) than others "
        f"({most}): the last updates are of fewer samples"
    )


def empty_servers_line(partition: Partition, weights: Sequence[float], empty: Sequence[int]) -> str:
    """Which servers hold nothing, why, and what to set."""
    who = f"servers {', '.join(map(str, empty))} hold nothing and only wait"
    if len(empty) == 1:
        who = f"server {empty[0]} holds nothing and only waits"
    num_chunks = len(partition.chunks)
    chunks = f"{_count(num_chunks, 'chunk')} of at most {partition.max_chunk_bytes:,} bytes"
    if partition.whole_tensors:
        why = f"this optimizer needs whole tensors, of which small ones go together: {chunks}"
    elif num_chunks < len(weights):
        why = f"the model of {partition.num_bytes:,} bytes is cut into {chunks}"
    else:
        why = f"the share that the plan gives them is smaller than a chunk, {chunks}"
    size = 0 if partition.whole_tensors else chunk_bytes_for_all(partition.num_bytes, weights)
    finer = f", or chunk_bytes = {size} so that each holds some" if size >= MIN_CHUNK_BYTES else ""
    return f"{who}: {why}; set servers = {len(weights) - len(empty)}{finer}"


def report_lines(summary: dict[str, Any], mode: str, run_dir: str) -> list[str]:
    """The end of a run, for people."""
    seen = {int(key): count for key, count in summary["staleness_seen"].items()}
    total = sum(seen.values())
    shares = "  ".join(f"{name}: {100 * n / total:.1f}%" for name, n in _ranges(seen).items())
    is_one = len(summary["modes"]) == 1
    bound = f", bound {summary['staleness']}" if summary["mode"] == "ssp" and is_one else ""
    sets = [_clocks(each["clocks"]) for each in summary["sets"]]
    by_group = "by group" if len(sets) == 1 else "by parameter set, by group"
    return [
        f"psdist: completed in {summary['wall_s']:.1f} s: {mode}, "
        f"{_count(summary['servers'], 'server')}, {_count(summary['workers'], 'worker')} in "
        f"{_count(summary['groups'], 'group')}",
        f"  iterations     {'; '.join(sets)} ({by_group})",
        f"  staleness      {shares or 'no use'} (max {summary['max_staleness_seen']}{bound})",
        f"  throughput     {summary['samples_per_s']:.0f} samples/s; pushed "
        f"{summary['bytes_pushed'] / 2**20:.1f} MiB, pulled "
        f"{summary['bytes_pulled'] / 2**20:.1f} MiB",
        *coding_line(summary),
        *share_line(summary),
        *(
            f"  rolled back    attempt {each['attempt']}: {each['why']}"
            for each in summary["rollbacks"]
        ),
        f"  run directory  {run_dir}",
    ]


def _clocks(clocks: Sequence[int]) -> str:
    return ", ".join(str(clock) for clock in clocks[:16]) + " ..." * (len(clocks) > 16)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranges(seen: dict[int, int]) -> dict[str, int]:
    """Counts by staleness; above 7 in ranges that double, so that async fits a line too."""
    ranges: dict[str, int] = {}
    for value, count in sorted(seen.items()):
        low = value if value < 8 else 1 << (value.bit_length() - 1)
        name = str(value) if value < 8 else f"{low}-{2 * low - 1}"
        ranges[name] = ranges.get(name, 0) + count
    return ranges
