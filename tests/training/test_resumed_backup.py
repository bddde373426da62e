"""A checkpoint with a group that has missed rounds without knowing it. In the resumed run every
group begins with the round of the others, after the batches of the rounds that it missed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.checkpoint import tree
from psdist.checkpoint.folder import Folder
from psdist.job import Job
from tests.support.jobs import occasions_of
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS = ((0,), (1,), (2, 3))
NUM_WORKERS = 4
ROUNDS, AT, SLOW_AT, BATCH = 12, 8, 5, 2
SETTINGS: dict[str, Any] = {"record": True, "overlap": "off"}
BACKED: dict[str, Any] = {**SETTINGS, "backup": 1, "backup_every": 20}


def script_of(*, num_epochs: int = 1, is_asked: bool = True, late: int = len(GROUPS) - 1) -> Script:
    """``ROUNDS`` in all. A signal comes to each worker of the other groups in front of the batch of
    round ``AT``; the group ``late`` asks late for that of ``SLOW_AT``, when they hold, and
    unless it ``is_asked``, too, it has not heard of that."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        num_samples = BATCH * NUM_WORKERS * ROUNDS // num_epochs
        data = TensorDataset(torch.randn(num_samples, 4), torch.arange(num_samples))
        loader = job.loader(data, batch_size=BATCH, shuffle=True)
        begin, is_first, seen = job.clock, not job.clock, []
        evaluated: list[int] = []
        is_late = job.group == late
        for epoch in job.epochs(num_epochs):
            with torch.no_grad():
                evaluated.append(sum(1 for _ in loader))
            for x, numbers in loader:
                seen.append((job.clock, epoch, numbers.tolist()))
                stage.sleep(0.01)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if is_first and job.clock == (SLOW_AT if is_late else AT):
                    stage.sleep(1.0 * is_late)
                    if is_asked or not is_late:
                        occasions_of(job).ask("checkpoint")
        return {"begin": begin, "seen": seen, "end": job.clock, "evaluated": evaluated}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    groups = settings.pop("groups", GROUPS)
    case = Case(name="backup", script=script, servers=2, groups=groups, settings=settings)
    return run_virtually(case, path, resumes=resumes)


def samples(results: Sequence[Result]) -> list[tuple[int, int]]:
    """(epoch, sample) of all workers."""
    return [
        (epoch, number)
        for each in results
        for _, epoch, numbers in each["seen"]
        for number in numbers
    ]


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_all_groups_go_on_in_the_round_of_the_others(num_epochs: int, tmp_path: Path) -> None:
    script = script_of(num_epochs=num_epochs)
    first = run(tmp_path, script, **BACKED)
    first.checked()
    began = list(first.results)
    (name,) = Folder(tmp_path).names()
    checkpoint = Folder(tmp_path).open(name)
    assert (name, checkpoint.index.sets[0].clocks) == (f"step-{AT:08d}", (AT,) * len(GROUPS))
    own = [tree.unpack(*checkpoint.worker(worker))["missed"]["clock"] for worker in range(4)]
    assert own == [AT, AT, SLOW_AT, SLOW_AT], "no group is late: nothing is tested"
    resumed = run(tmp_path, script, resumes=True, **SETTINGS)
    resumed.checked()
    for before, after in zip(began, resumed.results, strict=True):
        assert after["begin"] == AT
        assert [clock for clock, *_ in after["seen"]] == list(range(AT, ROUNDS))
        assert after["end"] == ROUNDS
        assert set(after["evaluated"]) == {ROUNDS // num_epochs}, "made once more, and whole"
        known = {clock: each for clock, *each in before["seen"]}
        assert all(known.get(clock, each) == each for clock, *each in after["seen"])
    made = [
        {**each, "seen": [one for one in each["seen"] if one[0] < clock]}
        for clock, each in zip(own, began, strict=True)
    ]
    all_samples = samples([*made, *resumed.results])
    assert len(all_samples) == len(set(all_samples)), "no sample comes twice"
    assert len(all_samples) == BATCH * (4 * ROUNDS - 2 * (AT - SLOW_AT))


def test_backup_groups_go_on_in_the_round_of_the_others(tmp_path: Path) -> None:
    """A group that missed rounds without knowing learns it: it is not awaited any sooner."""
    script = script_of()
    first = run(tmp_path, script, **BACKED)
    began = list(first.results)
    resumed = run(tmp_path, script, resumes=True, **BACKED)
    resumed.checked()
    running = resumed.history.run.missed_running
    assert running[:2] == (0, 0)
    assert running[2] >= AT - SLOW_AT
    made = [
        {**each, "seen": [one for one in each["seen"] if one[0] < clock]}
        for clock, each in zip((AT, AT, SLOW_AT, SLOW_AT), began, strict=True)
    ]
    all_samples = samples([*made, *resumed.results])
    assert len(all_samples) == len(set(all_samples)), "no sample comes twice"
    assert min(clock for each in resumed.results for clock, *_ in each["seen"]) == AT
    for before, after in zip(began, resumed.results, strict=True):
        known = {clock: each for clock, *each in before["seen"]}
        assert all(known.get(clock, each) == each for clock, *each in after["seen"])
        assert after["end"] == ROUNDS


@pytest.mark.parametrize("late", [0, 2])
def test_other_workers_go_on_behind_what_all_have_seen(late: int, tmp_path: Path) -> None:
    """As the chief counts it, and with the rounds that it had not heard of."""
    first = run(tmp_path, script_of(late=late), **BACKED)
    began = list(first.results)
    script, groups = script_of(), ((0,), (1,))
    resumed = run(tmp_path, script, resumes=True, groups=groups, **SETTINGS)
    resumed.checked()
    assert [each["begin"] for each in resumed.results] == [AT, AT]
    seen = [one for each in began for one in each["seen"] if one[0] < AT]
    again = [one for each in resumed.results for one in each["seen"]]
    assert len(again) == (ROUNDS - AT) * sum(map(len, GROUPS))
    assert not set(samples([{"seen": seen}])) & set(samples([{"seen": again}]))


def test_who_has_missed_several_rounds_hears_of_it_though_all_others_hold(tmp_path: Path) -> None:
    """It would be informed when the round closes before which they hold."""
    first = run(tmp_path, script_of(is_asked=False), **BACKED)
    first.checked()
    assert [each["end"] for each in first.results] == [ROUNDS] * 4
    (name,) = Folder(tmp_path).names()
    assert AT < int(name.removeprefix("step-")) < ROUNDS
