"""``psdist bench step`` on four hosts: a server and a worker on each, links of 1 Gbit/s (--link).

    python -m tests.benchmarks.steps.four_hosts --size 64MiB --json docs/bench/four-hosts-64MiB.json

Brings the Slurm test cluster up and takes it down, whatever happens: nobody else may use it then.
``--set key=value`` are settings of psdist, and names in capitals go to the ranks as they are, as
all of ``--env NAME=VALUE`` do. With several ``--set`` (``--set a=1 b=2 --set a=3``) there is a run
for each. ``--trace RUN_DIR`` runs the training script tests/benchmarks/steps/traced_step.py
instead, ``--compute`` in seconds, and brings its run directory here, for psdist trace. Needs root.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.slurm.cluster import SlurmCluster

PROGRAM = ("python", "-m", "psdist")
LINKS = """
[[switch]]
name = "spine"
nodes = "h[1-4]"
link = "{link}Mbit"
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", nargs="+", default=["64MiB"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compute", default="0")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", default="1")
    parser.add_argument("--link", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--ddp-bucket", default="25", help="MiB of DDP's buckets")
    parser.add_argument("--set", nargs="*", action="append", default=[])
    parser.add_argument("--env", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, metavar="RUN_DIR")
    options = parser.parse_args()
    status = 0
    with taken_cluster(shape=f"{options.link}mbit") as cluster:
        for size in options.size:
            for settings in options.set or [[]]:
                print(f"{size}, {settings or 'defaults'}", flush=True)
                status |= run(cluster, options, size, settings)
    return status


def run(cluster: SlurmCluster, options: argparse.Namespace, size: str, settings: list[str]) -> int:
    """One job; prints what it prints."""
    chosen = dict(each.replace(".", "_", 1).split("=", 1) for each in settings)
    with tempfile.TemporaryDirectory(dir=cluster.directory("step")) as folder:
        file = Path(folder) / "step.json"
        racks = Path(folder) / "racks.toml"
        racks.write_text(LINKS.format(link=options.link), encoding="utf-8")
        model = ("--size", size, "--layers", str(options.layers), "--compute", options.compute)
        if options.trace is None:
            words = ["bench", "step", *model, "--repeats", str(options.repeats),
                     "--steps", options.steps, "--servers", "4", "--json", str(file),
                     "--ddp-bucket", options.ddp_bucket]  # fmt: skip
        else:
            words = ["run", "--servers", "4", "--group", "rank", "--trace",
                     "-m", "tests.benchmarks.steps.traced_step", *model,
                     "--steps", str(options.repeats)]  # fmt: skip
        done = cluster.srun(
            ["--mpi=pmix", "-N", "4", "--ntasks-per-node=2", *PROGRAM, *words],
            env={
                "OMP_NUM_THREADS": "1",
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "PSDIST_RACKS": str(racks),
                "PSDIST_RUN_DIR": str(Path(folder) / "run"),
                "PSDIST_PROGRESS": "off",
                **dict(each.split("=", 1) for each in options.env),
                **{
                    key if key.split("_")[0].isupper() else f"PSDIST_{key.upper()}": value
                    for key, value in chosen.items()
                },
            },
            timeout_s=240,
        )
        print(done.stdout if done.returncode == 0 else done.text, flush=True)
        if options.json is not None and file.exists():
            shutil.copy(file, options.json)
        if options.trace is not None:
            shutil.copytree(Path(folder) / "run", options.trace, dirs_exist_ok=True)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main())
