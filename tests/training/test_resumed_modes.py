"""Modes that change within a run continue with ``--resume``: a schedule with the part of its clock,
what the script has set, what psdist has chosen; in rounds of sync with the bits of a run that
was not disturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.commands.check import check_run
from psdist.history import EventKind
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.workers.progress_reports import Rounds
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

BATCHES = 6
"""Batches of a worker in an epoch."""
Modes = Mapping[int, tuple[str, int | None]]
GROUPS = ((0, 1), (2,))


def script_of(
    *, at: Mapping[int, int], epochs: int = 4, modes: Modes | None = None, slow: int = -1
) -> Script:
    """``at``: by group, batches of the script after which there is a checkpoint; ``modes``: what
    it sets at the beginning of these epochs, -1 before the first; ``slow``: a group; each of its
    iterations takes long."""

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(3 * 2 * BATCHES, 8, generator=generator)
        loader = job.loader(TensorDataset(x, x[:, :2] * 2 + 1), batch_size=2)
        job.state.setdefault("batches", 0)
        seen = []

        def set_mode(epoch: int) -> None:
            if epoch in (modes or {}):
                mode, staleness = (modes or {})[epoch]
                job.set_mode(mode, staleness=staleness)

        set_mode(-1)
        for epoch in job.epochs(epochs):
            set_mode(epoch)
            for given, wanted in loader:
                seen.append([job.clock, job.mode, job.staleness or 0])
                if job.group == slow:
                    stage.sleep(0.05)
                optimizer.zero_grad()
                (model(given) - wanted).square().mean().backward()
                optimizer.step()
                job.state["batches"] += 1
                if job.state["batches"] == at.get(job.group):
                    job.checkpoint()
        job.barrier()
        values = torch.cat([each.detach().flatten() for each in model.parameters()])
        return {"parameters": values, "clock": job.clock, "seen": seen}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    told = {"record": True, **settings}
    groups = told.pop("groups", GROUPS)
    case = Case(name="resumed", script=script, servers=2, groups=groups, settings=told)
    return run_virtually(case, path, resumes=resumes)


def violated(path: Path) -> set[str]:
    return set(check_run(path, read_histories(path)).violations_by_rule)


def again(whole: Path, path: Path) -> Path:
    return Path(shutil.copytree(whole, path))


def same_parameters(first: Outcome, second: Outcome) -> bool:
    return all(
        torch.equal(mine["parameters"], its["parameters"])
        for mine, its in zip(first.results, second.results, strict=True)
    )


# -- a schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [7, 8, 13])
def test_a_schedule_goes_on_with_the_part_of_the_clock_and_the_bits_of_sync(
    batches: int, tmp_path: Path
) -> None:
    """Behind the change to sync, in its first round, and later."""
    settings = {"schedule": "0: ssp:2; 7: sync"}
    script = script_of(at={0: batches, 1: batches})
    whole = run(tmp_path / "whole", script, **settings)
    whole.checked()
    resumed = run(again(whole.path, tmp_path / "again"), script, resumes=True, **settings)
    resumed.checked()
    assert resumed.summary["resumed_from"] == f"step-{batches:08}"
    assert same_parameters(resumed, whole)
    assert resumed.results[0]["seen"] == [
        each for each in whole.results[0]["seen"] if each[0] >= batches
    ]


@pytest.mark.parametrize("schedule", ["0: ssp:4; 9: sync; 16: async", "0: async; 12: ssp:3"])
def test_groups_that_are_apart_go_on_where_they_were(schedule: str, tmp_path: Path) -> None:
    at = {0: 7, 1: 5}
    first = run(tmp_path, script_of(at=at, slow=1), schedule=schedule)
    first.checked()
    second = run(tmp_path, script_of(at={}), resumes=True, schedule=schedule)
    second.checked()
    assert second.history.run.first_clocks == (7, 5)
    assert {each["clock"] for each in second.results} == {4 * BATCHES}


def test_in_rounds_that_are_sync_now_all_begin_where_the_last_was(tmp_path: Path) -> None:
    run(tmp_path, script_of(at={0: 7, 1: 5}, slow=1), schedule="0: ssp:4; 9: sync")
    second = run(tmp_path, script_of(at={}), resumes=True, schedule="0: ssp:4; 6: sync")
    second.checked()
    assert second.history.run.first_clocks == (5, 5)
    path = tmp_path / "history" / "run.json"
    text = path.read_text()
    path.write_text(text.replace("5,\n  5", "7,\n  5"))
    assert path.read_text() != text
    assert Rule.KEPT.value in violated(tmp_path)


def test_with_other_groups_all_begin_at_the_lowest_clock(tmp_path: Path) -> None:
    schedule = "0: ssp:4; 9: sync"
    run(tmp_path, script_of(at={0: 7, 1: 5}, slow=1), schedule=schedule)
    groups = ((0,), (1,), (2,))
    second = run(tmp_path, script_of(at={}), resumes=True, schedule=schedule, groups=groups)
    second.checked()
    assert second.history.run.first_clocks == (5, 5, 5)


# -- by the script ---------------------------------------------------------------------------------

BY_SCRIPT: dict[str, Any] = {"set_mode": "allowed"}
SET: Modes = {-1: ("ssp", 2), 1: ("sync", None), 3: ("ssp", 1)}


@pytest.mark.parametrize("batches", [3, 6, 8, 12, 14])
def test_what_the_script_has_set_goes_on_and_is_not_set_again(
    batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the epoch that is resumed it is called once more, before its batches."""
    script = script_of(at={0: batches, 1: batches}, modes=SET)
    whole = run(tmp_path / "whole", script, **BY_SCRIPT)
    whole.checked()
    caplog.clear()
    resumed = run(again(whole.path, tmp_path / "again"), script, resumes=True, **BY_SCRIPT)
    resumed.checked()
    assert resumed.results[0]["seen"] == [
        each for each in whole.results[0]["seen"] if each[0] >= batches
    ]
    ruled = [(each["round"], each["mode"]) for each in whole.summary["modes"]]
    assert [(each["round"], each["mode"]) for each in resumed.summary["modes"]] == ruled
    kept = [each for each in resumed.summary["modes"] if each["why"].startswith("checkpoint step-")]
    assert len(kept) == 2 + (batches > 6), resumed.summary["modes"]
    assert "the script had set mode ssp:2 before step-" in caplog.text


def test_rounds_of_sync_that_the_script_has_set_have_the_bits_of_one_run(tmp_path: Path) -> None:
    modes: Modes = {-1: ("ssp", 2), 1: ("sync", None)}
    script = script_of(at={0: 14, 1: 14}, modes=modes)
    whole = run(tmp_path / "whole", script, **BY_SCRIPT)
    resumed = run(again(whole.path, tmp_path / "again"), script, resumes=True, **BY_SCRIPT)
    resumed.checked()
    assert same_parameters(resumed, whole)


def test_a_mode_that_was_set_for_a_later_round_begins_there(tmp_path: Path) -> None:
    """The checkpoint is made before the round, with groups that are apart."""

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(4, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        modes = []
        while job.clock < 12:
            if job.clock == (5 if job.group else 7) and len(modes) < 9:
                job.set_mode("sync")
                job.checkpoint()
            modes.append((job.clock, job.mode))
            if job.group:
                stage.sleep(0.1)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        return {"modes": modes}

    settings = {"mode": "ssp", "staleness": 4, **BY_SCRIPT}
    run(tmp_path, script, **settings).checked()
    resumed = run(tmp_path, script, resumes=True, **settings)
    resumed.checked()
    assert resumed.history.run.first_clocks == (7, 5)
    assert [(each["round"], each["mode"]) for each in resumed.summary["modes"]] == [
        (0, "ssp"),
        (8, "sync"),
    ]
    assert resumed.results[0]["modes"] == [(clock, "sync") for clock in range(7, 12)]


def test_several_sets_have_rounds_of_their_own(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        sets = []
        for _ in range(2):
            model = nn.Linear(4, 1)
            sets.append(job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))

        def train(index: int) -> None:
            model, optimizer = sets[index]
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

        while job.clock < 8:
            train(0)
            train(1)
            train(1)
            if job.clock == 3:
                job.set_mode("ssp", staleness=1)
            if job.clock == 4:
                job.checkpoint()
        return {}

    run(tmp_path, script, **BY_SCRIPT).checked()
    resumed = run(tmp_path, script, resumes=True, **BY_SCRIPT)
    resumed.checked()
    per_set = [each["modes"] for each in resumed.summary["sets"]]
    assert [[each["round"] for each in modes] for modes in per_set] == [[0, 4], [0, 7]]


def test_a_loop_of_the_script_s_own_sets_what_it_had_not_set(tmp_path: Path) -> None:
    """It is where the checkpoint was made from its first line on: what it calls before the loop,
    and had called, is no news; what it calls at this clock for the first time is."""

    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(4, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.set_mode("ssp", staleness=2)
        modes = []
        while job.clock < 10:
            if job.clock == 6:
                job.set_mode("async")
            modes.append((job.clock, job.mode))
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            if job.clock in (4, 6, 8):
                job.checkpoint()
        return {"modes": modes}

    settings = {"groups": ((0,),), "checkpoint_keep": 3, **BY_SCRIPT}
    whole = run(tmp_path / "whole", script, **settings)
    for step in (4, 6, 8):
        path = again(whole.path, tmp_path / f"{step}")
        (path / "checkpoints" / "latest").write_text(f"step-{step:08}\n")
        resumed = run(path, script, resumes=True, **settings)
        resumed.checked()
        expected = [(clock, "ssp" if clock < 6 else "async") for clock in range(step, 10)]
        assert resumed.results[0]["modes"] == expected


def test_with_other_settings_the_modes_are_dropped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = script_of(at={0: 8, 1: 8}, modes={0: ("async", None)})
    run(tmp_path, script, **BY_SCRIPT)
    second = run(tmp_path, script_of(at={}), resumes=True, mode="sync")
    second.checked()
    assert (
        "the modes that ruled until then are dropped: consistency.schedule = script is not"
    ) in caplog.text
    third = run(tmp_path, script_of(at={}), resumes=True, mode="ssp", staleness=3, **BY_SCRIPT)
    third.checked()
    assert "are dropped: they were sync, async, and now it is ssp (staleness 3)" in caplog.text
    assert [each["mode"] for each in third.summary["modes"]] == ["ssp"]


# -- by psdist -------------------------------------------------------------------------------------


def pretend_skew(monkeypatch: pytest.MonkeyPatch, *, until: int) -> None:
    """Up to this round now one of two groups takes ten times as long for two rounds, now the other
    one; each is told at once."""
    whole = Rounds.end
    number = {}

    def end(self: Rounds, clock: int, waited_s: float, now_s: float, error: float) -> None:
        del waited_s, now_s
        mine = number.setdefault(id(self), len(number) % 2)
        before = self._ended or (0, 0.0, 0.0)
        own_s = 0.1 if clock // 2 % 2 == mine and clock < until else 0.01
        whole(self, clock, before[2] + 0.001, before[1] + own_s + 0.001, error)

    monkeypatch.setattr(Rounds, "end", end)
    monkeypatch.setattr("psdist.workers.progress_reports._EVERY_S", 0.0)


AUTO: dict[str, Any] = {"mode": "auto", "staleness": 3, "groups": ((0,), (1,))}
BOUND: dict[str, Any] = {**AUTO, "mode": "ssp", "staleness": 1, "staleness_to": 6}


@pytest.mark.parametrize(
    ("settings", "kept", "then"),
    [
        (AUTO, ("ssp", 3), ("sync", None)),
        (BOUND, ("ssp", 2), ("ssp", 1)),
    ],
)
def test_what_psdist_has_chosen_goes_on_and_changes_again(
    settings: dict[str, Any],
    kept: tuple[str, int],
    then: tuple[str, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_skew(monkeypatch, until=40)
    script = script_of(at={0: 40, 1: 40}, epochs=7)
    first = run(tmp_path, script, **settings)
    first.checked()
    second = run(tmp_path, script_of(at={}, epochs=14), resumes=True, **settings)
    second.checked()
    begins, *later = second.summary["modes"]
    assert begins["why"] == "checkpoint step-00000040"
    assert (later[0]["mode"], later[0]["staleness"]) == kept
    assert later[0]["why"] == "checkpoint step-00000040"
    assert (later[-1]["mode"], later[-1]["staleness"]) == then
    assert later[-1]["round"] > 60


SSP = '"mode": "ssp", "staleness": 3}'


@pytest.fixture(scope="module")
def by_auto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auto") / "run"
    with pytest.MonkeyPatch.context() as patch:
        pretend_skew(patch, until=1000)
        run(path, script_of(at={0: 40, 1: 40}, epochs=7), **AUTO)
        run(path, script_of(at={}, epochs=9), resumes=True, **AUTO)
    assert violated(path) == set()
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attempt-1/decisions.jsonl", (SSP, '"mode": "sync", "staleness": 0}')),
        ("decisions.jsonl", (SSP, '"mode": "ssp", "staleness": 4}')),
        ("decisions.jsonl", ('{"resumed"', '{"kept"')),
    ],
)
def test_other_choices_than_were_kept_are_found(
    name: str, change: tuple[str, str], by_auto: Path, tmp_path: Path
) -> None:
    path = again(by_auto, tmp_path / "run")
    lines = (path / name).read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if line.startswith(('{"kept"', '{"resumed"')))
    assert change[0] in lines[place]
    lines[place] = lines[place].replace(*change)
    (path / name).write_text("".join(lines))
    assert violated(path) & {Rule.MODES.value, Rule.KEPT.value}


def test_a_mode_that_was_not_gone_on_with_is_found(by_auto: Path, tmp_path: Path) -> None:
    """Servers of the second attempt that begin with another mode than ruled, or with none."""
    for number, weight in enumerate((None, -2.0, 2.0)):
        path = again(by_auto, tmp_path / f"{number}")
        for server in range(2):
            change_modes(path / "history" / f"server-{server}.events", weight)
        found = violated(path)
        assert Rule.KEPT.value in found


def change_modes(path: Path, weight: float | None) -> None:
    """The first MODE event of a log has this weight, or becomes one that changes nothing."""
    data = bytearray(path.read_bytes())
    # In place: a copy of records would have anything between their fields.
    dtype = read_histories(path.parents[1])[0].servers[0].events.dtype
    events = np.frombuffer(data, dtype=dtype, offset=24)
    (places,) = np.nonzero(events["kind"] == EventKind.MODE)
    if weight is None:
        events["clock"][places[0]], events["weight"][places[0]] = 0, -1.0
    else:
        events["weight"][places[0]] = weight
    path.write_bytes(data)


def test_modes_of_a_checkpoint_stand_in_its_index(by_auto: Path) -> None:
    index = json.loads((by_auto / "checkpoints" / "step-00000040" / "index.json").read_text())
    modes = index["fidelity"]["modes"]
    assert modes["by"] == "auto"
    assert [each["mode"] for each in modes["starts"]] == ["sync", "ssp"]
