"""Whether the MPI that this process has loaded says that messages may lie in a GPU's memory.

takes_gpu_memory()

Handing such memory to an MPI that is not made for it ends the process, so a job asks the library;
`psdist doctor` tries it, in processes of its own.
"""

from __future__ import annotations

import ctypes
from typing import Final

from psdist.install.trials import loaded_library_file

_QUESTION: Final = "MPIX_Query_cuda_support"
"""Open MPI's and MPICH's: int (void)."""


def takes_gpu_memory() -> bool:
    path = loaded_library_file()
    if path is None:
        return False
    question = getattr(ctypes.CDLL(path), _QUESTION, None)
    return question is not None and bool(question())
