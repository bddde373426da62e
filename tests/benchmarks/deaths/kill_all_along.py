"""A training in which a random rank is killed every few seconds, to its end.

    python -m tests.benchmarks.deaths.kill_all_along --mode sync --every 20 --epochs 60 --json FILE

Four workers and four servers with buddies train tests/support/programs/deaths/long_training.py on
this host. Every ``--every`` seconds of training a role is drawn, worker, server or coordinator
(server 0), and one of those that live gets SIGKILL: the job continues without it, or where it
cannot it ends, and is started again with ``--resume``, with all ranks. With ``--spares N`` as many
more ranks wait to take the places of both, and may be killed, too. At the end ``psdist check``
judges the history, and the loss is shown next to that of a run without failures. Exit status 0
where the training has come to its end and the check has passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic, sleep, time

from tests.benchmarks.deaths.kill_and_resume import ranks_of

REPOSITORY = Path(__file__).resolve().parents[3]
WORKERS, SERVERS, CHECKPOINT_EVERY = 4, 4, 50
ROLES = ("worker", "server", "spare")
MOST_STARTS = 50
POLL_S = 0.05
STALLED_S = 180.0
"""Seconds of this program's own time (it may be stopped for a while) without another iteration."""


@dataclass
class Found:
    kills: Counter[str] = field(default_factory=Counter)
    """By role; the coordinator by itself."""
    ends: list[str] = field(default_factory=list)
    """Why the job had to be started again: the last line of each."""
    joined: int = 0
    """So many workers' places spares have taken."""
    seconds: float = 0.0
    loss: float | None = None
    check: str = ""


def start(
    run_dir: Path, mode: str, epochs: int, spares: int, pause_s: float, output: Path
) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "psdist", "run", "--workers", str(WORKERS), "--mode", mode]
    words += ["--servers", str(SERVERS), "--record", "--resume", "--run-dir", str(run_dir)]
    words += ["--checkpoint-every", str(CHECKPOINT_EVERY), "--group", "rank"]
    words += ["--set=max_deaths=99", "--set=replication=buddy", "--set=chunk_bytes=4096"]
    words += [f"--spares={spares}", "-m", "tests.support.programs.deaths.long_training"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PSDIST_PROGRESS": "off"}
    env["PYTHONFAULTHANDLER"] = "1"
    env |= {"EPOCHS": str(epochs), "PAUSE_S": str(pause_s)}
    with output.open("wb") as file:
        return subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT)


def iterations(run_dir: Path, since_s: float) -> int:
    """Iterations of all workers, of the job started then. While it has made none a failure ends
    it."""
    path = run_dir / "status.json"
    if not path.exists() or path.stat().st_mtime < since_s:
        return 0
    workers = json.loads(path.read_text("utf-8"))["workers"]
    return sum(each["clock"] or 0 for each in workers)


def kill_one(run_dir: Path, process: subprocess.Popen[bytes], pick: random.Random) -> str | None:
    """Return the role of the killed rank; None if no rank has a role yet."""
    alive = [each for each in ranks_of(run_dir, process.pid) if each[1] in ROLES]
    if not alive:
        return None
    places = json.loads((run_dir / "ranks.json").read_text("utf-8"))
    coordinator = next(each["pid"] for each in places if each["role"] == "server")
    by_role: defaultdict[str, list[int]] = defaultdict(list)
    for pid, role in alive:
        by_role["registrar" if pid == coordinator else role].append(pid)
    role = pick.choice(sorted(by_role))
    os.kill(pick.choice(by_role[role]), signal.SIGKILL)
    return role


def train(
    mode: str,
    *,
    epochs: int,
    every_s: float,
    seed: int,
    spares: int,
    pause_s: float,
    folder: Path,
) -> Found:
    """``every_s`` 0: no rank is killed."""
    found, pick, run_dir = Found(), random.Random(seed), folder / "run"
    begun_s = monotonic()
    for attempt in range(MOST_STARTS):
        output = folder / f"output-{attempt}"
        process = start(run_dir, mode, epochs, spares, pause_s, output)
        started_s, next_s = time(), inf
        made, num_looks = 0, 0
        while process.poll() is None and num_looks * POLL_S < STALLED_S:
            was, made = made, iterations(run_dir, started_s)
            num_looks = num_looks + 1 if made == was else 0
            if every_s and next_s == inf and made:
                next_s = monotonic() + every_s
            if monotonic() >= next_s:
                role = kill_one(run_dir, process, pick)
                if role is not None:
                    found.kills[role] += 1
                    next_s = monotonic() + every_s
            sleep(POLL_S)
        if process.poll() is None:
            for pid, _ in ranks_of(run_dir, process.pid):
                os.kill(pid, signal.SIGABRT)  # each says where it stands
            process.wait()
            raise SystemExit(f"{folder}: it hangs: {output.read_text('utf-8', 'replace')}")
        text = output.read_text("utf-8", "replace")
        if process.returncode == 0:
            (loss,) = re.findall(r"^loss ([0-9.]+)$", text, re.MULTILINE)
            found.loss = float(loss)
            break
        found.ends.append(text.strip().splitlines()[-1][:300])
        print(f"  {round(monotonic() - begun_s)} s: {found.ends[-1]}", flush=True)
    found.seconds = round(monotonic() - begun_s, 1)
    for path in (run_dir / "summary.json", *run_dir.glob("attempt-*/summary.json")):
        if path.exists():
            found.joined += len(json.loads(path.read_text("utf-8"))["joined"])
    words = [sys.executable, "-m", "psdist", "check", str(run_dir)]
    judged = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    found.check = "passed" if judged.returncode == 0 else (judged.stdout + judged.stderr)[-2000:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="sync", choices=("sync", "ssp", "async"))
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument(
        "--pause-s", type=float, default=0.01, help="after each iteration, where ranks are killed"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told: dict[str, Found] = {}
    for name, every_s in (("without kills", 0.0), ("with kills", given.every)):
        with tempfile.TemporaryDirectory() as folder:
            found = told[name] = train(
                given.mode,
                epochs=given.epochs,
                every_s=every_s,
                seed=given.seed,
                spares=given.spares,
                pause_s=given.pause_s if every_s else 0.0,
                folder=Path(folder),
            )
        killed = ", ".join(f"{count} {role}" for role, count in sorted(found.kills.items()))
        print(
            f"{given.mode}, {name}: loss {found.loss}, {found.seconds} s, killed: "
            f"{killed or 'nobody'}; spares took {found.joined} workers' places; started again "
            f"{len(found.ends)} times; check: {found.check}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({k: vars(v) for k, v in told.items()}, indent=2) + "\n")
    sys.exit(any(each.loss is None or each.check != "passed" for each in told.values()))


if __name__ == "__main__":
    main()
