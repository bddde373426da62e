"""Training on a GPU: overlap changes no bit. Skipped where torch sees no GPU, or too few.

    PSDIST_REQUIRE_MPI=1 python -m pytest -n 0 -rs tests/gpu

Its time off and with overlap: `psdist run --servers 1 tests/support/programs/gpu_step.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.mpi.test_overlap import overlap_on_ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_chunks_leave_a_gpu_during_backward_and_the_bits_are_those_without(tmp_path: Path) -> None:
    """Two workers share the GPU where there is one."""
    overlap_on_ranks(tmp_path, mpi="openmpi", polling="", group="rank", tier="auto", device="cuda")
