"""``codec = auto`` in every mode, in rounds of several local steps, and where Adam is frozen: whole
jobs, whose history is proved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from psdist.job import Job
from tests.support.pretended_link import pretend_link
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

WIDTH = 1024
"""Width of the model: several chunks, so that every worker has some."""
COPIES: dict[str, Any] = {"pull_copies": "on"}
SSP: dict[str, Any] = {"mode": "ssp", "staleness": 2}


def training(*, num_steps: int, kind: str = "sgd", checkpoint_at: int = 0) -> Script:
    """``kind``: of the optimizer; the loss of the last batches, and how many rounds there were."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(WIDTH, 2)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if kind == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, optimizer = job.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(1 + job.worker)
        spread = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9)) / 16
        losses: list[float] = []
        for step in range(num_steps):
            if checkpoint_at and step == checkpoint_at:
                job.checkpoint()
            parts = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            loss = (model(parts @ spread) - parts[:, :2]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        job.barrier()
        return {"first": losses[0], "last": sum(losses[-8:]) / 8, "clock": job.clock}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    settings = {"codec": "auto", "record": True, **settings}
    groups = ((0, 1), (2,))
    case = Case(name="chosen", script=script, servers=2, groups=groups, settings=settings)
    outcome = run_virtually(case, path, resumes=resumes)
    outcome.checked()
    return outcome


def chosen(outcome: Outcome) -> list[str]:
    return ["/".join((each["push"], each["pull"])) for each in outcome.summary["codecs"]]


@pytest.mark.parametrize(
    ("settings", "coarsest"),
    [
        ({**SSP, **COPIES, "local_steps": 2}, "int4/sign"),
        pytest.param({"mode": "async"}, "int4/fp16", marks=pytest.mark.slow),
        pytest.param(
            {"local_steps": 3, "outer": "nesterov:lr=0.7,momentum=0.5"},
            "int4/sign",
            marks=pytest.mark.slow,
        ),
        pytest.param({**SSP}, "int4/fp16", marks=pytest.mark.slow),
        pytest.param({"mode": "async", **COPIES}, "int4/sign", marks=pytest.mark.slow),
        pytest.param({**SSP, "pipeline": 1}, "int4/fp16", marks=pytest.mark.slow),
        pytest.param({**SSP, **COPIES, "overlap": "full"}, "int4/sign", marks=pytest.mark.slow),
        pytest.param(
            {"local_steps": 2, "outer": "accumulate"}, "int4/sign", marks=pytest.mark.slow
        ),
        pytest.param({"mode": "async", "local_steps": 2}, "int4/fp16", marks=pytest.mark.slow),
    ],
    ids=lambda each: (
        "-".join(f"{key}={value}" for key, value in each.items()) if isinstance(each, dict) else ""
    ),
)
def test_a_slow_link_brings_codecs_and_the_training_bears_them(
    settings: dict[str, Any], coarsest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_link(monkeypatch)
    steps = 60 * settings.get("local_steps", 1)
    outcome = run(tmp_path, training(num_steps=steps), **settings)
    assert chosen(outcome) == ["none/none", coarsest]
    for each in outcome.results:
        assert each["clock"] == 60
        assert each["last"] < 0.7 * each["first"]
    assert check_run(tmp_path, read_histories(tmp_path)).proved


def test_codecs_come_when_the_second_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_link(monkeypatch)
    outcome = run(tmp_path, training(num_steps=70, kind="adam"), freeze_step=30)
    (_, change) = outcome.summary["codecs"]
    assert chosen(outcome) == ["none/none", "int4/sign"]
    assert change["why"].startswith("iterations 30 to 49: ")
    assert change["round"] >= 50


@pytest.mark.parametrize("mode", ["ssp", pytest.param("async", marks=pytest.mark.slow)])
def test_what_was_chosen_goes_on_where_groups_are_apart(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_link(monkeypatch)
    settings = {"mode": mode, **COPIES}
    script = training(num_steps=50, checkpoint_at=46)
    first = run(tmp_path / "run", script, **settings)
    assert chosen(first) == ["none/none", "int4/sign"]
    again = run(tmp_path / "run", script, resumes=True, **settings)
    assert chosen(again)[0] == "int4/sign"
    assert again.summary["attempts"] == 2
    assert check_run(tmp_path / "run", read_histories(tmp_path / "run")).proved

    path = Path(shutil.copytree(tmp_path / "run", tmp_path / "forged"))
    lines = path / "decisions.jsonl"
    text = lines.read_text()
    assert '"came_from": 0' in text
    lines.write_text(text.replace('"came_from": 0', '"came_from": 1'))
    assert check_run(path, read_histories(path)).violations
