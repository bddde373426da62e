"""Give mpirun a folder for its files that no other mpirun can have had.

Open MPI's mpirun keeps them in ``/tmp/ompi.PID``. One that was killed leaves that folder, and
another that gets the same pid later refuses to start: "The PMIx server's listener thread failed to
start. We cannot continue." (status 213; Open MPI 5.0.11, PMIx's files of the same names are in its
way). Seen in tests that kill mpirun, after pids had begun anew at 32,768.

    environment |= own_session(folder, environment)        # folder: this job's own, on this host

**Can be deleted when** an mpirun of every version of Open MPI that is supported starts where a dead
one with its pid has left such a folder. To find out: run tests/mpi/test_session.py; then its first
assertion fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
_ALL_HOSTS = "PRTE_MCA_prte_tmpdir_base"


def own_session(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to mpirun's environment: nothing where the user has chosen a folder. MPICH's
    mpirun has no such files and takes no notice."""
    return {} if chosen_session(environment) else {_VARIABLE: str(folder)}


def chosen_session(environment: Mapping[str, str]) -> tuple[str, Path] | None:
    """Return the variable by which the user has chosen a folder for mpirun's files, and it."""
    for name in (_VARIABLE, _ALL_HOSTS):
        if name in environment:
            return name, Path(environment[name])
    return None
