"""Rounds of local steps that become shorter as the reported loss falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.data import IterableDataset

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage

STEPS = 61


def quarter_of(clock: int) -> float:
    """A loss that is a quarter from round 1 on, and a sixteenth from round 5 on."""
    return 4.0 if not clock else 1.0 if clock < 5 else 0.25


def nothing(_job: Job, _step: int) -> None: ...


def training(
    *,
    loss_of: Callable[[int], float] = quarter_of,
    num_steps: Callable[[Job], int] = lambda _job: STEPS,
    after_step: Callable[[Job, int], None] = nothing,
    reports: Callable[[Job, float], None] = lambda job, loss: job.report(loss),
    width: int = 3,
) -> Script:
    """Batches of the script's own; ``loss_of``: by round. How many steps each round had, by worker,
    and the parameters."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(width, 2)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(1 + job.worker)
        lengths = [0]
        for step in range(num_steps(job)):
            clock = job.clock
            optimizer.zero_grad()
            model(torch.randn(4, width, generator=generator)).square().mean().backward()
            reports(job, loss_of(clock))
            lengths[clock] += 1
            optimizer.step()
            after_step(job, step)
            lengths += [0] * (job.clock + 1 - len(lengths))
        job.barrier()
        values = torch.cat([each.detach().flatten() for each in model.parameters()])
        return {"lengths": [each for each in lengths if each], "parameters": values}

    return script


class Samples(IterableDataset[torch.Tensor]):
    """That say which they are; of some workers' last batches there may be nothing."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self._count, dtype=torch.float32).unsqueeze(1))


def passes(count: int, *, epochs: int = 3) -> Script:
    """The samples seen."""

    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        seen: list[int] = []
        for _ in range(epochs):
            for x in job.loader(Samples(count), batch_size=2):
                seen += x.flatten().int().tolist()
                optimizer.zero_grad()
                model(x).mean().backward()
                job.report(quarter_of(job.clock))
                optimizer.step()
        return {"seen": seen, "clock": job.clock}

    return script


CASES = (
    Case(
        name="by loss",
        script=training(),
        servers=2,
        groups=((0, 1), (2,)),
        settings={"local_steps": 8, "steps_by": "loss", "record": True},
    ),
)
