"""A gradient that changes once ``overlap`` sends gradients during backward: the bits of a plain
torch process on the joint batch, or one error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.training.overlap.test_overlap import Pause, parameters, run

PROBLEM = Problem(num_inputs=48)
STEPS, CHANGED_AT = 14, 10
WATCHED = 3
WORKERS, BATCH = 4, 2
GROUPS = {1: ((0,), (1,), (2,), (3,)), 2: ((0, 1), (2, 3))}
IN_GROUPS = pytest.mark.parametrize("size", list(GROUPS))

Change = Callable[["Model", torch.optim.Optimizer], None]


class Model(nn.Module):
    """Eight layers, each of several chunks; one of them may be left out. In float64: AdamW
    divides small gradients by their size, and so amplifies what rounding makes of sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(8))
        self.shifts = nn.ParameterList([torch.ones(5)])
        self.factor = 1.0
        self.left_out = -1
        self.pause: Callable[[], None] = lambda: None
        self.again: Callable[[], Tensor]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.left_out:
                x = Pause.apply(torch.tanh(layer(x)), lambda: self.pause())
        return x[:, :5] + self.factor * self.shifts[0]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: Any,
    optimizer: Any,
    change: Change,
    *,
    inner: Model,
    part: int = 0,
    num_parts: int = 1,
    before: Callable[[Model], None] = lambda _: None,
    from_step: int = CHANGED_AT,
) -> None:
    """From ``from_step`` on ``before`` and ``change`` are called: before forward and step()."""
    size = WORKERS * BATCH // num_parts
    batches = PROBLEM.batches(size=size, count=STEPS, part=part, num_parts=num_parts)
    for step, (single, y) in enumerate(batches):
        x = single.double()

        def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        inner.again = loss
        if step >= from_step:
            before(inner)
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        if step >= from_step:
            change(inner, optimizer)
        optimizer.step()


def training(
    change: Change,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    after: Callable[[Job, Model, Any], None] = lambda *_: None,
    **more: Any,
) -> Script:
    def script(job: Job, stage: Stage) -> Result:
        inner = Model()
        inner.pause = lambda: stage.sleep(1e-3)
        model, optimizer = job.prepare(inner, make(inner))
        train(
            model,
            optimizer,
            change,
            inner=inner,
            part=job.worker,
            num_parts=WORKERS,
            **more,
        )
        result = {"parameters": flat(model), "clock": job.clock}
        after(job, inner, optimizer)
        return result

    return script


def plain(change: Change, **more: Any) -> Tensor:
    model = Model()
    train(model, adamw(model), change, inner=model, **more)
    return flat(model)


def play(script: Script, path: Path, size: int, **options: Any) -> Outcome:
    return run(script, path, groups=GROUPS[size], **options)


# -- what is an error ------------------------------------------------------------------------------


def last(model: Model) -> nn.Parameter:
    weight = model.layers[-1].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def set_to_none(model: Model, _: Any) -> None:
    last(model).grad = None


def scale(model: Model, _: Any) -> None:
    gradient(last(model)).data.mul_(0.5)


def clip_values(model: Model, _: Any) -> None:
    nn.utils.clip_grad_value_([last(model)], 1e-6)


def add_noise(model: Model, _: Any) -> None:
    gradient(last(model)).add_(torch.full((48, 48), 1e-3))


def write_one_element_by_numpy(model: Model, _: Any) -> None:
    gradient(last(model)).numpy()[47, 47] += 1.0


def replace(model: Model, _: Any) -> None:
    last(model).grad = 2 * gradient(last(model))


def accumulate(model: Model, _: Any) -> None:
    model.again().backward()  # type: ignore[no-untyped-call]


def begin_again(model: Model, optimizer: Any) -> None:
    optimizer.zero_grad()
    (2 * model.again()).backward()  # type: ignore[no-untyped-call]


def drop(_: Model, optimizer: Any) -> None:
    optimizer.zero_grad()


ERRORS = (
    *(set_to_none, scale, clip_values, add_noise, write_one_element_by_numpy),
    *(replace, accumulate, begin_again, drop),
)
AGAIN = r" \(another backward pass came before step\(\)\)"
SENT = (
    rf"changed after it had been sent during backward({AGAIN})?; set transfer.overlap = off "
    rf"\(job\.prepare"
)


@IN_GROUPS
@pytest.mark.parametrize("change", ERRORS)
def test_a_gradient_that_changes_after_it_has_left_is_an_error_with_its_name(
    change: Change, size: int, tmp_path: Path
) -> None:
    name = r"layers\.7\.weight"
    if change in (accumulate, begin_again, drop):  # all of them change
        name = ".+"
    with pytest.raises(
        UsageError, match=rf"iteration 10: the gradient of {name}( \(and .*\))? {SENT}"
    ) as raised:
        play(training(change), tmp_path, size, record=False)
    assert bool(re.search(AGAIN, str(raised.value))) == (change in (accumulate, begin_again))


@IN_GROUPS
def test_plain_sgd_is_no_exception(size: int, tmp_path: Path) -> None:
    """The next gradients would be computed where plain torch never is (docs/dev/decisions.md)."""
    with pytest.raises(UsageError, match=SENT):
        play(training(scale, make=sgd), tmp_path, size, record=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": "strict"},
        {"overlap": "full"},
        {"mode": "ssp", "staleness": 1},
        {"mode": "async"},
    ],
    ids=str,
)
def test_it_is_an_error_in_every_mode_and_however_overlap_is_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=SENT):
        play(training(scale), tmp_path, 1, record=False, **settings)


@IN_GROUPS
def test_a_gradient_of_zeros_that_is_set_to_none_is_another(size: int, tmp_path: Path) -> None:
    """Without one AdamW leaves a parameter alone, with zeros it decays it."""

    def without_the_shift(model: Model) -> None:
        model.factor = 0.0

    def drop_zeros(model: Model, _: Any) -> None:
        assert not gradient(model.shifts[0]).count_nonzero()
        model.shifts[0].grad = None

    script = training(drop_zeros, before=without_the_shift)
    with pytest.raises(UsageError, match=rf"iteration 10: the gradient of shifts\.0 {SENT}"):
        play(script, tmp_path, size, record=False)


@IN_GROUPS
def test_a_learning_rate_that_changes_after_gradients_have_left_is_an_error(
    size: int, tmp_path: Path
) -> None:
    def lower(_: Model, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(
        UsageError, match="iteration 10: hyperparameters or the weight of the batch"
    ):
        play(training(lower), tmp_path, size, record=False)


# -- what gives the bits of overlap = off ----------------------------------------------------------


@IN_GROUPS
def test_a_gradient_that_changes_before_it_has_left_is_sent_as_it_is_in_step(
    size: int, tmp_path: Path
) -> None:
    def leave_out(model: Model) -> None:
        """Its gradient does not come, and holds back all that come later in backward."""
        model.left_out = 4

    def scale_the_first(model: Model, _: Any) -> None:
        gradient(next(model.layers.parameters())).data.mul_(0.5)

    script = training(scale_the_first, before=leave_out)
    auto = play(script, tmp_path / "auto", size)
    off = play(script, tmp_path / "off", size, overlap="off")
    assert torch.equal(parameters(auto), parameters(off))
    wanted = plain(scale_the_first, before=leave_out)
    assert relative_distance(parameters(auto), wanted) < 1e-6
    assert auto.summary["early_pushes"] > 0
    if size == 1:
        whole = auto.summary["chunks"] * WORKERS * (CHANGED_AT - WATCHED)
        assert (
            auto.summary["early_pushes"] > whole
        )  # some left in iteration 10, too; then it is off


@IN_GROUPS
def test_another_tensor_with_the_same_bits_is_no_error(size: int, tmp_path: Path) -> None:
    def copy(model: Model, _: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = gradient(parameter).clone()

    auto = play(training(copy), tmp_path / "auto", size)
    off = play(training(copy), tmp_path / "off", size, overlap="off")
    assert torch.equal(parameters(auto), parameters(off))
    assert relative_distance(parameters(auto), plain(copy)) < 1e-6


@IN_GROUPS
@pytest.mark.parametrize("change", [set_to_none, scale, accumulate])
def test_a_loop_that_changes_gradients_from_the_start_trains_as_plain_torch_does(
    change: Change, size: int, tmp_path: Path
) -> None:
    auto = play(training(change, from_step=0), tmp_path, size)
    assert relative_distance(parameters(auto), plain(change, from_step=0)) < 1e-6


# -- backward passes that no step() follows --------------------------------------------------------

UNFOLLOWED = (
    r"iteration 14: backward was not followed by step\(\), and a part .*; set transfer.overlap = "
    r"off"
)


@IN_GROUPS
@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_last_backward_of_which_gradients_have_left_is_an_error_at_the_end(
    mode: str, size: int, tmp_path: Path
) -> None:
    def once_more(_: Job, model: Model, optimizer: Any) -> None:
        optimizer.zero_grad()  # gradients that are added to others do not leave early
        accumulate(model, None)

    script = training(lambda *_: None, after=once_more)
    with pytest.raises(UsageError, match=UNFOLLOWED):
        play(script, tmp_path, size, record=False, mode=mode)


@IN_GROUPS
@pytest.mark.parametrize("call", ["mean", "save"])
def test_gradients_that_have_left_and_are_dropped_are_an_error_in_the_next_collective(
    call: str, size: int, tmp_path: Path
) -> None:
    def drop_and_meet(job: Job, model: Model, optimizer: Any) -> None:
        optimizer.zero_grad()
        accumulate(model, None)
        optimizer.zero_grad()
        if call == "mean":
            job.mean(1.0)
        else:
            job.save(str(tmp_path / "model.safetensors"))

    script = training(lambda *_: None, after=drop_and_meet)
    with pytest.raises(UsageError, match=UNFOLLOWED):
        play(script, tmp_path / "run", size, record=False)
