"""Let MPICH start under ``srun --mpi=pmi2`` whatever its ranks publish about themselves.

MPICH talks PMI-1 there: lines on a socket to Slurm, which allows values of 1,024 characters and
reads lines of 1,023. A value that fills its share makes a line that is longer, Slurm reads the rest
as another request, and every rank aborts in MPI_Init. With UCX this depends on luck: 4,096 bytes
from its address on are published, the address and then whatever the heap holds, and runs of zeros
are shortened, so most lines fit (MPICH 5.0.2, Slurm 22.05). Given a smaller limit MPICH cuts values
into more pieces, so the answer that names the limit is rewritten on its way.

    with readable_lines(os.environ):        # only where MPICH was started by srun
        MPI.Init_thread(...)

A child process stands between the two during MPI_Init, since mpi4py holds the interpreter lock in
there. MPI_Init then takes some 125 ms in place of 110.

**Can be deleted when** Slurm's pmi2 plugin reads the lines of every value that it allows (or names
a limit of 908 or less), in all versions of Slurm that are supported; or when MPICH is started
through PMIx under srun, and ``--mpi=pmi2`` is no longer asked for. To find out: take
``readable_lines`` out of psdist/ranks/agreement.py and run
``test_mpich_starts_whatever_its_ranks_publish`` in tests/slurm/test_slurm.py.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

# A line of 1,023 bytes: cmd=put kvsname=NAME key=KEY value=VALUE and a newline. PMI-1 allows keys
# of 64 characters, and Slurm's name is job.step, two numbers of up to 10 digits: 909 are left. An
# even number, since MPICH cuts values at (limit - 2) // 2 bytes and expects (limit - 1) // 2.
_LONGEST_VALUE: Final = 908
_LIMITS: Final = b"cmd=maxes "
_VALUE_LIMIT: Final = re.compile(rb"(?<=\bvallen_max=)\d{1,9}\b")


@contextmanager
def readable_lines(environment: Mapping[str, str]) -> Iterator[None]:
    """Do nothing where there is no PMI socket, or no relay can be made."""
    descriptor = _pmi_socket(environment)
    if descriptor is None:
        yield
        return
    slurm = os.dup(descriptor)
    ours, library = socket.socketpair()
    with library:
        try:
            with ours:
                relay = _start_relay(ours, slurm, unused=(library.fileno(), descriptor))
        except OSError:  # no more processes: most ranks start without a relay
            os.close(slurm)
            yield
            return
        os.dup2(library.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(slurm, descriptor)
            os.close(slurm)
            # Not only closed: another process may have inherited it meanwhile.
            library.shutdown(socket.SHUT_RDWR)
            with suppress(ChildProcessError):  # SIGCHLD is ignored
                os.waitpid(relay, 0)


def with_smaller_limit(answer: bytes) -> bytes:
    """Slurm's answer to MPICH; if it names the longest value, with one whose line Slurm can read.

    >>> with_smaller_limit(b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\\n")
    b'cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=908\\n'
    """
    if not answer.startswith(_LIMITS):
        return answer
    return _VALUE_LIMIT.sub(lambda found: b"%d" % min(int(found[0]), _LONGEST_VALUE), answer)


def _pmi_socket(environment: Mapping[str, str]) -> int | None:
    number = environment.get("PMI_FD", "")
    if not re.fullmatch("[0-9]{1,9}", number):
        return None
    try:
        mode = os.fstat(int(number)).st_mode
    except OSError:
        return None  # whatever started this process has closed it
    return int(number) if stat.S_ISSOCK(mode) else None


def _start_relay(library: socket.socket, slurm: int, *, unused: tuple[int, int]) -> int:
    # A handler of the script's must not run in the relay as well. Its end is that of either side.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        relay = os.fork()
        if relay == 0:
            _relay_and_exit(library, slurm, unused=unused)
        return relay
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _relay_and_exit(library: socket.socket, slurm: int, *, unused: tuple[int, int]) -> NoReturn:
    try:
        for each in unused:
            os.close(each)
        while True:
            readable, _, _ = select.select([library.fileno(), slurm], [], [])
            if library.fileno() in readable:
                data = library.recv(65536)
                _write(slurm, data)
            else:
                data = os.read(slurm, 65536)
                while _is_start_of_limits(data):
                    more = os.read(slurm, 65536)
                    if not more:
                        break
                    data += more
                library.sendall(with_smaller_limit(data))
            if not data:
                break
    finally:
        os._exit(0)


def _is_start_of_limits(data: bytes) -> bool:
    """Everything else goes on at once: messages of PMI-2 have no newline to wait for."""
    if len(data) < len(_LIMITS):
        return bool(data) and _LIMITS.startswith(data)
    return data.startswith(_LIMITS) and not data.endswith(b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
