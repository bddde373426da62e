"""Starting MPI, and all ranks agreeing on one configuration or on the errors to end with.

    comm = start_mpi()
    places, resolved = exchange(comm, resolved_or_error) # AgreedExit when a rank brought an error

Every rank brings its result or its error to the same exchanges, so each mistake is printed once,
by the lowest rank that has it, and every rank ends with the same status. psdist.ranks.connecting
makes the rank.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgpack

from psdist.config.settings import NAMES, RunConfig, decode, encode
from psdist.config.sources import Resolved
from psdist.errors import LaunchError, TransportError, UserError
from psdist.install import (
    boot_id,
    detect,
    explain_mismatch,
    explain_singleton,
    family_of,
    slurm_switches,
    survives_deaths,
)
from psdist.install.eager import limits, own_values
from psdist.install.quirks import own_home, readable_lines, wait_for_all_ranks
from psdist.install.trials import loaded_library_file
from psdist.protocol.roles import Place
from psdist.ranks.failure import printable, wait_until_read
from psdist.ranks.mpi_end import end_is_ours, finalize_at_exit
from psdist.topology.machine.gpus import visible_gpus
from psdist.version import VERSION

if TYPE_CHECKING:
    from mpi4py import MPI

_T = TypeVar("_T")

_NOTICE_S = 1.0


class AgreedExit(Exception):
    """All ranks have agreed to end with this status, and the errors have been printed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def start_mpi(*, link_bytes_per_s: float = 0.0) -> MPI.Intracomm:
    """Start MPI with the values of this installation and network; return psdist's communicator.

    ``link_bytes_per_s``: of this host's link to the network, one direction; 0 if it is unknown.
    Raises :class:`LaunchError` if MPI cannot be loaded or does not fit the launcher."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = not end_is_ours(os.environ)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MPI cannot be loaded: {error}; install psdist-mpi[mpi] or load the site's MPI module"
        ) from error
    library = MPI.Get_library_version()
    mismatch = explain_mismatch(os.environ, library_version=library)
    if mismatch:
        raise LaunchError(mismatch)
    if not MPI.Is_initialized():
        is_by_srun = detect(os.environ).name == "slurm"
        speaks_pmi1 = is_by_srun and family_of(library) == "mpich"
        os.environ.update(own_home(os.environ))
        if family_of(library) == "openmpi":
            file = loaded_library_file()
            values = own_values(os.environ, link_bytes_per_s=link_bytes_per_s, library_file=file)
            os.environ.update(values)
        with readable_lines(os.environ) if speaks_pmi1 else nullcontext():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        finalize_at_exit()
    size = MPI.COMM_WORLD.Get_size()
    singleton = explain_singleton(os.environ, world_size=size, library_version=library)
    if singleton:
        raise LaunchError(singleton)
    wait_for_all_ranks(os.environ)
    comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def allgather(comm: MPI.Comm, data: bytes) -> list[bytes]:
    """Return the bytes of every rank, in rank order."""
    from mpi4py import MPI

    sizes = [0] * comm.Get_size()
    lengths = bytearray(8 * len(sizes))
    comm.Allgather([len(data).to_bytes(8, "little"), MPI.BYTE], [lengths, MPI.BYTE])
    sizes = [int.from_bytes(lengths[8 * i : 8 * i + 8], "little") for i in range(len(sizes))]
    everything = bytearray(sum(sizes))
    comm.Allgatherv([data, MPI.BYTE], [everything, sizes, None, MPI.BYTE])
    return _cut(everything, sizes)


def gather(comm: MPI.Comm, data: bytes) -> list[bytes]:
    """Return the bytes of every rank in rank order, on rank 0; [] on other ranks."""
    from mpi4py import MPI

    is_root = comm.Get_rank() == 0
    lengths = bytearray(8 * comm.Get_size()) if is_root else None
    comm.Gather([len(data).to_bytes(8, "little"), MPI.BYTE], [lengths, MPI.BYTE])
    if lengths is None:
        comm.Gatherv([data, MPI.BYTE], None)
        return []
    sizes = [int.from_bytes(lengths[at : at + 8], "little") for at in range(0, len(lengths), 8)]
    everything = bytearray(sum(sizes))
    comm.Gatherv([data, MPI.BYTE], [everything, sizes, None, MPI.BYTE])
    return _cut(everything, sizes)


def _cut(everything: bytearray, sizes: Sequence[int]) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    for size in sizes:
        parts.append(bytes(everything[at : at + size]))
        at += size
    return parts


def broadcast(comm: MPI.Comm, data: bytes) -> bytes:
    """Return rank 0's bytes, on every rank."""
    from mpi4py import MPI

    length = bytearray(len(data).to_bytes(8, "little"))
    comm.Bcast([length, MPI.BYTE], root=0)
    num_bytes = int.from_bytes(length, "little")
    body = bytearray(data if comm.Get_rank() == 0 else num_bytes)
    comm.Bcast([body, MPI.BYTE], root=0)
    return bytes(body)


def agreed(comm: MPI.Intracomm, mine: _T | UserError) -> _T:
    """Return ``mine`` if no rank has an error. Otherwise the lowest rank that has an error prints
    it once, and every rank raises :class:`AgreedExit`."""
    error = mine if isinstance(mine, UserError) else None
    packed = msgpack.packb([error.exit_status, printable(str(error))] if error else [0, ""])
    outcomes = [msgpack.unpackb(each) for each in allgather(comm, packed)]
    _exit_on_errors(comm, [(int(status), str(text)) for status, text in outcomes])
    assert not isinstance(mine, UserError)
    return mine


def decided(comm: MPI.Intracomm, mine: bytes | UserError) -> bytes:
    """Return rank 0's bytes on every rank; an error of rank 0 is an error of every rank."""
    error = mine if isinstance(mine, UserError) else None
    packed = msgpack.packb(
        [error.exit_status, printable(str(error)), b""] if error else [0, "", mine]
    )
    status, text, data = msgpack.unpackb(broadcast(comm, packed))
    _exit_on_errors(comm, [(int(status), str(text))] * comm.Get_size())
    return bytes(data)


def cause_at_start(comm: MPI.Intracomm, error: Exception) -> Exception:
    """Return the cause of an error while ranks agree. Where the failure of a rank does not end the
    others (Open MPI's ``--with-ft ulfm``), they see an error of MPI, or only damaged bytes. So MPI
    is asked whether a rank has failed."""
    if not survives_deaths(os.environ) or not _has_lost_a_rank(comm):
        return error
    return TransportError(
        "a rank failed while the job was starting, which no job survives: the data from the others "
        f"is incomplete ({type(error).__name__}: {error}); find out what ended that "
        "rank, and start the job again"
    )


def _has_lost_a_rank(comm: MPI.Intracomm) -> bool:
    """True if a rank has failed. MPI may notice that later than its effects, so wait a little."""
    until_s = time.monotonic() + _NOTICE_S
    while not comm.Get_failed().Get_size():
        if time.monotonic() > until_s:
            return False
        time.sleep(_NOTICE_S / 100)
    return True


def _exit_on_errors(comm: MPI.Intracomm, outcomes: Sequence[tuple[int, str]]) -> None:
    failed = [(rank, status, text) for rank, (status, text) in enumerate(outcomes) if status]
    if not failed:
        return
    first_with: dict[str, int] = {}
    for rank, _, text in failed:
        first_with.setdefault(text, rank)
    for text, rank in first_with.items():
        if rank == comm.Get_rank():
            everywhere = sum(text == other for _, _, other in failed) == len(outcomes)
            where = "" if everywhere else f"rank {rank} on {socket.gethostname()}: "
            print(f"psdist: error: {where}{text}", file=sys.stderr, flush=True)
            wait_until_read()
    comm.Barrier()  # a launcher ends the job at the first rank that exits: let that one speak
    raise AgreedExit(failed[0][1])


def exchange(
    comm: MPI.Intracomm, outcome: Resolved | UserError, *, nic: str = ""
) -> tuple[list[Place], Resolved]:
    """Return every rank's place, and rank 0's configuration with its sources. Errors, and versions
    or configurations that differ between ranks, end the job.

    ``nic``: the network card that this rank is confined to."""
    resolved = agreed(comm, outcome)
    sources = dict(resolved.sources)
    flat = dict(resolved.flat)
    mine = [
        VERSION,
        socket.gethostname(),
        encode(resolved.config),
        sources,
        flat,
        *limits(os.environ),
    ]
    first = broadcast(comm, msgpack.packb(mine, unicode_errors="surrogateescape"))
    version, host, config, sources, flat, *eager = msgpack.unpackb(
        first, unicode_errors="surrogateescape"
    )
    difference = _differs(version=version, host=host, config=config, mine=resolved.config)
    if not difference and eager != limits(os.environ):
        names = "btl_tcp_eager_limit, btl_tcp_rndv_eager_limit and btl_tcp_max_send_size"
        difference = (
            f"Open MPI's limits {names} are {limits(os.environ)} on {socket.gethostname()} and "
            f"{eager} on {host} (rank 0); set the same OMPI_MCA_* variables and mca-params.conf on "
            "all hosts"
        )
    agreed(comm, LaunchError(difference) if difference else None)
    place = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": _runs_of(os.sched_getaffinity(0)),
        "gpus": visible_gpus(os.environ),
        "kernel": boot_id(),
        "switches": slurm_switches(os.environ),
        "nic": nic,
    }
    everybody = [msgpack.unpackb(each) for each in allgather(comm, msgpack.packb(place))]
    places = [
        Place(
            rank=rank,
            host=str(each["host"]),
            pid=int(each["pid"]),
            cores=tuple(n for first, num in each["cores"] for n in range(first, first + num)),
            gpus=None if each["gpus"] is None else tuple(each["gpus"]),
            kernel=str(each["kernel"]),
            switches=(str(each["switches"][0]), str(each["switches"][1])),
            nic=str(each["nic"]),
        )
        for rank, each in enumerate(everybody)
    ]
    return places, Resolved(config=decode(config), sources=sources, flat=flat)


def _runs_of(numbers: Collection[int]) -> list[tuple[int, int]]:
    """Return the numbers as ascending runs (first, length): short, because every rank receives the
    cores of all ranks."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _differs(*, version: str, host: str, config: bytes, mine: RunConfig) -> str:
    """Return how this rank's version or configuration differs from rank 0's; "" if it does not."""
    if version != VERSION:
        return (
            f"psdist {VERSION} on {socket.gethostname()}, {version} on {host} (rank 0); install "
            "the same version on all hosts"
        )
    return _config_difference(encode(mine), config) if encode(mine) != config else ""


def _config_difference(mine: bytes, first: bytes) -> str:
    left, right = decode(mine).model_dump(), decode(first).model_dump()
    differences = ", ".join(
        f"{NAMES[key]} = {left[key]!r} here, {right[key]!r} on rank 0"
        for key in left
        if left[key] != right[key]
    )
    return (
        f"the configuration differs between ranks: {differences}; give all ranks the same options, "
        "PSDIST_* variables and TOML file"
    )
