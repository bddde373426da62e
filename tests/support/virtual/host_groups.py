"""Groups of several hosts on the virtual network: each host's own group, and the whole one.

channels = over_hosts(network, members, [0, 0, 1, 1], seed=7, link=LinkModel())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psdist.workers.group.channel import AloneChannel, GroupChannel, Pending, Slices
from psdist.workers.group.two_levels import TwoLevelChannel
from tests.support.virtual.group import VirtualChannel, VirtualGroup
from tests.support.virtual.network import LinkModel, VirtualNetwork


class _OfHost(VirtualChannel):
    """The end of a host's own group: what was lent to it is returned when the whole group's next
    operation is done, which is not one of its own."""

    def reduce_scatter(
        self, flats: Any, slices: Slices, sums: Sequence[torch.Tensor] | None = None
    ) -> Pending[None]:
        pending = super().reduce_scatter(flats, slices, sums)
        self._lent = None
        return pending

    def duplicate(self) -> _OfHost:
        return _OfHost(self._group.duplicate(), self.place, self.size)


def over_hosts(
    network: VirtualNetwork,
    members: Sequence[int],
    hosts: Sequence[int],
    *,
    seed: int,
    link: LinkModel,
    over: type[VirtualChannel] = VirtualChannel,
) -> list[TwoLevelChannel]:
    """Every worker's end; ``members`` are stable ids, ``hosts`` the numbers of their hosts."""
    whole = VirtualGroup(network, members, seed=seed, link=link)
    places = {host: [p for p, at in enumerate(hosts) if at == host] for host in hosts}
    groups = {
        host: VirtualGroup(network, [members[p] for p in here], seed=seed + 1 + host, link=link)
        for host, here in places.items()
    }
    channels = []
    for place, host in enumerate(hosts):
        here = places[host]
        inner: GroupChannel = AloneChannel()
        if len(here) > 1:
            inner = _OfHost(groups[host], here.index(place), len(here))
        end = over(whole, place, len(hosts))
        channels.append(TwoLevelChannel(inner, end, hosts=hosts))
    return channels
