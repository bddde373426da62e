"""Tables in whole jobs over the virtual network: their bits, their modes, and their misuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psdist
from psdist.errors import (
    ModelError,
    NonFiniteGradientError,
    OptimizerRefusedError,
    UsageError,
)
from psdist.job import Job
from psdist.protocol.ids import worker_id
from tests.support.programs.tables.clicks import plain, train
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

NUM_ROWS, DIM = 40, 4
LR = 0.5
ANY_MODE = ("followed", "row_wise", "adam")
"""Tables of clicks.py that train in every mode."""


def served(
    scenario: Callable[[Job], Result],
    path: Path,
    *,
    groups: tuple[tuple[int, ...], ...] = ((0,),),
    servers: int = 2,
    seed: int = 0,
    resumes: bool = False,
    **settings: object,
) -> Outcome:
    case = Case(
        name="tables",
        script=lambda job, _stage: scenario(job),
        servers=servers,
        groups=groups,
        settings=settings,
    )
    return run_virtually(case, path, seed=seed, resumes=resumes)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = psdist.Embedding(NUM_ROWS, DIM, **options)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(ids)).squeeze(-1)


def prepared(job: Job, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return job.prepare(model, optimizer, **options)


def rows_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.items(torch.arange(NUM_ROWS))


# -- bits ------------------------------------------------------------------------------------------


def test_sync_has_the_same_bits_for_any_servers_prefetch_and_schedule(tmp_path: Path) -> None:
    wanted = plain()
    first: dict[str, torch.Tensor] = {}
    runs: list[dict[str, Any]] = [
        {"servers": 1},
        {"servers": 2, "tables_prefetch": "off"},
        {"servers": 3, "seed": 7},
        {"servers": 2, "tables_max_rows": 20, "seed": 9},
    ]
    for number, options in enumerate(runs):
        done = served(train, tmp_path / str(number), groups=((0,), (1,)), **options)
        for result in done.results:
            first = first or result
            for name, values in result.items():
                torch.testing.assert_close(values, wanted[name], atol=2e-6, rtol=0, msg=name)
                assert torch.equal(values, first[name]), (options, name)


@pytest.mark.parametrize(
    ("groups", "settings"),
    [(((0, 1),), {}), (((0, 1), (2, 3)), {}), (((0, 1),), {"tables_max_rows": 20})],
    ids=str,
)
def test_groups_of_several_workers_train_with_the_joint_batch(
    groups: tuple[tuple[int, ...], ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    done = served(train, tmp_path, groups=groups, **settings)
    for name, values in plain().items():
        torch.testing.assert_close(done.results[0][name], values, atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ssp", "staleness": 2},
        {"mode": "async"},
        {"mode": "ssp", "staleness": 2, "pipeline": 1},
        {"tables_mode": "async"},
        {"tables_mode": "ssp:1"},
        {"tables_mode": "ssp:1", "mode": "async", "pipeline": 1},
        {"tables_codec": "fp16"},
        {"tables_codec": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1), (2,))], ids=str)
def test_tables_train_in_every_mode(
    settings: dict[str, Any], groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def scenario(job: Job) -> Result:
        return train(job, num_steps=12, optimizers=ANY_MODE)

    done = served(scenario, tmp_path, groups=groups, seed=3, **settings)
    assert all(values.isfinite().all() for values in done.results[0].values())
    sets = done.summary["sets"]
    assert sets[1]["clocks"] == [12] * len(groups)
    if settings.get("tables_mode", "").startswith("ssp"):
        assert sets[1]["max_staleness_seen"] <= int(settings["tables_mode"][-1])


@pytest.mark.parametrize("settings", [{"tables_mode": "async"}, {"mode": "async", "pipeline": 1}])
def test_workers_of_a_group_pull_what_they_use_next(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def scenario(job: Job) -> Result:
        train(job, num_steps=12, optimizers=ANY_MODE)
        return {"pulled": job._sets.statistics()[1].bytes_pulled}

    runs = [{}, settings]
    groups = ((0, 1),)
    sync, stale = (
        served(scenario, tmp_path / str(n), groups=groups, **each).results[0]["pulled"]
        for n, each in enumerate(runs)
    )
    assert stale == pytest.approx(sync, rel=0.1)


# -- what a script does to gradients ---------------------------------------------------------------


def test_accumulated_and_clipped_gradients_of_rows_are_those_of_torch(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        before = rows_of(model)
        for part in (torch.tensor([1, 2, 2]), torch.tensor([2, 3])):
            model.items(part).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        optimizer.step()
        return {"moved": before - rows_of(model)}

    moved = served(scenario, tmp_path).results[0]["moved"]
    assert moved[:5].mean(dim=1).tolist() == pytest.approx([0, 0.25, 0.75, 0.25, 0])


@pytest.mark.parametrize("unscales", [False, True])
def test_a_grad_scaler_unscales_rows_and_skips_an_overflow(unscales: bool, tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        scaler, rows = torch.amp.GradScaler("cpu", init_scale=1024.0), [rows_of(model)]
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.tensor([1])).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            rows.append(rows_of(model))
        return {"rows": torch.stack(rows), "scale": scaler.get_scale()}

    result = served(scenario, tmp_path).results[0]
    first, second, third = result["rows"].diff(dim=0)
    assert first[1].abs().max() > 0.01
    assert first[1].abs().max() < 10
    assert not second.any()
    assert third[1].abs().max() > 0.01
    assert result["scale"] == 512.0


def test_rows_that_are_not_finite_end_the_job_before_they_are_pushed(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        (model.items(torch.tensor([1])) * float("inf")).sum().backward()
        optimizer.step()
        return {}

    with pytest.raises(NonFiniteGradientError, match=r"items\.rows_on_servers holds NaN"):
        served(scenario, tmp_path)


def test_an_iteration_that_is_skipped_for_its_rows_leaves_them(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        before = rows_of(model)
        (model.items(torch.tensor([1])) * float("nan")).sum().backward()
        optimizer.step()
        return {"same": torch.equal(before, rows_of(model))}

    assert served(scenario, tmp_path, on_nonfinite="skip").results[0]["same"]


def test_evaluation_between_steps_reads_the_newest_rows(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        rows = [rows_of(model)]
        job.barrier()
        model.eval()
        rows.append(rows_of(model))
        return {"rows": torch.stack(rows)}

    for result in served(scenario, tmp_path, groups=((0,), (1,))).results:
        assert torch.equal(result["rows"][0], result["rows"][1])


def test_a_worker_with_fewer_batches_lets_the_others_train(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.arange(11))

    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        for ids in job.loader(Stream(), batch_size=1):
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()
        job.barrier()
        return {"rows": rows_of(model)}

    done = served(scenario, tmp_path, groups=((0, 1),))
    assert all(torch.equal(each["rows"], done.results[0]["rows"]) for each in done.results)


def test_rows_that_the_script_announces_come_with_the_step(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        for step in range(4):
            ids = torch.tensor([step, step + 1])
            optimizer.zero_grad()
            model(ids).sum().backward()
            model.items.prefetch(ids + 1)
            optimizer.step()
        return {"pulled": job._sets.tables[0].num_pulled}

    assert served(scenario, tmp_path).results[0]["pulled"] == 2


def test_rows_weigh_as_much_as_the_samples_of_their_worker(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        before = rows_of(model)
        for ids in job.loader(torch.arange(7), batch_size=2):  # the last batch: 2 samples and 1
            optimizer.zero_grad()
            model.items(ids).sum(dim=1).mean().backward()
            optimizer.step()
        return {"moved": (before - rows_of(model))[:8, 0]}

    moved = served(scenario, tmp_path, groups=((0,), (1,))).results[0]["moved"].tolist()
    assert moved == pytest.approx([LR / 4] * 4 + [LR / 3] * 3 + [0], abs=1e-6)


def test_what_is_added_to_gradients_of_tables_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job)
        model.items(torch.arange(4)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(1e-6)
        optimizer.step()
        return {}

    with pytest.raises(UsageError, match="added to the gradient of a table's parameter"):
        served(scenario, tmp_path)


def test_a_compiled_model_has_the_rows_of_the_model(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        job.prepare(torch.compile(model, backend="eager"), optimizer)
        return {"rows": rows_of(model)}

    def plain(job: Job) -> Result:
        return {"rows": rows_of(prepared(job)[0])}

    found = [served(each, tmp_path / each.__name__) for each in (scenario, plain)]
    assert torch.equal(found[0].results[0]["rows"], found[1].results[0]["rows"])


# -- misuse ----------------------------------------------------------------------------------------


def refused(
    path: Path, error: type[Exception], match: str, scenario: Callable[[Job], Any], **settings: Any
) -> None:
    with pytest.raises(error, match=match):
        served(lambda job: scenario(job) or {}, path, **settings)


def test_a_table_needs_prepare_before_its_first_use(tmp_path: Path) -> None:
    refused(
        tmp_path, UsageError, "call model, optimizer = job.prepare", lambda _job: rows_of(Net())
    )


def test_a_table_in_no_optimizer_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model = Net()
        job.prepare(model, torch.optim.SGD(model.top.parameters(), lr=LR))

    refused(tmp_path, ModelError, "table items is in no optimizer; pass model.parameters", scenario)


def test_tables_in_two_optimizers_are_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model = nn.ModuleList([Net(), Net()])
        job.prepare(model, [torch.optim.SGD(each.parameters(), lr=LR) for each in model])

    refused(tmp_path, ModelError, "put all tables into one optimizer", scenario)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_converted_table_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    match = r"table items was converted to torch\..*float16; rows are float32"
    refused(tmp_path, ModelError, match, lambda job: prepared(job, Net().to(dtype)))


def test_an_optimizer_without_a_counterpart_names_the_choices(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model = Net()
        job.prepare(model, torch.optim.Adadelta(model.parameters()))

    refused(tmp_path, OptimizerRefusedError, "table items: .*Adadelta.*psdist.LazyAdam", scenario)


@pytest.mark.parametrize("settings", [{"mode": "async"}, {"tables_mode": "ssp:2"}], ids=str)
def test_ftrl_is_refused_where_tables_are_not_in_sync(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    refused(
        tmp_path,
        OptimizerRefusedError,
        "psdist.FTRL works in mode sync only",
        lambda job: prepared(job, Net(optimizer=psdist.FTRL(lr=0.1))),
        **settings,
    )


def test_what_rows_do_not_follow_is_refused_when_it_changes(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model = Net()
        model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=LR))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        scheduler.step()

    match = r"table items: .*beta1': 0.95.*beta1': 0.9, .*optimizer=psdist.LazyAdam"
    refused(tmp_path, OptimizerRefusedError, match, scenario)


def test_a_scheduler_before_a_learning_rate_of_the_table_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model = Net(optimizer=psdist.RowSGD(lr=0.1))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        job.prepare(model, optimizer)

    refused(tmp_path, UsageError, "make schedulers after job.prepare", scenario)


@pytest.mark.parametrize(
    "settings", [{"local_steps": 2}, {"backup": 1}, {"replication": "buddy"}], ids=str
)
def test_what_does_not_work_with_tables_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    groups = ((0,), (1,), (2,))
    refused(tmp_path, UsageError, "tables with ", prepared, groups=groups, **settings)


def test_a_model_after_one_with_tables_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        prepared(job)
        prepared(job, nn.Linear(2, 1))

    refused(tmp_path, UsageError, "prepare it last", scenario)


def test_servers_clip_parameters_beside_tables_with_a_mode_of_their_own(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = prepared(job, max_grad_norm=0.01)
        before = [each.clone() for each in model.top.parameters()]
        model(torch.arange(4)).sum().mul(100).backward()
        optimizer.step()
        moved = [old - new for old, new in zip(before, model.top.parameters(), strict=True)]
        return {"norm": torch.cat([each.detach().flatten() for each in moved]).norm()}

    done = served(scenario, tmp_path, groups=((0,), (1,)), tables_mode="async")
    torch.testing.assert_close(done.results[0]["norm"], torch.tensor(LR * 0.01))


def test_workers_with_other_tables_are_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        ModelError,
        "admit",
        lambda job: prepared(job, Net(admit=job.worker)),
        groups=((0,), (1,)),
    )


def test_a_table_after_the_job_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> None:
        model, _ = prepared(job)
        job.close()
        rows_of(model)

    refused(tmp_path, UsageError, "a table is used after job.close", scenario)


# -- checkpoints -----------------------------------------------------------------------------------


class _Killed(Exception):
    """Raised instead of kill -9."""


def test_a_killed_run_goes_on_with_its_rows_on_other_servers(tmp_path: Path) -> None:
    def scenario(job: Job, *, stops: bool = False) -> Result:
        model = Net(optimizer=psdist.RowAdagrad(lr=0.3), admit=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        data = torch.arange(64).view(32, 2) * 7 % NUM_ROWS
        for step, ids in enumerate(job.loader(data, batch_size=2), start=1):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
            if step == 3:
                job.checkpoint()
            if stops and step == 5:
                raise _Killed
        return {"rows": rows_of(model), "top": model.top.weight.detach()}

    settings: dict[str, Any] = {"groups": ((0,), (1,))}
    whole = served(scenario, tmp_path / "whole", **settings)
    for servers in (1, 3):
        path = tmp_path / str(servers)
        with pytest.raises(_Killed):
            served(lambda job: scenario(job, stops=True), path, **settings)
        resumed = served(scenario, path, servers=servers, resumes=True, **settings)
        assert resumed.summary["resumed_from"]
        for mine, its in zip(resumed.results, whole.results, strict=True):
            assert torch.equal(mine["rows"], its["rows"])
            assert torch.equal(mine["top"], its["top"])


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.parametrize("fails_at", [2, 4, 7])
def test_a_failed_worker_leaves_no_half_of_a_push(mode: str, fails_at: int, tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model, optimizer = prepared(job)
        for step in range(10):
            stage.sleep(0.01)
            ids = torch.arange(6) + step + 3 * job.worker
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()
        return {"rows": rows_of(model)}

    case = Case(
        name="deaths",
        script=script,
        servers=2,
        groups=((0,), (1,), (2,)),
        settings={"mode": mode, "max_deaths": 1, "tables_max_rows": 2, "record": True},
    )
    done = run_virtually(case, tmp_path, seed=fails_at, fails=(worker_id(2), fails_at))
    assert done.summary["deaths"]
    results = [torch.load(tmp_path / f"worker-{n}.pt", weights_only=True) for n in (0, 1)]
    assert all(each["rows"].isfinite().all() for each in results)
    done.checked()
