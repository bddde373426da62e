"""Network cards: which ones MPI uses, how fast they are, and how to confine a rank to one.

    ports = read_ports(Path("/"))             # what /sys says of the cards' ports
    variables(selectable(machine, ports)[:1], ports)    # {"UCX_NET_DEVICES": "mlx5_0:1", ...}

A rank may be confined to one of several cards only where every card reaches every other:
InfiniBand ports that are up and of one subnet, or Slingshot's. Between Ethernet cards, RoCE too,
the MPI library chooses: no file of the host says whether they are on one network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from psdist.topology.machine import Device, Machine, kernel_files, pci

# InfiniBand and RoCE, Omni-Path, Slingshot, EFA.
_FABRIC_NAMES: Final = ("mlx", "ib", "hfi", "opa", "hsi", "hsn", "cxi", "rdmap", "efa", "bnxt_re")
_RATE: Final = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?) Gb/sec\b")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_GID: Final = re.compile(r"(?:[0-9a-fA-F]{4}:){7}[0-9a-fA-F]{4}")
# An Omni-Path card is chosen by its number among those that PSM has found, not by a name, and PSM
# takes the nearest by itself.
_CHOSEN_BY_NUMBER: Final = ("hfi",)
VARIABLES: Final = (
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_openib_if_include",
    "FI_VERBS_DEVICE_NAME",
    "FI_CXI_DEVICE_NAME",
    "NCCL_IB_HCA",
)
"""All that :func:`variables` may name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of a card, by the name by which MPI libraries know the card."""

    device: str
    """``mlx5_0``, ``cxi1``."""
    number: int
    pci: str
    fabric: str
    """Ports with equal fabrics reach each other; "" if unknown."""
    is_slingshot: bool = False


def network_cards(machine: Machine) -> tuple[Device, ...]:
    """The cards that MPI will use: of a fast fabric if there are any, fastest first."""
    fast = fabric_cards(machine)
    return tuple(sorted(fast or machine.nics, key=lambda card: -card.speed))


def fabric_cards(machine: Machine) -> tuple[Device, ...]:
    return tuple(
        card for card in machine.nics if any(name.startswith(_FABRIC_NAMES) for name in card.names)
    )


def link_bytes_per_s(machine: Machine) -> float:
    """Bandwidth of the host's cards, one direction; 0 if the speed of one is not known.

    A fast fabric's cards count together; of others, maybe on several networks, the fastest counts.
    """
    fast = fabric_cards(machine)
    if fast:
        return sum(card.speed for card in fast) if all(card.speed for card in fast) else 0.0
    return max((card.speed for card in machine.nics), default=0.0)


def with_port_speed(device: Device, root: Path) -> Device:
    """Return the device with the rate of its ports that are up, from /sys below ``root``."""
    if device.kind != "nic" or not device.pci or device.port_bytes_per_s:
        return device
    folder = root / "sys/bus/pci/devices" / device.pci
    rates = [
        float(match[1]) * 1e9 / 8
        for path in kernel_files.entries(folder, "infiniband/*/ports/*/rate")
        if _is_up(path.parent) and (match := _RATE.match(kernel_files.text(path)))
    ]
    if not rates:
        speeds = (
            kernel_files.number(path / "speed") for path in kernel_files.entries(folder, "net/*")
        )
        rates = [speed * 1e6 / 8 for speed in speeds if speed is not None and 0 < speed < 10**7]
    return replace(device, port_bytes_per_s=float(sum(rates)))


def read_ports(root: Path) -> tuple[Port, ...]:
    """The ports that are up, of cards that MPI libraries know by name."""
    ports: list[Port] = []
    for device in kernel_files.entries(root / "sys/class/infiniband", "*"):
        bus = _bus_of(device)
        if not bus or not _NAME.fullmatch(device.name):
            continue
        for port in kernel_files.entries(device, "ports/*"):
            if port.name.isdecimal() and _is_up(port):
                fabric = _subnet(port)
                ports.append(
                    Port(device=device.name, number=int(port.name[:3]), pci=bus, fabric=fabric)
                )
    for device in kernel_files.entries(root / "sys/class/cxi", "*"):
        if (bus := _bus_of(device)) and _NAME.fullmatch(device.name):
            ports.append(
                Port(device=device.name, number=1, pci=bus, fabric="slingshot", is_slingshot=True)
            )
    return tuple(ports)


def _bus_of(device: Path) -> str:
    try:
        return pci.bus_id((device / "device").resolve().name)
    except OSError:
        return ""


def _is_up(port: Path) -> bool:
    state = kernel_files.text(port / "state")
    return not state or state.endswith("ACTIVE")


def _subnet(port: Path) -> str:
    gid = kernel_files.text(port / "gids/0")
    if kernel_files.text(port / "link_layer") != "InfiniBand" or not _GID.fullmatch(gid):
        return ""
    return gid.replace(":", "")[:16].lower()


def selectable(machine: Machine, ports: Sequence[Port]) -> tuple[Device, ...]:
    """Return the cards if each reaches what the others reach; () if that is uncertain for one."""
    known = {port.pci: port for port in ports}
    cards = tuple(card for card in fabric_cards(machine) if card.pci in known)
    fabrics = {port.fabric for port in ports}
    if len(cards) < 2 or len(fabrics) != 1 or "" in fabrics:
        return ()
    if any(port.device.startswith(_CHOSEN_BY_NUMBER) for port in ports):
        return ()
    return cards


def variables(chosen: Sequence[Device], ports: Sequence[Port]) -> Mapping[str, str]:
    """Return variables, set before the start, that confine MPI (UCX, Open MPI 4, libfabric) and
    NCCL to cards."""
    mine = [port for card in chosen for port in ports if port.pci == card.pci]
    names = list(dict.fromkeys(port.device for port in mine))
    if not mine:
        return {}
    if mine[0].is_slingshot:
        return {"FI_CXI_DEVICE_NAME": ",".join(names)}
    each = [f"{port.device}:{port.number}" for port in mine]
    found = {
        "UCX_NET_DEVICES": ",".join(each),
        "OMPI_MCA_btl_openib_if_include": ",".join(each),
        "NCCL_IB_HCA": "=" + ",".join(each),
    }
    if len(names) == 1:  # that one takes no list
        found["FI_VERBS_DEVICE_NAME"] = names[0]
    return found
