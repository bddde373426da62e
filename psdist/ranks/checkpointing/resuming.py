"""Going on with a run: which checkpoint, what becomes of the attempt before, where clocks begin.

    found = choose(config, say=print)           # on rank 0: set aside what was, the newest good one
    restored = Restored.of(checkpoint, roles, mode=config.mode, modes=modes_of_set)
    restored.first(0)                           # the clocks of the first set, by group

RUN_DIR's own files are those of the newest attempt; what an attempt before has written lies in
RUN_DIR/attempt-1, attempt-2 ...; metrics.jsonl and checkpoints/ are of all attempts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import encode
from psdist.checkpoint.reading import Checkpoint
from psdist.config.modes import ModeFrom
from psdist.errors import ConfigError
from psdist.protocol.checkpoints import FirstClocks, checkpoint_name
from psdist.protocol.roles import Roles
from psdist.ranks.checkpointing.rollbacks import Record, set_aside_checkpoints
from psdist.ranks.checkpointing.ruling import are_apart_in_sync

_OF_AN_ATTEMPT: Final = (
    *("config.toml", "plan.txt", "plan.json", "summary.json", "status.json", "logs", "history"),
    *("steps.jsonl", "decisions.jsonl"),
    "ranks.json",  # last: where it lies there is a run
)
_ATTEMPT: Final = re.compile(r"attempt-([1-9][0-9]{0,8})")
_PARTIAL: Final = ".partial"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that the job goes on from."""

    checkpoint: Checkpoint
    groups: Sequence[Sequence[int]]
    """[groups]: workers, of those that begin; spares that take workers' places have groups behind
    these."""
    num_substitutes: int
    is_same_layout: bool
    """Groups are of the same workers, in the same mode: each goes on where it was."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        roles: Roles,
        *,
        mode: str,
        modes: Callable[[int], Sequence[ModeFrom]],
    ) -> Restored:
        """``mode``: by which the run is judged; ``modes(set_index)``: which rule which rounds."""
        index, groups = checkpoint.index, roles.groups[: roles.num_groups_beginning]
        is_apart = any(
            are_apart_in_sync(each.clocks, modes(number)) for number, each in enumerate(index.sets)
        )
        return cls(
            checkpoint=checkpoint,
            groups=groups,
            num_substitutes=roles.num_substitutes,
            is_same_layout=index.groups == groups and index.mode == mode and not is_apart,
        )

    def first(self, set_index: int, *, may_miss: bool = False) -> FirstClocks | None:
        """Where the groups begin in a set; None where the checkpoint does not have it.
        ``may_miss``: with the rounds that they have missed, where they are the same groups."""
        sets = self.checkpoint.index.sets
        if set_index >= len(sets):
            return None
        clocks = sets[set_index].clocks
        if not self.is_same_layout:
            clocks = (min(clocks),) * len(self.groups)
        name = checkpoint_name(self.checkpoint.index.step)
        counts_on = may_miss and self.is_same_layout
        return FirstClocks(
            checkpoint=name,
            clocks=(*clocks, *(0,) * self.num_substitutes),
            misses=self.checkpoint.misses(set_index) if counts_on else None,
        )


def choose(
    run_dir: Path, say: Callable[[str], None], rollbacks: Sequence[Record] = ()
) -> tuple[Checkpoint | None, int]:
    """On rank 0, of a run that is to go on, behind these ``rollbacks``: what it goes on from, if
    anything, and the number of this attempt. The files of the one before are set aside. Raises
    :class:`ConfigError`."""
    try:
        attempt = set_aside(run_dir)
        set_aside_checkpoints(Folder(run_dir), rollbacks, say)
    except OSError as error:
        raise ConfigError(
            f"run_dir = {run_dir}: the attempt before cannot be set aside: {error.strerror}"
        ) from error
    checkpoint = Folder(run_dir).newest_good(say)
    if checkpoint is None:
        say(f"resume: {run_dir} has no checkpoint to go on from: this run starts afresh")
    else:
        index = checkpoint.index
        say(
            f"resume: attempt {attempt} goes on from checkpoint {checkpoint.name} of {index.time}, "
            f"attempt {index.attempt}"
        )
    return checkpoint, attempt


def set_aside(run_dir: Path) -> int:
    """What the attempt before has written goes into a folder of its own; the number of the next
    attempt. A death in the middle leaves what the next call completes."""
    if not run_dir.is_dir():
        return 1
    names = sorted(path.name for path in run_dir.iterdir())
    done = [int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))]
    last = max(done, default=0)
    partial = run_dir / f"attempt-{last + 1}{_PARTIAL}"
    if not partial.is_dir() and not (run_dir / "ranks.json").exists():
        return last + 1
    partial.mkdir(exist_ok=True)
    for name in _OF_AN_ATTEMPT:
        if (run_dir / name).exists():
            os.replace(run_dir / name, partial / name)
    os.replace(partial, partial.with_suffix(""))
    return last + 2


def mark_of(checkpoint: Checkpoint | None) -> str:
    """What ranks compare: that all see the same one."""
    return "" if checkpoint is None else encode(checkpoint.index)


def opened(run_dir: Path, name: str, mark: str) -> Checkpoint | None:
    """On every rank: the checkpoint that rank 0 has chosen. Raises :class:`ConfigError`."""
    if not name:
        return None
    checkpoint = Folder(run_dir).open(name)
    if mark_of(checkpoint) != mark:
        raise ConfigError(
            f"{checkpoint.path} is another checkpoint here than on rank 0: run_dir must lie on a "
            "file system that all hosts of the job share"
        )
    return checkpoint
