"""Checkpoints and files of tables in whole jobs over the virtual network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import psdist
from psdist.errors import ModelError, UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result
from tests.support.programs.training.virtual_job import run_virtually

PAIRS = ((0,), (1,))
STOP, LAST = 5, 11


class Net(nn.Module):
    def __init__(self, num_items: int = 90) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = psdist.EmbeddingBag(num_items, 4, mode="sum")
        self.users = psdist.Embedding(
            None, 2, optimizer=psdist.LazyAdam(lr=0.05), admit=2, evict="age:3"
        )
        self.top = nn.Linear(6, 1)

    def forward(self, items: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.items(items), self.users(users)], dim=1)).squeeze(1)


def train(job: Job, last: int, **options: Any) -> tuple[Any, Any]:
    model = Net(**options)
    model, optimizer = job.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.3))
    while job.clock < last:
        drawn = torch.Generator().manual_seed(100 * job.clock + job.worker)
        items = torch.randint(90, (6, 3), generator=drawn)
        users = torch.randint(25, (6,), generator=drawn) * 2**40 - 2**44
        optimizer.zero_grad()
        model(items, users).square().mean().backward()
        optimizer.step()
        if job.clock == STOP:
            job.checkpoint()
    return model, optimizer


def result_of(model: Any) -> Result:
    with torch.no_grad():
        items, users = model.items(torch.arange(90)[:, None]), model.users(torch.arange(25) * 2**40)
    return {"items": items, "users": users, "top": model.top.weight.detach().clone()}


def run(path: Path, script: Any, *, resumes: bool = False, **more: Any) -> Outcome:
    options = {"servers": 2, "groups": PAIRS, "schedule": 3} | more
    servers, groups, schedule = (options.pop(key) for key in ("servers", "groups", "schedule"))
    case = Case(
        name="tables",
        script=lambda job, _stage: script(job),
        servers=servers,
        groups=groups,
        settings=options,
    )
    return run_virtually(case, path, seed=schedule, resumes=resumes)


def to(last: int, rows: Path | None = None) -> Any:
    def script(job: Job) -> Result:
        model, _ = train(job, last)
        if rows is not None:
            job.save(rows.with_suffix(".dense.safetensors"), tables=rows)
        return result_of(model)

    return script


@pytest.mark.parametrize("groups", [PAIRS, ((0, 1), (2,))], ids=str)
def test_a_resumed_job_has_the_bits_of_one_that_went_on(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    whole = run(tmp_path / "whole", to(LAST, files[0]), groups=groups).results[0]
    for servers in (3, 1, 2):
        path = tmp_path / f"{servers}"
        run(path, to(STOP), groups=groups, schedule=servers)
        again = run(path, to(LAST, files[servers]), resumes=True, servers=servers, groups=groups)
        for name, values in whole.items():
            assert torch.equal(again.results[0][name], values), (servers, name)
        assert files[servers].read_bytes() == files[0].read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssp", "staleness": 2, "pipeline": 1},
        {"mode": "async"},
        {"tables_mode": "async"},
        {"tables_mode": "ssp:2", "tables_cache": 50, "tables_cache_staleness": 2},
    ],
    ids=str,
)
def test_a_job_in_any_mode_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    for number, groups in enumerate((PAIRS, ((0,), (1,), (2,)))):
        path = tmp_path / f"{number}"
        run(path, to(STOP), **settings)
        again = run(path, to(LAST), resumes=True, groups=groups, servers=3, **settings)
        assert again.summary["sets"][1]["clocks"] == [LAST] * len(groups)


def test_gradients_of_rows_that_no_step_has_used_are_kept(tmp_path: Path) -> None:
    def accumulating(*, stops: bool) -> Any:
        def script(job: Job) -> Result:
            model = Net()
            model, optimizer = job.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.3))
            for _ in job.epochs(1):
                for ids in job.loader(torch.arange(48), batch_size=6):
                    is_second = model.top.weight.grad is not None
                    model(ids[:, None], ids).square().mean().backward()
                    if is_second:
                        optimizer.step()
                        optimizer.zero_grad()
                    elif job.clock == 1:
                        job.checkpoint()
                        if stops:
                            return {}
            return result_of(model)

        return script

    whole = run(tmp_path / "whole", accumulating(stops=False)).results[0]
    path = tmp_path / "stopped"
    run(path, accumulating(stops=True))
    again = run(path, accumulating(stops=False), resumes=True).results[0]
    for name, values in whole.items():
        assert torch.equal(again[name], values), name


def test_other_tables_are_refused(tmp_path: Path) -> None:
    run(tmp_path, to(STOP))
    with pytest.raises(ModelError, match="table items: num_rows 90 there, 91 here; resume with"):
        run(tmp_path, lambda job: train(job, LAST, num_items=91), resumes=True)
    with pytest.raises(ModelError, match="table items: seed 0 there, 4 here"):
        run(tmp_path, to(LAST), resumes=True, seed=4)


def test_a_file_has_the_rows_that_were_trained(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    found = run(tmp_path / "run", to(LAST, path)).results[0]
    saved = load_file(path)
    assert saved.keys() == {
        f"{name}.{key}" for name in ("items", "users") for key in ("ids", "rows")
    }
    ids = saved["items.ids"]
    assert len(ids) > 60
    assert saved["items.rows"].tobytes() == found["items"].numpy()[ids].tobytes()
    assert saved["users.rows"].shape == (len(saved["users.ids"]), 2)
    assert 0 < len(saved["users.ids"]) < 25  # some were evicted
    assert np.all(saved["users.ids"] % 2**40 == 0)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ("rows.pt", "must end in .safetensors"),
        ("model.safetensors", "it is the model's file"),
        ("/proc/no/rows.safetensors", r"job\.save\(.*: \[Errno 2\]"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tables: str, words: str, tmp_path: Path) -> None:
    def script(job: Job) -> None:
        train(job, 1)
        job.save(tmp_path / "model.safetensors", tables=tmp_path / tables)

    with pytest.raises(UsageError, match=words):
        run(tmp_path / "run", script)
    assert not list(tmp_path.glob("rows*"))


def test_all_workers_save_rows_or_none(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        train(job, 1)
        rows = tmp_path / "rows.safetensors" if job.worker else None
        job.save(tmp_path / "model.safetensors", tables=rows)

    with pytest.raises(UsageError, match="saves another model than this worker, or no rows"):
        run(tmp_path / "run", script)


def test_a_model_without_tables_has_no_file_of_rows(tmp_path: Path) -> None:
    def script(job: Job) -> None:
        model = nn.Linear(1, 1)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.save(tmp_path / "model.safetensors", tables=tmp_path / "rows.safetensors")

    with pytest.raises(UsageError, match="no model has tables"):
        run(tmp_path / "run", script)
