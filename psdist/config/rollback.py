"""What ``rollback`` goes with: one function decides.

contradiction_of_rollback(config)        # "" where the run can be
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psdist.config.codec_rounds import is_auto
from psdist.config.modes import describe_modes, modes_that_may_come

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig


def contradiction_of_rollback(config: RunConfig) -> str:
    """What a run lacks that is to go back to a checkpoint when its loss blows up, and what to do;
    "" where nothing, or where none is to."""
    if config.rollback is None:
        return ""
    mine = f"rollback = {config.rollback:g}"
    if not is_auto(config) and config.steps_by != "loss":
        return (
            f"{mine} with codec = {config.codec or 'none'} and steps_by = {config.steps_by}: there "
            "is nothing that psdist could make less lossy; set codec = auto or steps_by = loss, or "
            "leave rollback out"
        )
    if modes_that_may_come(config) != ("sync",):
        return (
            f"{mine} with mode = {describe_modes(config)}: which checkpoint is of before the loss "
            "rose is known only where all groups are in the same round; set mode = sync, or leave "
            "rollback out"
        )
    if config.checkpoint_every is None:
        return (
            f"{mine} without checkpoint_every: there would be no checkpoint to go back to; set "
            "checkpoint_every, or leave rollback out"
        )
    if config.run_dir is None:
        return (
            f"{mine} without run_dir: say which run goes on when it is started again "
            "(--run-dir RUN_DIR, with --resume), or leave rollback out"
        )
    if config.on_nonfinite != "skip":
        return (
            f"{mine} with on_nonfinite = {config.on_nonfinite}: a step with NaN would end the job "
            "before it is known that the loss has blown up; set on_nonfinite = skip, or leave "
            "rollback out"
        )
    return ""
