"""The first line of a script: ``job = psdist.init()``, which gives the process its one Job."""

from __future__ import annotations

import multiprocessing

from psdist.errors import UsageError
from psdist.job import Job
from psdist.ranks.context import current
from psdist.ranks.plain_script import connect_or_serve, tell_errors

_job: Job | None = None


def init() -> Job:
    """Take part in the job; returns on workers only.

    Server ranks started as ``mpirun python train.py`` serve here and exit; under ``psdist run``
    they never run the script. Settings come from the environment then (PSDIST_MODE, ...; a TOML
    file by PSDIST_CONFIG). Calling it again returns the same Job.
    """
    global _job
    if _job is None:
        if multiprocessing.parent_process() is not None:
            # It has inherited the launcher's variables and would join MPI as its parent's rank.
            raise UsageError(
                "psdist.init() was called in a process that the script's DataLoader started, "
                "which imports the script again: put the script's body into a function and call "
                'it under if __name__ == "__main__":'
            )
        context = current()
        if context is not None:
            _job = Job(context)
            return _job
        context = connect_or_serve(_finish_if_begun)
        try:
            _job = Job(context)
        finally:
            tell_errors()
    return _job


def the_job() -> Job | None:
    """The Job of this process, if :func:`init` was called."""
    return _job


def _finish_if_begun() -> int:
    return _job.finish() if _job is not None else 0
