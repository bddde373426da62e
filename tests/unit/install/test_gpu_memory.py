"""What the MPI library says of GPUs' memory, asked of libraries that say it."""

from __future__ import annotations

import ctypes
from unittest import mock

import pytest

from psdist.install import trials


class Library:
    def __init__(self, answer: int | None) -> None:
        if answer is not None:
            self.MPIX_Query_cuda_support = lambda: answer


@pytest.mark.parametrize(("answer", "takes"), [(1, True), (0, False), (None, False)], ids=str)
def test_the_library_is_asked(answer: int | None, takes: bool) -> None:
    with (
        mock.patch.object(trials, "loaded_library_file", return_value="/lib/libmpi.so.40"),
        mock.patch.object(ctypes, "CDLL", lambda path: Library(answer) if path else None),
    ):
        assert trials.takes_gpu_memory() is takes


def test_without_a_library_there_is_no_such_memory() -> None:
    with mock.patch.object(trials, "loaded_library_file", return_value=None):
        assert trials.takes_gpu_memory() is False
