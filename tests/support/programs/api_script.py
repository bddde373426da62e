"""A training script that looks at everything a Job shows to its user.

    psdist run --workers 2 tests/support/programs/api_script.py OUT

Each worker writes what it saw to OUT.<worker>, as JSON; tests/mpi/test_public_api.py reads it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psdist


def main(out: str) -> None:
    job = psdist.init()
    seen: dict[str, Any] = {"numbers": numbers(job)}
    job.log(step=1)
    Path(f"{out}.{job.worker}").write_text(json.dumps(seen))


def numbers(job: psdist.Job) -> dict[str, int]:
    names = ("rank", "worker", "local_rank", "mpi_rank")
    names += ("world_size", "num_workers", "num_servers", "servers")
    return {name: getattr(job, name) for name in names}


if __name__ == "__main__":
    main(sys.argv[1])
