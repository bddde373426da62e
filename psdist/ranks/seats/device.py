"""Which device a worker computes on, the GPU of its plan or the CPU; and where a server's shard is.

device = device_of(session)       # cuda:1; also torch's current device from then on
shard_device_of(session)          # by the setting server_device
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from psdist.errors import ConfigError
from psdist.ranks.session import JobSession
from psdist.topology.machine.gpus import torch_bus_id

logger = logging.getLogger("psdist")

_FEWER: Final = (
    "start no more workers on a host than it has GPUs, or hide these (CUDA_VISIBLE_DEVICES=)"
)


def device_of(session: JobSession) -> torch.device:
    """A GPU of this worker's own where the host has one for every worker on it, else the CPU.

    The plan's GPU is found by its PCI bus id; where the plan knows of none, by order. Where torch
    sees GPUs and the worker has none, the log says why.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    places, roles = session.roles.places, session.roles
    host = places[session.rank.number].host
    here = [rank for rank in roles.worker_ranks if places[rank].host == host]
    planned = (
        [session.rank.bootstrap.plan.ranks[rank].gpu for rank in here]
        if session.rank.bootstrap.plan is not None
        else []
    )
    index = None
    if planned and all(planned):
        if len(set(planned)) < len(planned):
            return _the_cpu(
                f"the plan has {len(here)} workers on {host}, and some share a GPU; {_FEWER}"
            )
        bus_id = planned[here.index(session.rank.number)]
        buses = _buses()
        if bus_id in buses:
            index = buses.index(bus_id)
        elif set(planned) & set(buses):
            # By order this worker might take another one's.
            return _the_cpu(
                f"torch does not see {bus_id}, the one that the plan gives this worker, but others "
                "that the plan knows; make the plan with what jobs see, or leave "
                "CUDA_VISIBLE_DEVICES to it"
            )
    if index is None:
        if (number := torch.cuda.device_count()) < len(here):
            return _the_cpu(f"{len(here)} workers are on {host}, and torch sees {number}; {_FEWER}")
        index = here.index(session.rank.number)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _the_cpu(why: str) -> torch.device:
    logger.warning("this worker computes on the CPU, though torch sees GPUs: %s", why)
    return torch.device("cpu")


def shard_device_of(session: JobSession) -> torch.device:
    """Where this server's shard lies. Servers of a host take turns at its GPUs, with "auto" at
    those that no worker there has; where there is none of those, the CPU.

    Raises :class:`ConfigError` where there is no such GPU.
    """
    wanted = session.config.server_device
    if wanted == "cpu":
        return torch.device("cpu")
    places, roles = session.roles.places, session.roles
    host = places[session.rank.number].host
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = list(range(number))
    if wanted == "auto":
        usable = _without_those_of_workers(session, host, usable)
    elif ":" in wanted:
        usable = [each for each in usable if wanted == f"cuda:{each}"]
    if not usable and wanted != "auto":
        seen = f"no GPU but cuda:0 to cuda:{number - 1}" if number else "no GPU"
        raise ConfigError(
            f"hosts.server_device = {wanted}: torch sees {seen} on {host}, where rank "
            f"{session.rank.number} serves; set hosts.server_device = cpu, or auto, which takes "
            "what is there"
        )
    device = torch.device("cpu")
    if usable:
        here = [rank for rank in roles.server_ranks if places[rank].host == host]
        device = torch.device("cuda", usable[here.index(session.rank.number) % len(usable)])
    logger.info("this server's shard is on %s (hosts.server_device = %s)", device, wanted)
    return device


def _without_those_of_workers(session: JobSession, host: str, numbers: list[int]) -> list[int]:
    workers = [
        rank for rank in session.roles.worker_ranks if session.roles.places[rank].host == host
    ]
    plan = session.rank.bootstrap.plan
    taken = {plan.ranks[rank].gpu for rank in workers} if plan is not None and numbers else set()
    buses = _buses() if numbers else []
    if taken & set(buses):
        return [number for number in numbers if buses[number] not in taken]
    return numbers[len(workers) :]


def _buses() -> list[str]:
    """PCI bus ids of the GPUs that torch sees, in its order."""
    return [
        torch_bus_id(torch.cuda.get_device_properties(number))
        for number in range(torch.cuda.device_count())
    ]
