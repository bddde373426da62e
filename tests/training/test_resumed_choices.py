"""psdist's own choices continue with ``--resume``: local steps by the loss with the bits of an
undisturbed run, codecs with the current level."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.commands.check import check_run
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from tests.support.pretended_link import pretend_link
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

BATCHES = 12
BY_LOSS: dict[str, Any] = {"local_steps": 8, "steps_by": "loss", "record": True}


def script_of(*, at: tuple[int, ...], epochs: int = 4, width: int = 8) -> Script:
    """``at``: behind these batches of the script there is a checkpoint."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(width, 2)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.4 / width))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(6 * BATCHES, width, generator=generator)
        dataset = TensorDataset(x, x[:, :2] * 2 + 1)
        loader = job.loader(dataset, batch_size=2)
        job.state.setdefault("batches", 0)
        for _ in job.epochs(epochs):
            job.report(7.0)  # again where the script is executed again; not in the mean, then
            for given, wanted in loader:
                optimizer.zero_grad()
                loss = (model(given) - wanted).square().mean()
                loss.backward()
                job.report(loss.item())
                optimizer.step()
                job.state["batches"] += 1
                if job.state["batches"] in at:
                    job.checkpoint()
        job.barrier()
        values = torch.cat([each.detach().flatten() for each in model.parameters()])
        return {"parameters": values, "clock": job.clock}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0, 1), (2,)))
    case = Case(name="resumed", script=script, servers=2, groups=groups, settings=settings)
    return run_virtually(case, path, resumes=resumes)


def lines_of(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def violated(path: Path) -> set[str]:
    return set(check_run(path, read_histories(path)).violations_by_rule)


@pytest.mark.parametrize("batches", [3, 16, 33])
def test_steps_by_the_loss_go_on_with_the_bits_of_a_run_that_nobody_ended(
    batches: int, tmp_path: Path
) -> None:
    """Checkpoints within a block, the first one and later ones, whose steps were fixed."""
    script = script_of(at=(batches,))
    whole = run(tmp_path / "whole", script, **BY_LOSS)
    whole.checked()
    assert len(whole.summary["steps_by_loss"]) > 1, "steps never change: nothing is tested"
    again = run(
        Path(shutil.copytree(tmp_path / "whole", tmp_path / "again")),
        script,
        resumes=True,
        **BY_LOSS,
    )
    again.checked()
    assert again.summary["attempts"] == 2
    for mine, its in zip(again.results, whole.results, strict=True):
        assert mine["clock"] == its["clock"]
        assert torch.equal(mine["parameters"], its["parameters"])
    (first, *later), before = again.summary["steps_by_loss"], whole.summary["steps_by_loss"]
    assert first["why"].startswith("checkpoint step-")
    assert [each for each in before if each in later] == later


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attempt-1/steps.jsonl", ('"count": ', '"count": 1')),
        ("steps.jsonl", ('"count": ', '"count": 1')),
        ("steps.jsonl", ('{"resumed"', '{"kept"')),
    ],
)
def test_other_choices_than_were_kept_are_found(
    name: str, change: tuple[str, str], resumed: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(resumed, tmp_path / "run"))
    lines = (path / name).read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if line.startswith(('{"kept"', '{"resumed"')))
    lines[place] = lines[place].replace(*change)
    (path / name).write_text("".join(lines))
    assert violated(path) >= {Rule.KEPT.value}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resumed") / "run"
    script = script_of(at=(16,), epochs=2)
    run(path, script, **BY_LOSS)
    run(path, script, resumes=True, **BY_LOSS)
    assert violated(path) == set()
    return path


def test_with_other_settings_nothing_of_it_goes_on(
    resumed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(resumed, tmp_path / "run"))
    run(path, script_of(at=()), resumes=True, local_steps=4, record=True)
    assert "local steps that psdist had chosen are dropped: local.steps_by = loss is not" in (
        capsys.readouterr().out
    )
    assert violated(path) == set()


# -- codecs --------------------------------------------------------------------------------------


def test_codecs_go_on_with_the_level_that_ruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_link(monkeypatch)
    settings = {"codec": "auto", "record": True, "codec_exact": ("no_such_name",)}
    script = script_of(at=(40,), width=1024)
    first = run(tmp_path, script, groups=((0,), (1,), (2,)), **settings)
    first.checked()
    assert [each["push"] for each in first.summary["codecs"]][:2] == ["none", "int4"]
    again = run(tmp_path, script, resumes=True, groups=((0,), (1,), (2,)), **settings)
    again.checked()
    begins = again.summary["codecs"][0]
    assert (begins["push"], begins["pull"]) == ("int4", "sign")
    assert begins["why"] == "checkpoint step-00000040"
    resumed_line, *_ = lines_of(tmp_path, "decisions.jsonl")
    kept = [
        each["kept"]
        for each in lines_of(tmp_path / "attempt-1", "decisions.jsonl")
        if "kept" in each
    ]
    assert resumed_line["resumed"] == kept[-1]
    assert kept[-1]["fidelity"]["codecs"]["starts"] == [[0, 4]]

    (tmp_path / "decisions.jsonl").write_text("")
    assert violated(tmp_path) >= {Rule.MODES.value, Rule.KEPT.value}
