"""The network of the Slurm test cluster: namespaces that are hosts, and the bridge between them.

Owns: the hosts' names and addresses, their links and how fast those are, their lines in /etc/hosts.
Knows nothing of Slurm. Needs root and iproute2; standard library only.

    network.build(owner)
    network.limit("1gbit")
    network.processes_in("h1")
    network.remove(owner)
"""

from __future__ import annotations

import subprocess
from pathlib import Path

RACKS = {"rack1": ("h1", "h2"), "rack2": ("h3", "h4")}
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


def build(owner: Path) -> None:
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
    _ip(f"link add {BRIDGE} type bridge")
    _ip(f"address add {BRIDGE_ADDRESS}/24 dev {BRIDGE}")
    _ip(f"link set {BRIDGE} up")
    for host in HOSTS:
        inside = namespace(host)
        _ip(f"netns add {inside}")
        _ip(f"link add {_outer_link(host)} type veth peer name eth0 netns {inside}")
        _ip(f"link set {_outer_link(host)} master {BRIDGE} up")
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
        _ip(f"link delete {_outer_link(host)}", check=False)
    _ip(f"link delete {BRIDGE}", check=False)
    if NAMES_BEGIN in NAMES.read_text():
        NAMES.write_text("\n".join(_names_without_block()) + "\n")
    OWNER.unlink(missing_ok=True)


def other_owner(owner: Path) -> str | None:
    """The state directory of another cluster that has the network, if there is one."""
    seen = OWNER.read_text().strip() if OWNER.exists() else str(owner)
    return None if seen == str(owner) else seen


def limit(rate: str | None) -> None:
    """Limit each host's link, in both directions, to such as "1gbit"; None is no limit."""
    # Both ends of each link: what a host sends leaves by its eth0, what it gets by the other.
    inner = [(f"-netns {namespace(host)}", "eth0") for host in HOSTS]
    outer = [("", _outer_link(host)) for host in HOSTS]
    for where, device in inner + outer:
        _tc(f"{where} qdisc delete dev {device} root", check=False)
        if rate is not None:
            # The burst holds the largest packet that segmentation offload makes.
            shaper = f"tbf rate {rate} burst 256kb latency 100ms"
            _tc(f"{where} qdisc add dev {device} root {shaper}")


def describe_link(host: str) -> str:
    """Its address and limit: "10.77.0.1, link limited to 1Gbit"."""
    words = _tc(f"-netns {namespace(host)} qdisc show dev eth0", check=False).split()
    rate = f"link limited to {words[words.index('rate') + 1]}" if "rate" in words else "link"
    return f"{address(host)}, {rate}"


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
