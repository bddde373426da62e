"""Small programs that find out what works here, each run in a process of its own.

    python -m psdist.install.trials library  # which MPI mpi4py loads; no MPI_Init
    mpirun -n 2 python -m psdist.install.trials round-trip  # does a message come back unchanged
    python -m psdist.install.trials torch  # which torch, and what it can talk over
    mpirun -n 2 python -m psdist.install.trials device-messages  # does MPI take memory of a GPU

Loading or starting MPI may end the process, torch takes seconds to load, and an MPI that is not
made for memory of a GPU may crash or hang. So `psdist doctor` starts this module and reads the one
marked line of JSON it prints. It never imports the rest of psdist.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

MARK: Final = "psdist-probe:"
ROUND_TRIP_BYTES: Final = 1 << 20
DEVICE_BYTES: Final = (64, 4 << 20)
"""MPI libraries send what is small and what is large by different paths."""


def library() -> dict[str, Any]:
    """The MPI library that mpi4py loads: its version text and its file."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {
        "mpi4py": mpi4py.__version__,
        "version": MPI.Get_library_version(),
        "file": loaded_library_file(),
    }


def round_trip() -> dict[str, Any] | None:
    """Send 1 MiB from rank 0 to rank 1 and back. The facts on rank 0, None on the others."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    facts: dict[str, Any] = {
        "world_size": world.size,
        "multiple": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        "ulfm": _has_ulfm(world),
    }
    if world.size == 2:
        sent = bytes(range(256)) * (ROUND_TRIP_BYTES // 256)
        received = bytearray(ROUND_TRIP_BYTES)
        if world.rank == 0:
            start_s = time.perf_counter()
            world.Send(sent, dest=1)
            world.Recv(received, source=1)
            facts["seconds"] = time.perf_counter() - start_s
            facts["unchanged"] = bytes(received) == sent
        else:
            world.Recv(received, source=0)
            world.Send(received, dest=0)
    return facts if world.rank == 0 else None


def device_messages(device: str = "cuda") -> dict[str, Any] | None:
    """Send memory of ``device`` from rank 0 to memory of rank 1's and back, without a copy on the
    host of this program's making. The facts on rank 0, None on the others."""
    import torch

    def memory(rank: int, value: int, num_bytes: int) -> torch.Tensor:
        index = rank % torch.cuda.device_count() if device == "cuda" else 0
        where = torch.device(device, index)
        return torch.full((num_bytes,), value, dtype=torch.uint8, device=where)

    def finish() -> None:
        """Wait for the device: MPI does not wait for streams."""
        if device == "cuda":
            torch.cuda.synchronize()

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    facts: dict[str, Any] = {"world_size": world.size, "unchanged": True}
    if world.size != 2:
        return facts
    for num_bytes in DEVICE_BYTES:
        mine = memory(world.rank, 7 if world.rank == 0 else 0, num_bytes)
        finish()
        start_s = time.perf_counter()
        if world.rank == 0:
            world.Send(mine, dest=1)
            mine.zero_()
            finish()
            world.Recv(mine, source=1)
            facts["seconds"] = time.perf_counter() - start_s
            facts["unchanged"] &= bool((mine == 8).all())
        else:
            world.Recv(mine, source=0)
            mine.add_(1)
            finish()
            world.Send(mine, dest=0)
    return facts if world.rank == 0 else None


def torch_facts() -> dict[str, Any]:
    """The version of torch, its accelerators, and the back ends workers can reduce over."""
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ],
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
    }


def _has_ulfm(world: Any) -> bool:
    """Whether the library implements revoking, the part of ULFM that MPICH's wheel lacks."""
    communicator = world.Dup()
    try:
        communicator.Revoke()
    except NotImplementedError:  # how mpi4py says that its MPI has no such call
        return False
    finally:
        communicator.Free()
    return True


def loaded_library_file() -> str | None:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = [line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line]
    except (OSError, IndexError):
        return None
    return paths[0] if paths else None


def main(arguments: list[str]) -> int:
    name, *more = arguments
    trials: dict[str, Callable[..., dict[str, Any] | None]] = {
        "library": library,
        "round-trip": round_trip,
        "torch": torch_facts,
        "device-messages": device_messages,
    }
    facts = trials[name](*more)
    if facts is not None:
        print(f"{MARK} {json.dumps(facts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


_QUESTION: Final = "MPIX_Query_cuda_support"
"""A function of Open MPI and MPICH: int (void)."""


def takes_gpu_memory() -> bool:
    """True if the MPI that this process has loaded reports that it takes memory of a GPU.

    A job calls the library's function, because an MPI without support may end the process;
    `psdist doctor` tries it in processes of its own.
    """
    path = loaded_library_file()
    if path is None:
        return False
    question = getattr(ctypes.CDLL(path), _QUESTION, None)
    return question is not None and bool(question())
