"""A program of workers that share one GPU, as if each had one of its own.

    psdist run --servers 1 -m tests.support.programs.on_a_gpu MODULE [words]

Where workers are more than GPUs psdist computes on the CPU. Here job.device is the first GPU all
the same, and NCCL is told that each worker is on another host, since it refuses two on one GPU:
so they are joined by sockets. What goes over MPI, streams, NCCL's calls and its aborts are those
of a machine with many; its speeds are not.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any
from unittest import mock

import torch

from tests.support.process_groups import share_a_gpu


def device(_context: Any) -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


if __name__ == "__main__":
    share_a_gpu(int(os.environ["OMPI_COMM_WORLD_RANK"]))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits each time
    sys.argv = sys.argv[1:]
    with mock.patch("psdist.job_parts.device_of", device):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
