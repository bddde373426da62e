"""Anonymous shared memory of the processes of one host: memfd.

    segment = Segment(1 << 20)                    # mine, to write
    theirs = open_segment(pid, fd, 1 << 20)       # another process's, to read
    bell = Bell()                                 # others wake me: ring(open_bell(pid, bell.fd))

A memfd is not a file of /dev/shm. Its limit is the host's memory (a container's /dev/shm often has
64 MiB), and the kernel frees it with the last process that has mapped it, also after kill -9. Other
processes open it by ``/proc/PID/fd/FD``, which needs the same kernel, user and space of process
ids. They must check its contents, because the process id may belong to another process.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

import torch

from psdist.protocol.memory import PAGE_BYTES

_NOEXEC_SEAL = 0x8
"""MFD_NOEXEC_SEAL: some hosts require it (vm.memfd_noexec = 2), kernels before 6.3 refuse it."""

_HUGE_FROM_BYTES = 4 << 20

_lock = Lock()
_lock.acquire()


def fence() -> None:
    """Complete all earlier reads and writes of this process before all later ones.

    x86 needs this for stores before loads only; ARM for all accesses. To release and then acquire a
    lock orders both: POSIX requires it of locks, and a load-acquire of ARMv8 does not overtake a
    store-release.
    """
    _lock.release()
    _lock.acquire()


_CACHES = {"inactive_file", "active_file", "total_inactive_file", "total_active_file"}
"""Memory of a cgroup that the kernel can reclaim: names of v2, then of v1, which uses the first two
for the cgroup without its children."""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate, or None if they are unknown.

    The minimum of the host's free memory and that of each cgroup above the process. Callers ask
    before they reserve memory, because the kernel kills a process when it runs out.
    """
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
    """Return the free bytes of the cgroup at ``path`` and of each one above it. In a container the
    path may be the host's, and only the mount itself exists."""
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


class Segment:
    """Zeroed memory that other processes of the host can open until it is closed."""

    def __init__(
        self, num_bytes: int, *, free_bytes: Callable[[], int | None] = free_bytes
    ) -> None:
        """Reserve all of the memory. Raises :class:`OSError` if it is not available.
        ``free_bytes()``: bytes that may be taken; None: unknown."""
        self.num_bytes = max(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        left = free_bytes()
        if left is not None and self.num_bytes > left:
            raise OSError(errno.ENOMEM, f"{self.num_bytes} bytes are wanted, {left} are free")
        self.fd = _memfd()
        try:
            os.posix_fallocate(self.fd, 0, self.num_bytes)
            self.memory = mmap.mmap(self.fd, self.num_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise
        if self.num_bytes >= _HUGE_FROM_BYTES:
            with suppress(OSError):  # a kernel without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = bytes_of(self.memory)
        self.address = self.bytes.data_ptr()

    def close(self) -> None:
        """Stop others from opening it. Processes that have opened it keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def free(self) -> None:
        """Return the memory to the host. No process may touch it again."""
        if self.fd >= 0:
            os.ftruncate(self.fd, 0)
        self.close()


def _memfd() -> int:
    try:
        return os.memfd_create("psdist", os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("psdist", os.MFD_CLOEXEC)


def open_segment(pid: int, fd: int, num_bytes: int) -> mmap.mmap:
    """Another process's segment, to read. Raises :class:`OSError` or ValueError."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(mine, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(mine)


def bytes_of(memory: mmap.mmap) -> torch.Tensor:
    """The same memory as a tensor, which keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that cannot be written
        return torch.frombuffer(memory, dtype=torch.uint8)


class Bell:
    """A pipe by which another process of the host wakes this one."""

    def __init__(self) -> None:
        self._reader, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)

    def wait(self, at_most_s: float) -> None:
        """Sleep until it rings; it may have rung before."""
        if self._poll.poll(1e3 * at_most_s):
            with suppress(BlockingIOError):
                os.read(self._reader, 4096)

    def close(self) -> None:
        for fd in (self._reader, self.fd):
            os.close(fd)


def open_bell(pid: int, fd: int) -> int:
    """The end to :func:`ring` of another process's bell, whose ``fd`` this is there. Raises
    :class:`OSError`."""
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def ring(fd: int) -> None:
    with suppress(BlockingIOError, BrokenPipeError):  # it rings already; the process has ended
        os.write(fd, b"!")


def started_at(pid: int) -> int:
    """Return the start time of the process in ticks since boot; -1 if it has ended. A later process
    may have the same id, but not the same start time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def has_ended(pid: int, start: int, *, within_s: float = 1.0) -> bool:
    """True if the process with that id and :func:`started_at` has ended. A process that is ending
    has closed its files but is still listed, so wait ``within_s`` for it."""
    until_s = time.monotonic() + within_s
    while started_at(pid) == start:
        if time.monotonic() >= until_s:
            return False
        time.sleep(1e-3)
    return True
