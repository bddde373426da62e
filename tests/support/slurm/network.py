"""The network of the Slurm test cluster: namespaces that are hosts, and the switches above them.

    h1  h2      h3  h4        a host's link: a veth pair, eth0 inside it and psdist-h1 outside
                              (with racks of 3+1: h1 h2 h3, h4)
    psdist-rack1  psdist-rack2    bridges; their uplinks: psdist-rack1-up, psdist-to-rack1
          psdist0                 the spine, with the controller's address

Owns: the hosts' names and addresses, all links, how fast they are and what they have carried, and
the hosts' lines in /etc/hosts. Knows nothing of Slurm. Needs root and iproute2; standard library
only.

    network.build(owner, RACKS)
    network.limit("1gbit", uplink=("500mbit", "250mbit"))
    with network.cut("h3", "down"): ...
    sent, received = network.counted_bytes()["rack1"]
    network.remove(owner)
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Cut = Literal["down", "cable", "silent"]
"""A host's interface taken down, its cable pulled, or all its packets dropped on the way."""

RACKS = {"rack1": ("h1", "h2"), "rack2": ("h3", "h4")}
"""The usual ones, 2+2; names of racks and hosts are the same in all layouts."""
HOSTS = tuple(host for hosts in RACKS.values() for host in hosts)
NETWORK = "10.77.0"
BRIDGE = "psdist0"
BRIDGE_ADDRESS = f"{NETWORK}.254"
NAMES = Path("/etc/hosts")
NAMES_BEGIN, NAMES_END = "# psdist test cluster: begin", "# psdist test cluster: end"
# Names and addresses are the machine's: it has room for one such network, and its owner is here.
OWNER = Path("/run/psdist-cluster")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(Exception):
    """The cluster could not be brought up; the text says what failed and where the logs are."""


def racks_of(sizes: str) -> dict[str, tuple[str, ...]]:
    """The hosts of each rack: "2+2" is RACKS, "3+1" has h4 alone. Raises ClusterError."""
    words = sizes.split("+")
    if len(words) != len(RACKS) or not all(word.isdecimal() and int(word) for word in words):
        raise ClusterError(f"racks of {sizes}: write two numbers of hosts, such as 3+1")
    if sum(map(int, words)) != len(HOSTS):
        raise ClusterError(f"racks of {sizes}: there are {len(HOSTS)} hosts")
    first = int(words[0])
    return dict(zip(RACKS, (HOSTS[:first], HOSTS[first:]), strict=True))


def build(owner: Path, racks: Mapping[str, Sequence[str]]) -> None:
    """Make the bridge and the hosts; `owner` is the state directory of the cluster they are for.

    Raises ClusterError where another cluster has them.
    """
    if (other := other_owner(owner)) is not None:
        raise ClusterError(
            f"the machine has room for one cluster, and that of {other} is up: "
            f"PSDIST_CLUSTER_DIR={other} tests/cluster down"
        )
    OWNER.write_text(f"{owner}\n")
    kept = _names_without_block()
    block = [NAMES_BEGIN, *(f"{address(host)} {host}" for host in HOSTS), NAMES_END]
    # Written in place: in a container /etc/hosts is a mount and cannot be replaced.
    NAMES.write_text("\n".join([*kept, *block]) + "\n")
    _add_bridge(BRIDGE)
    _ip(f"address add {BRIDGE_ADDRESS}/24 dev {BRIDGE}")
    for rack, hosts in racks.items():
        _add_bridge(_rack_bridge(rack))
        _ip(f"link add {_rack_end(rack)} type veth peer name {_spine_end(rack)}")
        _ip(f"link set {_rack_end(rack)} master {_rack_bridge(rack)} up")
        _ip(f"link set {_spine_end(rack)} master {BRIDGE} up")
        for host in hosts:
            inside = namespace(host)
            _ip(f"netns add {inside}")
            _ip(f"link add {_outer_link(host)} type veth peer name eth0 netns {inside}")
            _ip(f"link set {_outer_link(host)} master {_rack_bridge(rack)} up")
            _ip(f"-netns {inside} address add {address(host)}/24 dev eth0")
            _ip(f"-netns {inside} link set eth0 up")
            # MPI and gloo use it between the ranks of a host.
            _ip(f"-netns {inside} link set lo up")


def remove(owner: Path) -> None:
    """Remove what `build` made, also half of it; nothing where another cluster made it."""
    if other_owner(owner) is not None:
        return
    for host in HOSTS:
        if _exists(host):
            _ip(f"netns delete {namespace(host)}")
    # Deleting a namespace deletes its links some time later; here they must be gone now.
    for device in _devices():
        _ip(f"link delete {device}", check=False)
    if NAMES_BEGIN in NAMES.read_text():
        NAMES.write_text("\n".join(_names_without_block()) + "\n")
    OWNER.unlink(missing_ok=True)


def is_complete() -> bool:
    """Whether everything `build` makes is there: not half of it, nor an older layout."""
    return all(map(_exists, HOSTS)) and all(
        Path("/sys/class/net", device).exists() for device in _devices()
    )


def other_owner(owner: Path) -> str | None:
    """The state directory of another cluster that has the network, if there is one."""
    seen = OWNER.read_text().strip() if OWNER.exists() else str(owner)
    return None if seen == str(owner) else seen


def limit(rate: str | None, uplink: str | Sequence[str | None] | None = None) -> None:
    """Limit each host's link to `rate` and each rack's uplink to `uplink`, such as "1gbit".

    Both directions, each for itself; None is no limit. Several uplinks are one for each rack.
    """
    # Both ends of each link: what a host sends leaves by its eth0, what it gets by the other.
    for host in HOSTS:
        _shape(f"-netns {namespace(host)}", "eth0", rate)
        _shape("", _outer_link(host), rate)
    for rack, each in zip(RACKS, uplinks_of(uplink), strict=True):
        _shape("", _rack_end(rack), each)
        _shape("", _spine_end(rack), each)


def uplinks_of(uplink: str | Sequence[str | None] | None) -> list[str | None]:
    """The limit of each rack's uplink; one is that of all. Raises ClusterError."""
    if uplink is None or isinstance(uplink, str):
        return [uplink] * len(RACKS)
    if len(uplink) != len(RACKS):
        raise ClusterError(f"{len(uplink)} uplinks for {len(RACKS)} racks: give one, or one each")
    return list(uplink)


def limits() -> tuple[str | None, list[str | None]]:
    """The limits of the hosts' links and of the racks' uplinks, as `limit` takes them."""
    return (
        _limit_of(f"-netns {namespace(HOSTS[0])}", "eth0"),
        [_limit_of("", _rack_end(rack)) for rack in RACKS],
    )


def counted_bytes() -> dict[str, tuple[int, int]]:
    """Bytes on each link since it was made: (sent, received), of hosts and of racks.

    A host's are those of its eth0, a rack's those of its uplink: sent is what went up. With the
    headers of packets, of which segmentation offload makes few.
    """
    counted = {host: _carried(f"-netns {namespace(host)}", "eth0") for host in HOSTS}
    return {**counted, **{rack: _carried("", _rack_end(rack)) for rack in RACKS}}


@contextmanager
def cut(name: str, how: Cut) -> Iterator[None]:
    """A host, or with "silent" a rack, that nothing reaches and that reaches nothing."""
    device = _spine_end(name) if name in RACKS else _outer_link(name)
    if how == "silent":
        bridge = Path("/sys/class/net", device, "master").resolve().name
        away, back = f"link set {device} nomaster", f"link set {device} master {bridge}"
    else:
        link = f"-netns {namespace(name)} link set eth0" if how == "down" else f"link set {device}"
        away, back = f"{link} down", f"{link} up"
    _ip(away)
    try:
        yield
    finally:
        _ip(back)


def describe_link(name: str) -> str:
    """Describe a host's link, "10.77.0.1, link limited to 1Gbit", or a rack's, "uplink limited to
    500Mbit"."""
    if name in RACKS:
        link, rate = "uplink", _limit_of("", _rack_end(name))
    else:
        link = f"{address(name)}, link"
        rate = _limit_of(f"-netns {namespace(name)}", "eth0")
    return link if rate is None else f"{link} limited to {rate}"


def processes_in(host: str) -> list[int]:
    """The pids of all processes whose network is that host's."""
    if not _exists(host):
        return []
    return [int(word) for word in _ip(f"netns pids {namespace(host)}").split()]


def address(host: str) -> str:
    return f"{NETWORK}.{HOSTS.index(host) + 1}"


def namespace(host: str) -> str:
    """The network namespace that is the host: /run/netns/<this>."""
    return f"psdist-{host}"


def run(
    *argv: str,
    check: bool = True,
    env: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> subprocess.CompletedProcess[str]:
    """Run a system command; with `check`, ClusterError where it fails."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env or {"PATH": SYSTEM_PATH},
        check=False,
    )
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done


def _outer_link(host: str) -> str:
    return f"psdist-{host}"


def _rack_bridge(rack: str) -> str:
    return f"psdist-{rack}"


def _rack_end(rack: str) -> str:
    return f"psdist-{rack}-up"


def _spine_end(rack: str) -> str:
    return f"psdist-to-{rack}"


def _devices() -> list[str]:
    """All network devices on the machine's side."""
    made = [_outer_link(host) for host in HOSTS]
    for rack in RACKS:
        made += [_rack_end(rack), _spine_end(rack), _rack_bridge(rack)]
    return [*made, BRIDGE]


def _add_bridge(name: str) -> None:
    _ip(f"link add {name} type bridge")
    _ip(f"link set {name} up")


def _shape(where: str, device: str, rate: str | None) -> None:
    _tc(f"{where} qdisc delete dev {device} root", check=False)
    if rate is not None:
        # The burst holds the largest packet that segmentation offload makes.
        _tc(f"{where} qdisc add dev {device} root tbf rate {rate} burst 256kb latency 100ms")


def _limit_of(where: str, device: str) -> str | None:
    words = _tc(f"{where} qdisc show dev {device}", check=False).split()
    return words[words.index("rate") + 1] if "rate" in words else None


def _carried(where: str, device: str) -> tuple[int, int]:
    shown = json.loads(_ip(f"-json -statistics {where} link show dev {device}"))
    counters = shown[0]["stats64"]
    return int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"])


def _exists(host: str) -> bool:
    return Path("/run/netns", namespace(host)).exists()


def _names_without_block() -> list[str]:
    kept, inside = [], False
    for line in NAMES.read_text().splitlines():
        if line == NAMES_BEGIN:
            inside = True
        elif line == NAMES_END:
            inside = False
        elif not inside:
            kept.append(line)
    return kept


def _ip(arguments: str, *, check: bool = True) -> str:
    return run("ip", *arguments.split(), check=check).stdout


def _tc(arguments: str, *, check: bool = True) -> str:
    return run("tc", *arguments.split(), check=check).stdout
