"""A small training of one worker, right or wrong: ``alone.py CASE [NAME=VALUE ...]``.

``model``: narrow, wide, large, renamed; ``optimizer``: sgd, adamw; ``sets``: 1 or 2; ``steps``;
``at``: the iteration behind which ``job.checkpoint()`` is called; ``decay``: by which every step
multiplies the learning rate. CASE says what is done beside.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import psdist

job: Any = None


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x).relu())


def make_model(name: str) -> nn.Module:
    if name == "renamed":
        return Renamed()
    width = {"wide": 24, "large": 2048}.get(name, 16)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def make_optimizers(model: nn.Module, name: str, sets: int) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    parts = [parameters] if sets == 1 else [parameters[:2], parameters[2:]]
    if name == "sgd":
        return [torch.optim.SGD(each, lr=0.05, momentum=0.9) for each in parts]
    return [torch.optim.AdamW(each, lr=0.01) for each in parts]


def batch(clock: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(clock)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def nothing(_clock: int) -> None: ...


def attach_late(clock: int) -> None:
    if clock == 2:
        job.attach(late=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter()]), 1))


def attach_twice(clock: int) -> None:
    if clock == 0:
        counter = Counter()
        job.attach(one=counter)
        job.attach(one=counter)


def attach_a_number(clock: int) -> None:
    if clock == 0:
        job.attach(number=7)


def attach_an_optimizer(clock: int) -> None:
    if clock == 0:
        job.attach(mine=torch.optim.SGD([nn.Parameter()]))


def keep_a_function(_clock: int) -> None:
    job.state["nested"] = {"works": [1, {"hidden": len}]}


def epochs_within_epochs(clock: int) -> None:
    if clock == 0:
        for _ in job.epochs(2):
            for _ in job.epochs(2):
                pass


def fewer_than_no_epochs(_clock: int) -> None:
    for _ in job.epochs(-1):
        pass


def usr1(clock: int) -> None:
    if clock == 2:
        os.kill(os.getpid(), signal.SIGUSR1)


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["n"] != 1:
            raise ValueError("no such count")


class Narrow(Counter):
    def load_state_dict(self, _state: dict[str, int]) -> None:
        raise ValueError("too wide for this one")


def attach_counter(_clock: int) -> None:
    if not has_attached:
        has_attached.append(True)
        job.attach(counter=Counter())


def attach_narrow(_clock: int) -> None:
    if not has_attached:
        has_attached.append(True)
        job.attach(counter=Narrow())


has_attached: list[bool] = []

CASES: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        *(nothing, attach_late, attach_twice, attach_a_number, attach_an_optimizer),
        *(keep_a_function, epochs_within_epochs, fewer_than_no_epochs),
        *(attach_counter, attach_narrow, usr1),
    )
}


def iterations(given: dict[str, str]) -> Iterator[int]:
    """With ``loop=epochs`` one in each epoch, else by the clock, where nothing is a boundary."""
    steps = int(given.get("steps", "6"))
    if given.get("loop") == "epochs":
        yield from job.epochs(steps)
        return
    while job.clock < steps:
        yield job.clock


def main(case: str, given: dict[str, str]) -> None:
    global job
    torch.manual_seed(0)
    job = psdist.init()
    if case == "checkpoint_before_prepare":
        job.checkpoint()
    model = make_model(given.get("model", "narrow"))
    sets = int(given.get("sets", "1"))
    served: Any = make_optimizers(model, given.get("optimizer", "adamw"), sets)
    model, served = job.prepare(model, served)
    print(f"begins at {job.clocks}", flush=True)
    at = [int(each) for each in given.get("at", "3").split(",") if each]
    if case == "checkpoint_before_training":
        print(f"has {job.checkpoint()}", flush=True)
    for _ in iterations(given):
        CASES.get(case, nothing)(job.clock)
        x, y = batch(job.clock)
        for each in served:
            each.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if case == "checkpoint_before_step":
            job.checkpoint()
        for each in served:
            each.step()
            for group in each.param_groups:
                group["lr"] *= float(given.get("decay", "1"))
        if case == "count":
            job.state["count"] = job.state.get("count", 0) + 1
        if job.clock in at:
            job.checkpoint()
    print(f"state {dict(job.state)}", flush=True)
    if "out" in given:
        job.save(given["out"])


if __name__ == "__main__":
    main(sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:]))
