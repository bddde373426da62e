"""Resume a run: choose its checkpoint, set the last attempt's files aside, and give first clocks.

    found = choose(run_dir, say=print)          # on rank 0: the newest good checkpoint
    restored = Restored.of(checkpoint, roles, mode=config.mode, modes=modes_of_set)
    restored.first(0)                           # the clocks of the first set, by group

RUN_DIR has the files of the newest attempt, and RUN_DIR/attempt-1, attempt-2 ... have those of
earlier ones. All attempts share metrics.jsonl and checkpoints/.
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
    """The job's first checkpoint."""

    checkpoint: Checkpoint
    groups: Sequence[Sequence[int]]
    """[groups]: workers of the groups that begin. Groups of spares for workers follow them."""
    num_substitutes: int
    is_same_layout: bool
    """True if groups have the same workers and mode, so that each continues at its own clock."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        roles: Roles,
        *,
        mode: str,
        modes: Callable[[int], Sequence[ModeFrom]],
        of_tables: ModeFrom | None = None,
    ) -> Restored:
        """``mode``: the mode that the check uses; ``modes(set_index)``: the modes by round, of
        tables too if they have no mode ``of_tables``."""
        index, groups = checkpoint.index, roles.groups[: roles.num_groups_beginning]
        is_apart = any(
            are_apart_in_sync(
                each.clocks, [of_tables] if each.tables and of_tables else modes(number)
            )
            for number, each in enumerate(index.sets)
        )
        return cls(
            checkpoint=checkpoint,
            groups=groups,
            num_substitutes=roles.num_substitutes,
            is_same_layout=index.groups == groups and index.mode == mode and not is_apart,
        )

    def first(self, set_index: int) -> FirstClocks | None:
        """Return the groups' first clocks in a set, and the rounds that they have missed if they
        are the same groups; None if the checkpoint does not contain the set."""
        sets = self.checkpoint.index.sets
        if set_index >= len(sets):
            return None
        clocks = sets[set_index].clocks
        if not self.is_same_layout:
            clocks = (min(clocks),) * len(self.groups)
        name = checkpoint_name(self.checkpoint.index.step)
        return FirstClocks(
            checkpoint=name,
            clocks=(*clocks, *(0,) * self.num_substitutes),
            misses=self.checkpoint.misses(set_index) if self.is_same_layout else None,
        )


def choose(
    run_dir: Path, say: Callable[[str], None], rollbacks: Sequence[Record] = ()
) -> tuple[Checkpoint | None, int]:
    """On rank 0 of a resumed run, after these ``rollbacks``: set the last attempt's files aside and
    return the checkpoint to start from (None: none) and the number of this attempt. Raises
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
        say(f"resume: {run_dir} has no checkpoint to resume from: this run starts afresh")
    else:
        index = checkpoint.index
        say(
            f"resume: attempt {attempt} resumes from checkpoint {checkpoint.name} of {index.time}, "
            f"attempt {index.attempt}"
        )
    return checkpoint, attempt


def set_aside(run_dir: Path) -> int:
    """Move the files of the last attempt into their own folder; return the number of the next
    attempt. If this process fails meanwhile, the next call completes the move."""
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
    """Return text by which ranks compare their checkpoints."""
    return "" if checkpoint is None else encode(checkpoint.index)


def opened(run_dir: Path, name: str, mark: str) -> Checkpoint | None:
    """Return the checkpoint that rank 0 has chosen, on every rank. Raises :class:`ConfigError`."""
    if not name:
        return None
    checkpoint = Folder(run_dir).open(name)
    if mark_of(checkpoint) != mark:
        raise ConfigError(
            f"{checkpoint.path} is another checkpoint here than on rank 0: run_dir must lie on a "
            "file system that all hosts of the job share"
        )
    return checkpoint
