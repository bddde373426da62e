"""The inside of a running job, for tests: the only place that reads private attributes of a Job.

trainers_of(job)[0].is_open
occasions_of(job).ask("checkpoint")          # as a signal does
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psdist.job import Job
from psdist.prepared import ParameterSets
from psdist.ranks.rank import Rank
from psdist.workers.loop import WorkerLoop
from psdist.workers.script.occasions import Occasions
from psdist.workers.trainer import Trainer


def sets_of(job: Job) -> ParameterSets:
    return job._sets


def trainers_of(job: Job) -> Sequence[Trainer]:
    return sets_of(job).trainers


def loop_of(job: Job) -> WorkerLoop:
    return job._loop


def rank_of(job: Job) -> Rank:
    return job._session.rank


def run_directory_of(job: Job) -> Path:
    return Path(job._session.run_directory.path)


def occasions_of(job: Job) -> Occasions:
    return job._checkpoints.occasions


def after_each_push(hook: Callable[[], None]) -> None:
    """Call ``hook()`` after each push of this process."""
    send_push = WorkerLoop._send_push

    def send_and_call(loop: WorkerLoop, action: Any) -> None:
        send_push(loop, action)
        hook()

    WorkerLoop._send_push = send_and_call  # type: ignore[method-assign]
