"""Monitor whether the hosts of this job still reach each other.

    hosts = HostWatch.begin(comm, roles, hubs=[COORDINATOR], ...)     # collective
    hosts.verdict        # on the coordinator: why the job ends, or None
    hosts.close()

Every rank connects to the hubs (psdist.reach): the coordinator, and with replication its standby,
unless it shares their host. Only the coordinator decides that the job ends. A rank that has lost
all its hubs ends itself after the same time, because it can receive no message. So no rank that is
cut off continues, and no other rank waits for it.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgpack

from psdist.protocol.roles import Roles
from psdist.ranks.agreement import allgather
from psdist.reach import Rank, Watch
from psdist.reach.greeting import KEY_BYTES
from psdist.reach.hub import Hub
from psdist.reach.member import HubAt, Member
from psdist.workers.group.addresses import HINTS, offer

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("psdist")


class Ends(Protocol):
    def __call__(self, text: str, *, is_told: bool) -> NoReturn:
        """End this process, from any thread."""
        ...


class HostWatch:
    def __init__(self) -> None:
        self._hub: Hub | None = None
        self._member: Member | None = None

    @classmethod
    def begin(
        cls,
        comm: MPI.Intracomm,
        roles: Roles,
        *,
        hubs: Sequence[int],
        timeout_s: float,
        dead: Callable[[], Collection[int]],
        decides: Callable[[], bool],
        end: Ends,
    ) -> HostWatch:
        """``hubs``: the stable ids of the coordinator and its standby; ``dead()``: the ids of
        failed ranks; ``decides()``: True if this rank is the coordinator now. Collective over
        ``comm``."""
        made, rank = cls(), comm.Get_rank()
        hub_ranks = [roles.rank_of_peer[peer] for peer in hubs]
        places = roles.places
        host = places[rank].host
        others = {
            place.rank: Rank(place.host, roles.describe_rank(place.rank))
            for place in places
            if place.host != host
        }
        is_first = rank == min(place.rank for place in places if place.host == host)

        def known() -> set[int]:
            return {roles.rank_of_peer[peer] for peer in dead()}

        mine = b""
        if rank in hub_ranks:
            key = secrets.token_bytes(KEY_BYTES)
            try:
                made._hub = Hub(
                    Watch(others, host=host, timeout_s=timeout_s, is_hub=True),
                    key=key,
                    num_lines=len(others),
                    timeout_s=timeout_s,
                    known=known,
                    decides=decides,
                    on_verdict=lambda text: end(text, is_told=True),
                )
            except OSError as error:
                logger.warning("host monitoring disabled: cannot open a listening port: %s", error)
            else:
                mine = msgpack.packb([_addresses(host), made._hub.port, key])
        table = allgather(comm, mine)
        lines = {
            each: HubAt(*msgpack.unpackb(table[each]))
            for each in hub_ranks
            if each in others and table[each]
        }
        if lines:
            made._member = Member(
                Watch(
                    {each: others[each] for each in lines},
                    host=host,
                    timeout_s=timeout_s,
                    is_hub=False,
                    # A computing rank notices late that the job survives a failed hub.
                    outlives_hubs=len(hubs) > 1,
                ),
                lines,
                rank=rank,
                timeout_s=timeout_s,
                known=known,
                on_verdict=lambda text: end(text, is_told=is_first),
            )
        return made

    @property
    def verdict(self) -> str | None:
        """On the coordinator: which host is cut off, or which rank has ended without a message;
        None if all hosts are connected."""
        return self._hub.verdict if self._hub is not None else None

    def close(self) -> None:
        """End the monitor before this process ends as planned."""
        for each in (self._member, self._hub):
            if each is not None:
                each.close()


def _addresses(host: str) -> list[str]:
    """Return addresses of this host, the most likely one first."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    hints = [os.environ[name] for name in HINTS if os.environ.get(name)]
    found = offer(host=host, wanted=wanted, preferred=hints).addresses
    named = [each for each in found if not wanted or each.interface in wanted.split(",")]
    return [each.ip for each in sorted(named, key=lambda each: each.rank)] or [host]
