"""Which device a worker computes on: the GPU of its plan, or the CPU.

device = device_of(context)       # cuda:1; also torch's current device from then on
"""

from __future__ import annotations

import torch

from psdist.ranks.context import RankContext
from psdist.topology.machine.gpus import torch_bus_id


def device_of(context: RankContext) -> torch.device:
    """A GPU of this worker's own where the host has one for every worker on it, else the CPU.

    The plan's GPU is found by its PCI bus id; where the plan knows of none, by order.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    places, roles = context.roles.places, context.roles
    host = places[context.rank].host
    here = [rank for rank in roles.worker_ranks if places[rank].host == host]
    planned = [context.plan.ranks[rank].gpu for rank in here] if context.plan is not None else []
    index = None
    if planned and all(planned):
        if len(set(planned)) < len(planned):
            return torch.device("cpu")
        bus_id = planned[here.index(context.rank)]
        buses = [
            torch_bus_id(torch.cuda.get_device_properties(number))
            for number in range(torch.cuda.device_count())
        ]
        if bus_id in buses:
            index = buses.index(bus_id)
        elif set(planned) & set(buses):
            return torch.device("cpu")  # by order this worker might take another one's
    if index is None:
        if torch.cuda.device_count() < len(here):
            return torch.device("cpu")
        index = here.index(context.rank)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
