"""Remedies for faults of launchers and MPI libraries. Each says when it can be deleted.

    environment |= own_home(environment) | own_session(folder, environment)
    with readable_lines(os.environ):
        MPI.Init_thread(...)
    wait_for_all_ranks(os.environ)

A remedy does nothing where its launcher has not started the process. Imports nothing of psdist.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import select
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

# A line of 1,023 bytes: cmd=put kvsname=NAME key=KEY value=VALUE and a newline. PMI-1 allows keys
# of 64 characters, and Slurm's name is job.step, two numbers of up to 10 digits: 909 are left. An
# even number, since MPICH cuts values at (limit - 2) // 2 bytes and expects (limit - 1) // 2.
_LONGEST_VALUE: Final = 908
_LIMITS: Final = b"cmd=maxes "
_VALUE_LIMIT: Final = re.compile(rb"(?<=\bvallen_max=)\d{1,9}\b")
_PMIX_BOOL: Final = 1
_SESSION_FOLDERS: Final = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
"""Folder of this host, and of all hosts."""


def own_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addition to an environment without HOME: the home directory of this user, or
    ``/`` if the system has no entry of the user, as in containers.

    Without HOME every program of Open MPI ends at once: "Unable to get the user home directory"
    (mpirun --version, and MPI_Init in a rank; Open MPI 5.0.11). Services, cron jobs, ``env -i`` and
    ``srun --export=NONE`` start programs without HOME.

    **Can be deleted when** mpirun and MPI_Init of every supported Open MPI start without HOME. To
    find out, run tests/mpi/test_limits_of_the_machine.py: its first assertion on HOME then fails.
    """
    if "HOME" in environment:
        return {}
    try:
        return {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:
        return {"HOME": "/"}


def own_session(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addition to mpirun's environment that puts its files into ``folder``, which must
    be this job's own on this host; nothing if the user has chosen a folder.

    Open MPI's mpirun keeps them in ``/tmp/ompi.PID``. An mpirun that was killed leaves that folder,
    and a later one with the same pid refuses to start: "The PMIx server's listener thread failed to
    start. We cannot continue." (status 213; Open MPI 5.0.11). Seen in tests that kill mpirun, after
    pids had wrapped around at 32,768. MPICH's mpirun has no such files and ignores the variable.

    **Can be deleted when** an mpirun of every supported Open MPI starts next to such a folder. To
    find out, run tests/mpi/test_session.py: its first assertion then fails.
    """
    return {} if chosen_session(environment) else {_SESSION_FOLDERS[0]: str(folder)}


def chosen_session(environment: Mapping[str, str]) -> tuple[str, Path] | None:
    """Return the variable by which the user has chosen a folder for mpirun's files, and the folder.
    **Can be deleted when** :func:`own_session` can."""
    for name in _SESSION_FOLDERS:
        if name in environment:
            return name, Path(environment[name])
    return None


def wait_for_all_ranks(environment: Mapping[str, str]) -> None:
    """Wait for all ranks under ``srun --mpi=pmix``, after MPI_Init and before the first message.

    MPI_Init of Open MPI 5 ends in a PMIx fence. Slurm's fence without data does not wait for other
    hosts: ranks left it 400 ms before others had entered, and Open MPI's ob1 crashes on a message
    to a rank that is still inside (open-mpi/ompi issue 12495; 24 of 100 jobs of 8 ranks on 4 hosts,
    Slurm 22.05, Open MPI 5.0.11). A fence that collects data waits: 0 of 60. It takes 15 to 25 ms.

    **Can be deleted when** a fence without data waits for all hosts in every supported Slurm, or
    issue 12495 is fixed in every supported Open MPI. To find out, remove the call in
    psdist/ranks/agreement.py and run the Open MPI case of
    ``test_srun_makes_one_world_over_four_hosts`` in tests/slurm/test_slurm.py 100 times.
    """
    if "PMIX_RANK" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return  # mpirun's own PMIx server, whose fence waits
    try:
        pmix = ctypes.CDLL("libpmix.so.2")  # the one that Open MPI has already loaded
        create, load, fence = pmix.PMIx_Info_create, pmix.PMIx_Info_load, pmix.PMIx_Fence
    except (OSError, AttributeError):
        return  # an Open MPI with PMIx built in hides it
    create.restype, create.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    load.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint16]
    fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    info, collect = create(1), ctypes.c_bool(True)
    load(info, b"pmix.collect", ctypes.byref(collect), _PMIX_BOOL)
    fence(None, 0, info, 1)


@contextmanager
def readable_lines(environment: Mapping[str, str]) -> Iterator[None]:
    """Let MPICH start under ``srun --mpi=pmi2`` whatever its ranks publish about themselves.

    MPICH talks PMI-1 there: lines on a socket to Slurm, which allows values of 1,024 characters and
    reads lines of 1,023. A value that fills its share makes a longer line, Slurm reads the rest as
    another request, and every rank aborts in MPI_Init. With UCX this depends on luck: 4,096 bytes
    from its address on are published, the address and then whatever the heap holds, and runs of
    zeros are shortened, so most lines fit (MPICH 5.0.2, Slurm 22.05). Given a smaller limit MPICH
    cuts values into more pieces, so the answer that names the limit is rewritten on its way.

    A child process stands between the two during MPI_Init, because mpi4py holds the interpreter
    lock there. MPI_Init then takes some 125 ms instead of 110. Does nothing where there is no PMI
    socket, or no relay can be made.

    **Can be deleted when** the pmi2 plugin of every supported Slurm reads the lines of every value
    that it allows (or names a limit of 908 or less), or when MPICH is started through PMIx under
    srun. To find out, remove the call in psdist/ranks/agreement.py and run
    ``test_mpich_starts_whatever_its_ranks_publish`` in tests/slurm/test_slurm.py.
    """
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
            # Not only closed: another process may have a copy of the descriptor.
            library.shutdown(socket.SHUT_RDWR)
            with suppress(ChildProcessError):  # SIGCHLD is ignored
                os.waitpid(relay, 0)


def with_smaller_limit(answer: bytes) -> bytes:
    """Return Slurm's answer to MPICH with a longest value whose line Slurm can read. **Can be
    deleted when** :func:`readable_lines` can.

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
    """All other data passes at once: messages of PMI-2 have no newline to wait for."""
    if len(data) < len(_LIMITS):
        return bool(data) and _LIMITS.startswith(data)
    return data.startswith(_LIMITS) and not data.endswith(b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
