"""With stale_lr and delay_compensation a resumed run begins with what its checkpoint has: tau
counts from there, and gradients are moved from there."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS = ((0,), (1,), (2,))
LR = 0.3


def script_of(*, at: dict[int, int], more: int) -> Script:
    """A checkpoint after so many iterations of each group, and so many more."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(6, 1, bias=False)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        begin, seen = job.clock, []
        while job.clock < at[job.group] + more:
            stage.sleep((0.1, 0.03, 0.01)[job.group])
            optimizer.zero_grad()
            x = 0.1 * (torch.arange(6.0).roll(job.worker) + job.clock % 3)
            (model(x) - 1.0).square().mean().backward()
            assert model.weight.grad is not None
            seen.append([model.weight.detach().flatten().clone(), model.weight.grad.flatten()])
            optimizer.step()
            if job.clock == at[job.group] and not begin:
                job.checkpoint()
        job.barrier()
        job.pull()
        return {"begin": begin, "seen": seen, "end": model.weight.detach().flatten().clone()}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    told = {"record": True, **settings}
    case = Case(name="stale", script=script, servers=2, groups=GROUPS, settings=told)
    return run_virtually(case, path, resumes=resumes)


@pytest.mark.parametrize(
    "settings",
    [{"stale_lr": "inverse"}, {"stale_lr": "inverse", "delay_compensation": 0.04}],
)
def test_a_resumed_run_is_proved_with_its_factors(settings: dict[str, Any], tmp_path: Path) -> None:
    at = {0: 5, 1: 9, 2: 14}
    told = {"mode": "async", **settings}
    run(tmp_path, script_of(at=at, more=3), **told).checked()
    resumed = run(tmp_path, script_of(at=at, more=12), resumes=True, **told)
    resumed.checked()
    assert [each["begin"] for each in resumed.results] == [5, 9, 14]
    events = resumed.history.servers[0].events
    factors = events["lr_scale"][(events["kind"] == 1)].tolist()
    assert min(factors) < max(factors), "no update is stale: nothing is tested"


def test_gradients_are_moved_from_what_the_checkpoint_has(tmp_path: Path) -> None:
    """One more iteration of each group, all computed on the same parameters."""
    at, strength = {0: 2, 1: 5, 2: 9}, 0.5
    told = {"mode": "async", "delay_compensation": strength}
    run(tmp_path, script_of(at=at, more=1), **told)
    resumed = run(tmp_path, script_of(at=at, more=1), resumes=True, **told)
    resumed.checked()
    began, gradients = zip(*(each["seen"][0] for each in resumed.results), strict=True)
    begin = began[0]
    assert all(torch.equal(each, begin) for each in began)
    ends = []
    for order in permutations(gradients):
        values = begin.clone()
        for gradient in order:
            values -= LR / 3 * (gradient + strength * gradient**2 * (values - begin))
        ends.append(values)
    assert any(torch.allclose(resumed.results[0]["end"], each, atol=1e-5) for each in ends)
