"""Checks before Open MPI starts: room in two folders of this host, and files large enough.

    has_room(Path("/tmp"), session_bytes(num_ranks=4))
    check_shared_memory(os.environ | {"OMPI_MCA_btl": "self,sm"})        # LaunchError

Without room an MPI library ends by SIGBUS or SIGXFSZ, or prints pages of advice that name neither
the folder nor the limit. The errors here name both. They refuse nothing that another transport
could carry.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from psdist.errors import LaunchError

_SESSION_BYTES: Final = 256 << 10
_SESSION_BYTES_PER_RANK: Final = 8 << 10
"""Open MPI 5.0.11: 2 ranks start with 128 KiB and not with 96, 24 with 256 KiB and not with 128."""
_SEGMENT_BYTES: Final = 16 << 20
"""The default of btl_sm_segment_size, the size of each rank's file."""
_BACKING_FOLDER: Final = Path("/dev/shm")
"""The default of btl_sm_backing_directory."""
_INFO_TIMEOUT_S: Final = 5.0


def session_bytes(num_ranks: int) -> int:
    """Return how many bytes mpirun and its ranks may write into the folder of their job."""
    return _SESSION_BYTES + num_ranks * _SESSION_BYTES_PER_RANK


def has_room(folder: Path, num_bytes: int) -> bool:
    """True if ``num_bytes`` can be written there, or if the system does not report it."""
    free = _free_bytes(folder)
    return free is None or free >= num_bytes


def no_room(folders: Sequence[Path], num_bytes: int, *, variable: str = "TMPDIR") -> LaunchError:
    """Return the error of a job whose files fit into none of these folders, which the environment
    variable ``variable`` names."""
    found = ", ".join(
        f"{folder} has {in_words(free)}"
        for folder in dict.fromkeys(folders)
        if (free := _free_bytes(folder)) is not None
    )
    return LaunchError(
        f"no space for the files of mpirun, {in_words(num_bytes)}: {found} free; free some, or set "
        f"{variable} to a folder with more"
    )


def check_file_limit(num_bytes: int, *, what: str) -> None:
    """Raise LaunchError if the limit of files is below ``num_bytes``, which ``what`` needs."""
    limit = _file_limit()
    if limit is not None and limit < num_bytes:
        raise LaunchError(
            f"files may have {in_words(limit)} at most (ulimit -f), and {what} needs one of "
            f"{in_words(num_bytes)}: raise the limit (ulimit -f unlimited)"
        )


def check_shared_memory(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if ranks can reach each other by Open MPI's shared memory only, as
    OMPI_MCA_btl in ``environment`` says, and there is no room for it."""
    if set(environment.get("OMPI_MCA_btl", "").split(",")) != {"self", "sm"}:
        return
    limit = _file_limit()
    if has_room(_BACKING_FOLDER, _SEGMENT_BYTES) and (limit is None or limit >= _SEGMENT_BYTES):
        return
    folder, num_bytes = _as_set(environment)  # only now: it takes 0.1 s
    check_file_limit(num_bytes, what=f"Open MPI's shared memory in {folder}")
    free = _free_bytes(folder)
    if free is not None and free < num_bytes:
        raise LaunchError(
            f"{folder} has {in_words(free)} free, and Open MPI's shared memory needs "
            f"{in_words(num_bytes)} there for each rank: free some, give the container more "
            "(docker run --shm-size=1g), or set OMPI_MCA_btl_sm_backing_directory=/tmp"
        )


def in_words(num_bytes: int) -> str:
    """``0 B``, ``64 KiB``, ``16 MiB``: rounded down."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def _file_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _free_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _as_set(environment: Mapping[str, str]) -> tuple[Path, int]:
    """Return the folder and the bytes of a rank's shared memory, by ompi_info, which reads the
    environment and the files of parameters."""
    told: dict[str, str] = {}
    places = os.pathsep.join([f"{sys.prefix}/bin", environment.get("PATH", os.defpath)])
    program = shutil.which("ompi_info", path=places)
    if program is not None:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [program, "--parsable", "--param", "btl", "sm", "--level", "9"],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_INFO_TIMEOUT_S,
                check=False,
            )
            for line in done.stdout.decode(errors="replace").splitlines():
                name, _, value = line.partition(":value:")
                told[name.rpartition(":")[2]] = value
    size = told.get("btl_sm_segment_size", "")
    return (
        Path(told.get("btl_sm_backing_directory") or _BACKING_FOLDER),
        int(size) if size.isdecimal() and len(size) < 16 else _SEGMENT_BYTES,
    )
