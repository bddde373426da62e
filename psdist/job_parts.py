"""The parts of a Job that its settings and its rank's role determine.

device = device_of_job(session)
group = start_group(session, device)
loop = loop_of(session)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from psdist.config.codec_rounds import is_auto, is_controlled
from psdist.config.compatibility import reads_losses, refusal
from psdist.config.settings import RunConfig
from psdist.errors import ConfigError
from psdist.install.trials import takes_gpu_memory
from psdist.protocol.ids import worker_of
from psdist.ranks.seats.device import device_of
from psdist.ranks.session import JobSession
from psdist.workers.assembly import make_loop
from psdist.workers.group import tier as group_tier
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.meeting import Hosts
from psdist.workers.loop import WorkerLoop
from psdist.workers.progress_reports import Losses, ProgressReports
from psdist.workers.protocol import Seat
from psdist.workers.shrinking import GroupShrinker
from psdist.workers.trainer import Trainer

logger = logging.getLogger("psdist")


def seat_of(session: JobSession) -> Seat:
    """Return the place of this rank's worker in the job."""
    roles, worker = session.roles, worker_of(session.rank.me)
    group = roles.group_of_worker[worker]
    return Seat(
        worker=worker,
        group=group,
        members=roles.groups[group],
        num_servers=roles.num_servers,
        servers_have_buddies=session.survives_servers,
        num_spares=roles.num_spares,
        is_substitute=session.rank.is_substitute,
        group_reforms=session.reforms_groups,
    )


def device_of_job(session: JobSession) -> torch.device:
    """Return the device of this worker's model: its own GPU if every worker of the group has one,
    else the CPU. Collective over the group.

    Raises :class:`ConfigError` for a GPU in a job with spares for workers' places."""
    cpu = torch.device("cpu")
    device = cpu if session.rank.is_substitute else device_of(session)
    if device != cpu:
        script = {"workers on GPUs": "a worker on a GPU (CUDA_VISIBLE_DEVICES= hides it)"}
        if wrong := refusal(session.config, script=script):
            raise ConfigError(wrong)
    kinds = session.rank.comms.gather_in_group(device.type.encode())
    if device != cpu and len(set(kinds)) > 1:
        logger.warning(
            "this worker computes on the CPU, since others of its group have no GPU of their own, "
            "and a group reduces over one back end"
        )
        return cpu
    return device


def start_group(session: JobSession, device: torch.device) -> GroupChannel:
    """Return this worker's end of its group. Collective over the group."""
    seat, comms = seat_of(session), session.rank.comms
    mpi = None
    if comms.group is not None:
        mpi = group_tier.GroupMpi(comm=comms.group, takes_gpu_memory=takes_gpu_memory)
    return group_tier.start(
        session.config.group_tier,
        index=seat.members.index(seat.worker),
        size=len(seat.members),
        device=device,
        timeout_s=session.config.wait_timeout_s,
        broadcast=comms.broadcast_in_group,
        is_spinning=session.rank.waiting().is_spinning,
        hosts=_hosts_of(session, seat.group),
        mpi=mpi,
        reforms=session.reforms_groups,
    )


def let_group_shrink(
    session: JobSession,
    group: GroupChannel,
    loop: WorkerLoop,
    device: torch.device,
    trainers: Callable[[], Sequence[Trainer]],
) -> GroupChannel:
    """Return a channel of the group that continues without failed members, if the job allows it;
    else ``group``. ``trainers()``: the trainers of all parameter sets."""
    if not session.reforms_groups:
        return group
    seat = loop.core.seat
    formed = group_tier.shrinking(
        group,
        members=seat.members,
        device=device,
        timeout_s=session.config.wait_timeout_s,
        hosts=_hosts_of(session, seat.group),
    )
    if formed is None:
        return group
    channel, former = formed
    loop.on_turn = GroupShrinker(loop, channel, former, trainers=trainers).advance
    return channel


def _hosts_of(session: JobSession, group: int) -> Hosts | None:
    """Return the hosts of a group's workers; None if the group runs on one host."""
    rank, plan = session.rank, session.rank.bootstrap.plan
    names = session.roles.hosts_of_group(group)
    if len(set(names)) == 1:
        return None
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    planned = "" if plan is None else plan.ranks[rank.number].nic
    return Hosts(
        numbers=[numbers[name] for name in names],
        names=names,
        gather=rank.comms.gather_in_group,
        preferred=[each for each in (session.roles.places[rank.number].nic, planned) if each],
    )


def loop_of(session: JobSession) -> WorkerLoop:
    """Return the loop that sends and receives this worker's messages."""
    return make_loop(
        session.transport,
        seat_of(session),
        waiting=session.rank.waiting(),
        now_s=session.rank.now_s,
        describe_group=session.roles.describe_group,
        tracer=session.tracer,
        survives_workers=session.survives_workers,
        replace=session.replace,
        heard=session.heard,
    )


def losses_of(config: RunConfig) -> Losses:
    """Return the record of the losses that the script reports."""
    has_rollback = config.rollback is not None
    return Losses(
        skips_nonfinite=config.on_nonfinite == "skip",
        may_be_negative=config.steps_by != "loss" and not has_rollback,
        counts_nonfinite=has_rollback,
    )


def standing_of(session: JobSession, loop: WorkerLoop, losses: Losses) -> ProgressReports:
    """Return the reports of this worker's progress to the coordinator."""
    config = session.config
    return ProgressReports(
        loop.core.seat.worker,
        session.transport,
        now_s=session.rank.now_s,
        tells_rounds=is_controlled(config),
        leads=lambda: loop.core.seat.is_leader,
        tells_errors=is_auto(config),
        losses=losses if reads_losses(config) and is_auto(config) else None,
    )
