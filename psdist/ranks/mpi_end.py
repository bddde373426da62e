"""The end of MPI in a process: MPI_Finalize, which is left out where ranks have died.

    rc.finalize = not end_is_ours(os.environ)     # before mpi4py.MPI is loaded
    finalize_at_exit()                            # MPI has begun
    leave_out()                                   # ranks have died: the process ends without it

With two of five ranks gone Open MPI 5.0.11 was seen to wait in MPI_Finalize for ever. mpi4py calls
it when the interpreter has been torn down, where nothing keeps it from that but the end of the
process, with a status of one's own: what the script has passed to sys.exit() is not known to
anybody then. So psdist calls it itself wherever a job may outlive ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Mapping

from psdist.install.launcher import survives_deaths
from psdist.ranks.failure import flush_output

_is_ours = False
_is_left_out = False


def end_is_ours(environment: Mapping[str, str]) -> bool:
    """Whether psdist calls MPI_Finalize: mpi4py does where no job outlives a rank, and where the
    script has loaded it before."""
    global _is_ours
    _is_ours = survives_deaths(environment) and "mpi4py.MPI" not in sys.modules
    return _is_ours


def is_ours() -> bool:
    """What :func:`end_is_ours` has said."""
    return _is_ours


def finalize_at_exit() -> None:
    """MPI has begun in this process; what is registered later to be called at the process's end
    comes before MPI's."""
    if _is_ours:
        atexit.register(_finalize, os.getpid())


def _finalize(rank: int) -> None:
    from mpi4py import MPI

    if not _is_left_out and os.getpid() == rank and not MPI.Is_finalized():
        MPI.Finalize()


def leave_out() -> None:
    """This process ends without MPI_Finalize, with the status that it ends with anyway. The last
    that is called of this process's own. MPI's end must be psdist's."""
    global _is_left_out
    _is_left_out = True
    flush_output()
    libc = ctypes.CDLL(None)
    # The first that exit(status) calls ends the process: no library waits for the dead.
    libc.on_exit(libc._exit, None)
