"""A checkpoint file that is written in a thread: how each way to fail reaches the rank."""

from __future__ import annotations

import pytest

from psdist.checkpoint.index import FileRecord
from psdist.errors import InvariantError
from psdist.protocol.control import WriteFailed
from psdist.ranks.checkpointing.files import Writing


def full() -> FileRecord:
    raise OSError(28, "No space left on device", "step-1/server-0.safetensors")


def broken() -> FileRecord:
    raise InvariantError("a region has no chunk")


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_full_disk_fails_the_checkpoint_and_not_the_job(is_behind: bool) -> None:
    outcome = Writing("step-1", full, is_behind=is_behind).outcome(waits=is_behind)
    assert isinstance(outcome, WriteFailed)
    assert outcome.problem == "step-1/server-0.safetensors: No space left on device"


def test_a_broken_invariant_in_the_thread_ends_the_job() -> None:
    writing = Writing("step-1", broken, is_behind=True)
    with pytest.raises(InvariantError, match="a region has no chunk"):
        writing.outcome(waits=True)
