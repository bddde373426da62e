"""Make ranks wait for one another after MPI_Init under ``srun --mpi=pmix``.

MPI_Init of Open MPI 5 ends in a PMIx fence. Slurm's fence without data does not wait for other
hosts: ranks were seen to leave it 400 ms before others had entered, and Open MPI's ob1 crashes on
a message to a rank that is still inside (open-mpi/ompi issue 12495; 24 of 100 jobs of 8 ranks on 4
hosts, Slurm 22.05, Open MPI 5.0.11). A fence that collects data really waits: 0 of 60.

    wait_for_all_ranks(os.environ)     # after MPI_Init, before the first message; 15 to 25 ms

**Can be deleted when** a fence without data waits for all hosts in all versions of Slurm that are
supported, or when issue 12495 is mended in all versions of Open MPI that are. To find out: take
``wait_for_all_ranks`` out of psdist/ranks/agreement.py and run the Open MPI case of
``test_srun_makes_one_world_over_four_hosts`` in tests/slurm/test_slurm.py 100
times; none may crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_PMIX_BOOL = 1


def wait_for_all_ranks(environment: Mapping[str, str]) -> None:
    """Do nothing unless srun started this process through PMIx."""
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
