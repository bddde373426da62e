"""Give MPI a home directory where the environment names none.

Without HOME every program of Open MPI ends at once: "Unable to get the user home directory"
(mpirun --version, and MPI_Init in a rank; Open MPI 5.0.11). Services, cron jobs, ``env -i`` and
``srun --export=NONE`` start programs so. MPI reads its parameters of the user from there.

    environment |= own_home(environment)

**Can be deleted when** mpirun and MPI_Init of every version of Open MPI that is supported start
without HOME. To find out: run tests/mpi/test_limits_of_the_machine.py; then its first assertion
about HOME fails.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping


def own_home(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addition to an environment without HOME: the home directory of this user. In
    containers the system may have no entry of the user; then it is ``/``."""
    if "HOME" in environment:
        return {}
    try:
        return {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:
        return {"HOME": "/"}
