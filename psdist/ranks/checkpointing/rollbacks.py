"""RUN_DIR/rollbacks.jsonl: each time that a loss which had blown up has ended an attempt, and what
the next one does about it.

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
"""Of the names of checkpoints that are not gone on from any more."""


class Record(NamedTuple):
    attempt: int
    """That has ended with it."""
    rollback: Rollback


_LINE: Final = TypeAdapter(Record)


def add_rollback(run_dir: Path, record: Record) -> None:
    """One line more, on the disk when this returns, in place of a last one that a crash has cut.
    Raises OSError."""
    line = {"attempt": record.attempt, "rollback": dataclasses.asdict(record.rollback)}
    with (run_dir / ROLLBACKS).open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_rollbacks(run_dir: Path) -> list[Record]:
    """In order; a last line that a crash has cut is left out. Raises :class:`ConfigError`."""
    path = run_dir / ROLLBACKS
    try:
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        found = [Record(**json.loads(line)) for line in lines]
        return [_LINE.validate_python(each) for each in found]
    except (OSError, ValueError, TypeError, ValidationError) as error:
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}), which says what this run goes on "
            "with: repair or remove it"
        ) from error


def set_aside_checkpoints(
    folder: Folder, records: Sequence[Record], say: Callable[[str], None]
) -> None:
    """Those of attempts up to a rollback's that are of after the loss began to rise, once: a line
    says which. Raises OSError."""
    names = []
    for name in folder.names():
        try:
            index = folder.open(name).index
        except CheckpointError:
            continue  # which nobody goes on from
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
    """What has happened, and what follows."""
    names, now, then = rollback.names, rollback.lossiest, rollback.allowed
    told = (
        f"the loss was {rollback.loss:.4g}, its least {rollback.best:.4g}, and good up to "
        f"iteration {rollback.good}"
    )
    was = f"codec {names[now]}" if names else f"{now} local step{'s' * (now > 1)}"
    if then < 0:
        return (
            f"{told}; that was with {was}, and nothing less lossy is left to go back with: lower "
            "the learning rate, or leave training.rollback out"
        )
    allowed = f"codec {names[then]}" if names else f"{then} local step{'s' * (then > 1)}"
    return f"{told}; from a checkpoint of then with {allowed} at most in place of {was}"
