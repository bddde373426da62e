"""``if job.is_chief: job.save(...)``: the others train on, and that is told at once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from psdist.errors import CollectiveError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, train
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem(num_samples=96)
GROUPS = ((0,), (1, 2))
AT_THE_END = "save was called by worker 0 only; absent: worker [12], whose script has finished"


def run(script: Script, tmp_path: Path, *, mode: str, seed: int = 0) -> Outcome:
    case = Case(name="missed", script=script, groups=GROUPS, settings={"mode": mode})
    return run_virtually(case, tmp_path / "run", seed=seed)


def saves_on_the_chief_only(*, has_loader: bool) -> Script:
    """Two passes of four batches each, and in the second of them the chief saves."""

    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(TensorDataset(*PROBLEM.data()), batch_size=8, shuffle=True)
        assert len(loader) == 4
        for epoch in range(2):
            own = PROBLEM.batches(size=8, count=4, part=job.worker, num_parts=3)
            for number, batch in enumerate(loader if has_loader else own):
                train(model, optimizer, [batch])
                if job.is_chief and epoch and number == 1:
                    job.save(stage.path / "model.safetensors")
        return {"clock": job.clock}

    return script


@pytest.mark.parametrize("seed", range(3))
def test_in_sync_over_loaders_it_is_an_error_that_names_both_and_the_call(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CollectiveError) as caught, caplog.at_level(logging.WARNING, "psdist"):
        run(saves_on_the_chief_only(has_loader=True), tmp_path, mode="sync", seed=seed)
    assert str(caught.value) in {
        f"worker 0 called save after 6 iterations, but worker {other} continued past iteration 6 "
        "without calling save, although both iterate over a job.loader of 4 batches; save must be "
        "called by every worker, after the same iteration"
        for other in (1, 2)
    }
    assert caplog.messages == []
    assert not list((tmp_path / "run").glob("model*"))


@pytest.mark.parametrize(
    ("mode", "has_loader"), [("sync", False), ("ssp", True), ("async", True), ("async", False)]
)
def test_elsewhere_it_is_a_warning_at_once_and_an_error_at_the_end(
    mode: str, has_loader: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(CollectiveError, match=AT_THE_END),
        caplog.at_level(logging.WARNING, "psdist"),
    ):
        run(saves_on_the_chief_only(has_loader=has_loader), tmp_path, mode=mode)
    (warning,) = caplog.messages
    assert warning in {
        f"worker 0 called save after 6 iterations, but worker {other} continued past iteration 6 "
        f"without calling save; save must be called by every worker: if worker {other} never calls "
        "it, that will be an error at the end of its script"
        for other in (1, 2)
    }


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_calls_by_everybody_are_none_of_that_however_far_apart_the_groups_are(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = job.loader(TensorDataset(*PROBLEM.data()), batch_size=8, shuffle=True)
        for _ in range(2):
            for number, batch in enumerate(loader):
                stage.sleep(0.1 * job.group)
                train(model, optimizer, [batch])
                if number == 1:
                    job.mean(number)
            job.log(epoch=1)
        job.save(stage.path / "model.safetensors")
        return {"clock": job.clock}

    with caplog.at_level(logging.WARNING, "psdist"):
        outcome = run(script, tmp_path, mode=mode)
    assert [result["clock"] for result in outcome.results] == [8, 8, 8]
    assert caplog.messages == []
