"""The script of a spare continues where the chief's is, with the dead worker's part of the data.

Every script is played by the chief and cut at each of its boundaries. The spare begins the script
again, gets the chief's state when it comes to prepare, leaves out what it does not make, and must
see then what the worker whose place it has would have seen.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.script_runs import Script, Worker, _run, play, seed_all
from tests.unit.workers.script.test_going_on import Augmented, evaluate


class Spare(Worker):
    """Its script has made loaders before it hears where it continues."""

    def __init__(self, told: dict[str, Any], *, num_skipped: int, batches: int = 1) -> None:
        super().__init__(worker=1, num_workers=2, clock=told["clock"] + num_skipped)
        self.told = copy.deepcopy(told)
        self.num_skipped = num_skipped * batches

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del self.told["random"]
        self.script.is_chief = False
        self.loaders.skip(self.num_skipped)
        self.script.restore(self.told, name="state-7-0-1")
        super().prepare(model, optimizer)


def with_state(job: Worker) -> None:
    loader = job.loader(Augmented(12))
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    job.prepare(model, optimizer)
    job.attach(scheduler=scheduler)
    for epoch in job.epochs(3):
        for index, *drawn in loader:
            model(torch.stack(drawn, dim=1).float().mean(dim=1, keepdim=True))
            optimizer.step()
            job.state["steps"] = job.state.get("steps", 0) + 1
            job.step(epoch, index)
            job.looked_at.append((optimizer.param_groups[0]["lr"], job.state["steps"]))
        scheduler.step()


def evaluated(job: Worker) -> None:
    loader, validation = job.loader(Augmented(8)), job.loader(Augmented(4), shuffle=True)
    again = job.loader(loader.dataset)
    prepare(job)
    for epoch in job.epochs(3):
        evaluate(again)
        for index, *_ in loader:
            job.step(epoch, index)
        evaluate(validation)


def two_passes_in_an_epoch(job: Worker) -> None:
    first, second = job.loader(Augmented(5)), job.loader(Augmented(6))
    prepare(job)
    for epoch in job.epochs(2):
        for each in (first, second):
            for index, *_ in each:
                job.step(epoch, index)


def prepare(job: Worker) -> None:
    model = nn.Linear(1, 1)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Of a scheduler whose epoch's last steps were left out.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def seen(worker: Worker) -> list[Any]:
    return [each[:-1] for each in worker.trace]  # without what dropout draws


@pytest.mark.parametrize("num_skipped", [0, 1, 4])
@pytest.mark.parametrize("script", [with_state, evaluated, two_passes_in_an_epoch])
def test_a_spare_sees_what_the_dead_would_have_seen(script: Script, num_skipped: int) -> None:
    whole = seen(play(script, share=(1, 2)))
    num_cuts = 0
    while (first := play(script, cut_at=num_cuts, share=(0, 2))).tree is not None:
        spare = Spare(first.tree, num_skipped=num_skipped)
        seed_all(99)
        _run(script, spare)
        assert seen(spare) == whole[first.clock + num_skipped :], num_cuts
        num_cuts += 1
    assert num_cuts >= len(whole)


def test_a_spare_has_the_chiefs_values_scheduler_and_buffers() -> None:
    chief = play(with_state, share=(0, 2))
    first = play(with_state, cut_at=5, share=(0, 2))
    assert first.tree is not None
    spare = Spare(first.tree, num_skipped=0)
    _run(with_state, spare)
    assert spare.looked_at == chief.looked_at[first.clock :]
    (buffers,) = first.tree["models"]
    assert buffers["1.num_batches_tracked"] == first.clock


def test_its_random_numbers_are_its_own() -> None:
    first = play(with_state, cut_at=5, share=(0, 2))
    assert first.tree is not None
    spare = Spare(first.tree, num_skipped=0)
    seed_all(99)
    expected = torch.rand(1)
    seed_all(99)
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))
    spare.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    spare.script.resume()
    assert not spare.script.is_resuming
    assert torch.equal(torch.rand(1), expected)


def test_batches_of_a_round_are_left_out_together() -> None:
    def accumulated(job: Worker) -> None:
        loader = job.loader(Augmented(16))
        prepare(job)
        for epoch in job.epochs(2):
            for number, (index, *_) in enumerate(loader):
                job.looked_at.append((epoch, index.tolist()))
                if number % 2:
                    job.step()
                    job.loaders.end_iteration()

    whole = play(accumulated, share=(1, 2))
    first = play(accumulated, cut_at=3, share=(0, 2))
    assert first.tree is not None
    assert first.loaders.batches_per_round == 2
    spare = Spare(first.tree, num_skipped=1, batches=2)
    _run(accumulated, spare)
    assert spare.looked_at == whole.looked_at[2 * (first.clock + 1) :]
