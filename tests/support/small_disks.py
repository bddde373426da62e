"""Programs on a machine with too little space: small file systems, and a limit of files.

    words = with_small_disks([sys.executable, "-m", "psdist", ...], {"/dev/shm": "64k"})
    words = with_file_limit([...], kib=1024)

The small file systems are the program's own (a mount name space); nothing else sees them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import pytest

_UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def with_small_disks(words: Sequence[str], sizes: Mapping[str, str]) -> list[str]:
    """The command that runs ``words`` with an empty file system of that size at each place. Skips
    the test where none can be mounted."""
    trial = [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/tmp"]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    mounts = [f"mount -t tmpfs -o size={size} none {place}" for place, size in sizes.items()]
    return [*_UNSHARE, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh", *words]


def with_file_limit(words: Sequence[str], *, kib: int) -> list[str]:
    """The command that runs ``words``, whose files may have so many KiB."""
    return ["bash", "-c", f'ulimit -f {kib} && exec "$@"', "bash", *words]
