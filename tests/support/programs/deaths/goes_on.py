"""A training script of which some workers are killed by SIGKILL, each at a moment that it is told,
and whose groups continue without them.

DIES="1 pushing 12" (several are parted by commas): worker 1, in iteration 12, when

    forward      it is between two steps, and nothing is under way
    agreeing     it has come to the group's agreement
    reducing     it has brought its gradients to the others of its group
    pushing      its first chunk has left, the others have not
    parked       it has pushed all, and waits for the replies
    gathering    it has brought its new parameters to the others
    collective   it has entered a job.mean, behind the iteration
    kills-1      it lives, and kills server 1

Every worker that lives prints the checksum of its parameters at the end, and where it is in torch's
default process group, over which all who are left of the group have met.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import psdist
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.shared_memory import SharedMemoryChannel
from psdist.workers.group.two_levels import TwoLevelChannel
from psdist.workers.loop import WorkerLoop

ITERATIONS = int(os.environ.get("ITERATIONS", "30"))
PLANS = [each.split() for each in filter(None, os.environ.get("DIES", "").split(","))]
CHANNELS = (SharedMemoryChannel, ProcessGroupChannel, TwoLevelChannel)
OPERATIONS = {"agreeing": "agree", "reducing": "reduce_scatter", "gathering": "all_gather"}
LATE_S = 0.1


def die(after_s: float = 0.0) -> None:
    def kill() -> None:
        time.sleep(after_s)
        print(f"killed at {time.time():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if after_s:
        threading.Thread(target=kill, daemon=True).start()
    else:
        kill()


def kill_server(server: int) -> None:
    ranks = json.loads((Path(os.environ["PSDIST_RUN_DIR"]) / "ranks.json").read_text())
    print(f"killed at {time.time():.6f}", flush=True)
    os.kill([each["pid"] for each in ranks if each["role"] == "server"][server], signal.SIGKILL)


def dying(method: Callable[..., Any], is_due: Callable[[], bool]) -> Callable[..., Any]:
    """``method``, behind which the worker fails when that ``is_due()``."""

    def call(*arguments: Any, **more: Any) -> Any:
        result = method(*arguments, **more)
        if is_due():
            die()
        return result

    return call


def main() -> None:
    now = {"clock": -1, "pushes": 0}
    plan = {int(worker): (phase, int(clock)) for worker, phase, clock in PLANS}
    mine = ["never", -1]

    def is_due(what: str) -> bool:
        return mine == [what, now["clock"]]

    def is_second_push() -> bool:
        now["pushes"] += is_due("pushing")
        return is_due("pushing") and now["pushes"] == 2

    WorkerLoop._send_push = dying(WorkerLoop._send_push, is_second_push)  # type: ignore[method-assign]
    for what, name in OPERATIONS.items():
        for each in CHANNELS:
            setattr(each, name, dying(getattr(each, name), partial(is_due, what)))
    job = psdist.init()
    mine[:] = phase, at = plan.get(job.worker, ("never", -1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = job.prepare(model, optimizer)
    clocks = {clock for _, clock in plan.values()}
    for clock, batch in enumerate(
        job.loader(torch.arange(4 * ITERATIONS * job.num_workers), batch_size=4)
    ):
        now["clock"] = clock
        if clock == at and phase == "forward":
            die()
        if clock == at and phase.startswith("kills-"):
            kill_server(int(phase.removeprefix("kills-")))
        loss = model(batch[:, None].float().to(job.device).expand(-1, 64) / 1e3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clock == at and phase == "parked":
            die(after_s=LATE_S)  # the other groups take longer to come to this iteration
        elif clock in clocks and at != clock and job.group == job.num_groups - 1:
            time.sleep(2 * LATE_S)
        optimizer.step()
        job.log(loss=float(loss.detach()))
        if clock % 5 == 4:
            if phase == "collective" and clock == at:
                die(after_s=LATE_S)
            elif clock in clocks:
                time.sleep(2 * LATE_S)
            mean = job.mean({"one": 1.0})
            assert abs(mean["one"] - 1.0) < 1e-12
    job.save(Path(os.environ["PSDIST_RUN_DIR"]) / "model.safetensors")
    values = torch.cat([each.detach().flatten() for each in model.parameters()]).cpu()
    checksum = zlib.crc32(values.numpy().tobytes())
    print(f"worker {job.worker} clock {job.clock} has {checksum:08x}", flush=True)
    met = torch.ones(1)
    dist.all_reduce(met)
    print(f"worker {job.worker} is {dist.get_rank()} of {int(met)}", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
