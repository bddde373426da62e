"""A script for plain PyTorch works the same on servers: it is run both ways and compared.

A scenario is a function of ``prepare``: once it gets one that changes nothing, once ``job.prepare``
of a job with one worker. Its results must be the same, within the rounding of torch's fused
optimizers, which servers use.

Longer than other modules: every case is a line of one comparison and shares its set-up.
"""

from __future__ import annotations

import copy
import io
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from psdist.errors import (
    ModelError,
    NonFiniteGradientError,
    OptimizerRefusedError,
    UsageError,
)
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.problems import Problem, flat, train
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem()
MODES = ["sync", "ssp", "async"]
RECORD = {"record": True, "checksum_every": 1}

_M = TypeVar("_M", bound=nn.Module)


class Prepare(Protocol):
    def __call__(
        self, model: _M, optimizer: torch.optim.Optimizer
    ) -> tuple[_M, torch.optim.Optimizer]: ...


Scenario = Callable[[Prepare], Result]


def unchanged(model: _M, optimizer: torch.optim.Optimizer) -> tuple[_M, torch.optim.Optimizer]:
    return model, optimizer


def served(
    scenario: Callable[[Job], Result], tmp_path: Path, *, servers: int = 2, **settings: object
) -> Outcome:
    case = Case(
        name="like",
        script=lambda job, _stage: scenario(job),
        servers=servers,
        settings=settings,
    )
    return run_virtually(case, tmp_path / f"run-{settings.get('mode', 'sync')}")


def same_as_plain(
    scenario: Scenario,
    tmp_path: Path,
    *,
    mode: str = "sync",
    tolerance: float = 1e-6,
    **settings: object,
) -> Outcome:
    """Run ``scenario`` both ways and compare all that it returns."""
    plain = scenario(unchanged)
    settings = {"mode": mode, **RECORD, **settings}
    outcome = served(lambda job: scenario(job.prepare), tmp_path, **settings)
    outcome.checked()
    assert_same(outcome.results[0], plain, tolerance)
    return outcome


def assert_same(ours: Any, plain: Any, tolerance: float, where: str = "result") -> None:
    assert type(ours) is type(plain), where
    if isinstance(plain, Tensor):
        assert ours.shape == plain.shape, where
        assert ours.dtype == plain.dtype, where
        if plain.numel():
            norm = float(torch.linalg.vector_norm(plain.double()))
            distance = float(torch.linalg.vector_norm(ours.double() - plain.double()))
            ratio = distance / norm if norm else distance
            assert ratio <= tolerance, f"{where}: norm(a - b) / norm(b) = {ratio:.2e}"
    elif isinstance(plain, dict):
        assert list(ours) == list(plain), where
        for key in plain:
            assert_same(ours[key], plain[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(plain, list):
        assert len(ours) == len(plain), where
        for index, pair in enumerate(zip(ours, plain, strict=True)):
            assert_same(*pair, tolerance, f"{where}[{index}]")
    elif isinstance(plain, float):
        assert math.isclose(ours, plain, rel_tol=1e-5, abs_tol=1e-9), f"{where}: {ours} != {plain}"
    else:
        assert ours == plain, where


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, **options}
    return torch.optim.SGD(model.parameters(), **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "weight_decay": 1e-2, **options})


# -- the optimizers --------------------------------------------------------------------------------

SYNC_ONLY = {"Rprop", "ASGD", "Adafactor"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 3e-3, "weight_decay": 1e-2},
    "Adam amsgrad": {"lr": 3e-3, "amsgrad": True},
    "AdamW": {"lr": 3e-3, "betas": (0.8, 0.99)},
    "Adagrad": {"lr": 1e-2, "lr_decay": 1e-2},
    "Adagrad initial": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 3e-3},
    "NAdam": {"lr": 3e-3},
    "RAdam": {"lr": 3e-3},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
    "Adam maximize": {"lr": 1e-4, "maximize": True},
}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_trains_as_in_plain_pytorch(
    name: str, mode: str, tmp_path: Path
) -> None:
    class_name = name.split(" ", maxsplit=1)[0]
    if mode != "sync" and class_name in SYNC_ONLY:
        pytest.skip(f"{class_name} is refused in {mode}")

    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        optimizer_class = getattr(torch.optim, class_name)
        model, optimizer = prepare(model, optimizer_class(model.parameters(), **OPTIMIZERS[name]))
        train(model, optimizer, PROBLEM.batches(size=24, count=12))
        return {"parameters": flat(model)}

    # Rprop and the like follow signs of gradients: one rounding may turn a sign near zero.
    same_as_plain(scenario, tmp_path, mode=mode, tolerance=1e-5)


def test_muon_trains_whole_matrices_as_in_plain_pytorch(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 80, bias=False), nn.Tanh(), nn.Linear(80, 5, bias=False)
        )
        model, optimizer = prepare(model, torch.optim.Muon(model.parameters(), lr=1e-2))
        train(model, optimizer, PROBLEM.batches(size=24, count=8))
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path, tolerance=1e-5)


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_a_transposed_matrix_is_the_same_matrix_to_whole_tensor_optimizers(
    name: str, tmp_path: Path
) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = nn.Linear(20, 5, bias=False)
        model.weight = nn.Parameter(torch.randn(20, 5).t())
        optimizer_class = getattr(torch.optim, name)
        model, optimizer = prepare(model, optimizer_class(model.parameters(), lr=1e-2))
        train(model, optimizer, PROBLEM.batches(size=24, count=8))
        return {"parameters": model.weight.detach().clone()}

    same_as_plain(scenario, tmp_path, tolerance=1e-5)


# -- the training loop -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_sets_to_none_or_to_zero(set_to_none: bool, mode: str, tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, sgd(model))
        are_none = []
        for x, y in PROBLEM.batches(size=24, count=10):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            are_none.append(all(p.grad is None for p in model.parameters()))
        # With zeros, a step without backward still decays weights and moves by momentum.
        optimizer.step()
        return {"parameters": flat(model), "are none": are_none}

    same_as_plain(scenario, tmp_path, mode=mode)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=20),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, T_max=12),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("make_optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_made_before_or_after_prepare_is_followed_without_a_warning(
    name: str,
    is_before: bool,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        original = make_optimizer(model)
        scheduler = SCHEDULERS[name](original) if is_before else None
        model, optimizer = prepare(model, original)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        rates = []

        def follow() -> None:
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))

        train(model, optimizer, PROBLEM.batches(size=24, count=12), after_step=follow)
        assert scheduler.get_last_lr() == [rates[-1]]
        return {"parameters": flat(model), "rates": rates}

    same_as_plain(scenario, tmp_path)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_reduce_on_plateau_is_followed(is_before: bool, tmp_path: Path) -> None:
    def make(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        original = sgd(model)
        scheduler = make(original) if is_before else None
        model, optimizer = prepare(model, original)
        scheduler = scheduler or make(optimizer)
        rates = []
        for epoch in range(5):
            train(model, optimizer, PROBLEM.batches(size=24, count=3))
            scheduler.step(1.0 if epoch < 3 else 0.5)
            rates.append(optimizer.param_groups[0]["lr"])
        return {"parameters": flat(model), "rates": rates}

    same_as_plain(scenario, tmp_path)


def test_a_rate_that_the_script_sets_by_hand_is_followed(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, adamw(model))
        for step, batch in enumerate(PROBLEM.batches(size=24, count=10)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1)
                group["weight_decay"] = 0.1 / (step + 1)
            train(model, optimizer, [batch])
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path, mode="async")


@pytest.mark.parametrize("mode", MODES)
def test_gradients_accumulate_over_several_backward_passes(mode: str, tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, sgd(model))
        for step, (x, y) in enumerate(PROBLEM.batches(size=8, count=30)):
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return {"parameters": flat(model)}

    outcome = same_as_plain(scenario, tmp_path, mode=mode)
    assert outcome.summary["clocks"] == [10]


def test_clipping_sees_and_changes_the_gradients_that_are_used(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, sgd(model))
        norms = []
        for x, y in PROBLEM.batches(size=24, count=10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)))
            optimizer.step()
        assert max(norms) > 0.1
        return {"parameters": flat(model), "norms": norms}

    same_as_plain(scenario, tmp_path)


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, sgd(model))
        losses = []
        for x, y in PROBLEM.batches(size=24, count=8):

            def closure(x: Tensor = x, y: Tensor = y) -> float:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return float(loss.detach())

            with torch.no_grad():
                losses.append(optimizer.step(closure))
        return {"parameters": flat(model), "losses": losses}

    same_as_plain(scenario, tmp_path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_unscale", [False, True], ids=["step", "unscale_"])
def test_grad_scaler_skips_an_overflow_and_its_scale_follows(
    has_unscale: bool, mode: str, tmp_path: Path
) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, adamw(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scales, norms = [], []
        before = flat(model)
        for step, (x, y) in enumerate(PROBLEM.batches(size=24, count=12)):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if step in (2, 7):
                next(model.parameters()).grad[0, 0] = math.inf
                before = flat(model)
            if has_unscale:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                norms.append(float(norm) if math.isfinite(norm) else -1.0)
            scaler.step(optimizer)
            scaler.update()
            if step in (2, 7):
                assert torch.equal(flat(model), before), "a skipped step moved the parameters"
            scales.append(scaler.get_scale())
        return {"parameters": flat(model), "scales": scales, "norms": norms}

    outcome = same_as_plain(scenario, tmp_path, mode=mode)
    assert outcome.summary["clocks"] == [12], "a skipped step advances the clock"


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_an_average_of_the_model_follows_it(is_before: bool, tmp_path: Path) -> None:
    def make(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        average = make(model) if is_before else None
        model, optimizer = prepare(model, sgd(model))
        average = average or make(model)
        train(
            model,
            optimizer,
            PROBLEM.batches(size=24, count=10),
            after_step=lambda: average.update_parameters(model),
        )
        x, _ = PROBLEM.data()
        with torch.no_grad():
            logits = average(x)
        # A copy is not the model: training continues without it.
        average(x).sum().backward()
        train(model, optimizer, PROBLEM.batches(size=24, count=2))
        return {"parameters": flat(model), "average": flat(average), "logits": logits}

    same_as_plain(scenario, tmp_path)


def test_evaluation_between_epochs_changes_nothing(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5)
        )
        model, optimizer = prepare(model, sgd(model))
        x, y = PROBLEM.data()
        losses = []
        torch.manual_seed(1)
        for _ in range(3):
            model.train()
            train(model, optimizer, PROBLEM.batches(size=24, count=5))
            model.eval()
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(model(x), y)))
            losses.append(nn.functional.cross_entropy(model(x), y).item())
        return {"state": dict(model.state_dict()), "losses": losses}

    same_as_plain(scenario, tmp_path, tolerance=1e-5)


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_groups_have_their_own_rates_and_labels(mode: str, tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        groups = [
            {"params": weights, "lr": 3e-3, "weight_decay": 0.1, "label": "decay"},
            {"params": biases, "lr": 1e-2, "weight_decay": 0.0, "label": "no decay"},
        ]
        model, optimizer = prepare(model, torch.optim.AdamW(groups))
        assert [group["label"] for group in optimizer.param_groups] == ["decay", "no decay"]
        train(model, optimizer, PROBLEM.batches(size=24, count=10))
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path, mode=mode)


def test_named_parameters_make_an_optimizer_as_well(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, torch.optim.SGD(model.named_parameters(), lr=0.1))
        train(model, optimizer, PROBLEM.batches(size=24, count=4))
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(20, 12, bias=False)
        self.decoder = nn.Linear(20, 12, bias=False)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.encoder(x)) @ self.decoder.weight)
        return logits


def test_tied_parameters_are_one_parameter(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = Tied()
        model, optimizer = prepare(model, sgd(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=10))
        assert model.encoder.weight is model.decoder.weight
        return {"state": dict(model.state_dict())}

    same_as_plain(scenario, tmp_path)


@pytest.mark.parametrize("is_in_the_optimizer", [True, False])
def test_frozen_parameters_stay_and_are_never_pushed(
    is_in_the_optimizer: bool, tmp_path: Path
) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model[0].weight.requires_grad_(False)
        model[0].bias.requires_grad_(False)
        given = [p for p in model.parameters() if is_in_the_optimizer or p.requires_grad]
        model, optimizer = prepare(model, torch.optim.SGD(given, lr=0.1, weight_decay=0.1))
        train(model, optimizer, PROBLEM.batches(size=24, count=10))
        return {"parameters": flat(model)}

    outcome = same_as_plain(scenario, tmp_path)
    trained = sum(p.numel() for p in list(PROBLEM.model().parameters())[2:])
    padding = 64 * 4
    assert outcome.summary["bytes_pushed"] <= 10 * 4 * (trained + padding)


class TwoHeads(nn.Module):
    """Each batch uses one head; the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(20, 64)
        self.heads = nn.ModuleList([nn.Linear(64, 5), nn.Linear(64, 5)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        # Head 1 every third time: Adam's corrections then differ from head to head.
        head = self.heads[int(self.calls % 3 == 2)]
        self.calls += 1
        logits: Tensor = head(torch.tanh(self.body(x)))
        return logits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw], ids=["sgd", "adamw"])
def test_a_parameter_without_a_gradient_is_left_alone(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], mode: str, tmp_path: Path
) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = TwoHeads()
        model, optimizer = prepare(model, make_optimizer(model))
        for step, batch in enumerate(PROBLEM.batches(size=24, count=12)):
            idle = model.heads[int(step % 3 != 2)].weight
            before = idle.detach().clone()
            train(model, optimizer, [batch])
            assert torch.equal(idle, before), step
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw], ids=["sgd", "adamw"])
def test_a_step_without_any_gradient_changes_nothing_but_the_clock(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], mode: str, tmp_path: Path
) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, make_optimizer(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=4))
        before = flat(model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step()
        assert torch.equal(flat(model), before)
        train(model, optimizer, PROBLEM.batches(size=24, count=4))
        return {"parameters": flat(model)}

    outcome = same_as_plain(scenario, tmp_path, mode=mode)
    assert outcome.summary["clocks"] == [11]


def test_float64_models_train_in_float64(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model().double()
        model, optimizer = prepare(model, adamw(model))
        batches = ((x.double(), y) for x, y in PROBLEM.batches(size=24, count=12))
        train(model, optimizer, batches)
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path, tolerance=1e-14)


def train_with_masters(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    dtype: torch.dtype,
) -> None:
    """Half-precision weights against float32 masters, as plain PyTorch scripts do it by hand."""
    masters = copy.deepcopy(model).float()
    optimizer = make_optimizer(masters)
    for x, y in PROBLEM.batches(size=24, count=12):
        model.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
                parameter.copy_(master)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_weights_train_against_float32_on_the_servers(
    dtype: torch.dtype,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    mode: str,
    tmp_path: Path,
) -> None:
    # Small steps: most are lost where the weights themselves are stepped in half precision.
    def small_steps(model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model, lr=1e-4)

    def scenario(job: Job) -> Result:
        model = PROBLEM.model().to(dtype)
        model, optimizer = job.prepare(model, small_steps(model))
        for x, y in PROBLEM.batches(size=24, count=12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
        return {"parameters": flat(model)}

    outcome = served(scenario, tmp_path, mode=mode, **RECORD)
    outcome.checked()
    plain = PROBLEM.model().to(dtype)
    train_with_masters(plain, lambda model: make_optimizer(model, lr=1e-4, fused=True), dtype)
    ours = outcome.results[0]["parameters"]
    assert torch.equal(ours, flat(plain)), f"{int((ours != flat(plain)).sum())} weights differ"


def test_a_model_of_several_dtypes_trains(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(20, 64)
            self.middle = nn.Linear(64, 64, dtype=torch.float64)
            self.head = nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.middle(torch.tanh(self.body(x)).double()))
            logits: Tensor = self.head(hidden.float())
            return logits

    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = Mixed()
        model, optimizer = prepare(model, sgd(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=8))
        return {"parameters": flat(model)}

    same_as_plain(scenario, tmp_path)


@pytest.mark.parametrize("is_channels_last", [True, False])
def test_convolutions_keep_their_memory_format(is_channels_last: bool, tmp_path: Path) -> None:
    memory_format = torch.channels_last if is_channels_last else torch.contiguous_format

    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Flatten(),
            nn.Linear(160, 5),
        ).to(memory_format=memory_format)
        model, optimizer = prepare(model, sgd(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=10))
        strides = [list(p.stride()) for p in model.parameters()]
        return {"state": dict(model.state_dict()), "strides": strides}

    same_as_plain(scenario, tmp_path)


class Odd(nn.Module):
    """A scalar parameter, an empty one, a transposed one and one with a stride of zero elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.body = nn.Linear(20, 30)
        self.nothing_more = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(5, 30).t() / 5)
        self.row = nn.Parameter(torch.randn(1, 5)[:, ::1])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x)) * self.scale + self.nothing.sum()
        return hidden @ self.transposed + self.row


def test_scalar_empty_and_transposed_parameters_train(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        torch.manual_seed(0)
        model = Odd()
        model, optimizer = prepare(model, adamw(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=10))
        return {"state": dict(model.state_dict())}

    same_as_plain(scenario, tmp_path)


def test_backward_through_old_values_is_an_error_as_after_any_step(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, sgd(model))
        ((x, y),) = PROBLEM.batches(size=24, count=1)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return {}

    same_as_plain(scenario, tmp_path)


def test_a_prepared_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model))
        twin = copy.deepcopy(model)
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)  # a module, from our own memory
        start = flat(model)
        train(model, optimizer, PROBLEM.batches(size=24, count=2))
        x, _ = PROBLEM.data()
        assert torch.equal(twin(x), loaded(x))
        for other in (twin, loaded):
            assert torch.equal(flat(other), start)
            train(other, sgd(other), PROBLEM.batches(size=24, count=2))
        assert not torch.equal(flat(model), start)
        return {"model": flat(model), "twin": flat(twin), "loaded": flat(loaded)}

    result = served(scenario, tmp_path).results[0]
    assert_same(result["twin"], result["model"], 1e-6)
    assert_same(result["loaded"], result["model"], 1e-6)


# -- what is refused, with the remedy --------------------------------------------------------------


def refused(
    error: type[Exception],
    match: str,
    script: Callable[[nn.Sequential, torch.optim.Optimizer, Job], object],
    tmp_path: Path,
    **settings: object,
) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model))
        script(model, optimizer, job)
        return {}

    with pytest.raises(error, match=match):
        served(scenario, tmp_path, **settings)


def test_the_state_of_the_optimizer_is_said_to_be_on_the_servers(tmp_path: Path) -> None:
    refused(
        UsageError, r"state_dict\(\) is not available: the servers hold .*job\.save",
        lambda _model, optimizer, _job: optimizer.state_dict(), tmp_path,
    )  # fmt: skip


def test_loading_optimizer_state_is_refused(tmp_path: Path) -> None:
    refused(
        UsageError, r"load_state_dict\(\) is not available: .*before job\.prepare",
        lambda model, optimizer, _job: optimizer.load_state_dict(sgd(model).state_dict()),
        tmp_path,
    )  # fmt: skip


def test_a_group_added_after_prepare_is_refused(tmp_path: Path) -> None:
    extra = {"params": [nn.Parameter(torch.zeros(3))]}
    refused(
        UsageError, "add the group before prepare",
        lambda _model, optimizer, _job: optimizer.add_param_group(extra), tmp_path,
    )  # fmt: skip


def test_a_model_moved_after_prepare_is_refused_in_the_next_step(tmp_path: Path) -> None:
    def move(model: nn.Sequential, optimizer: torch.optim.Optimizer, _job: Job) -> None:
        model.double().float()
        train(model, optimizer, PROBLEM.batches(size=24, count=1))

    refused(UsageError, r"0\.weight no longer uses the memory.*before job\.prepare", move, tmp_path)


def test_values_written_after_prepare_are_warned_of_once(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=3))
        job.pull()
        train(model, optimizer, PROBLEM.batches(size=24, count=1))
        assert not records
        for _ in range(2):
            nn.init.zeros_(model[0].weight)
            train(model, optimizer, PROBLEM.batches(size=24, count=1))
        return {}

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("psdist")
    logger.addHandler(handler)
    try:
        served(scenario, tmp_path)
    finally:
        logger.removeHandler(handler)
    (record,) = records
    assert "has written to parameter 0.weight since" in record.getMessage()
    assert "before job.prepare" in record.getMessage()


def test_values_loaded_after_prepare_are_refused_in_the_next_step(tmp_path: Path) -> None:
    def load(model: nn.Sequential, optimizer: torch.optim.Optimizer, _job: Job) -> None:
        saved = copy.deepcopy(model.state_dict())
        train(model, optimizer, PROBLEM.batches(size=24, count=1))
        model.load_state_dict(saved)
        train(model, optimizer, PROBLEM.batches(size=24, count=1))

    told = r"iteration 1: load_state_dict\(\) has changed the model since .*before job\.prepare"
    refused(UsageError, told, load, tmp_path)


def test_a_part_that_is_loaded_after_prepare_is_refused_in_the_next_step(tmp_path: Path) -> None:
    def load(model: nn.Sequential, optimizer: torch.optim.Optimizer, _job: Job) -> None:
        model[2].load_state_dict({"weight": torch.zeros(32, 64), "bias": torch.zeros(32)})
        train(model, optimizer, PROBLEM.batches(size=24, count=1))

    refused(UsageError, r"iteration 0: load_state_dict\(\) has changed", load, tmp_path)


def test_averages_may_be_loaded_for_an_evaluation_and_what_was_there_back(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        average = copy.deepcopy(model.state_dict())
        model, optimizer = job.prepare(model, sgd(model))
        for _ in range(2):
            train(model, optimizer, PROBLEM.batches(size=24, count=2))
            trained = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.load_state_dict(trained)
        train(model, optimizer, PROBLEM.batches(size=24, count=1))
        return {"clock": job.clock}

    assert served(scenario, tmp_path).results[0]["clock"] == 5


def test_a_pull_replaces_what_was_loaded_by_what_others_have_trained_meanwhile(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        average = copy.deepcopy(model.state_dict())
        model, optimizer = job.prepare(model, sgd(model))
        if job.is_chief:
            model.load_state_dict(average)
        else:
            train(model, optimizer, PROBLEM.batches(size=24, count=2))
        job.barrier()
        job.pull()
        train(model, optimizer, PROBLEM.batches(size=24, count=1))
        return {"clock": job.clock}

    case = Case(name="pull", script=script, groups=((0,), (1,)), settings={"mode": "async"})
    results = run_virtually(case, tmp_path / "run").results
    assert [result["clock"] for result in results] == [1, 3]


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.Linear(64, 32)


def assigned(model: nn.Sequential) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def set_anew(model: nn.Sequential) -> None:
    model[4].bias = nn.Parameter(torch.zeros(5))


def taken_out(model: nn.Sequential) -> None:
    del model[4]


@pytest.mark.parametrize(
    ("change", "name"),
    [(replaced, "2"), (assigned, r"0\.weight"), (set_anew, r"4\.bias"), (taken_out, "4")],
)
def test_parameters_that_are_not_the_prepared_ones_are_refused_in_the_next_step(
    change: Callable[[nn.Sequential], None], name: str, tmp_path: Path
) -> None:
    def script(model: nn.Sequential, optimizer: torch.optim.Optimizer, _job: Job) -> None:
        train(model, optimizer, PROBLEM.batches(size=24, count=1))
        change(model)
        optimizer.step()

    told = rf"iteration 1: {name} is not any more what job\.prepare"
    refused(UsageError, told, script, tmp_path)


def test_a_parameter_that_is_not_in_the_model_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        job.prepare(model[0], sgd(model))
        return {}

    with pytest.raises(ModelError, match="4 parameters that are not in the model passed"):
        served(scenario, tmp_path)


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model().requires_grad_(False)
        job.prepare(model, sgd(model))
        return {}

    with pytest.raises(ModelError, match="no parameters to train"):
        served(scenario, tmp_path)


def test_an_optimizer_that_no_server_runs_is_refused(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        job.prepare(model, torch.optim.LBFGS(model.parameters()))
        return {}

    with pytest.raises(OptimizerRefusedError, match="LBFGS"):
        served(scenario, tmp_path)


def test_a_sparse_gradient_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def scenario(job: Job) -> Result:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.zeros(3, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return {}

    with pytest.raises(ModelError, match=r"0\.weight has a sparse gradient.*sparse=False"):
        served(scenario, tmp_path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_never_pushed(
    bad: float, tmp_path: Path
) -> None:
    def scenario(job: Job) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model))
        train(model, optimizer, PROBLEM.batches(size=24, count=2))
        before = flat(model)
        optimizer.zero_grad()
        ((x, y),) = PROBLEM.batches(size=24, count=1)
        nn.functional.cross_entropy(model(x), y).backward()
        model[2].bias.grad[3] = bad
        with pytest.raises(NonFiniteGradientError, match=r"iteration 2: the gradient of 2\.bias"):
            optimizer.step()
        job.pull()
        assert torch.equal(flat(model), before)
        return {"clock": job.clock}

    assert served(scenario, tmp_path).results[0]["clock"] == 2


def test_iterations_that_are_not_finite_can_be_left_out(tmp_path: Path) -> None:
    def scenario(prepare: Prepare) -> Result:
        model = PROBLEM.model()
        model, optimizer = prepare(model, adamw(model))
        is_plain = prepare is unchanged
        for step, (x, y) in enumerate(PROBLEM.batches(size=24, count=9)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if step % 4 == 2:
                model[4].weight.grad[0, 0] = math.nan
            if step % 4 != 2 or not is_plain:
                optimizer.step()
        return {"parameters": flat(model)}

    outcome = same_as_plain(scenario, tmp_path, on_nonfinite="skip")
    assert outcome.summary["clocks"] == [9]
