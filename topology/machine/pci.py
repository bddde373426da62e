"""Interpret PCI numbers: which function is a GPU or a network card, and how fast it is.

kind(0x0302, vendor=0x10DE, device=0x1DB8)                  # 'gpu'
link_bytes_per_s("16.0 GT/s PCIe", "16")                    # 31.5e9
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["gpu", "nic"]
MAX_DEVICES: Final = 4096
"""Maximum devices of a machine; more are left out."""
MAX_NAMED: Final = 8
"""Devices in a note."""
MAX_BRIDGES: Final = 16
"""Levels of them above a device; deeper ones are as one."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
"""Valid device names."""
_GID: Final = re.compile(r"(?:[0-9a-fA-F]{4}:){7}[0-9a-fA-F]{4}")

_BUS_ID: Final = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_SPEED: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?) ?GT/s")

_DISPLAY: Final = 0x03
_VGA, _3D, _OTHER_DISPLAY = 0x0300, 0x0302, 0x0380
# VGA controllers of AMD, NVIDIA and Intel compute as well; those of other vendors only draw.
_COMPUTE_VENDORS: Final = frozenset({0x1002, 0x10DE, 0x8086})
_NETWORK: Final = 0x02
# The display chips of management controllers and of virtual machines draw a console and compute
# nothing; a worker given one as its GPU would fail.
_CONSOLE_VENDORS: Final = frozenset(
    {0x102B, 0x1A03, 0x126F, 0x19E5, 0x1013, 0x1234, 0x15AD, 0x1AF4, 0x1B36, 0x18CA, 0x80EE, 0x1414}
)
_CONSOLE_CHIPS: Final = frozenset({(0x1002, 0x515E), (0x1002, 0x4752)})


def bus_id(text: str) -> str:
    """Domain of four digits or more, lower case; "" for text that is no PCI bus id."""
    match = _BUS_ID.fullmatch(text.strip().lower())
    if not match:
        return ""
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}"


def kind(pci_class: int, *, vendor: int, device: int) -> Kind | None:
    """By the class (16 bits, as 0x0302) of a function; None for what is neither."""
    if pci_class >> 8 == _NETWORK:
        return "nic"
    is_console = vendor in _CONSOLE_VENDORS or (vendor, device) in _CONSOLE_CHIPS
    is_compute = pci_class in (_3D, _OTHER_DISPLAY) or (
        pci_class == _VGA and vendor in _COMPUTE_VENDORS
    )
    return "gpu" if is_compute and not is_console else None


def is_display(pci_class: int, *, vendor: int, device: int) -> bool:
    """Whether the function draws a picture and is no GPU that could compute."""
    return pci_class >> 8 == _DISPLAY and kind(pci_class, vendor=vendor, device=device) is None


def device_notes(screens: Sequence[str], num_idle: int) -> list[str]:
    """Return what people are told of devices that were left out: those that only draw, by names or
    PCI bus ids, and network functions that no driver has made a device of.

    A card may show hundreds of virtual functions, for virtual machines; those carry no traffic of
    this host's.
    """
    notes = []
    if screens:
        listed = ", ".join(screens[:MAX_NAMED])
        notes.append(f"for display only, no GPU to compute on: {listed}")
    if num_idle:
        notes.append(f"{num_idle} network functions without a driver (virtual ones) left out")
    return notes


def guid_of(gid: str) -> int:
    """Return the GUID of a port, the lower half of its first GID; 0 for text that is no GID."""
    return int(gid.replace(":", "")[16:], 16) if _GID.fullmatch(gid) else 0


def link_bytes_per_s(speed: str, width: str) -> float:
    """One direction, after the line code: 8b/10b below 8 GT/s, 128b/130b from there on (PCIe).

    ``speed`` and ``width`` as /sys has them; 0.0 where /sys has ``Unknown``.
    """
    match = _SPEED.match(speed)
    if not match or not (width.isascii() and width.isdecimal() and len(width) < 4):
        return 0.0
    transfers = float(match[1])
    payload = 128 / 130 if transfers >= 8 else 8 / 10
    lanes = int(width) if int(width) <= 32 else 0  # 63 and 255 mean "unknown"
    return transfers * 1e9 * payload * lanes / 8
