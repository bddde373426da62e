"""A server rank's life: it waits for a job, runs its state machine and loop, and waits again.

    status = serve(context)      # returns when the workers' processes end

It never runs the user's script. The run's files and report are written by psdist.ranks.reporter,
decisions are psdist.servers'.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from psdist.config.codec_rounds import is_auto
from psdist.config.modes import (
    ModeFrom,
    is_changing,
    judging_mode,
    least_bound,
    mode_by,
    modes_that_may_come,
)
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.bound import BoundControl
from psdist.controller.decisions import Controller
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.steps import StepControl
from psdist.history.writers import ServerHistory, history_folder
from psdist.protocol.flow import REPLY_WINDOW_BYTES
from psdist.protocol.ids import REGISTRAR, is_spare, server_id
from psdist.ranks.checkpointing.fidelity import codec_control, levels_of, loss_step_control
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.ranks.checkpointing.ruling import begins_with
from psdist.ranks.context import RankContext
from psdist.ranks.duty import Duty
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.pairing import hosts_of, racks_of
from psdist.ranks.reporter import Reporter, write_files_when_terminated
from psdist.ranks.seats.device import shard_device_of
from psdist.ranks.wire import wire_of
from psdist.servers.loop import ServerLoop
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.lobby import Lobby
from psdist.servers.protocol.registrar import Registrar
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules.backup import Backup
from psdist.servers.protocol.rules.rule import MakeRule
from psdist.servers.protocol.rules.switching import Switching
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.succession.office import Office
from psdist.servers.replication.replication import ReplicationOptions
from psdist.servers.set_loop import ServerOptions
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.spare import SpareLoop
from psdist.servers.traced import TracedSetLoop
from psdist.transfers import transfers_for
from psdist.transport.base import Transport
from psdist.transport.virtual import Actor

logger = logging.getLogger("psdist")


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
        picture: ShardState | None = None,
    ) -> ServerCore:
        return assemble_core(
            server=number,
            make_rule=rule_of(config, context.modes_of(set_index)),
            groups=roles.groups,
            pipeline=config.pipeline,
            resumed_up_to=resumed_up_to,
            first=context.first_clocks(set_index),
            survives_workers=context.survives_workers,
            picture=picture,
            num_substitutes=roles.num_substitutes,
            reforms=context.reforms_groups,
        )

    def make_history(
        set_index: int, number: int = server, copy: int = 0, position: int = 0
    ) -> ServerHistory | None:
        if not config.record:
            return None
        folder = history_folder(context.run_directory.path, set_index)
        history = ServerHistory(folder, number, copy=copy, position=position)
        context.flushes.append(history.flush)
        return history

    def make_keeper(number: int) -> FileKeeper:
        return FileKeeper(
            context.folder,
            number,
            restored=restored.checkpoint if restored is not None else None,
            is_behind=context.writes_behind,
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
    )
    duty.contained = lambda: [each.core.contained() for each in loop.sets]
    return loop, duty


def _registrar(context: RankContext) -> Registrar:
    roles, first = context.roles, context.first_clocks(0)
    kept_modes = context.fidelity.modes if context.fidelity is not None else None
    return Registrar(
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        mode=judging_mode(context.config),
        # Replies to iteration c are used in c + 1 + pipeline, so who waits for them waits for as
        # many more of the others' iterations.
        staleness=least_bound(context.config) - context.config.pipeline,
        groups=roles.groups,
        max_deaths=context.config.max_deaths,
        buddies=context.buddies,
        hosts=hosts_of(roles),
        racks=racks_of(roles),
        num_spares=roles.num_spares,
        reforms=context.reforms_groups,
        may_miss=context.config.backup > 0,
        takes_set_mode=context.config.set_mode == "allowed",
        control=_controller(context.config, roles.num_groups_beginning),
        steps=_step_control(context),
        num_substitutes=roles.num_substitutes,
        rollback=context.config.rollback,
        fidelity=context.fidelity,
        first_round=max(first.clocks[: roles.num_groups_beginning]) if first is not None else 0,
        modes=kept_modes if kept_modes is not None else begins_with(context.config),
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
        return StepControl(sizes=sizes, local_steps=counted_steps(config))
    if config.steps_by == "loss":
        return loss_step_control(
            config, num_workers=roles.num_workers, num_groups=len(roles.groups)
        )
    return None


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


def rule_of(config: RunConfig, modes: Sequence[ModeFrom]) -> MakeRule:
    """Return the round rule of a parameter set. ``modes``: the modes with which the job begins, in
    the order in which they were set."""
    has_stale_lr = config.stale_lr != "off"
    if config.backup:
        return partial(Backup, backup=config.backup, wait_every=config.backup_every)
    if (len(modes) > 1 or is_changing(config)) and not is_auto(config):
        changes = [ChangeMode(*each) for each in modes]
        return partial(Switching, modes=changes, has_stale_lr=has_stale_lr)
    return rule_for(modes[0].mode, staleness=modes[0].staleness, has_stale_lr=has_stale_lr)
