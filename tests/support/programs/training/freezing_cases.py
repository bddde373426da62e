"""Transfer learning for tests/training/test_freezing.py: a backbone that is frozen for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from psdist.job import Job
from tests.support.jobs import loop_of
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Batch, Problem, flat, train

PROBLEM = Problem()
FROZEN = 20
"""Iterations, from the first on."""
ITERATIONS = 2 * FROZEN
JOINT_BATCH = 24
HEAD = 4
"""Which layer of the model is trained all the time."""

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda each: torch.optim.AdamW(each, lr=3e-3, weight_decay=0.1),
}
LAYOUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((0,),),
    "two-in-a-group": ((0, 1),),
    "two-groups": ((0,), (1,)),
    "groups-of-one-and-two": ((0,), (1, 2)),
}


def model_with_frozen_backbone() -> nn.Sequential:
    model = PROBLEM.model()
    set_frozen(model, True)
    return model


def set_frozen(model: nn.Sequential, is_frozen: bool) -> None:
    for layer in model[:HEAD]:
        layer.requires_grad_(not is_frozen)


def head_bytes() -> int:
    """What one worker pushes of the head; pieces begin at multiples of 64 elements."""
    sizes = [parameter.numel() for parameter in PROBLEM.model()[HEAD].parameters()]
    return sum(4 * -(-size // 64) * 64 for size in sizes)


def all_bytes() -> int:
    return sum(4 * -(-parameter.numel() // 64) * 64 for parameter in PROBLEM.model().parameters())


def batches(*, part: int = 0, num_parts: int = 1) -> list[Batch]:
    size = JOINT_BATCH // num_parts
    return list(PROBLEM.batches(size=size, count=ITERATIONS, part=part, num_parts=num_parts))


def train_both_stages(
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    given: list[Batch],
    *,
    between: Callable[[], None] = lambda: None,
) -> None:
    """First the head alone, then all: the usual script."""
    train(model, optimizer, given[:FROZEN])
    between()
    set_frozen(model, False)
    train(model, optimizer, given[FROZEN:])


def transfer(optimizer_name: str) -> Script:
    def run(job: Job, _stage: Stage) -> Result:
        moved: list[list[int]] = []

        def count() -> None:
            counts = loop_of(job).core.counts()
            moved.append([counts.bytes_pushed, counts.bytes_pulled])

        model = model_with_frozen_backbone()
        model, optimizer = job.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()))
        count()
        given = batches(part=job.worker, num_parts=job.num_workers)
        train_both_stages(model, optimizer, given, between=count)
        count()
        return {"parameters": flat(model), "moved": moved}

    return run


def case(name: str, *, layout: str, optimizer: str = "adamw", **settings: object) -> Case:
    return Case(
        name=name,
        script=transfer(optimizer),
        servers=2,
        groups=LAYOUTS[layout],
        settings={"mode": "sync", "record": True, "checksum_every": 1, **settings},
    )


CASES = [
    case("sync", layout="groups-of-one-and-two"),
    case("ssp", layout="groups-of-one-and-two", mode="ssp", staleness=2),
]
