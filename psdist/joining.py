"""The first line of a script: ``job = psdist.init()``, which gives the process its one Job.

    job = psdist.init(mode="ssp", staleness=4)      # unless other sources give these settings
    job.close()
    job = psdist.init()                             # another one, of the same ranks

A process has one Job at a time.
"""

from __future__ import annotations

import multiprocessing
from typing import Any, Final, Literal

from psdist.config.sources import script_settings
from psdist.errors import UsageError
from psdist.job import Job
from psdist.mode_names import ModeSetting
from psdist.ranks.connecting import current
from psdist.ranks.lobby import join_job, leave
from psdist.ranks.plain_script import connect_or_serve, tell_errors
from psdist.worker_variables import set_variables

_job: Job | None = None
_is_plain = False
"""True if python itself runs the script (psdist.ranks.plain_script)."""
_settings: dict[str, Any] = {}
"""Settings with which ``_job`` was made."""


def init(
    *,
    mode: ModeSetting | None = None,
    staleness: int | None = None,
    pipeline: Literal[0, 1] | None = None,
    on_nonfinite: Literal["error", "skip"] | None = None,
    seed: int | None = None,
    checksum_every: int | None = None,
    **others: Any,
) -> Job:
    """Join the job. Returns on workers only, after every worker has called it.

    Under ``psdist run`` servers never run the script. Under ``mpirun python train.py`` servers
    serve inside this call, and then exit. Settings then come from the environment (PSDIST_MODE,
    ...; a TOML file by PSDIST_CONFIG).

    Command line, environment and file replace the settings passed here. Every worker must pass the
    same settings. ``others`` are tables of settings, such as ``consistency={"pipeline": 1}``.

    A second call returns the same Job; after :meth:`Job.close` it starts another one. Until then
    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE count workers, as under torchrun.

    Raises :class:`ConfigError` for a wrong value and for settings that exclude each other,
    :class:`UsageError` for a setting that must be known before scripts run, and
    :class:`CollectiveError` if workers pass different settings.
    """
    global _job, _settings, _is_plain
    passed = {
        "mode": mode,
        "staleness": staleness,
        "pipeline": pipeline,
        "on_nonfinite": on_nonfinite,
        "seed": seed,
        "checksum_every": checksum_every,
        **others,
    }
    if _is_of_multiprocessing():
        # It has the launcher's variables and would join MPI as its parent's rank.
        raise UsageError(
            "psdist.init() was called in a process that the script's DataLoader started, "
            "which imports the script again: put the script's body into a function and call "
            'it under if __name__ == "__main__":'
        )
    rank = current()
    if rank is None:
        # Where no rank has begun yet, all of them agree on a mistake.
        rank = connect_or_serve(finish, check=lambda: script_settings(passed))
        _is_plain = True
    settings = script_settings(passed)
    if _job is not None and _job.failure is not None and not rank.is_alone:
        raise UsageError(
            "psdist.init() was called after a job had failed on this worker, for which others may "
            f"wait: {type(_job.failure).__name__}"
        )
    if _job is None or _job.is_closed:
        join_job(rank, settings)
        if rank.is_alone:
            from psdist.ranks.server import serve_beside  # a worker imports nothing of servers

            serve_beside(rank)
        try:
            _job = Job(rank.session)
        finally:
            if _is_plain:
                tell_errors()
        _settings = settings
        set_variables(
            {
                "RANK": _job.rank,
                "WORLD_SIZE": _job.world_size,
                "LOCAL_RANK": _job.local_rank,
                "LOCAL_WORLD_SIZE": rank.roles.num_workers_beside(rank.number),
            }
        )
    else:
        _require_same(settings)
    return _job


def _require_same(settings: dict[str, Any]) -> None:
    """For a second call, which may pass the same settings or none."""
    for key, value in settings.items():
        if _settings.get(key, _NOT_PASSED) != value:
            raise UsageError(
                f"psdist.init({key}={value!r}) was called during a job that was begun "
                f"{_described(key)}; pass settings in the first call"
            )


_NOT_PASSED: Final = object()


def _described(key: str) -> str:
    return f"with {key}={_settings[key]!r}" if key in _settings else f"without {key}"


def the_job() -> Job | None:
    """The Job of this process, or the last one, if :func:`init` was called."""
    return _job


def finish() -> int:
    """The script has ended: finish its job, if it is open, and leave the other ranks."""
    rank = current()
    if rank is None:
        return 0
    if _job is not None and _job.failure is not None and not rank.is_alone:
        rank.exit.fail_with(_job.failure)
    if _job is not None:
        _job.finish()
    leave(rank)
    return 0


def _is_of_multiprocessing() -> bool:
    """True if multiprocessing has started this process. A script without ``if __name__`` calls
    this during its import, when parent_process() is not set yet."""
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_importing or multiprocessing.parent_process() is not None
