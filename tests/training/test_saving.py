"""job.save, the loader's weights, and the other collectives, against plain PyTorch.

Longer than other modules: all cases of one mpirun stand together.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from psdist.errors import CollectiveError, UsageError
from psdist.job import Job
from psdist.workers.data.sharding import BatchPlan, epoch_order
from tests.support.jobs import loop_of, rank_of
from tests.support.programs.training import saving_cases, sync_cases
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance, train
from tests.support.programs.training.saving_cases import (
    BATCH_SIZE,
    DATASET_SIZES,
    EPOCHS,
    PROBLEM,
    Everything,
)
from tests.support.programs.training.virtual_job import DeadlockError, run_virtually

OVER_MPI = "saving_cases"
MODES = ["sync", "ssp", "async"]


def virtually(script: Script, path: Path, *, workers: int = 2, **settings: object) -> Outcome:
    groups = tuple((worker,) for worker in range(workers))
    case = Case(name="virtual", script=script, servers=2, groups=groups, settings=settings)
    return run_virtually(case, path / "run")


# -- what a saved file holds -----------------------------------------------------------------------


def assert_holds_the_model(outcome: Outcome) -> None:
    """Every worker has read the same complete file; plain PyTorch loads it; its values are those
    that the servers had, buffers and untrained parameters the chief's."""
    chief = outcome.results[0]
    plain = Everything(seed=0)
    for moment in ("middle", "end"):
        saved = chief[moment]
        assert sorted(saved) == sorted(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert saved[name].dtype == value.dtype, name
            assert saved[name].shape == value.shape, name
        for result in outcome.results[1:]:
            assert_equal(result[moment], saved)
        plain.load_state_dict(saved)
        assert_equal(dict(plain.state_dict()), saved)
    assert_equal(chief["end"], chief["state"])
    start = Everything(seed=0).state_dict()
    for name in ("frozen", "outside", "mask", "count", "doubles"):
        assert torch.equal(chief["end"][name], start[name]), name
    trained = ("first.weight", "scale", "rounded", "transposed", "conv.weight")
    for name in (*trained, "norm.running_mean"):
        assert not torch.equal(chief["end"][name], chief["middle"][name]), name
        assert not torch.equal(chief["middle"][name], start[name]), name
    assert torch.equal(chief["end"]["tied.weight"], chief["end"]["first.weight"])
    # Trained parameters are the servers', the same for all; batch norm's statistics are each
    # worker's own, and the chief's are saved.
    for result in outcome.results[1:]:
        state = result["state"]
        assert_equal({name: state[name] for name in trained},
                     {name: chief["end"][name] for name in trained})  # fmt: skip
        assert not torch.equal(state["norm.running_mean"], chief["end"]["norm.running_mean"])


def assert_equal(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(ours) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_file_is_the_model_that_the_servers_hold(
    outcomes: dict[str, Outcome], mode: str
) -> None:
    assert_holds_the_model(outcomes[f"saves-{mode}"])
    outcomes[f"saves-{mode}"].checked()


def pulls_after_all_are_done(job: Job, stage: Stage) -> Result:
    result = saving_cases.saves(job, stage)
    job.barrier()
    return result


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_file_is_the_model_that_the_servers_hold_on_a_virtual_network(
    mode: str, tmp_path: Path
) -> None:
    outcome = virtually(pulls_after_all_are_done, tmp_path, workers=3, mode=mode, record=True)
    assert_holds_the_model(outcome)
    outcome.checked()


def test_a_save_overwrites_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        path = stage.path / "deep" / "model.safetensors"
        job.save(path)
        job.save(str(path))
        return {"files": sorted(each.name for each in path.parent.iterdir())}

    outcome = virtually(script, tmp_path)
    assert [result["files"] for result in outcome.results] == [["model.safetensors"]] * 2
    saved = load_file(outcome.path / "deep" / "model.safetensors")
    assert_equal(saved, dict(PROBLEM.model().state_dict()))


def test_saving_changes_nothing_that_training_sees(tmp_path: Path) -> None:
    def script(*, does_save: bool) -> Script:
        def run(job: Job, stage: Stage) -> Result:
            model = PROBLEM.model()
            model, optimizer = job.prepare(model, sync_cases.OPTIMIZERS["adamw"](model))
            batches = PROBLEM.batches(size=8, count=12, part=job.worker, num_parts=2)

            def after_step() -> None:
                before = flat(model)
                if does_save and job.clock % 3 == 0:
                    job.save(stage.path / "model.safetensors")
                assert torch.equal(flat(model), before)

            train(model, optimizer, batches, after_step=after_step)
            return {"parameters": flat(model)}

        return run

    with_saves = virtually(script(does_save=True), tmp_path / "a").results[0]["parameters"]
    without = virtually(script(does_save=False), tmp_path / "b").results[0]["parameters"]
    assert torch.equal(with_saves, without)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_a_save_holds_all_updates_although_the_savers_own_memory_is_older(
    mode: str, tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        # The chief is done first: its parameters lack what the slow worker pushes later.
        stage.sleep(0.1 * job.worker)
        train(model, optimizer, PROBLEM.batches(size=8, count=3, part=job.worker, num_parts=2))
        before = flat(model)
        path = stage.path / "model.safetensors"
        job.save(path)
        assert torch.equal(flat(model), before)
        job.pull()
        return {"before": before, "pulled": dict(model.state_dict()), "saved": load_file(path)}

    outcome = virtually(script, tmp_path, mode=mode, staleness=3)
    for result in outcome.results:
        assert_equal(result["saved"], result["pulled"])
    assert not torch.equal(outcome.results[0]["before"], outcome.results[1]["before"])


def test_a_path_that_cannot_be_written_is_told_to_every_worker(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (stage.path / "file").touch()
        with pytest.raises(UsageError) as caught:
            job.save(stage.path / "file" / "model.safetensors")
        return {"told": str(caught.value)}

    told = [result["told"] for result in virtually(script, tmp_path).results]
    assert told[0] == told[1]
    assert "model.safetensors" in told[0]
    assert "job.save(" in told[0]


def test_what_the_file_format_reports_is_told_and_nothing_is_left_behind(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        path = stage.path / "model.safetensors"
        if job.is_chief:
            path.mkdir()  # complete, and then it cannot be moved into place
        with pytest.raises(UsageError, match=r"job\.save"):
            job.save(path)
        other = stage.path / "other.safetensors"
        if job.is_chief:
            (stage.path / "other.safetensors.partial").mkdir()  # and here it cannot even be written
        with pytest.raises(UsageError, match=r"job\.save"):
            job.save(other)
        return {"files": sorted(each.name for each in stage.path.glob("*.partial"))}

    outcome = virtually(script, tmp_path)
    assert outcome.results[0]["files"] == ["other.safetensors.partial"]


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("m.pt", r"in \.safetensors: '.*/m\.safetensors'"),
        ("model", r"in \.safetensors: '.*/model\.safetensors'"),
        ("m.safetensors.gz", r"in \.safetensors: '.*/m\.safetensors\.safetensors'"),
    ],
)
def test_a_name_of_another_kind_of_file_is_refused_with_a_better_one(
    name: str, better: str, tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError, match=rf"{name}'\): it writes a safetensors file.*{better}"):
            job.save(stage.path / name)
        return {"clock": job.clock}

    virtually(script, tmp_path)
    assert not list((tmp_path / "run").glob("m*t*r*"))


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_saved_file_has_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        path = stage.path / "folder" / "model.safetensors"
        for _ in range(2):  # the second replaces the first
            job.save(path)
        return {"mode": stat.S_IMODE(path.stat().st_mode)}

    before = os.umask(umask)
    try:
        outcome = virtually(script, tmp_path, workers=1)
    finally:
        os.umask(before)
    assert outcome.results[0]["mode"] == 0o666 & ~umask


def test_an_entry_that_is_no_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    def script(job: Job, stage: Stage) -> Result:
        model = WithExtra(3, 2)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.save(stage.path / "model.safetensors")
        return {}

    with pytest.raises(UsageError, match="_extra_state is a dict"):
        virtually(script, tmp_path)


# -- the other collectives -------------------------------------------------------------------------


def test_a_mean_is_over_all_workers_and_the_same_for_all(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        x = torch.tensor(float(job.worker), requires_grad=True)
        return {"means": [job.mean(job.worker), job.mean(x * 2), job.mean(0.1 * job.worker)]}

    for result in virtually(script, tmp_path, workers=4).results:
        assert result["means"] == [1.5, 3.0, pytest.approx(0.15)]


def test_a_mean_of_a_tree_is_the_tree_of_means(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        per_class = torch.arange(3.0) * job.worker
        tree = {"loss": 2.0 * job.worker, "classes": [per_class, per_class.half()], "n": (1, True)}
        if job.worker:  # the order of a dict says nothing
            tree = dict(reversed(tree.items()))
        return job.mean(tree)

    outcome = virtually(script, tmp_path)
    for result in outcome.results:
        assert result["loss"] == 1.0
        assert result["n"] == (1.0, 1.0)
        for mean, dtype in zip(result["classes"], (torch.float32, torch.float16), strict=True):
            assert mean.dtype == dtype
            assert mean.tolist() == [0.0, 0.5, 1.0]
    assert list(outcome.results[1]) == ["n", "classes", "loss"]


def test_means_of_different_trees_end_in_one_error_for_all(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        tree = {"loss": 1.0} if job.worker < 2 else {"accuracy": 1.0, "loss": 1.0}
        with pytest.raises(CollectiveError) as caught:
            job.mean(tree)
        job.barrier()  # and the job continues
        return {"told": str(caught.value)}

    told = {result["told"] for result in virtually(script, tmp_path, workers=3).results}
    assert told == {
        "job.mean was called with different trees: on worker 0 ['loss'] is a number, on worker 2 "
        "['accuracy'] is a number; every worker must bring the same names and shapes"
    }


def test_nobody_passes_a_barrier_before_the_last_has_come(tmp_path: Path) -> None:
    story: list[str] = []

    def script(job: Job, stage: Stage) -> Result:
        stage.sleep(0.1 * job.worker)
        story.append("came")
        job.barrier()
        story.append("went")
        return {}

    virtually(script, tmp_path, workers=4)
    assert story == ["came"] * 4 + ["went"] * 4


def test_a_pull_brings_what_others_have_pushed(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if job.worker == 1:
            train(model, optimizer, PROBLEM.batches(size=8, count=10))
        job.barrier()
        before = flat(model)
        job.pull()
        return {"before": before, "after": flat(model)}

    idle, busy = virtually(script, tmp_path, mode="async").results
    assert torch.equal(busy["after"], busy["before"])
    assert torch.equal(idle["after"], busy["after"])
    assert not torch.equal(idle["before"], idle["after"])


@pytest.mark.parametrize("name", ["save", "mean", "barrier"])
def test_a_collective_that_a_worker_never_calls_ends_in_an_error_that_names_it(
    name: str, tmp_path: Path
) -> None:
    calls: dict[str, Callable[[Job, Stage], object]] = {
        "save": lambda job, stage: job.save(stage.path / "model.safetensors"),
        "mean": lambda job, _stage: job.mean(1.0),
        "barrier": lambda job, _stage: job.barrier(),
    }

    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if job.is_chief:
            calls[name](job, stage)
        return {}

    with pytest.raises(CollectiveError, match=rf"{name} was called by worker 0 only.*worker 1"):
        virtually(script, tmp_path)


def test_different_collectives_at_the_same_time_end_in_an_error_that_names_both(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        if job.is_chief:
            job.barrier()
        else:
            job.mean(1.0)
        return {}

    with pytest.raises(CollectiveError, match="worker 0 called barrier; worker 1 called mean"):
        virtually(script, tmp_path)


@pytest.mark.parametrize("name", ["save", "pull"])
def test_calls_that_need_a_model_say_so(name: str, tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        if name == "save":
            job.save(stage.path / "model.safetensors")
        job.pull()
        return {}

    with pytest.raises(UsageError, match=rf"job\.{name}\(\) was called before job\.prepare"):
        virtually(script, tmp_path)


def test_a_job_that_hangs_is_noticed_by_these_tests(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        loop_of(job).wait_until_stopped(rank_of(job).waiting())
        return {}

    with pytest.raises(DeadlockError):
        virtually(script, tmp_path)


# -- batches of the loader -------------------------------------------------------------------------


def plain_loader_parameters(
    num_samples: int, *, batch_size: int, workers: int, seed: int
) -> Tensor:
    """One process on the joined batches, in the loader's order."""
    dataset = saving_cases.Points(num_samples)
    plan = BatchPlan(num_samples=num_samples, batch_size=batch_size, num_workers=workers)
    model = PROBLEM.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(EPOCHS):
        order = epoch_order(num_samples=num_samples, shuffle=True, seed=seed, epoch=epoch)
        joint = [
            list(order[part.start : part.stop])
            for part in map(plan.joint_batch, range(plan.num_batches))
        ]
        train(model, optimizer, [(dataset.x[chosen], dataset.y[chosen]) for chosen in joint])
    return flat(model)


@pytest.mark.mpi
@pytest.mark.parametrize("num_samples", DATASET_SIZES)
def test_short_last_batches_train_as_one_process_on_the_joined_batches(
    outcomes: dict[str, Outcome], num_samples: int
) -> None:
    results = outcomes[f"loads-{num_samples}"].results
    ours = results[0]["parameters"]
    assert all(torch.equal(result["parameters"], ours) for result in results)
    assert sum(sum(result["sizes"]) for result in results) == EPOCHS * num_samples
    plain = plain_loader_parameters(num_samples, batch_size=BATCH_SIZE, workers=4, seed=5)
    ratio = relative_distance(ours, plain)
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


@pytest.mark.parametrize("num_samples", [49, 50, 56, 61, 70])
def test_short_last_batches_of_groups_of_one_train_as_one_process(
    num_samples: int, tmp_path: Path
) -> None:
    outcome = virtually(saving_cases.loads(num_samples), tmp_path, workers=3, seed=2)
    plain = plain_loader_parameters(num_samples, batch_size=BATCH_SIZE, workers=3, seed=2)
    ratio = relative_distance(outcome.results[0]["parameters"], plain)
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


def test_batches_accumulated_over_the_end_of_an_epoch_weigh_by_their_samples(
    tmp_path: Path,
) -> None:
    dataset = saving_cases.Points(43)

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(EPOCHS):
            num_samples = 0
            for x, y in job.loader(dataset, batch_size=BATCH_SIZE):
                nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
                num_samples += len(x)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= num_samples
            optimizer.step()
            optimizer.zero_grad()
        return {"parameters": flat(model)}

    ours = virtually(script, tmp_path, workers=2).results[0]["parameters"]
    model = PROBLEM.model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.5), [(dataset.x, dataset.y)] * EPOCHS)
    ratio = relative_distance(ours, flat(model))
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"
