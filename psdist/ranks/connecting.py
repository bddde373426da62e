"""The start of every rank: MPI, one configuration, roles, the run directory, the transport.

    rank = connect(resolved)          # or the error of resolving: all ranks agree on it

Every rank brings its configuration or its error to one exchange, so each mistake is printed once
and every rank ends with the same status. Without a launcher there is no MPI at all: one process
is server 0 and worker 0, over a virtual network without delays.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgpack

from psdist.checkpoint.reading import Checkpoint
from psdist.config.sources import Resolved, describe_defaults
from psdist.controller.kept import TuningState
from psdist.errors import ConfigError, LaunchError, UserError
from psdist.install import detect, explain_torchrun, survives_deaths
from psdist.install.room import check_shared_memory
from psdist.protocol.ids import COORDINATOR, is_worker, worker_of
from psdist.protocol.roles import Place, Roles
from psdist.ranks.agreement import (
    AgreedExit,
    agreed,
    broadcast,
    cause_at_start,
    exchange,
    start_mpi,
)
from psdist.ranks.checkpointing.resuming import mark_of, opened
from psdist.ranks.checkpointing.tuning_state import packed, unpacked
from psdist.ranks.failure import end_all, format_error, ignore_interrupts, wait_until_read
from psdist.ranks.mpi_end import is_ours
from psdist.ranks.parent_link import ParentLink
from psdist.ranks.rank import Bootstrap, Comms, Rank, network_alone
from psdist.ranks.run_files import Begun, create_run_directory
from psdist.ranks.seats.cards import choose_card, described_link
from psdist.ranks.seats.placing import (
    agree_on_plan,
    pairs_of,
    refusal_of_substitutes,
    unexpected_workers,
)
from psdist.report.logs import start_logs
from psdist.servers.protocol.replication.pairs import Pairs

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("psdist")

_ALONE_TEXT = "{host}\n  rank 0    server 0 and worker 0, group 0, in one process\n"

_SPEAKS_FIRST_S: Final = 2.0
"""For rank 0 to speak, and for the launcher to end the others."""

_current: Rank | None = None


def current() -> Rank | None:
    """Return this process's rank; None before it has connected."""
    return _current


def connect(
    outcome: Resolved | UserError,
    *,
    num_workers: int | None = None,
    parent: ParentLink | None = None,
) -> Rank:
    """Start MPI and agree with all ranks; raises :class:`AgreedExit` when there was an error, such
    as another number of workers than ``num_workers`` (None: any)."""
    global _current
    started_s = time.monotonic()
    launcher = detect(os.environ)
    if not launcher.is_present:
        if why := explain_torchrun(os.environ):
            outcome = LaunchError(why)
        _current = _connect_alone(outcome, num_workers, started_s)
        return _current
    nic = choose_card(outcome, launcher)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A launcher's pipe would make it a block buffer, which the end of a failing job discards.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        check_shared_memory(os.environ)
    except LaunchError as error:
        if launcher.rank not in (0, None):
            time.sleep(_SPEAKS_FIRST_S)  # one speaks for all, if they have found the same
        _refuse(error)
    try:
        comm = start_mpi(link_bytes_per_s=described_link(outcome))
    except LaunchError as error:  # no MPI, so no agreeing: the launcher's rank 0 speaks for all
        if launcher.rank in (0, None):
            _refuse(error)
        raise AgreedExit(error.exit_status) from None
    try:
        if comm.Get_size() == 1:  # mpirun -n 1 is no launcher
            _current = _connect_alone(outcome, num_workers, started_s)
        else:
            _current = _connect(comm, outcome, num_workers, started_s, parent, nic=nic)
    except AgreedExit:
        raise
    except BaseException as error:  # the others wait for this rank in the next exchange
        ignore_interrupts()
        heading = f"psdist: rank {comm.Get_rank()} on {socket.gethostname()}"
        if isinstance(error, Exception):
            error = cause_at_start(comm, error)
        text, status = format_error(error)
        if parent is not None:
            parent.failed(status)
        end_all(comm, heading, text, status)
    return _current


def _refuse(error: LaunchError) -> NoReturn:
    print(f"psdist: error: {error}", file=sys.stderr, flush=True)
    wait_until_read()
    raise AgreedExit(error.exit_status) from None


def _connect(
    comm: MPI.Intracomm,
    outcome: Resolved | UserError,
    num_workers: int | None,
    started_s: float,
    parent: ParentLink | None,
    *,
    nic: str,
) -> Rank:
    is_wanted = isinstance(outcome, Resolved) and outcome.config.max_deaths > 0
    survives = isinstance(outcome, Resolved) and outcome.config.replication != "none"
    if is_wanted and not survives_deaths(os.environ):
        outcome = LaunchError(
            "failures.max_deaths is above 0, but this launcher ends all ranks when one fails: "
            "start with Open MPI's mpirun --with-ft ulfm (psdist run -n adds it; srun and MPICH "
            "have no such option), or leave failures.max_deaths out and resume from a checkpoint"
        )
    elif (is_wanted or survives) and survives_deaths(os.environ) and not is_ours():
        outcome = LaunchError(
            "failures.max_deaths or failures.replication is set, and the script loads mpi4py's MPI "
            "before psdist.init(): MPI's own end, which may wait for failed ranks for ever, would "
            "then hide the status of the script; import it after psdist.init(), or start by psdist "
            "run"
        )
    places, resolved = exchange(comm, outcome, nic=nic)
    config = resolved.config
    if parent is not None:
        parent.reach("placing")
    placed = agree_on_plan(comm, places, config, num_workers=num_workers)
    made: bytes | UserError = b""
    if comm.Get_rank() == 0:
        try:
            assert isinstance(outcome, Resolved)
            made = _packed(create_run_directory(outcome, placed.roles, placed.files))
        except ConfigError as error:
            made = error
    path, attempt, name, mark, tuning_state = _unpacked(broadcast(comm, agreed(comm, made)))
    checkpoint: Checkpoint | UserError | None = None
    try:
        checkpoint = opened(path, name, mark)
    except UserError as error:
        checkpoint = error
    checkpoint = agreed(comm, checkpoint)
    if placed.roles.num_substitutes:
        sees_run_dir = (path / "ranks.json").exists()
        agreed(comm, refusal_of_substitutes(placed.roles, sees_run_dir=sees_run_dir))
    pairs: Pairs | UserError | None = None
    try:
        pairs = pairs_of(config, placed.roles, os.environ)
    except UserError as error:
        pairs = error
    pairs = agreed(comm, pairs)
    rank = join(
        comm,
        Bootstrap(
            resolved=resolved,
            roles=placed.roles,
            path=path,
            started_s=started_s,
            plan=placed.plan,
            buddies=() if pairs is None else pairs.buddies,
            attempt=attempt,
            checkpoint=checkpoint,
            tuning_state=tuning_state,
        ),
        parent=parent,
    )
    start_logs(path, rank=rank.number, who=rank.who_in_logs, setting=config.log)
    rank.exit.watch_hosts()
    atexit.register(rank.exit.end_process)  # after whatever the script registers
    is_coordinator = rank.me == COORDINATOR
    if parent is not None:
        parent.take_role(rank.who, "registrar" if is_coordinator else rank.role)
    logger.info("connected: %d ranks", comm.Get_size())
    if is_coordinator:
        _log_choices(resolved, pairs)
    return rank


def _log_choices(resolved: Resolved, pairs: Pairs | None = None) -> None:
    logger.info("defaults: %s", describe_defaults(resolved))
    if pairs is not None and pairs.warning:
        logger.warning("%s", pairs.warning)
    for server, buddy in enumerate(pairs.buddies if pairs is not None else ()):
        logger.info("server %d keeps a copy of the shard of server %d", buddy, server)


def _packed(begun: Begun) -> bytes:
    name = begun.checkpoint.name if begun.checkpoint is not None else ""
    mark = mark_of(begun.checkpoint)
    words = [os.fsencode(begun.path), begun.attempt, name, mark, packed(begun.tuning_state)]
    as_bytes: bytes = msgpack.packb(words)
    return as_bytes


def _unpacked(data: bytes) -> tuple[Path, int, str, str, TuningState | None]:
    path, attempt, name, mark, tuning_state = msgpack.unpackb(data)
    return Path(os.fsdecode(path)), int(attempt), str(name), str(mark), unpacked(tuning_state)


def join(comm: MPI.Intracomm, bootstrap: Bootstrap, *, parent: ParentLink | None = None) -> Rank:
    """Return this rank of a job over all of ``comm``, whose ranks have agreed on ``bootstrap``; its
    run directory exists. Collective."""
    from psdist.transport.mpi import MpiTransport  # only now: it needs MPI to be initialised

    number, roles = comm.Get_rank(), bootstrap.roles
    transport = MpiTransport(comm, roles)
    me = transport.me
    group = roles.group_of_worker[worker_of(me)] if is_worker(me) else -1
    begins = is_worker(me) and not roles.is_substitute(me)
    workers_comm = comm.Split(0 if begins else 1, number)
    group_comm = comm.Split(group + 1, number)
    return Rank(
        bootstrap,
        number=number,
        transport=transport,
        core_share=_core_share(roles, number),
        comms=Comms(comm, workers_comm if begins else None, group_comm if is_worker(me) else None),
        parent=parent,
        advance=transport.advance,
    )


def _core_share(roles: Roles, rank: int) -> float:
    """Spares, which wait, take nothing from others."""
    mine, spares = roles.places[rank], roles.waiting_ranks - {rank}
    places = [each for each in roles.places if each.rank not in spares]
    here = [each for each in places if (each.kernel or each.host) == (mine.kernel or mine.host)]
    users = Counter(core for each in here for core in each.cores)
    return sum(1.0 / users[core] for core in mine.cores)


def _connect_alone(
    outcome: Resolved | UserError, num_workers: int | None, started_s: float
) -> Rank:
    """One process is server 0 and worker 0; psdist.ranks.server.serve_beside starts its server."""
    if isinstance(outcome, Resolved) and outcome.config.servers not in ("auto", 1):
        outcome = LaunchError(
            f"servers = {outcome.config.servers} with 1 rank, which is one server and one worker "
            "in one process; start more ranks (psdist run -n N, mpirun or srun) or leave servers "
            "out"
        )
    if isinstance(outcome, Resolved):
        outcome = unexpected_workers(num_workers, num_servers=0, num_ranks=1) or outcome
    if isinstance(outcome, Resolved) and outcome.config.replication == "buddy":
        outcome = ConfigError(
            "failures.replication = buddy with 1 rank, which is the only server: no other rank can "
            "have a replica; start more ranks, or set failures.replication = none"
        )
    if isinstance(outcome, UserError):
        print(f"psdist: error: {outcome}", file=sys.stderr, flush=True)
        raise AgreedExit(outcome.exit_status)
    alone = Place(
        rank=0,
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    roles = Roles(places=(alone,), server_ranks=(0,), worker_ranks=(0,), groups=((0,),))
    try:
        begun = create_run_directory(
            outcome, roles, {"plan.txt": _ALONE_TEXT.format(host=alone.host)}
        )
    except ConfigError as error:
        print(f"psdist: error: {error}", file=sys.stderr, flush=True)
        raise AgreedExit(error.exit_status) from None
    network, transport = network_alone()
    rank = Rank(
        Bootstrap(
            resolved=outcome,
            roles=roles,
            path=begun.path,
            started_s=started_s,
            attempt=begun.attempt,
            checkpoint=begun.checkpoint,
            tuning_state=begun.tuning_state,
        ),
        number=0,
        transport=transport,
        core_share=float(len(alone.cores)),
        network=network,
    )
    start_logs(begun.path, rank=0, who=rank.who_in_logs, setting=outcome.config.log)
    _log_choices(outcome)
    return rank
