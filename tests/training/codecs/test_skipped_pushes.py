"""Pushes that are left for later while they are small: in a worker's encoder, and in whole jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from psdist.errors import OptimizerRefusedError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS = ((0,), (1, 2), (3,))
STEPS, WIDTH = 40, 32


def train(
    job: Job, stage: Stage, *, adam: bool = False, breaks_at: int = -1, uses_both: bool = True
) -> Result:
    """Two linear maps; one has gradients a thousand times smaller."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"large": torch.nn.Linear(WIDTH, WIDTH), "small": torch.nn.Linear(WIDTH, 4 * WIDTH)}
    )
    chosen = torch.optim.Adam if adam else torch.optim.SGD
    model, optimizer = job.prepare(model, chosen(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(job.worker)
    losses = []
    for step in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = (model["large"](x) - x).square().mean()
        if uses_both:
            loss = loss + 1e-3 * model["small"](x).square().mean()
        (WIDTH * loss).backward()
        if step == breaks_at:
            model["small"].weight.grad[0, 0] = torch.nan
        optimizer.step()
        losses.append(loss.item())
        stage.sleep(1e-3 * (1 + job.worker % 2))
    file = stage.path / "model.safetensors"
    job.save(file)
    return {"losses": losses, "saved": load_file(file) if job.is_chief else {}}


def train_by_adam(job: Job, stage: Stage) -> Result:
    return train(job, stage, adam=True)


def train_with_a_gradient_that_is_not_finite(job: Job, stage: Stage) -> Result:
    return train(job, stage, breaks_at=5)


def train_the_large_one_alone(job: Job, stage: Stage) -> Result:
    return train(job, stage, uses_both=False)


def play(path: Path, *, servers: int = 2, script: Any = train, **settings: Any) -> Outcome:
    given = {"chunk_bytes": 4096, "record": True, "codec_exact": (), **settings}
    case = Case(name="skip", script=script, servers=servers, groups=GROUPS, settings=given)
    return run_virtually(case, path)


@pytest.mark.parametrize("codec", ["skip:0.002:4", "int8+skip:0.002:4"])
def test_what_is_small_is_sent_less_often_and_nothing_is_lost(codec: str, tmp_path: Path) -> None:
    plain = play(tmp_path / "plain")
    runs = [play(tmp_path / f"run-{at}", servers=at, push_codec=codec) for at in (1, 3)]
    for outcome in (plain, *runs):
        outcome.checked()
    first, other = (each.results[0] for each in runs)
    assert first["losses"] == other["losses"]
    for name, tensor in first["saved"].items():
        assert torch.equal(other["saved"][name], tensor)
        moved = plain.results[0]["saved"][name]
        assert torch.allclose(tensor, moved, atol=2e-3), f"{name}: updates were lost"
    coding = runs[0].summary["coding"]
    # Four in five pushes of the small one's chunks, in each group.
    assert coding["pushes_skipped"] > 0.3 * coding_pushes(runs[0])
    assert coding["bytes_pushed_before"] == plain.summary["bytes_pushed"]
    assert runs[0].summary["bytes_pushed"] < 0.75 * plain.summary["bytes_pushed"]
    if codec.startswith("skip"):  # where all groups leave a chunk for later its parameters stay
        assert runs[0].summary["bytes_pulled"] < 0.8 * plain.summary["bytes_pulled"]


def coding_pushes(outcome: Outcome) -> int:
    """Number of pushes of chunks, of all groups."""
    return STEPS * len(GROUPS) * outcome.summary["sets"][0]["chunks"]


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_do_not_wait_leave_small_pushes_for_later(mode: str, tmp_path: Path) -> None:
    outcome = play(tmp_path / "run", mode=mode, staleness=2, push_codec="skip:0.002")
    outcome.checked()
    assert outcome.summary["coding"]["pushes_skipped"] > 0
    losses = outcome.results[0]["losses"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_an_iteration_that_is_left_out_leaves_nothing_for_later(tmp_path: Path) -> None:
    script = train_with_a_gradient_that_is_not_finite
    codec, path = "skip:0.002", tmp_path / "run"
    outcome = play(path, script=script, push_codec=codec, on_nonfinite="skip")
    outcome.checked()
    for tensor in outcome.results[0]["saved"].values():
        assert tensor.isfinite().all()
    assert outcome.summary["coding"]["pushes_skipped"] > 0


def test_what_has_no_gradient_is_not_left_for_later(tmp_path: Path) -> None:
    script = train_the_large_one_alone
    plain = play(tmp_path / "plain", script=script)
    outcome = play(tmp_path / "run", script=script, push_codec="skip:1e-9")
    outcome.checked()
    coding = outcome.summary["coding"]
    assert coding["bytes_pushed_before"] == plain.summary["bytes_pushed"]
    assert coding["pushes_skipped"] == 0


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptimizerRefusedError, match=r"skip:0.002 with torch.optim.Adam on servers:"
    ):
        play(tmp_path / "run", script=train_by_adam, push_codec="skip:0.002", record=False)
