"""How much memory this process may still have: of the host, and of the cgroups that hold it.

    free_bytes()

Asked before memory is reserved: what the kernel cannot give it takes from some process by killing
it, where a file system would only have said that it is full.
"""

from __future__ import annotations

from pathlib import Path

_CACHES = {"inactive_file", "active_file", "total_inactive_file", "total_active_file"}
"""What of a cgroup's memory the kernel gives up when it is short (v2; v1, which also has the first
two, of the cgroup without those below it)."""


def free_bytes(root: Path = Path("/")) -> int | None:
    """The least that host and cgroups have left; None where nothing says so."""
    found = [_of_host(root / "proc/meminfo")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _of_cgroups(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            found += _of_cgroups(root / "sys/fs/cgroup/memory", path, *names)
    return min((each for each in found if each is not None), default=None)


def _of_host(file: Path) -> int | None:
    for line in _read(file).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return None


def _of_cgroups(mount: Path, path: str, limit: str, usage: str) -> list[int | None]:
    """Of the one at ``path`` and all above it. In a container the path may be the host's, and only
    the mount itself be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [
        _of_cgroup(mount.joinpath(*parts[:depth]), limit, usage) for depth in range(len(parts) + 1)
    ]


def _of_cgroup(folder: Path, limit: str, usage: str) -> int | None:
    most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():  # "max"
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    names = {name for name in stat if name in _CACHES}
    totals = {name for name in names if name.startswith("total_")}
    caches = sum(int(stat[name]) for name in totals or names)
    return max(int(most) - int(used) + caches, 0)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
