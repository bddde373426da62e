"""The end of MPI in a process: MPI_Finalize, which is skipped if ranks have failed.

    rc.finalize = not end_is_ours(os.environ)     # before mpi4py.MPI is loaded
    finalize_at_exit()                            # MPI has begun
    leave_out()                                   # ranks have failed: skip MPI_Finalize

After two of five ranks had failed, Open MPI 5.0.11 waited in MPI_Finalize forever. mpi4py calls it
after the interpreter has been torn down. There only os._exit() could skip it, and the status that
the script passed to sys.exit() is lost by then. So psdist calls MPI_Finalize itself if a job may
outlive ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Mapping

from psdist.install import survives_deaths
from psdist.ranks.failure import flush_output

_is_ours = False
_is_left_out = False


def end_is_ours(environment: Mapping[str, str]) -> bool:
    """Decide and return whether psdist calls MPI_Finalize. mpi4py calls it if no job outlives a
    rank, and if the script has loaded mpi4py before."""
    global _is_ours
    _is_ours = survives_deaths(environment) and "mpi4py.MPI" not in sys.modules
    return _is_ours


def is_ours() -> bool:
    """Return the decision of :func:`end_is_ours`."""
    return _is_ours


def finalize_at_exit() -> None:
    """Call MPI_Finalize at the end of the process, after all functions that are registered with
    atexit from now on. MPI has begun in this process."""
    if _is_ours:
        atexit.register(_finalize, os.getpid())


def _finalize(rank: int) -> None:
    from mpi4py import MPI

    if not _is_left_out and os.getpid() == rank and not MPI.Is_finalized():
        MPI.Finalize()


def leave_out() -> None:
    """End this process without MPI_Finalize, with the status that it has anyway; the last call of
    the process. :func:`end_is_ours` must have returned True."""
    global _is_left_out
    _is_left_out = True
    flush_output()
    libc = ctypes.CDLL(None)
    # exit(status) calls it first, so no library can wait for failed ranks.
    libc.on_exit(libc._exit, None)
