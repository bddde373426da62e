"""Groups whose steps take differently long, in rounds of local steps by speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.job import Job
from tests.support.jobs import rank_of
from tests.support.programs.training.cases import Case, Result, Script, Stage

STEP_S = 0.01
"""Of a group of speed 1."""
COUNT = 2 * 3 * 4 * 6 + 1


def dataset(count: int) -> TensorDataset:
    """Samples that say which they are."""
    return TensorDataset(torch.arange(count, dtype=torch.float32).unsqueeze(1))


def training(
    speeds: tuple[float, ...],
    *,
    count: int,
    epochs: int = 1,
    batch_size: int = 2,
    changes_in: int = -1,
    **options: Any,
) -> Script:
    """What each worker has seen in each epoch, how long it has waited in ``step()``, and how long
    it has trained. From epoch ``changes_in`` on speeds are those of the groups in reverse."""

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        loader = job.loader(dataset(count), batch_size=batch_size, shuffle=True, **options)
        seen: list[list[int]] = []
        clocks, waited_s, began_s = [], [], rank_of(job).now_s()
        for epoch in range(epochs):
            speed = (speeds if epoch != changes_in else speeds[::-1])[job.group]
            mine: list[int] = []
            waited_s.append(0.0)
            for (x,) in loader:
                mine += x.flatten().int().tolist()
                optimizer.zero_grad()
                model(x).mean().backward()
                stage.sleep(STEP_S / speed)
                computed_s = rank_of(job).now_s()
                optimizer.step()
                waited_s[-1] += rank_of(job).now_s() - computed_s
            seen.append(mine)
            clocks.append(job.clock)
        took_s = rank_of(job).now_s() - began_s
        return {"seen": seen, "clocks": clocks, "waited_s": waited_s, "took_s": took_s}

    return script


CASES = (
    Case(
        name="by speed",
        script=training((1.0, 4.0), count=COUNT, epochs=2),
        servers=2,
        groups=((0, 1), (2,)),
        settings={"local_steps": 4, "steps_by": "speed", "record": True},
    ),
)
