"""A training script whose workers are killed by SIGKILL, while spares wait to take their places.

DIES="1 pushing 12" (several are parted by commas): who has the place of worker 1, while it pushes,
in iteration 12; each plan is carried out once.

    pushing      its first chunk of the iteration has left, the others have not
    parked       it has pushed all of the iteration, and waits for the replies
    loading      its loader fetches the batch of the iteration
    checkpoint   it makes a checkpoint behind the iteration, and has not written its file
    collective   it waits in a job.mean behind the epoch in which the iteration was
    joining      it is a spare that has just been told that it has joined
    torn         likewise, but it is not killed: of what the chief has written it finds a part
    kills-2      it lives, and kills server 2 in the iteration
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
from psdist import script_joins
from psdist.ranks.checkpointing.worker_files import WorkerCheckpoints
from psdist.script_joins import ScriptJoins
from tests.support.jobs import after_each_push

EPOCHS, BATCHES, BATCH_SIZE = 4, int(os.environ.get("BATCHES", "15")), 4
PLANS = [tuple(each.split()) for each in filter(None, os.environ.get("DIES", "").split(","))]
MAY_JOIN = int(os.environ.get("MAY_JOIN", "0"))
"""So many of the dead are followed by a spare: until it is there iterations take long."""
MAX_NORM = float(os.environ["MAX_NORM"]) if "MAX_NORM" in os.environ else None
PAUSE_S, LONG_PAUSE_S = 0.01, 0.4
RUN_DIR = Path(os.environ["PSDIST_RUN_DIR"])


def plan_of(job: psdist.Job, phase: str, clock: int) -> Path | None:
    """The mark that this worker is to leave behind, if it fails now."""
    for index, (worker, what, at) in enumerate(PLANS):
        mark = RUN_DIR / f"killed-{index}"
        if (int(worker), what) == (job.worker, phase) and clock == int(at) and not mark.exists():
            return mark
    return None


def kill_servers(job: psdist.Job) -> None:
    for worker, what, at in PLANS:
        _, is_of_server, server = what.partition("kills-")
        if is_of_server and (int(worker), int(at)) == (job.worker, job.clock):
            places = json.loads((RUN_DIR / "ranks.json").read_text())
            servers = [each["pid"] for each in places if each["role"] == "server"]
            os.kill(servers[int(server)], signal.SIGKILL)


def die(mark: Path, after_s: float = 0.0) -> None:
    def kill() -> None:
        time.sleep(after_s)
        mark.write_text(f"{time.time():.6f}")
        print(f"killed at {time.time():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if after_s:
        threading.Thread(target=kill, daemon=True).start()
    else:
        kill()


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched = lambda: None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.fetched()
        return index


def main() -> None:
    now: dict[str, Any] = {"clock": -1, "pushes": 0}
    make = WorkerCheckpoints.make
    come, read = ScriptJoins.come, script_joins.read_values

    def die_at_second() -> None:
        now["pushes"] += 1
        if now["pushes"] == 2 and (mark := plan_of(job, "pushing", now["clock"])):
            die(mark)

    def dying_make(self: Any, *arguments: Any) -> str:
        if mark := plan_of(job, "checkpoint", now["clock"]):
            die(mark, after_s=0.05)
        return make(self, *arguments)

    def dying_come(self: ScriptJoins) -> Any:
        try:
            found = come(self)
        finally:
            (RUN_DIR / f"joined-{self._loop.core.seat.worker}").touch()
        if found is not None and (mark := plan_of(job, "joining", 0)):
            die(mark)
        return found

    def read_torn(path: Path) -> Any:
        if mark := plan_of(job, "torn", 0):
            mark.touch()
            path.write_bytes(path.read_bytes()[:100])
        return read(path)

    script_joins.read_values = read_torn
    after_each_push(die_at_second)
    WorkerCheckpoints.make = dying_make  # type: ignore[method-assign,assignment]
    ScriptJoins.come = dying_come  # type: ignore[method-assign]
    print(f"begins {os.getpid()}", flush=True)
    job = psdist.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
    samples = Samples(BATCHES * BATCH_SIZE * job.num_workers)
    loader = job.loader(samples, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer = job.prepare(model, optimizer, max_grad_norm=MAX_NORM)
    first = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.attach(scheduler=scheduler)
    job.state.setdefault("epochs", 0)

    def fetch() -> None:
        if mark := plan_of(job, "loading", job.clock):
            die(mark)

    samples.fetched = fetch  # type: ignore[assignment,method-assign]
    for epoch in job.epochs(EPOCHS):
        for batch in loader:
            now["clock"], now["pushes"] = job.clock, 0
            kill_servers(job)
            loss = model(batch[:, None].float().expand(-1, 64) / 1e3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if mark := plan_of(job, "parked", now["clock"]):
                die(mark, after_s=0.05)
            elif any(what == "parked" and int(at) == now["clock"] for _, what, at in PLANS):
                time.sleep(0.2)
            num_dead = len(list(RUN_DIR.glob("killed-*")))
            num_joined = len(list(RUN_DIR.glob("joined-*")))
            time.sleep(LONG_PAUSE_S if num_joined < min(num_dead, MAY_JOIN) else PAUSE_S)
            optimizer.step()
            job.log(loss=float(loss.detach()), samples=" ".join(map(str, batch.tolist())))
        scheduler.step()
        job.state["epochs"] = epoch + 1
        if (mark := plan_of(job, "collective", job.clock // BATCHES - 1)) is not None:
            die(mark, after_s=0.05)
        elif any(what == "collective" and int(at) == epoch for _, what, at in PLANS):
            time.sleep(0.2)
        mean = job.mean({"one": 1.0})
        assert abs(mean["one"] - 1.0) < 1e-12
    assert job.state["epochs"] == EPOCHS, job.state
    assert abs(scheduler.get_last_lr()[0] - 1e-2 * 0.9**EPOCHS) < 1e-9
    job.save(RUN_DIR / "model.safetensors")
    last = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    print(f"change {float((last - first).norm())}", flush=True)
    print(f"worker {job.worker} number {job._number} clock {job.clock}", flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
