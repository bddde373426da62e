"""Train a little with what psdist.init was passed, and say what the job then was.

    psdist run -n 3 settings_script.py OUT '{"mode": "ssp"}' '{"mode": "ssp"}'

Worker w passes the settings of the last argument that there is for it. It writes what it saw to
OUT.<worker>, as JSON; tests/mpi/test_settings_of_script.py reads it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import psdist


def main(out: str, *passed: str) -> None:
    settings: dict[str, Any] = json.loads(passed[min(my_worker(), len(passed) - 1)])
    job = psdist.init(**settings)
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        (loss * (float("nan") if iteration == 2 and job.is_chief else 1.0)).backward()
        optimizer.step()
    again = psdist.init() is job
    (batch,) = list(job.loader(range(8), batch_size=8, shuffle=True, shard=False))
    order = batch.tolist()
    seen = {"mode": job.mode, "staleness": job.staleness, "order": order, "again": again}
    Path(f"{out}.{job.worker}").write_text(json.dumps(seen))


def my_worker() -> int:
    """Before there is a job; server ranks of a plain mpirun ask as well."""
    from psdist.ranks.connecting import current

    context = current()
    if context is None:
        return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    return context.roles.worker_ranks.index(context.number)


if __name__ == "__main__":
    main(*sys.argv[1:])
