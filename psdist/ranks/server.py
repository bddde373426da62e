"""A server rank's life: it waits for a job, runs its state machine and loop, and waits again.

    status = serve(context)      # returns when the workers' processes end

It never runs the user's script. The run's files and report are written by psdist.ranks.reporter,
decisions are psdist.servers'.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from functools import partial

from psdist.config.codec_rounds import is_auto
from psdist.config.modes import (
    ModeFrom,
    is_changing,
    mode_of_tables,
    modes_that_may_come,
)
from psdist.config.settings import RunConfig
from psdist.history.writers import ServerHistory, history_folder
from psdist.protocol.flow import REPLY_WINDOW_BYTES
from psdist.protocol.ids import COORDINATOR, is_spare, server_id, spare_id
from psdist.ranks.checkpointing.files import FileKeeper
from psdist.ranks.checkpointing.tuning_state import levels_of
from psdist.ranks.coordinating import Duty, coordinator_log_of, coordinator_of
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.rank import Rank
from psdist.ranks.reporter import Reporter, write_files_when_terminated
from psdist.ranks.seats.device import shard_device_of
from psdist.ranks.session import JobSession
from psdist.ranks.wire import wire_of
from psdist.servers.loop import ServerLoop, ServerPart
from psdist.servers.parts import CoordinatorSeat, ModeSwitches, codec_sizes, plain_loop
from psdist.servers.protocol.actions import ChangeMode
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.lobby import Lobby
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT, StaleLr
from psdist.servers.protocol.rules.backup import backup_rule, misses_groups
from psdist.servers.protocol.rules.switching import Switching
from psdist.servers.protocol.start import Start
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.successor import Successor
from psdist.servers.replication import Replication
from psdist.servers.replication.keeping import ReplicationOptions
from psdist.servers.replication.standby import LoggedSeat, StandbySeat
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import ServerOptions, ShardStore
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.spare import SpareSeat
from psdist.servers.tables.contents import contents_of
from psdist.servers.tables.service import RowService
from psdist.servers.traced import TracedSetLoop
from psdist.transfers import transfers_for
from psdist.transport import Transport
from psdist.transport.virtual import Actor

logger = logging.getLogger("psdist")


def serve(context: Rank) -> int:
    """Serve in every job that the workers begin, until their processes end; returns the exit
    status. A spare that is to take a worker's place returns in the job."""
    import torch

    torch.set_num_threads(context.num_threads)
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
        write_files_when_terminated(context.session)
    context.reach("training")
    while wait_for_job(context, lobby):
        serve_job(context)
        if context.session.replace is not None:
            return 0
        context.session.end()
        if lobby is not None:
            lobby.admit(context.session.joined)
    context.exit.close()
    return 0


def serve_job(context: Rank) -> None:
    """Serve in the job that has begun, until all workers are done with it."""
    loop, duty = build_loop(context.session, context.session.transport)
    loop.run(context.waiting(has_deadline=False), on_idle=duty.on_idle)
    served = loop.served
    if isinstance(served, SpareSeat) and served.replace is not None:
        context.become_worker(served.replace, served.heard)


def serve_beside(context: Rank) -> None:
    """Start the server of a job in one process."""
    assert context.network is not None
    me = server_id(0)
    context.network.spawn(me, server_actor(context.session, context.network.endpoint(me)))


def write_summary_if_it_fails(context: Rank) -> None:
    """On the coordinator, or in one process: also a run that fails before its job has begun has a
    summary."""
    Reporter(context.session, coordinator_of(context.session))


def ignore_signals_of_scripts() -> None:
    """Launchers forward these to every rank (Slurm's --signal=USR1@60 among them); they are meant
    for scripts, and would end a server."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def server_actor(context: JobSession, transport: Transport) -> Actor:
    """The server of a job in one process: takes a turn whenever something arrives."""
    loop, duty = build_loop(context, transport)
    return loop.actor(on_idle=duty.on_idle)


def build_loop(context: JobSession, transport: Transport) -> tuple[ServerLoop, Duty]:
    """Return the server of the job that has begun, and what it has to report."""
    config, roles, server = context.config, context.roles, transport.me
    duty = Duty(context)
    options = ServerOptions(
        server=server,
        shard_weights=roles.shard_weights,
        modes=modes_that_may_come(config),
        receive_buffers=None if config.receive_buffers == "auto" else config.receive_buffers,
        reply_window=REPLY_WINDOW_BYTES if config.overlap == "full" else None,
        extra_optimizers=config.optimizers,
        checksum_every=config.checksum_every,
        compensation=config.delay_compensation,
        freeze_step=config.freeze_step,
    )
    build = _replicated if context.rank.bootstrap.buddies else _plain
    return build(context, transport, options, duty), duty


def _plain(
    context: JobSession, transport: Transport, options: ServerOptions, duty: Duty
) -> ServerLoop:
    store = _make_store(context, options.server)(options.server, 0)
    seats: list[ServerPart] = [duty, RowService()]
    if options.server == COORDINATOR:
        coordinator = coordinator_of(context)
        seat = CoordinatorSeat(coordinator, duty.report_on(coordinator))
        seats += [seat, *codec_sizes(store.wire, seat.know_sizes)]
    tracer = context.tracer
    return plain_loop(
        transport,
        partial(_make_core, context, options.server),
        options,
        store,
        seats=seats,
        make_set=SetLoop if tracer is None else partial(TracedSetLoop, tracer=tracer),
    )


def _replicated(
    context: JobSession, transport: Transport, options: ServerOptions, duty: Duty
) -> ServerLoop:
    """The server of a job with replicas, or a spare."""
    server, buddies, roles = options.server, context.rank.bootstrap.buddies, context.roles
    make_store = _make_store(context, server)
    replication = Replication(
        transport,
        ReplicationOptions(
            buddies=buddies,
            num_groups=len(roles.groups),
            num_substitutes=roles.num_substitutes,
            make_core=partial(_make_core, context),
            make_store=make_store,
            first_clocks=context.first_clocks,
        ),
        options,
        buddy=None if is_spare(server) else buddies[server],
    )
    wire = wire_of(context.config, levels_of(context.tuning_state))
    seat: LoggedSeat | StandbySeat
    if server == COORDINATOR:
        log = coordinator_log_of(context, is_active=True)
        seat = LoggedSeat(log, duty.report_on(log.coordinator, log), replication)
    else:
        standby = duty.standby() if server == server_id(buddies[0]) else None
        seat = StandbySeat(duty.standby, replication, wire, standby)
    seats = (duty, seat, *codec_sizes(wire, seat.know_sizes))
    if is_spare(server):
        return ServerLoop(transport, SpareSeat(options, replication), (replication, *seats))
    make_core = partial(_make_core, context, server)
    return replication.make_loop(make_core, make_store(server, 0), seats=(*seats, ModeSwitches()))


def _make_store(context: JobSession, here: int) -> Callable[[int, int], ShardStore]:
    """Return the function that makes the store of a server's shard, or the ``copy``-th replica of
    a shard, on server ``here``."""
    wire = wire_of(context.config, levels_of(context.tuning_state))
    make_executor = partial(TensorShard, transfers=transfers_for(shard_device_of(context)))

    def make_store(server: int, copy: int) -> ShardStore:
        return ShardStore(
            make_executor,
            choose=None if context.rank.bootstrap.buddies else contents_of,  # rows: no replicas
            wire=wire,
            make_history=partial(_make_history, context, server, copy),
            keeper=_make_keeper(context, server, is_expecting=server == here),
        )

    return make_store


def _make_core(
    context: JobSession,
    server: int,
    set_index: int,
    resumed_up_to: int,
    state: ShardState | None = None,
) -> ServerCore:
    roles, first = context.roles, context.first_clocks(set_index)
    own = mode_of_tables(context.config)
    return assemble_core(
        server=server,
        make_rule=rule_of(context.config, context.modes_of(set_index)),
        groups=roles.groups,
        pipeline=context.config.pipeline,
        resumed_up_to=resumed_up_to,
        start=Start(first) if state is None else Successor(state, first),
        survives_workers=context.survives_workers,
        num_substitutes=roles.num_substitutes,
        is_out=all if context.reforms_groups else any,
        of_tables=None if own is None else rule_of(context.config, [own]),
    )


def _make_history(
    context: JobSession, server: int, copy: int, set_index: int, position: int
) -> ServerHistory | None:
    if not context.config.record:
        return None
    folder = history_folder(context.run_directory.path, set_index)
    history = ServerHistory(folder, server, copy=copy, position=position)
    context.exit.flushes.append(history.flush)
    return history


def _make_keeper(context: JobSession, server: int, *, is_expecting: bool) -> FileKeeper:
    restored = context.restored
    return FileKeeper(
        context.folder,
        server,
        restored=restored.checkpoint if restored is not None else None,
        is_behind=not context.rank.is_alone,
        is_expecting=is_expecting and context.config.checkpoint_every is not None,
    )


def rule_of(config: RunConfig, modes: Sequence[ModeFrom]) -> MakeRule:
    """Return the round rule of a parameter set. ``modes``: the modes with which the job begins, in
    the order in which they were set."""
    scale = BY_WEIGHT if config.stale_lr == "off" else StaleLr()
    if misses_groups(config):
        return backup_rule(config)
    if (len(modes) > 1 or is_changing(config)) and not is_auto(config):
        changes = [ChangeMode(*each) for each in modes]
        return partial(Switching, modes=changes, scale=scale)
    return rule_for(modes[0].mode, staleness=modes[0].staleness, scale=scale)
