"""Optimizers with state: at prepare it goes to the servers, and job.optimizer_state brings it back.

Compared with one plain process that trains all along: bitwise where nothing is summed in another
order, else within the rounding of float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import CollectiveError, OptimizerRefusedError, PsdistError, UsageError
from psdist.job import Job
from psdist.protocol import optimizer_state
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

Groups = tuple[tuple[int, ...], ...]
ALONE: Groups = ((0,),)
APART: Groups = ((0,), (1,))
MIXED: Groups = ((0, 1), (2,))
BATCH = 4
BEFORE, AFTER = 3, 4
Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def run(
    script: Script, path: Path, *, groups: Groups = ALONE, servers: int = 2, **settings: object
) -> Outcome:
    """Proved, too."""
    settings = {"mode": "sync", "record": True, "checksum_every": 1, **settings}
    case = Case(name="state", script=script, groups=groups, servers=servers, settings=settings)
    outcome = run_virtually(case, path)
    assert outcome.checked().proved
    return outcome


def refused(error: type[PsdistError], told: str, script: Script, path: Path) -> None:
    with pytest.raises(error, match=told):
        run_virtually(Case(name="refused", script=script, groups=APART), path)


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Chunks with several pieces, and pieces in several chunks; every length a multiple of 64, so
    that torch's vector code sees the same on servers as in one process."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).to(dtype)


def batch(step: int, workers: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    parts = []
    for worker in workers:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        parts.append(torch.randn(BATCH, 16, generator=generator))
    return torch.cat(parts).to(dtype)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    workers: Sequence[int] = (0,),
) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, workers, dtype)).sin().square().mean().backward()
        optimizer.step()


FIRST, SECOND = range(BEFORE), range(BEFORE, BEFORE + AFTER)
WHOLE = range(BEFORE + AFTER)

FUSED: dict[str, Optimize] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True),
    "momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "maximize": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.01, momentum=0.9, dampening=0.1, maximize=True, fused=True
    ),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=3e-3, fused=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, amsgrad=True, fused=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, fused=True),
}
LOOPED: dict[str, Optimize] = {
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), foreach=False),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=3e-3, foreach=False),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=3e-3, foreach=False),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=3e-3, foreach=False),
    "RMSprop": lambda m: torch.optim.RMSprop(
        m.parameters(), lr=1e-3, momentum=0.5, centered=True, foreach=False
    ),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3, foreach=False),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=1e-2, foreach=False),
}
ALL = {**FUSED, **LOOPED}


def plain_throughout(optimize: Optimize, workers: Sequence[int] = (0,)) -> tuple[nn.Module, Any]:
    model = make()
    optimizer = optimize(model)
    train(model, optimizer, WHOLE, workers)
    return model, optimizer.state_dict()


def same_state(ours: dict[str, Any], plain: dict[str, Any]) -> bool:
    """Bitwise, each with the same keys in the same order, dtypes, shapes and groups."""
    if (
        ours["state"].keys() != plain["state"].keys()
        or ours["param_groups"] != plain["param_groups"]
    ):
        return False
    for number, state in plain["state"].items():
        if list(ours["state"][number]) != list(state):
            return False
        for key, value in state.items():
            its = ours["state"][number][key]
            if not isinstance(value, Tensor):
                is_same = its == value
            else:
                is_same = (its.dtype, its.shape) == (value.dtype, value.shape)
                is_same &= torch.allclose(its, value, rtol=0, atol=0, equal_nan=True)
            if not is_same:
                return False
    return True


# -- before prepare --------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", ALL)
def test_steps_made_before_prepare_and_on_servers_are_bitwise_those_of_one_process(
    name: str, servers: int, tmp_path: Path
) -> None:
    optimize = ALL[name]

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        original = optimize(model)
        train(model, original, FIRST)
        model, optimizer = job.prepare(model, original)
        assert not original.state
        assert not optimizer.state
        train(model, optimizer, SECOND)
        state = job.optimizer_state()
        return {"model": flat(model), "state": state}

    plain, state = plain_throughout(optimize)
    (result,) = run(script, tmp_path, servers=servers).results
    assert torch.equal(result["model"], flat(plain))
    assert same_state(result["state"], state)


@pytest.mark.parametrize("name", ALL)
def test_what_the_job_returns_trains_on_in_plain_torch_bitwise(name: str, tmp_path: Path) -> None:
    optimize = ALL[name]

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        model, optimizer = job.prepare(model, optimize(model))
        train(model, optimizer, FIRST)
        return {"model": model.state_dict(), "state": job.optimizer_state()}

    (result,) = run(script, tmp_path).results
    model = make()
    optimizer = optimize(model)
    model.load_state_dict(result["model"])
    optimizer.load_state_dict(result["state"])
    train(model, optimizer, SECOND)
    assert torch.equal(flat(model), flat(plain_throughout(optimize)[0]))


@pytest.mark.parametrize("name", ["momentum", "Adam"])
@pytest.mark.parametrize("groups", [APART, MIXED])
def test_the_chiefs_state_is_that_of_the_joint_batch(
    name: str, groups: Groups, tmp_path: Path
) -> None:
    """Others have none, or another one."""
    optimize = ALL[name]
    workers = [worker for group in groups for worker in group]

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        optimizer = optimize(model)
        if job.is_chief:
            train(model, optimizer, FIRST, workers)
        elif job.worker == 1:
            train(model, optimizer, range(1), [7])
        model, optimizer = job.prepare(model, optimizer)
        train(model, optimizer, SECOND, [job.worker])
        state = job.optimizer_state()
        assert (state is not None) == job.is_chief
        return {"model": flat(model), "state": state}

    plain, state = plain_throughout(optimize, workers)
    fresh = make()
    train(fresh, optimize(fresh), FIRST, workers)
    train(fresh, optimize(fresh), SECOND, workers)
    assert relative_distance(flat(fresh), flat(plain)) > 1e-3
    results = run(script, tmp_path, groups=groups).results
    for result in results:
        assert relative_distance(result["model"], flat(plain)) < 1e-5
    for number, its in state["state"].items():
        for key, value in its.items():
            assert relative_distance(results[0]["state"]["state"][number][key], value) < 1e-4


def test_a_state_that_was_saved_by_one_job_is_loaded_before_the_prepare_of_the_next(
    tmp_path: Path,
) -> None:
    def first(job: Job, _stage: Stage) -> Result:
        model = make()
        model, optimizer = job.prepare(model, ALL["Adam"](model))
        train(model, optimizer, FIRST)
        return {"model": model.state_dict(), "state": job.optimizer_state()}

    saved = run(first, tmp_path / "first", servers=3).results[0]

    def second(job: Job, _stage: Stage) -> Result:
        model = make()
        optimizer = ALL["Adam"](model)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["state"]))
        model, optimizer = job.prepare(model, optimizer)
        train(model, optimizer, SECOND)
        return {"model": flat(model), "state": job.optimizer_state()}

    (result,) = run(second, tmp_path / "second", servers=1).results
    plain, state = plain_throughout(ALL["Adam"])
    assert torch.equal(result["model"], flat(plain))
    assert same_state(result["state"], state)


def odd(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of no dimension, of one element, of odd lengths, and not contiguous."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.one = nn.Parameter(torch.tensor([0.5]))
            self.first = nn.Parameter(torch.randn(185, 16).t())
            self.cube = nn.Parameter(
                torch.randn(1, 185, 3, 5).to(memory_format=torch.channels_last)
            )
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = (x @ self.first * self.gain).tanh() * self.one
            return hidden @ self.cube.reshape(185, 15) + self.empty.sum()

    return Odd().to(dtype)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["momentum", "amsgrad", "NAdam"])
def test_odd_shapes_strides_and_dtypes_go_there_and_come_back_as_they_were(
    name: str, dtype: torch.dtype, servers: int, tmp_path: Path
) -> None:
    """In half precision servers compute in float32, and return that, with the same values."""

    def script(job: Job, _stage: Stage) -> Result:
        model = odd(dtype)
        optimizer = ALL[name](model)
        train(model, optimizer, FIRST)
        before = copy.deepcopy(optimizer.state_dict())
        job.prepare(model, optimizer)
        return {"state": job.optimizer_state(), "before": before}

    (result,) = run(script, tmp_path, servers=servers).results
    plain = result["before"]
    plain["state"].pop(4)  # no server holds a parameter without elements
    if dtype in (torch.float16, torch.bfloat16):
        for state in plain["state"].values():
            state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor)})
    assert same_state(result["state"], plain)


def test_groups_keep_their_hyperparameters_and_what_a_scheduler_made_of_them(
    tmp_path: Path,
) -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        slow, fast = model[0].parameters(), model[2].parameters()
        return torch.optim.Adam(
            [{"params": fast, "lr": 1e-2}, {"params": slow, "name": "slow", "betas": (0.8, 0.9)}],
            fused=True,
        )

    def scheduled(model: nn.Module, optimizer: Any, prepare: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in WHOLE:
            if step == BEFORE:
                model, optimizer = prepare(model, optimizer)
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        return optimizer

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        scheduled(model, grouped(model), job.prepare)
        return {"model": flat(model), "state": job.optimizer_state()}

    plain = make()
    optimizer = scheduled(plain, grouped(plain), lambda *both: both)
    (result,) = run(script, tmp_path).results
    assert torch.equal(result["model"], flat(plain))
    assert same_state(result["state"], optimizer.state_dict())
    assert [group["lr"] for group in result["state"]["param_groups"]] == [1.25e-3, 1.25e-4]


def test_parameters_that_were_frozen_have_no_state_and_begin_with_a_fresh_one(
    tmp_path: Path,
) -> None:
    """Neighbours in one chunk with and without state, and with other counts of steps."""

    def thaw(model: nn.Module, optimizer: torch.optim.Optimizer, prepare: Any) -> Any:
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        train(model, optimizer, range(2))
        model[0].weight.requires_grad_(True)
        train(model, optimizer, range(2, BEFORE))
        model, optimizer = prepare(model, optimizer)
        train(model, optimizer, range(BEFORE, 5))
        model[2].bias.requires_grad_(True)
        train(model, optimizer, range(5, BEFORE + AFTER))
        return optimizer

    for name in ("NAdam", "amsgrad"):

        def script(job: Job, _stage: Stage, name: str = name) -> Result:
            model = make()
            thaw(model, ALL[name](model), job.prepare)
            return {"model": flat(model), "state": job.optimizer_state()}

        plain = make()
        optimizer = thaw(plain, ALL[name](plain), lambda *both: both)
        # One chunk of all that is not frozen, in which pieces differ.
        (result,) = run(script, tmp_path / name, chunk_bytes=2**20).results
        assert torch.equal(result["model"], flat(plain)), name
        assert same_state(result["state"], optimizer.state_dict()), name


def test_a_momentum_that_is_none_or_absent_is_made_by_the_first_step(tmp_path: Path) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        optimizer = ALL["momentum"](model)
        train(model, optimizer, FIRST)
        optimizer.state[model[0].bias]["momentum_buffer"] = None
        del optimizer.state[model[2].bias]
        return model, optimizer

    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(*begun())
        begins = job.optimizer_state()
        train(model, optimizer, SECOND)
        return {"model": flat(model), "state": job.optimizer_state(), "begins": begins}

    (result,) = run(script, tmp_path, chunk_bytes=2**20).results
    model, optimizer = begun()
    assert same_state(result["begins"], optimizer.state_dict())
    for group in optimizer.param_groups:  # as fused, torch cannot mix those with and without
        group["fused"], group["foreach"] = False, False
    train(model, optimizer, SECOND)
    assert relative_distance(result["model"], flat(model)) < 1e-6
    state = optimizer.state_dict()["state"]
    for number, its in result["state"]["state"].items():
        assert relative_distance(its["momentum_buffer"], state[number]["momentum_buffer"]) < 1e-5


def test_an_optimizer_whose_momentum_is_switched_off_keeps_it_for_later(tmp_path: Path) -> None:
    def scenario(prepare: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        optimizer = ALL["momentum"](model)
        train(model, optimizer, FIRST)
        for group in optimizer.param_groups:
            group["nesterov"], group["momentum"] = False, 0.0
        model, optimizer = prepare(model, optimizer)
        train(model, optimizer, range(BEFORE, 5))
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
        train(model, optimizer, range(5, BEFORE + AFTER))
        return model, optimizer

    def script(job: Job, _stage: Stage) -> Result:
        model, _ = scenario(job.prepare)
        return {"model": flat(model), "state": job.optimizer_state()}

    (result,) = run(script, tmp_path).results
    plain, optimizer = scenario(lambda *both: both)
    assert torch.equal(result["model"], flat(plain))
    assert same_state(result["state"], optimizer.state_dict())


def test_muon_which_needs_whole_tensors_goes_on_with_its_momentum(tmp_path: Path) -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([model[0].weight, model[2].weight], lr=0.02)

    def scenario(prepare: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make()
        optimizer = muon(model)
        train(model, optimizer, FIRST)
        model, optimizer = prepare(model, optimizer)
        train(model, optimizer, SECOND)
        return model, optimizer

    def script(job: Job, _stage: Stage) -> Result:
        model, _ = scenario(job.prepare)
        return {"model": flat(model), "state": job.optimizer_state()}

    (result,) = run(script, tmp_path).results
    plain, optimizer = scenario(lambda *both: both)
    assert relative_distance(result["model"], flat(plain)) < 1e-6
    for number, its in optimizer.state_dict()["state"].items():
        ours = result["state"]["state"][number]
        assert list(ours) == list(its)
        assert relative_distance(ours["momentum_buffer"], its["momentum_buffer"]) < 1e-6


def test_each_of_two_parameter_sets_has_its_own_state(tmp_path: Path) -> None:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(model[0].parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9, fused=True),
        ]

    def steps(model: nn.Module, optimizers: list[Any], which: range) -> None:
        for step in which:
            model.zero_grad()
            model(batch(step, [0])).sin().square().mean().backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        optimizers = two(model)
        steps(model, optimizers, FIRST)
        model, served = job.prepare(model, optimizers)
        steps(model, served, SECOND)
        return {"model": flat(model), "states": [job.optimizer_state(each) for each in served]}

    plain = make()
    optimizers = two(plain)
    steps(plain, optimizers, WHOLE)
    (result,) = run(script, tmp_path).results
    assert torch.equal(result["model"], flat(plain))
    for ours, optimizer in zip(result["states"], optimizers, strict=True):
        assert same_state(ours, optimizer.state_dict())


def test_a_set_that_goes_on_may_stand_beside_one_that_begins(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        first, second = make(), make()
        old = ALL["Adam"](first)
        train(first, old, FIRST)
        first, old = job.prepare(first, old)
        second, new = job.prepare(second, ALL["Adam"](second))
        train(first, old, SECOND)
        train(second, new, WHOLE)
        return {"models": [flat(first), flat(second)]}

    outcome = run(script, tmp_path)
    plain = flat(plain_throughout(ALL["Adam"])[0])
    for model in outcome.results[0]["models"]:
        assert torch.equal(model, plain)
    notes = [note for note in outcome.checked().notes if "optimizer state" in note]
    assert len(notes) == 1
    assert notes[0].startswith("set 0: ")


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_drift_apart_have_counted_every_update_when_the_state_is_asked_for(
    mode: str, tmp_path: Path
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = make()
        optimizer = ALL["Adam"](model)
        train(model, optimizer, FIRST)
        model, optimizer = job.prepare(model, optimizer)
        for step in SECOND:
            stage.sleep(0.01 * (1 + job.group))
            train(model, optimizer, range(step, step + 1), [job.worker])
        return {"state": job.optimizer_state()}

    results = run(script, tmp_path, groups=APART, mode=mode, staleness=2).results
    assert results[1]["state"] is None
    for its in results[0]["state"]["state"].values():
        assert float(its["step"]) == BEFORE + 2 * AFTER
        assert its["exp_avg"].abs().sum() > 0


def test_the_steps_of_a_clipped_run_go_on_with_state_too(tmp_path: Path) -> None:
    workers = [0, 1]

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        optimizer = ALL["momentum"](model)
        train(model, optimizer, FIRST, workers)
        model, optimizer = job.prepare(model, optimizer, max_grad_norm=0.01)
        train(model, optimizer, SECOND, [job.worker])
        return {"model": flat(model)}

    plain = make()
    optimizer = ALL["momentum"](plain)
    train(plain, optimizer, FIRST, workers)
    for step in SECOND:
        optimizer.zero_grad()
        plain(batch(step, workers)).sin().square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
    for result in run(script, tmp_path, groups=APART).results:
        assert relative_distance(result["model"], flat(plain)) < 1e-5


def test_a_history_says_that_the_run_began_with_state_and_what_is_not_proved(
    tmp_path: Path,
) -> None:
    def script_of(count: int) -> Script:
        def script(job: Job, _stage: Stage) -> Result:
            model = make()
            optimizer = ALL["Adagrad"](model)
            train(model, optimizer, range(count))
            model, optimizer = job.prepare(model, optimizer)
            train(model, optimizer, SECOND)
            return {}

        return script

    fresh, begun = (run(script_of(count), tmp_path / str(count)) for count in (0, 2))
    assert not fresh.history.run.begins_with_state
    assert begun.history.run.begins_with_state
    told = "it began with optimizer state of the chief"
    assert not any(told in note for note in fresh.checked().notes)
    assert any(told in note for note in begun.checked().notes)


@pytest.mark.parametrize("seed", range(4))
def test_many_parts_come_in_order_whatever_the_network_does(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With delays, pairs that overtake one another and second deliveries."""
    monkeypatch.setattr(optimizer_state, "PART_ELEMENTS", 100)
    workers = range(3)

    def script(job: Job, stage: Stage) -> Result:
        model = make()
        optimizer = ALL["amsgrad"](model)
        train(model, optimizer, FIRST, workers)
        model, optimizer = job.prepare(model, optimizer)
        before = job.optimizer_state()
        stage.sleep(0.001 * job.worker)
        train(model, optimizer, SECOND, [job.worker])
        return {"model": flat(model), "before": before, "after": job.optimizer_state()}

    case = Case(name="seeds", script=script, groups=MIXED, servers=3, settings={"record": True})
    link = LinkModel(jitter_s=1e-3, duplicate_rate=0.3)
    outcome = run_virtually(case, tmp_path, seed=seed, link=link)
    assert outcome.checked().proved
    begun = make()
    optimizer = ALL["amsgrad"](begun)
    train(begun, optimizer, FIRST, workers)
    assert same_state(outcome.results[0]["before"], optimizer.state_dict())
    train(begun, optimizer, SECOND, workers)
    for result in outcome.results:
        assert relative_distance(result["model"], flat(begun)) < 1e-5


def test_the_state_of_an_optimizer_without_any_is_empty_and_loads_into_a_new_one(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        job.prepare(model, ALL["Adam"](model))
        return {"state": job.optimizer_state()}

    (result,) = run(script, tmp_path).results
    optimizer = ALL["Adam"](make())
    assert same_state(result["state"], optimizer.state_dict())
    optimizer.load_state_dict(result["state"])


# -- what is refused -------------------------------------------------------------------------------


def test_state_that_cannot_be_cut_is_refused_by_name_on_every_worker(tmp_path: Path) -> None:
    told: dict[int, str] = {}

    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        optimizer = torch.optim.Adafactor(model.parameters())
        if job.is_chief:
            train(model, optimizer, range(1))
        with pytest.raises(OptimizerRefusedError) as caught:
            job.prepare(model, optimizer)
        told[job.worker] = str(caught.value)
        model, fresh = job.prepare(model, ALL["SGD"](model))
        train(model, fresh, FIRST)
        return {}

    run(script, tmp_path, groups=APART)
    assert told == dict.fromkeys(
        range(2),
        "torch.optim.Adafactor has state that cannot be cut into shards: state 'row_var' of "
        "parameter 0.weight is a float32 tensor of the shape (64, 1) for a parameter of the shape "
        "(64, 16); between scripts and servers goes state with a value for each element of the "
        "parameter, a number, or a tensor of one value",
    )


def test_state_of_servers_that_cannot_be_put_together_is_refused_on_every_worker(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        model, optimizer = job.prepare(model, torch.optim.Adafactor(model.parameters()))
        train(model, optimizer, FIRST)
        with pytest.raises(OptimizerRefusedError) as caught:
            job.optimizer_state()
        train(model, optimizer, SECOND)
        return {"told": str(caught.value)}

    for result in run(script, tmp_path, groups=APART).results:
        assert result["told"].startswith(
            "job.optimizer_state: torch.optim.Adafactor has state that cannot be cut into shards: "
            "state 'row_var' of parameter 0.weight is a float32 tensor of the shape (64, 1)"
        )


def test_which_optimizer_must_be_said_where_there_are_several_and_be_a_prepared_one(
    tmp_path: Path,
) -> None:
    def prepared(job: Job) -> Any:
        model = make()
        both = [ALL["Adam"](model[0]), ALL["SGD"](model[2])]
        return job.prepare(model, both)[1]

    def ambiguous(job: Job, _stage: Stage) -> Result:
        prepared(job)
        job.optimizer_state()
        return {}

    def foreign(job: Job, _stage: Stage) -> Result:
        prepared(job)
        job.optimizer_state(ALL["Adam"](make()))  # type: ignore[arg-type]
        return {}

    def different(job: Job, _stage: Stage) -> Result:
        job.optimizer_state(prepared(job)[job.worker])
        return {}

    def early(job: Job, _stage: Stage) -> Result:
        job.optimizer_state()
        return {}

    refused(
        UsageError,
        r"job\.optimizer_state: 2 optimizers were prepared, .*job\.optimizer_state\(optimizer\)",
        ambiguous, tmp_path / "ambiguous",
    )  # fmt: skip
    refused(UsageError, r"job\.optimizer_state: this optimizer was not prepared", foreign,
            tmp_path / "foreign")  # fmt: skip
    refused(UsageError, "worker [01] asks for another optimizer's state than this worker",
            different, tmp_path / "different")  # fmt: skip
    refused(UsageError, r"job\.optimizer_state\(\) was called before job\.prepare", early,
            tmp_path / "early")  # fmt: skip


def test_a_call_that_not_all_workers_make_is_told(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        job.prepare(model, ALL["Adam"](model))
        job.optimizer_state() if job.is_chief else job.barrier()
        return {}

    refused(CollectiveError, "optimizer_state", script, tmp_path)
