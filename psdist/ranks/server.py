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
    modes_that_may_come,
)
from psdist.config.settings import RunConfig
from psdist.history.writers import ServerHistory, history_folder
from psdist.protocol.flow import REPLY_WINDOW_BYTES
from psdist.protocol.ids import COORDINATOR, is_spare, server_id, spare_id
from psdist.ranks.checkpointing.fidelity import levels_of
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.ranks.context import RankContext
from psdist.ranks.coordinating import coordinator_log_of, coordinator_of
from psdist.ranks.duty import Duty
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.reporter import Reporter, write_files_when_terminated
from psdist.ranks.seats.device import shard_device_of
from psdist.ranks.wire import wire_of
from psdist.servers.loop import ServerLoop
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.lobby import Lobby
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules.backup import Backup
from psdist.servers.protocol.rules.rule import MakeRule
from psdist.servers.protocol.rules.switching import Switching
from psdist.servers.protocol.start import Start
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.successor import Successor
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
    if context.me == COORDINATOR:
        roles = context.roles
        lobby = Lobby(
            num_workers=roles.num_beginning,
            num_servers=roles.num_servers,
            spares=map(spare_id, range(roles.num_spares)),
            joining=roles.waits_as,
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
    """On the coordinator, or in one process: also a run that fails before its job has begun has a
    summary."""
    Reporter(context, coordinator_of(context))


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
        first = context.first_clocks(set_index)
        return assemble_core(
            server=number,
            make_rule=rule_of(config, context.modes_of(set_index)),
            groups=roles.groups,
            pipeline=config.pipeline,
            resumed_up_to=resumed_up_to,
            start=Start(first) if picture is None else Successor(picture, first),
            survives_workers=context.survives_workers,
            num_substitutes=roles.num_substitutes,
            is_out=all if context.reforms_groups else any,
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
    is_standby = bool(context.buddies) and server == server_id(context.buddies[0])
    coordinator: Coordinator | CoordinatorLog | None = None
    standby = None
    if is_standby:
        standby = duty.standby(
            coordinator_log_of(context, coordinator_of(context), is_active=False)
        )
    elif server == COORDINATOR:
        coordinator = coordinator_of(context)
        coordinator_log = (
            coordinator_log_of(context, coordinator, is_active=True) if context.buddies else None
        )
        duty.begin(coordinator, coordinator_log, is_active=True)
        coordinator = coordinator_log or coordinator
    loop = ServerLoop(
        transport,
        make_core,
        options,
        make_executor=make_executor,
        make_history=make_history,
        coordinator=coordinator,
        on_coordinator=duty.on_action,
        standby=standby,
        what_was_told=duty.what_was_told,
        make_standby=duty.make_standby,
        on_built=duty.on_built,
        make_set=make_set,
        replication=replication,
    )
    duty.contained = lambda: [each.core.contained() for each in loop.sets]
    return loop, duty


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
