"""RUN_DIR/rollbacks.jsonl: the attempts that a rising loss has ended, and the next ones' limits.

add_rollback(run_dir, Record(attempt=1, rollback=rollback))    # on the coordinator, at the end
records = read_rollbacks(run_dir)                              # on rank 0 of the next attempt
set_aside_checkpoints(Folder(run_dir), records, print)
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from psdist.checkpoint.folder import Folder
from psdist.controller.kept import Rollback
from psdist.errors import CheckpointError, ConfigError

ROLLBACKS: Final = "rollbacks.jsonl"
SUFFIX: Final = "rolled-back"
"""Suffix of the names of checkpoints that no run starts from any more."""


class Record(NamedTuple):
    attempt: int
    """Number of the attempt that ended."""
    rollback: Rollback


_LINE: Final = TypeAdapter(Record)


def add_rollback(run_dir: Path, record: Record) -> None:
    """Append a line, and return when it is on disk. It replaces a last line that a crash has cut.
    Raises OSError."""
    line = {"attempt": record.attempt, "rollback": dataclasses.asdict(record.rollback)}
    with (run_dir / ROLLBACKS).open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_rollbacks(run_dir: Path) -> list[Record]:
    """Return the records in order, without a last line that a crash has cut. Raises
    :class:`ConfigError`."""
    path = run_dir / ROLLBACKS
    try:
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        found = [Record(**json.loads(line)) for line in lines]
        return [_LINE.validate_python(each) for each in found]
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}), which has the limits of this run"
            ": repair or remove it"
        ) from error


def set_aside_checkpoints(
    folder: Folder, records: Sequence[Record], say: Callable[[str], None]
) -> None:
    """Set aside the checkpoints that were made after the loss began to rise, in attempts up to the
    rollback's. ``say`` receives a line with their names. Raises OSError."""
    names = []
    for name in folder.names():
        try:
            index = folder.open(name).index
        except CheckpointError:
            continue  # no run can start from it
        if any(
            index.attempt <= each.attempt and index.step > each.rollback.good for each in records
        ):
            names.append(name)
    if names:
        suffix = f"{SUFFIX}-{len(records)}"  # there may be some of the same iterations already
        folder.set_aside(names, suffix=suffix)
        say(
            f"resume: the loss had blown up: {', '.join(names)} of after it began to rise "
            f"{'is' if len(names) == 1 else 'are'} set aside (*.{suffix})"
        )


def in_words(rollback: Rollback) -> str:
    """Return a text on the rise of the loss and on what follows."""
    names, now, then = rollback.names, rollback.lossiest, rollback.allowed
    told = (
        f"the loss was {rollback.loss:.4g}, its least {rollback.best:.4g}, and good up to "
        f"iteration {rollback.good}"
    )
    was = f"codec {names[now]}" if names else f"{now} local step{'s' * (now > 1)}"
    if then < 0:
        return (
            f"{told}; that was with {was}, and nothing less lossy is left: lower "
            "the learning rate, or leave training.rollback out"
        )
    allowed = f"codec {names[then]}" if names else f"{then} local step{'s' * (then > 1)}"
    return f"{told}; from a checkpoint of that time, with {allowed} at most instead of {was}"
