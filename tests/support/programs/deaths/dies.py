"""A training script of which some workers are killed by SIGKILL, each at a moment that it is told.

DIES="1 pushing 12" (several are parted by commas): worker 1, while it pushes, in iteration 12.

    pushing      its first chunk of the iteration has left, the others have not
    parked       it has pushed all of the iteration, and waits for the replies
    forward      between two steps, where nothing is under way
    collective   it has entered a job.mean, in which it waits for others
    setting      as the chief, when it is about to send what job.set_parameters sets
    saving       as the chief, when it has written half of what job.save writes
    finishing    its script has ended, and it waits for the others

KILLS="1 15": the last worker kills server 1 when it begins iteration 15.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import psdist
from psdist import prepared
from psdist.workers.loop import WorkerLoop

ITERATIONS = int(os.environ.get("ITERATIONS", "40"))
PAUSE_S = 0.01
KILLS = [int(each) for each in os.environ.get("KILLS", "").split()]
PLANS = [each.split() for each in filter(None, os.environ.get("DIES", "").split(","))]
ALL_WAIT_AT = max(
    (int(at) for _, what, at in PLANS if what in ("parked", "collective")), default=-1
)
"""The iteration in which those who live take long, so that whoever is to fail waits for them."""


def die(after_s: float = 0.0) -> None:
    def kill() -> None:
        time.sleep(after_s)
        print(f"killed at {time.time():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if after_s:
        threading.Thread(target=kill, daemon=True).start()
    else:
        kill()


def kill_server(number: int) -> None:
    ranks = json.loads((Path(os.environ["PSDIST_RUN_DIR"]) / "ranks.json").read_text())
    servers = [each["pid"] for each in ranks if each["role"] == "server"]
    print(f"killed at {time.time():.6f}", flush=True)
    os.kill(servers[number], signal.SIGKILL)


def plan_of(worker: int) -> tuple[str, int]:
    """When this worker fails: what it does then, and in which iteration."""
    for number, phase, clock in PLANS:
        if int(number) == worker:
            return phase, int(clock)
    return "never", -1


def main() -> None:
    now: dict[str, Any] = {"clock": -1, "pushes": 0}

    send_push = WorkerLoop._send_push

    def dying_push(self: WorkerLoop, action: Any) -> None:
        send_push(self, action)
        if phase == "pushing" and now["clock"] == at:
            now["pushes"] += 1
            if now["pushes"] == 2:
                die()

    WorkerLoop._send_push = dying_push  # type: ignore[method-assign]
    job = psdist.init()
    phase, at = plan_of(job.worker)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = job.prepare(model, optimizer)
    loader = job.loader(torch.arange(4 * ITERATIONS * job.num_workers), batch_size=4)
    for clock, batch in enumerate(loader):
        now["clock"] = clock
        if job.worker == job.num_workers - 1 and KILLS[1:] == [clock]:
            kill_server(KILLS[0])
        if clock == at and phase == "forward":
            die()
        loss = model(batch[:, None].float().expand(-1, 64) / 1e3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clock == at and phase == "parked":
            die(after_s=0.1)  # the others take longer to come to this iteration
        if clock == ALL_WAIT_AT and phase == "never":
            time.sleep(0.4)
        else:
            time.sleep(PAUSE_S)
        optimizer.step()
        job.log(loss=float(loss.detach()), at=time.time())
        if clock % 10 == 9:
            if phase == "collective" and clock == at:
                die(after_s=0.1)
            mean = job.mean({"one": 1.0, "worker": float(job.worker)})
            assert abs(mean["one"] - 1.0) < 1e-12
    if phase == "setting":
        prepared.PreparedModel.set_values = lambda _self: die()  # type: ignore[method-assign]
    if PLANS:
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.fill_(job.worker + 1)
        job.set_parameters()
        everything = (*model.parameters(), *model.buffers())
        told = job.mean([each.flatten()[0].item() for each in everything])
        # The lowest worker that lives has set them all.
        assert {*told} == {float(min_alive(job))}, told
    if phase == "saving":
        die_in_save()
    job.save(Path(os.environ["PSDIST_RUN_DIR"]) / "model.safetensors")
    if phase == "finishing":
        die(after_s=0.1)
    elif any(what == "finishing" for _, what, _ in PLANS):
        time.sleep(0.4)
    print(f"worker {job.worker} chief {job.is_chief} clock {job.clock}", flush=True)


def min_alive(job: psdist.Job) -> int:
    """The number that the chief has filled its model with."""
    mine = [job.worker + 1.0, 1.0] if job.is_chief else [0.0, 0.0]
    filled, share = job.mean(mine)
    return round(filled / share)


def die_in_save() -> None:
    write = prepared.PreparedModel.write

    def dying_write(self: Any, path: Path) -> None:
        write(self, path)
        path.write_bytes(path.read_bytes()[:100])
        die()

    prepared.PreparedModel.write = dying_write  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
    sys.exit(0)
