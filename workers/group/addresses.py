"""The network interface of a group's workers on different hosts, chosen before they connect.

    mine = offer(host="h3", wanted=os.environ.get("GLOO_SOCKET_IFNAME", ""), preferred=["ib0"])
    at = choose([Offer.decode(row) for row in table], hosts, place)       # At("eth0", "10.0.0.3")

Every worker offers the addresses of its host, and all choose by the same rule. An interface that
the user names (GLOO_SOCKET_IFNAME) comes first. Otherwise it is an interface of a network in which
every host of the group has its own address (a bridge for containers has the same one everywhere):
first those that MPI or the plan uses, then the fastest. Without a common network, as between
routers, it is the interface by which the kernel reaches the leader. :func:`unreachable` tests it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from psdist.errors import UsageError

_SIOCGIFADDR, _SIOCGIFNETMASK, _SIOCGIFFLAGS = 0x8915, 0x891B, 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
REMEDY: Final = "GLOO_SOCKET_IFNAME=NAME, set where the job starts, names the interface to use"
HINTS: Final = ("OMPI_MCA_btl_tcp_if_include", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
"""Environment variables that name interfaces or networks for MPI or NCCL."""


class Address(NamedTuple):
    """An IPv4 address of this host."""

    interface: str
    ip: str
    network: str
    """``10.0.0.0/24``."""
    rank: int
    """Lower is better."""


class Offer(NamedTuple):
    host: str
    wanted: str
    """Interfaces that the user names, separated by commas; "" for none."""
    addresses: list[Address]

    def encode(self) -> bytes:
        return json.dumps(self).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        host, wanted, addresses = json.loads(data)
        return cls(host, wanted, [Address(*each) for each in addresses])


class At(NamedTuple):
    """The address at which a worker can be reached."""

    interface: str
    ip: str


def offer(*, host: str, wanted: str, preferred: Iterable[str] = ()) -> Offer:
    """``preferred``: interfaces, cards or networks that MPI or the plan uses."""
    hints = [hint for each in preferred for hint in _interfaces_of(each)]
    found: list[Address] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode("ascii", "replace")[:15])
            try:
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                ip = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(probe, _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # it has no such address
            if not flags & _IFF_UP or (flags & _IFF_LOOPBACK and name not in wanted.split(",")):
                continue
            words = f"{socket.inet_ntoa(ip)}/{socket.inet_ntoa(mask)}"
            network = str(ipaddress.ip_network(words, strict=False))
            is_hinted = name in hints or any(_is_in(socket.inet_ntoa(ip), hint) for hint in hints)
            rank = -1_000_000_000 * is_hinted - _megabits(name)
            found.append(Address(name, socket.inet_ntoa(ip), network, rank))
    return Offer(host, wanted, found)


def choose(offers: Sequence[Offer], hosts: Sequence[int], place: int) -> At:
    """Return the address of the worker at ``place``; ``hosts``: for each place the number of its
    host. Raises :class:`UsageError`, on all workers or on those without the named interface.
    """
    mine = offers[place]
    if mine.wanted:
        names = mine.wanted.split(",")
        at = [each for each in mine.addresses if each.interface in names]
        if not at:
            have = ", ".join(sorted({each.interface for each in mine.addresses})) or "none"
            raise UsageError(
                f"GLOO_SOCKET_IFNAME={mine.wanted}: {mine.host} has no such interface with an IPv4 "
                f"address ({have}); name one that each host of the group has, or none"
            )
        return At(mine.wanted, min(at, key=lambda each: names.index(each.interface)).ip)
    owners: dict[str, set[int]] = {}
    for each, host in zip(offers, hosts, strict=True):
        for address in each.addresses:
            owners.setdefault(address.ip, set()).add(host)
    own = [[each for each in their.addresses if len(owners[each.ip]) == 1] for their in offers]
    common = set.intersection(*({each.network for each in their} for their in own))
    if common:
        # By the leader's order, so that all choose the same one.
        network = min(
            (each for each in own[0] if each.network in common),
            key=lambda each: (each.rank, each.network),
        ).network
        best = min(each for each in own[place] if each.network == network)
        return At(best.interface, best.ip)
    if not own[0]:
        raise UsageError(
            f"a group over {', '.join(dict.fromkeys(each.host for each in offers))}: "
            f"{offers[0].host} has no address of its own that others could reach; {REMEDY}"
        )
    leader = min(own[0], key=lambda each: (each.rank, each.ip))
    if hosts[place] == hosts[0]:
        return At(leader.interface, leader.ip)
    ip = _source_of(leader.ip)
    interface = next((each.interface for each in mine.addresses if each.ip == ip), "")
    if not interface:
        raise UsageError(
            f"a group over several hosts: {mine.host} has no route to {leader.ip} of "
            f"{offers[0].host}; {REMEDY}"
        )
    return At(interface, ip)


def listen(at: At) -> socket.socket:
    """Open a socket that others can reach. Raises :class:`OSError`."""
    return socket.create_server((at.ip, 0), backlog=socket.SOMAXCONN)


def unreachable(host: str, there: tuple[str, int], at: At, timeout_s: float) -> str:
    """Return why ``there``, on ``host``, cannot be reached from here; "" if it can."""
    try:
        with socket.create_connection(there, timeout=timeout_s, source_address=(at.ip, 0)):
            return ""
    except OSError as error:
        return f"{host} at {there[0]} cannot be reached over {at.interface} ({at.ip}): {error}"


def _source_of(ip: str) -> str:
    """Return the address of this host that the kernel would use to reach ``ip``, without
    sending."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((ip, 9))
        return str(probe.getsockname()[0])
    return ""


def _interfaces_of(hint: str) -> list[str]:
    """Return ``mlx5_0`` and the card's interfaces for ``mlx5_0:1``; both for
    ``eth0,10.0.0.0/8``."""
    found: list[str] = []
    for word in hint.split(","):
        name = word.partition(":")[0].strip()
        if name:
            found.append(name)
            with suppress(OSError):
                folder = Path("/sys/class/infiniband", name.replace("/", "_"), "device", "net")
                found += sorted(each.name for each in folder.iterdir())
    return found


def _is_in(ip: str, network: str) -> bool:
    if "/" not in network:
        return False
    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _megabits(interface: str) -> int:
    """Return the speed of the link; 0 if the kernel does not report it."""
    with suppress(OSError, ValueError):
        return max(0, int(Path("/sys/class/net", interface, "speed").read_text(encoding="ascii")))
    return 0
