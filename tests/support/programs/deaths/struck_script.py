"""A training script that knows the moments of tests/support/strikes.py that are a script's: in
which a worker comes first, and the others wait until somebody is killed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

import psdist
from tests.support.jobs import after_each_push
from tests.support.strikes import AT, Strike

ITERATIONS = 24
MEAN_AT = 17
PAUSE_S = 0.005
STILL_S = 0.25
"""A worker that has been in a step, or in a collective, for so long and sends nothing waits."""
MOST_S = 30.0
CHECKPOINT_S = 2.0
"""In every iteration, until the first checkpoint is there: so the next one's is far away."""


class Watch:
    """Strikes when this worker has waited for ``STILL_S`` in a ``with`` of it."""

    def __init__(self, strike: Strike) -> None:
        self._strike = strike
        self._since_s = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        self._since_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since_s = 0.0

    def has_sent(self) -> None:
        if self._since_s:
            self._since_s = time.monotonic()

    def _look(self) -> None:
        while True:
            time.sleep(0.01)
            since_s = self._since_s
            if since_s and time.monotonic() - since_s > STILL_S:
                self._strike.fall()


def wait_until_fallen(strike: Strike) -> None:
    until_s = time.monotonic() + MOST_S
    while not strike.has_fallen:
        if time.monotonic() > until_s:
            raise RuntimeError(f"{MOST_S:g} s, and nobody was killed in {strike.phase}")
        time.sleep(0.01)


def is_there(file: Path) -> bool:
    """Behind :data:`CHECKPOINT_S` at the latest."""
    until_s = time.monotonic() + CHECKPOINT_S
    while not file.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return file.exists()


class Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def watch_pushes(watch: Watch) -> None:
    after_each_push(watch.has_sent)


def main() -> None:
    strike = Strike.of_environment()
    job = psdist.init()
    is_first = strike is not None and job.worker == strike.leading_worker
    waited: Watch | Nothing = Nothing()
    if strike is not None and is_first and strike.phase in ("parked", "collective"):
        waited = Watch(strike)
        watch_pushes(waited)

    def let_the_first_go(phase: str) -> None:
        if strike is not None and not is_first and strike.phase == phase:
            wait_until_fallen(strike)

    parks = strike is not None and strike.phase == "parked"
    newest = Path(os.environ["PSDIST_RUN_DIR"]) / "checkpoints" / "latest"

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64)
    )
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = job.prepare(model, optimizer)
    loader = job.loader(torch.arange(4 * ITERATIONS * job.num_workers), batch_size=4)
    for _ in job.epochs(1):
        for batch in loader:
            clock = job.clock
            loss = model(batch[:, None].float().expand(-1, 64) / 1e3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if parks and clock >= AT and is_there(newest):  # else it would wait for who waits here
                let_the_first_go("parked")
            time.sleep(PAUSE_S)
            with waited if parks and clock >= AT else Nothing():
                optimizer.step()
            job.log(loss=float(loss.detach()), at=time.time())
            if clock == MEAN_AT:
                let_the_first_go("collective")
                with waited:
                    mean = job.mean({"one": 1.0})
                assert abs(mean["one"] - 1.0) < 1e-12
    job.save(Path(os.environ["PSDIST_RUN_DIR"]) / "model.safetensors")
    if strike is not None and strike.role == "worker":
        let_the_first_go("shutting down")
    print(f"worker {job.worker} has made {job.clock} iterations", flush=True)


if __name__ == "__main__":
    main()
