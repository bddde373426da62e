"""A host of four is cut off, or all that runs on it is killed, while a job trains over all of them.

    python -m tests.benchmarks.deaths.cut_hosts --launcher mpirun --how silent --host h3 --json FILE

On the Slurm test cluster (root; docs/dev/tests.md): tests/support/programs/deaths/long_training.py
on two ranks a host, by ``mpirun``, ``mpirun --with-ft ulfm`` or ``srun``. In the middle of training
the host's interface is taken down (down), its cable pulled (cable), its packets are dropped
(silent; of a rack, too), every process of it is killed (killed), or its power is gone (off: killed
and silent). Told are the seconds from then until each rank, and the job, had ended, what the job
said, and its status.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.cut_jobs import LAUNCHERS, How, played


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="mpirun")
    parser.add_argument("--how", choices=get_args(How), default="silent")
    parser.add_argument("--host", default="h3")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cluster = SlurmCluster()
    seen = played(
        cluster,
        cluster.directory("cut"),
        launcher=given.launcher,
        how=given.how,
        where=given.host,
        options=[f"--set {each}" for each in given.set],
        given=dict(each.split("=", 1) for each in given.env),
        limit_s=given.limit,
    )
    told = json.dumps(asdict(seen), indent=2)
    print(told)
    if given.json:
        given.json.write_text(told + "\n")


if __name__ == "__main__":
    main()
