"""``steps_by = speed``: groups of different speed take different numbers of local steps, arrive
together, and see every sample of an epoch once."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from psdist.commands.check import check_run
from psdist.errors import UsageError
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.transport.virtual import LinkModel
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

LINK = LinkModel(latency_s=1e-5, jitter_s=1e-4, duplicate_rate=0.02)
STEP_S = 0.01
"""Of a group of speed 1."""


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
        clocks, waited_s, began_s = [], [], job._context.now_s()
        for epoch in range(epochs):
            speed = (speeds if epoch != changes_in else speeds[::-1])[job.group]
            mine: list[int] = []
            waited_s.append(0.0)
            for (x,) in loader:
                mine += x.flatten().int().tolist()
                optimizer.zero_grad()
                model(x).mean().backward()
                stage.sleep(STEP_S / speed)
                computed_s = job._context.now_s()
                optimizer.step()
                waited_s[-1] += job._context.now_s() - computed_s
            seen.append(mine)
            clocks.append(job.clock)
        took_s = job._context.now_s() - began_s
        return {"seen": seen, "clocks": clocks, "waited_s": waited_s, "took_s": took_s}

    return script


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0,), (1,), (2,), (3,)))
    given = {"local_steps": 8, "steps_by": "speed", "record": True, **settings}
    case = Case(name="speed", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=LINK)
    if given["record"]:
        outcome.checked()
    return outcome


def each_once(outcome: Outcome, count: int, epochs: int) -> None:
    for epoch in range(epochs):
        seen = Counter(chain.from_iterable(each["seen"][epoch] for each in outcome.results))
        assert seen == Counter(range(count))


def share_waited(outcome: Outcome, epochs: slice = slice(None)) -> float:
    """Of all workers' time, in ``step()``."""
    waited_s = sum(sum(each["waited_s"][epochs]) for each in outcome.results)
    return waited_s / sum(each["took_s"] for each in outcome.results)


def test_groups_of_different_speed_arrive_together(tmp_path: Path) -> None:
    speeds, count = (3.0, 3.0, 3.0, 1.0), 2 * 4 * 16 * 40 + 5
    settings = {"local_steps": 16, "record": True}
    by_speed = run(training(speeds, count=count), tmp_path / "speed", **settings)
    equal = run(training(speeds, count=count), tmp_path / "equal", steps_by="count", **settings)
    for outcome in (by_speed, equal):
        each_once(outcome, count, 1)
    assert share_waited(equal) > 0.45
    assert share_waited(by_speed) < 0.1
    assert len({tuple(each["clocks"]) for each in by_speed.results}) == 1
    numbers = [len(each["seen"][0]) for each in by_speed.results]
    assert min(numbers[:3]) > 2.5 * numbers[3]
    assert max(each["took_s"] for each in by_speed.results) < 0.5 * max(
        each["took_s"] for each in equal.results
    )
