"""A training script that kills a server by SIGKILL in iteration KILL_AT, and continues.

KILLS: the server's number (s0 is spare 0), or several, with commas: each of them three iterations
after the one before, when every shard has two copies again. DEPUTIES: how
often the coordinator has a standby again before each of them. OPTIMIZER:
adam or sgd. Before iteration CHECKPOINT_AT there is a checkpoint, and before SET_MODE_AT the script
asks for ssp with the bound 2. The parameters that it ends with are printed as one CRC-32.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import zlib
from pathlib import Path

import torch

import psdist

ITERATIONS = 12
RUN_DIR = Path(os.environ["PSDIST_RUN_DIR"])
LOGS = RUN_DIR / "logs"
KILL_AT = int(os.environ.get("KILL_AT", "5"))
CHECKPOINT_AT = int(os.environ.get("CHECKPOINT_AT", "-1"))
SET_MODE_AT = int(os.environ.get("SET_MODE_AT", "-1"))


def kill(name: str) -> None:
    role, number = ("spare", name[1:]) if name.startswith("s") else ("server", name)
    ranks = json.loads((RUN_DIR / "ranks.json").read_text())
    pids = [each["pid"] for each in ranks if each["role"] == role]
    os.kill(pids[int(number)], signal.SIGKILL)


def logs() -> str:
    return "".join(each.read_text() for each in sorted(LOGS.glob("rank-*.log")))


def wait_until_told(dead: list[str], *, of_copies: bool = True) -> None:
    """Wait until the coordinator, or its successor, has reported all of ``dead`` and, with
    ``of_copies``, a new replica of every shard that has lost its own."""
    while True:
        text = logs()
        shards = re.findall(r"the shard of server (\d+) has (no|a) replica", text)
        standing = dict(shards)  # the last word of each
        spares = {f"s{each}" for each in re.findall(r"spare (\d+) \(rank .*\) has failed", text)}
        are_whole = "no" not in standing.values()
        if standing.keys() | spares >= set(dead) and (are_whole or not of_copies):
            return
        time.sleep(0.02)


def main() -> None:
    torch.manual_seed(1)
    job = psdist.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[os.environ.get("OPTIMIZER", "adam")]
    optimizer = make(model.parameters(), lr=0.01)
    model, optimizer = job.prepare(model, optimizer)
    torch.manual_seed(100 + job.rank)
    victims = [each for each in os.environ.get("KILLS", "").split(",") if each]
    standbys = [int(each) for each in os.environ.get("DEPUTIES", "").split(",") if each]
    kills = {KILL_AT + 3 * index: each for index, each in enumerate(victims)}
    for iteration in range(ITERATIONS):
        if iteration == CHECKPOINT_AT:
            job.checkpoint()
            while not job.all("is complete" in logs()):
                time.sleep(0.02)
        if iteration == SET_MODE_AT:
            job.set_mode("ssp", staleness=2)
        if iteration in kills and standbys:
            num_awaited = standbys[victims.index(kills[iteration])]
            while not job.all(logs().count("has a standby again") >= num_awaited):
                time.sleep(0.02)
        if iteration in kills and job.is_chief:
            wait_until_told(victims[: victims.index(kills[iteration])])
            kill(kills[iteration])
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    job.pull()
    if job.is_chief:
        if spares := [each for each in victims if each.startswith("s")]:
            wait_until_told(spares, of_copies=False)
        flat = torch.cat([each.detach().flatten() for each in model.parameters()])
        print(f"parameters {zlib.crc32(flat.numpy().tobytes()):08x}", flush=True)


if __name__ == "__main__":
    main()
