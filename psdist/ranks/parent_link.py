"""A rank's line to ``psdist run -n N``, its parent: facts go up, signals come down.

    link = connect_to_parent(os.environ, rank=3)      # None under a foreign mpirun, or elsewhere
    link.reach("placing")
    link.take_role("worker 1 (rank 3 on n2)", "worker")
    with link.script():
        ...                                           # a signal of the parent's reaches the script

The line is a Unix socket in a folder of the parent's, so only ranks on its host have one, and its
end is noticed whatever becomes of the parent: a thread of this module waits for it, and a rank
whose parent has vanished ends itself. With the line come pipes that take the place of standard
output and error. The launcher forwards those line by line, mixed with its own words; what a rank
writes into the parent's pipes arrives as it is, and survives the end of the rank.

Only signals that come over the line reach a script as an interruption. The same signals from the
launcher mean that it is ending the ranks, and do so at once, as ever.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from psdist.errors import LaunchError, ProtocolError
from psdist.install import boot_id
from psdist.ranks.failure import Interrupted
from psdist.report import (
    KERNEL_VARIABLE,
    PACKET_BYTES,
    PARENT_VARIABLE,
    EndNow,
    Fact,
    Failed,
    Finished,
    Hello,
    InputGiven,
    InputWanted,
    Phase,
    PhaseReached,
    Role,
    RoleTaken,
    SignalCame,
    decode_order,
    encode,
)

logger = logging.getLogger("psdist")

LOST_S: Final = 1.0
"""From the end of the line to the end of this rank: time for the coordinator's last words."""
_INPUT_TIMEOUT_S: Final = 10.0
_MAX_DESCRIPTORS: Final = 4
_ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_VANISHED: Final = "psdist run, which started this rank, has ended"


def connect_to_parent(environment: Mapping[str, str], *, rank: int) -> ParentLink | None:
    """The line to the parent, if one started this rank and is on this host.

    Standard output and error are its pipes from then on. Raises LaunchError if the parent has
    ended already.
    """
    path = environment.get(PARENT_VARIABLE)
    if not path:
        return None
    # The parent's input is the chief's alone; at that of others MPICH's ranks would wait for ever.
    _replace_input(os.open(os.devnull, os.O_RDONLY))
    if environment.get(KERNEL_VARIABLE) != boot_id():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except ConnectionRefusedError:  # its socket exists, and no process listens
        connection.close()
        raise LaunchError(_VANISHED) from None
    except OSError:  # another container of the same host
        connection.close()
        return None
    return ParentLink(connection, Path(path), rank=rank)


class ParentLink:
    def __init__(self, connection: socket.socket, path: Path, *, rank: int) -> None:
        self._connection = connection
        self._path = path
        self._is_over = False
        self._is_worker = False
        self._is_in_script = False
        self._is_deaf = False
        self._sent_by_parent: set[int] = set()
        self._input: list[int] = []
        self._has_input_answer = threading.Event()
        self.is_lost = False
        """The parent has vanished: this rank ends within LOST_S."""
        self.postpone: Callable[[int], bool] | None = None
        """True if a worker's script that must end continues until it has made a checkpoint."""
        self.end_signal: int | None = None
        """The parent wants the coordinator to end the job, because of this signal."""
        self._send(Hello(rank=rank))
        data, pipes = self._receive()
        if not data:
            connection.close()
            raise LaunchError(_VANISHED)
        decode_order(data)
        if len(pipes) == 2:
            os.dup2(pipes[0], 1)
            os.dup2(pipes[1], 2)
        for pipe in pipes:
            os.close(pipe)
        threading.Thread(target=self._listen, name="psdist-parent", daemon=True).start()

    # -- facts for the parent ------------------------------------------------------------------

    def reach(self, phase: Phase) -> None:
        self._send(PhaseReached(phase=phase))

    def take_role(self, who: str, role: Role) -> None:
        """From now on the parent's signals reach a worker; the coordinator may be told to end."""
        self._is_worker = role == "worker"
        if self._is_worker:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._on_signal)
        self._send(RoleTaken(who=who, role=role))

    def tell(self, fact: Fact) -> None:
        """Send a fact; it is dropped if the parent does not read."""
        self._send(fact)

    def failed(self, status: int) -> None:
        """This rank has printed why, and ends the job with ``status``."""
        self._is_deaf = True
        self._send(Failed(status=status))

    def finished(self) -> None:
        """This rank has done its part; it may outlive its parent."""
        self._is_over = self._is_deaf = True
        self._send(Finished())

    def ignore_signals(self) -> None:
        """This rank is ending already."""
        self._is_deaf = True

    @contextmanager
    def script(self) -> Iterator[None]:
        """While the user's script runs: it may get any signal."""
        self._is_in_script = True
        try:
            yield
        finally:
            self._is_in_script = False

    def take_input(self) -> None:
        """Standard input becomes the parent's: the user's terminal, file or pipe itself."""
        self._send(InputWanted())
        self._has_input_answer.wait(_INPUT_TIMEOUT_S)
        if self._input:
            _replace_input(self._input.pop())

    # -- orders of the parent ------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            data, descriptors = self._receive()
            if not data:
                break
            try:
                order = decode_order(data)
            except ProtocolError:
                logger.exception("psdist run sent an unknown order")
                continue
            if isinstance(order, SignalCame):
                self.deliver(order.number)
            elif isinstance(order, EndNow):
                self.end_signal = order.number
            elif isinstance(order, InputGiven):
                self._input += descriptors
                self._has_input_answer.set()
        self._vanish()

    def deliver(self, number: int) -> None:
        """To the script, as a signal of the system: it interrupts what waits, and finds whatever
        handler the script has set."""
        is_wanted = number in _ENDINGS or self._is_in_script
        if not self._is_worker or self._is_deaf or not is_wanted:
            return
        self._sent_by_parent.add(number)
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in self._sent_by_parent:
            self._sent_by_parent.discard(number)
            if self.postpone is not None and self.postpone(number):
                return
            raise Interrupted(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _vanish(self) -> None:
        if self._is_over:
            return
        self.is_lost = True
        with suppress(OSError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                self._path.unlink()
                self._path.parent.rmdir()
        time.sleep(LOST_S)
        os._exit(1)

    # -- packets -------------------------------------------------------------------------------

    def _send(self, fact: Fact) -> None:
        with suppress(OSError):  # the end of the line is the other direction's to notice
            self._connection.send(encode(fact), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _receive(self) -> tuple[bytes, list[int]]:
        """Return a packet and its descriptors; b"" if the parent has ended."""
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, PACKET_BYTES + 1, _MAX_DESCRIPTORS
            )
        except OSError:
            return b"", []
        return data, descriptors


def _replace_input(source: int) -> None:
    if source != 0:
        os.dup2(source, 0)
        os.close(source)
    os.set_inheritable(0, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
