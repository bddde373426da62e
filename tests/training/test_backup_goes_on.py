"""Runs with backup groups that resume from a checkpoint: a group that was always slow is awaited
in time, earlier misses decide which group's hyperparameters a step has, and the same sets of
contributors give the bits of an undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from psdist.checkpoint.folder import Folder
from psdist.commands.check import check_run
from psdist.config.settings import RunConfig
from psdist.history.rules.findings import Rule
from psdist.history.writers import History, read_histories, read_history
from psdist.job import Job
from psdist.ranks.reporting.summary import share_line
from psdist.servers.protocol.rules.closing import Closed
from tests.support.backup_sets import replay, sets_of
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS = ((0,), (1,), (2, 3))
EPOCHS, BATCHES = 3, 8
ROUNDS, EVERY = EPOCHS * BATCHES, 7
SETTINGS: dict[str, Any] = {
    "record": True,
    "overlap": "off",
    "backup": 1,
    "backup_every": EVERY,
    "checkpoint_every": "10",
}


def script_of(
    slow: Mapping[int, float] = MappingProxyType({}), *, now_and_then: bool = False
) -> Script:
    """``slow``: by group how many times as long an iteration takes; ``now_and_then``: one of every
    few, of another group each time. Where the first group is slow, the lr falls with every
    iteration that a group makes."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(64, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, optimizer = job.prepare(model, optimizer)
        schedule = StepLR(optimizer, step_size=1, gamma=0.9 if 0 in slow else 1.0)
        job.attach(schedule=schedule)
        generator = torch.Generator().manual_seed(1)
        num_samples = 2 * 4 * BATCHES
        x = torch.randn(num_samples, 64, generator=generator)
        loader = job.loader(TensorDataset(x, torch.arange(num_samples)), batch_size=2)
        seen: list[tuple[int, list[int]]] = []
        for epoch in job.epochs(EPOCHS):
            for batch, numbers in loader:
                seen.append((job.clock, [epoch * num_samples + each for each in numbers.tolist()]))
                stage.sleep(0.01 * slow.get(job.group, 1.0))
                if now_and_then and (job.clock * 7 + job.group) % 5 == 0:
                    stage.sleep(0.05)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                schedule.step()
        values = torch.cat([each.detach().flatten() for each in model.parameters()])
        return {"parameters": values, "clock": job.clock, "seen": seen}

    return script


def run(
    path: Path, script: Script, *, resumes: bool = False, seed: int = 0, **settings: Any
) -> Outcome:
    told = {**SETTINGS, **settings}
    groups, servers = told.pop("groups", GROUPS), told.pop("servers", 2)
    case = Case(name="backup", script=script, servers=servers, groups=groups, settings=told)
    return run_virtually(case, path, seed=seed, resumes=resumes)


def at_first(first: Outcome, path: Path) -> tuple[Path, int]:
    """A copy of the run as if it had failed after its first checkpoint, and that one's round."""
    shutil.copytree(first.path, path)
    folder = Folder(path)
    name = folder.names()[0]
    (path / "checkpoints" / "latest").write_text(name + "\n")
    return path, int(name.removeprefix("step-"))


def attempts(path: Path) -> list[History]:
    return [read_history(path / "attempt-1"), read_history(path)]


def joined(earlier: History, later: History, clock: int) -> list[Closed]:
    """The sets of the rounds until the checkpoint, and of those after it."""
    return numbered([*(each for each in sets_of(earlier) if each.round < clock), *sets_of(later)])


def numbered(sets: Sequence[Closed]) -> list[Closed]:
    """As one run decides them."""
    return [dataclasses.replace(each, number=number) for number, each in enumerate(sets)]


def violated(path: Path) -> set[str]:
    return set(check_run(path, read_histories(path)).violations_by_rule)


SLOW = {0: 12.0}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """With a group, the first one, that is always slow; the lr falls."""
    return run(tmp_path_factory.mktemp("first") / "run", script_of(SLOW))


def test_who_is_always_slow_is_waited_for_in_time_across_a_resume(
    first: Outcome, tmp_path: Path
) -> None:
    path, clock = at_first(first, tmp_path / "again")
    second = run(path, script_of(SLOW), resumes=True)
    report = second.checked()
    assert not [note for note in report.notes if "not proved" in note]
    one, two = attempts(path)
    before = sets_of(one)[:clock]
    running = clock - 1 - max(each.round for each in before if 0 in each.groups)
    assert two.run.missed_running == (running, 0, 0)
    assert 0 < running < EVERY - 1, "it is in the middle: nothing is tested"
    rounds = [each.round for each in joined(one, two, clock) if 0 in each.groups]
    assert max(b - a for a, b in pairwise(rounds)) <= EVERY
    assert next(each for each in rounds if each >= clock) == clock - running + EVERY - 1


def test_a_run_that_counts_anew_is_found_out(
    first: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that forget are found by the rounds, and what is made up by the attempt before."""
    path, clock = at_first(first, tmp_path / "again")
    with monkeypatch.context() as patched:
        patched.setattr("psdist.servers.protocol.rules.backup.Rounds", forgetful())
        run(path, script_of(SLOW), resumes=True)
    assert violated(path) == {Rule.MISSED.value}
    record = path / "history" / "run.json"
    told = json.loads(record.read_text())
    before = told["missed_running"]
    record.write_text(json.dumps({**told, "missed_running": [0, 0, 0]}))
    assert violated(path) == {Rule.MISSED.value}
    record.write_text(json.dumps({**told, "backup_every": before[0] - 1}))
    lines = check_run(path, read_histories(path)).violations
    assert any(f"update {clock} of group 0: missed, the" in line for line in lines)


def forgetful() -> Any:
    from psdist.servers.protocol.rules.closing import Rounds

    class Forgetful(Rounds):
        def __init__(self, *, first: Any, wait_every: int, misses: Any) -> None:  # noqa: ARG002
            super().__init__(first=first, wait_every=wait_every)

    return Forgetful


@pytest.mark.parametrize(
    "slow",
    [
        SLOW,
        pytest.param({2: 4.0}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_the_same_sets_give_the_bits_of_a_run_that_nobody_has_ended(
    slow: dict[int, float], first: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the lr, which follows who has missed the fewest rounds in all; with other delays,
    other servers, and at once or in two attempts."""
    script = script_of(slow, now_and_then=not slow)
    if slow != SLOW:
        first = run(tmp_path / "first", script)
    path, clock = at_first(first, tmp_path / "again")
    every = 2 if slow == SLOW else EVERY  # so that it comes to the first round at once
    second = run(path, script, resumes=True, seed=1, backup_every=every)
    second.checked()
    sets = joined(*attempts(path), clock)
    assert [each.round for each in sets] == list(range(ROUNDS))
    assert sum(len(each.missed) for each in sets if each.round >= clock) > 2
    path, _ = at_first(first, tmp_path / "replayed")
    replay(numbered(sets[clock:]), monkeypatch)
    even = script_of(slow if slow == SLOW else {1: 3.0})  # who computes what is late steps its lr
    third = run(path, even, resumes=True, seed=2, servers=3, checkpoint_every=None)
    third.checked()
    replay(sets, monkeypatch)
    whole = run(tmp_path / "whole", even, seed=3, servers=1, checkpoint_every=None)
    whole.checked()
    assert sets_of(whole.history) == sets
    for again in (third, whole):
        for mine, its in zip(second.results, again.results, strict=True):
            assert torch.equal(mine["parameters"], its["parameters"])
    if slow != SLOW:
        monkeypatch.undo()
        path, _ = at_first(first, tmp_path / "plain")
        plain = run(path, script, resumes=True, backup=0)
        assert not torch.equal(plain.results[1]["parameters"], second.results[1]["parameters"])


def test_no_sample_comes_twice_and_shares_are_of_the_attempt(tmp_path: Path) -> None:
    slow = {2: 4.0}
    first = run(tmp_path / "first", script_of(slow))
    path, clock = at_first(first, tmp_path / "again")
    second = run(path, script_of(slow), resumes=True)
    second.checked()
    before = [
        number
        for each in first.results
        for at, numbers in each["seen"]
        if at < clock
        for number in numbers
    ]
    behind = [s for each in second.results for _, numbers in each["seen"] for s in numbers]
    assert len(behind) == len(set(behind))
    assert not set(before) & set(behind)
    for each in second.results:
        assert each["clock"] == ROUNDS
        rounds = [at for at, _ in each["seen"]]
        assert rounds == sorted(set(rounds))
        assert min(rounds) == clock
    missed = second.summary["rounds_missed"]
    assert missed[:2] == [0, 0]
    assert 0 < missed[2] < ROUNDS - clock
    (line,) = share_line(second.summary)
    share = 100 * (1 - missed[2] / (ROUNDS - clock))
    assert line.split("contributed")[1].split(" of ")[0].strip() == f"100%, 100%, {share:.0f}%"


def test_with_other_groups_nobody_has_missed_anything_yet(first: Outcome, tmp_path: Path) -> None:
    path, _ = at_first(first, tmp_path / "again")
    second = run(path, script_of(SLOW), resumes=True, groups=((0,), (1,), (2,), (3,)))
    second.checked()
    assert read_history(path).run.missed_running == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_run_in_which_all_are_waited_for_goes_on_with_backup_and_back(tmp_path: Path) -> None:
    script = script_of({1: 12.0})
    first = run(tmp_path / "first", script, backup=0)
    path, _ = at_first(first, tmp_path / "again")
    second = run(path, script, resumes=True)
    second.checked()
    assert read_history(path).run.missed_running == (0, 0, 0)
    (path / "checkpoints" / "latest").write_text(Folder(path).names()[-1] + "\n")
    third = run(path, script, resumes=True, backup=0)
    third.checked()
    assert third.summary["rounds_missed"] is None
    assert [each["clock"] for each in third.results] == [ROUNDS] * 4


def test_the_settings_go_together() -> None:
    told = {"backup": 1, "on_usr1": "requeue", "run_dir": "runs/a"}
    assert RunConfig.model_validate(told).backup == 1
    assert RunConfig.model_validate({**told, "resume": True, "on_usr1": "checkpoint"}).resume


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_attempt_behind_attempt_is_proved(seed: int, tmp_path: Path) -> None:
    pick = random.Random(seed)
    slow = {group: pick.choice([1.0, 1.0, 3.0, 12.0]) for group in range(3)}
    script = script_of(slow, now_and_then=pick.random() < 0.5)
    told = {"backup_every": pick.randint(2, 9), "backup": pick.randint(1, 2)}
    every = str(pick.randint(3, 8))
    path, clocks = tmp_path / "run", list[int]()
    for attempt in range(3):
        if attempt:
            (path / "checkpoints" / "latest").write_text(Folder(path).names()[0] + "\n")
        done = run(path, script, resumes=attempt > 0, seed=attempt, checkpoint_every=every, **told)
        done.checked()
        assert [each["clock"] for each in done.results] == [ROUNDS] * 4
        clocks.append(min(at for each in done.results for at, _ in each["seen"]))
    assert clocks == sorted(clocks)
