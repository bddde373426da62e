"""``psdist bench convergence`` on four hosts, a server and a worker on each, over slow links.

    python -m tests.benchmarks.steps.slow_links --link 10 --json docs/bench/convergence-10mbit.json

``--link`` in Mbit/s; words behind ``--`` go to the benchmark as they are. Printed besides is what
the hosts' interfaces have sent beside what the summaries say, of which three quarters cross a link
here: of every worker's bytes all but those of its own host's server; ``bytes_sent``, so psdist's
headers and control messages count. Of each packet 66 bytes are headers (Ethernet 14, IP 20, TCP
32). Brings the Slurm test cluster up and takes it down, whatever
happens: nobody else may use it then. Needs root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.benchmarks.steps.four_hosts import LINKS, PROGRAM
from tests.support.slurm.cluster import SlurmCluster

HOSTS: Final = 4
HEADERS: Final = 66
TIMEOUT_S: Final = 560.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Schemes over slow links, on four hosts.")
    parser.add_argument("--link", type=int, default=10, help="Mbit/s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("words", nargs="*", help="of psdist bench convergence")
    options = parser.parse_args()
    with taken_cluster(shape=f"{options.link}mbit") as cluster:
        return run(cluster, options)


def run(cluster: SlurmCluster, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=cluster.directory("links")) as folder:
        file, picture = Path(folder) / "convergence.json", Path(folder) / "convergence.svg"
        racks = Path(folder) / "racks.toml"
        racks.write_text(LINKS.format(link=options.link), encoding="utf-8")
        words = ("bench", "convergence", "--servers", str(HOSTS), "--link", f"{options.link}Mbit")
        done = cluster.srun(
            ["--mpi=pmix", "-N", str(HOSTS), "--ntasks-per-node=2", *PROGRAM, *words,
             "--json", str(file), "--plot", str(picture), *options.words],
            env={
                "OMP_NUM_THREADS": "1",
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "PSDIST_GROUP": "rank",
                "PSDIST_RACKS": str(racks),
                "PSDIST_RUN_DIR": str(Path(folder) / "run"),
            },
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        print(done.stdout if done.returncode == 0 else done.text, flush=True)
        if done.returncode == 0:
            print(interfaces(json.loads(file.read_text(encoding="utf-8"))))
            if options.json is not None:
                shutil.copy(file, options.json)
            if options.plot is not None:
                shutil.copy(picture, options.plot)
        return done.returncode


def interfaces(result: dict[str, Any]) -> str:
    lines = [
        "bytes on the interfaces, packets' headers left out, against the summary's or the ring's:"
    ]
    for row in result["rows"]:
        is_ring = "bytes_sent" not in row
        told = row["bytes"] if is_ring else row["bytes_sent"] * (HOSTS - 1) / HOSTS
        seen = row["hosts_sent_bytes"] - HEADERS * row["hosts_sent_packets"]
        lines.append(f"  {row['name']}: {seen / 1e6:.2f} MB, {100 * (seen / told - 1):+.1f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
