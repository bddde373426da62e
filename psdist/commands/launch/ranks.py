"""mpirun and the ranks of this host: their processes, and the parent's end of the lines to them.

    with Ranks() as ranks:
        mpirun = start(command, environment | ranks.environment(), death_signal=signal.SIGTERM)
        facts = ranks.accept().receive()     # when the listener and the connection can be read

mpirun gets a session of its own: the terminal's Ctrl-C then reaches the parent only, which passes
it on once. The kernel ends mpirun with its parent. A line is a socket in a folder that
only this user can enter; the kernel says which process each rank is.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.errors import LaunchError
from psdist.install import boot_id
from psdist.install.room import has_room, no_room
from psdist.report import (
    KERNEL_VARIABLE,
    PACKET_BYTES,
    PARENT_VARIABLE,
    Fact,
    InputGiven,
    Order,
    RoleTaken,
    Welcome,
    decode_fact,
    encode,
)

_PR_SET_PDEATHSIG: Final = 1


def start(
    command: Sequence[str], environment: Mapping[str, str], *, death_signal: int
) -> subprocess.Popen[bytes]:
    """Start ``command`` with pipes for its output and nothing as its input.

    To be called by the main thread: the kernel sends ``death_signal`` when the thread ends that
    started the process. Raises LaunchError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        # Between fork and exec, in a process of one thread.
        libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # it has ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A process that is no child of ours, told apart from a later one with the same number."""

    pid: int
    started: str
    """When, as the kernel counts; empty if it had ended already."""

    @classmethod
    def of(cls, pid: int) -> RankProcess:
        return cls(pid, _start_time(pid))

    @property
    def is_alive(self) -> bool:
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal_group(self, number: int) -> None:
        """To this process and those it has started, where the launcher gave it a group."""
        if not self.is_alive:
            return
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def _start_time(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in brackets, may have spaces and brackets of its own.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


_BACKLOG: Final = 4096
# sockaddr_un has room for 107 bytes; a rank of another name space never sees the path.
_LONGEST_PATH: Final = 100
_CREDENTIALS: Final = struct.Struct("3i")
_MAX_PACKETS: Final = 64
"""Most packets of one rank in a row: the others and the terminal wait meanwhile."""


class Rank:
    """One rank on this host, from the moment in which it connected."""

    def __init__(self, connection: socket.socket, process: RankProcess) -> None:
        self.connection = connection
        self.process = process
        self.number: int | None = None
        """Its rank in MPI, once reported."""
        self.who = ""
        """``worker 1 (rank 3 on n2)``, once it has a role."""
        self.is_worker = self.is_coordinator = False
        self.has_ended_well = False
        """It has done its part, or has told people why it ends."""
        self.is_connected = True

    @property
    def name(self) -> str:
        return self.who or ("a rank" if self.number is None else f"rank {self.number}")

    def take_role(self, role: RoleTaken) -> None:
        self.who = role.who
        self.is_worker = role.role == "worker"
        self.is_coordinator = role.role == "registrar"

    def welcome(self) -> list[int]:
        """Send pipes for its standard output and error; the ends to read. None where no more can
        be opened: the rank then writes as it would under any mpirun."""
        ends: list[int] = []
        with suppress(OSError):
            ends += os.pipe()
            ends += os.pipe()
        pipes = [ends[1], ends[3]] if len(ends) == 4 else []
        is_sent = self._send(Welcome(), pipes)
        kept = [ends[0], ends[2]] if pipes and is_sent else []
        for end in ends:
            if end not in kept:
                os.close(end)
        return kept

    def give_input(self) -> None:
        """Its standard input becomes ours, if we have one."""
        try:
            os.fstat(0)
        except OSError:
            self._send(InputGiven(), [])
        else:
            self._send(InputGiven(), [0])

    def tell(self, order: Order) -> None:
        self._send(order, [])

    def receive(self) -> Iterator[Fact]:
        """Yield the facts that have arrived; :attr:`is_connected` is False after the rank has left.

        Raises ProtocolError for a fact of another version.
        """
        for _ in range(_MAX_PACKETS):
            try:
                data = self.connection.recv(PACKET_BYTES + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_connected = False
                return
            yield decode_fact(data)

    def close(self) -> None:
        self.is_connected = False
        self.connection.close()

    def _send(self, order: Order, descriptors: list[int]) -> bool:
        try:
            socket.send_fds(
                self.connection,
                [encode(order)],
                descriptors,
                socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
            )
        except OSError:  # it has gone, or has not read for long: it is ending
            return False
        return True


class Ranks:
    """All ranks of this host. A context manager: at its end the lines and the folder are gone."""

    def __init__(self, *, num_bytes: int = 0) -> None:
        """``num_bytes``: of what others will write into the folder. Raises LaunchError where no
        folder has room for it."""
        self.folder = _private_folder(num_bytes)
        """The job's folder on this host; only this user can read it."""
        self._path = self.folder / "parent"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self._path))
        self.listener.listen(_BACKLOG)
        self.listener.setblocking(False)
        self.all: list[Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the variables by which ranks find this parent."""
        return {PARENT_VARIABLE: str(self._path), KERNEL_VARIABLE: boot_id()}

    def accept(self) -> Rank | None:
        """The next rank, if one has come."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(packed)
        if user not in (os.geteuid(), 0):
            connection.close()
            return None
        rank = Rank(connection, RankProcess.of(pid))
        self.all.append(rank)
        return rank

    @property
    def connected(self) -> list[Rank]:
        return [rank for rank in self.all if rank.is_connected]

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.all if rank.process.is_alive]

    def hang_up(self) -> None:
        """Close all lines: no rank outlives its line."""
        for rank in self.all:
            rank.close()


def _private_folder(num_bytes: int) -> Path:
    # Absolute: Open MPI makes another folder of a relative path, and complains of it at the end.
    places = [Path(os.environ.get("TMPDIR") or "/tmp").absolute(), Path("/tmp")]
    with suppress(FileNotFoundError):  # all of them are full
        places.insert(1, Path(tempfile.gettempdir()))
    roomy = [place for place in places if has_room(place, num_bytes)]
    if not roomy:
        raise no_room(places, num_bytes)
    reason = "its path is too long"
    for parent in roomy:
        try:
            folder = Path(tempfile.mkdtemp(prefix="psdist-", dir=parent))
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        if len(os.fsencode(folder)) <= _LONGEST_PATH:
            return folder
        folder.rmdir()
    raise LaunchError(
        f"no folder for the job's socket can be made in {places[0]} or /tmp: {reason}; "
        "set TMPDIR to one with a short path"
    )
