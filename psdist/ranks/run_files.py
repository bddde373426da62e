"""The first files of a run, which one rank writes: the run directory, its configuration, roles.

    path = create_run_directory(resolved, roles, {"plan.txt": drawing})

psdist.ranks.reporter (on the coordinator) and psdist.report.logs write the other files.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psdist.checkpoint.reading import Checkpoint
from psdist.config.modes import describe_modes, modes_that_may_come
from psdist.config.settings import RunConfig, to_toml
from psdist.config.sources import SCRIPT, Resolved, deprecation, describe, describe_script
from psdist.controller.kept import TuningState
from psdist.errors import ConfigError
from psdist.protocol.ids import is_spare, is_worker, worker_of
from psdist.protocol.roles import Roles
from psdist.ranks.checkpointing.resuming import choose
from psdist.ranks.checkpointing.rollbacks import read_rollbacks
from psdist.ranks.checkpointing.tuning_state import tuning_state_of
from psdist.report.run_directory import RunDirectory

_PLAN_FILES: Final = ("plan.txt", "plan.json")


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A new run directory, and what the run starts from."""

    path: Path
    attempt: int = 1
    checkpoint: Checkpoint | None = None
    """Checkpoint that the run starts from."""
    tuning_state: TuningState | None = None
    """Tuning state that the run starts with."""


def create_run_directory(outcome: Resolved, roles: Roles, files: Mapping[str, str]) -> Begun:
    """Make the run's directory with its first files, and print the configuration.

    ``files``: texts of further files, by name. Raises :class:`ConfigError` if the directory holds a
    run already and ``resume`` is off, or cannot be written.
    """
    config = outcome.config
    if config.run_dir is not None:
        path = Path(config.run_dir)
    else:
        job = os.environ.get("SLURM_JOB_ID") or str(os.getpid())
        path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{job}"
    path = path.absolute()
    lines: list[str] = []
    rollbacks = read_rollbacks(path) if config.resume else []
    checkpoint, attempt = choose(path, lines.append, rollbacks) if config.resume else (None, 1)
    tuning_state = tuning_state_of(config, checkpoint, lines.append, rollbacks)
    directory = RunDirectory.create(path)
    try:
        directory.write_text("config.toml", to_toml(config))
        for name, text in files.items():
            directory.write_text(name, text)
        directory.write_json("ranks.json", _rank_table(roles))
    except OSError as error:
        raise _unwritable(path, error) from error
    _say(describe(outcome))
    _say(deprecation(outcome))
    _say(lines)
    _say(_nobody_to_be_ahead_of(config, roles))
    return Begun(path=path, attempt=attempt, checkpoint=checkpoint, tuning_state=tuning_state)


def create_next_run_directory(path: Path, resolved: Resolved, roles: Roles, *, first: Path) -> None:
    """Make the directory of another job of the same ranks, as :func:`create_run_directory` does.
    ``first``: the directory of the first job; ``resolved`` includes the script's settings."""
    if resolved.config.resume:
        choose(path, lambda _line: None)  # later jobs start without a checkpoint
    directory = RunDirectory.create(path)
    try:
        directory.write_text("config.toml", to_toml(resolved.config))
        for name in _PLAN_FILES:
            if (first / name).exists():
                directory.write_text(name, (first / name).read_text("utf-8"))
        directory.write_json("ranks.json", _rank_table(roles))
    except OSError as error:
        raise _unwritable(path, error) from error
    _say([f"another job of the same ranks: run_dir = {path}", *describe_script(resolved)])
    if resolved.sources["mode"] == SCRIPT:
        _say(_nobody_to_be_ahead_of(resolved.config, roles))


def take_settings_of_script(directory: RunDirectory, resolved: Resolved, roles: Roles) -> None:
    """Write and print the script's settings, if there are any; ``resolved`` includes them."""
    lines = describe_script(resolved)
    if not lines:
        return
    try:
        directory.write_text("config.toml", to_toml(resolved.config))
    except OSError as error:
        raise _unwritable(directory.path, error) from error
    _say(lines)
    if resolved.sources["mode"] == SCRIPT:
        _say(_nobody_to_be_ahead_of(resolved.config, roles))


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"psdist: {line}", flush=True)


def _nobody_to_be_ahead_of(config: RunConfig, roles: Roles) -> list[str]:
    if (
        modes_that_may_come(config) == ("sync",)
        or roles.num_groups_beginning > 1
        or len(roles.places) == 1
    ):
        return []
    return [
        f"mode {describe_modes(config)} with one group: no group can be ahead of another; "
        "--group rank makes every worker a group of its own"
    ]


def _role(roles: Roles, peer: int) -> str:
    if is_spare(peer) or roles.is_substitute(peer):
        return "spare"
    return "worker" if is_worker(peer) else "server"


def _rank_table(roles: Roles) -> list[dict[str, Any]]:
    seen: Counter[str] = Counter()
    table: list[dict[str, Any]] = []
    for each in roles.places:
        peer = roles.peer_of_rank[each.rank]
        worker = worker_of(peer) if is_worker(peer) else None
        table.append(
            {
                "rank": each.rank,
                "role": _role(roles, peer),
                "worker": worker,
                "host": each.host,
                "pid": each.pid,
                "group": None if worker is None else roles.group_of_worker[worker],
                "local_rank": seen[each.host],
            }
        )
        seen[each.host] += 1
    return table


def _unwritable(path: Path, error: OSError) -> ConfigError:
    remedy = "free some space there, or choose another run_dir"
    if error.errno == errno.EFBIG:
        remedy = "raise the limit of files (ulimit -f unlimited)"
    return ConfigError(f"run_dir = {path}: cannot be written ({error.strerror}): {remedy}")
