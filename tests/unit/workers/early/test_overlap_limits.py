"""Where no gradient leaves before step(), and what is said of it."""

from __future__ import annotations

import pytest

from psdist.workers.early.overlap_limits import why_not_here


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("has_thread", [True, False])
def test_on_the_cpu_they_may_with_and_without_a_thread(group_size: int, has_thread: bool) -> None:
    assert not why_not_here(device="cpu", group_size=group_size, has_thread=has_thread)


def test_on_a_gpu_they_may_from_a_worker_alone_whose_loop_a_thread_may_drive() -> None:
    assert not why_not_here(device="cuda", group_size=1, has_thread=True)
    assert "groups of several" in why_not_here(device="cuda", group_size=2, has_thread=True)
    assert "MPI_THREAD_MULTIPLE" in why_not_here(device="cuda", group_size=1, has_thread=False)
