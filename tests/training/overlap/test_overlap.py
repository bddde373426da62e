"""Gradients that leave during backward: the same bits, and what changed later is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.job import Job
from psdist.protocol.events import Frame
from psdist.protocol.partition import Chunk
from psdist.workers.loop import WorkerLoop
from tests.support.jobs import loop_of, trainers_of
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

PROBLEM = Problem()
STEPS = 10
WATCHED = 3
WATCHED_OF_SETS = 16
BATCH = 8
APART = ((0,), (1,), (2,))
NUM_CHUNKS = 4
"""Of PROBLEM's model."""
LINK = LinkModel(latency_s=1e-5, jitter_s=2e-4, bytes_per_s=1e8)


class Pause(torch.autograd.Function):
    """Time passes in backward: what was sent travels, and replies come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Callable[[], None]) -> Tensor:
        ctx.pause = pause
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.pause()
        return gradients[0], None


class Slow(nn.Module):
    """``inner``, with pauses around each of its layers."""

    def __init__(self, inner: nn.Sequential, pause: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.pause = inner, pause

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = Pause.apply(layer(x), self.pause)
        return x


@dataclass
class Turn:
    """State that a test may use in an iteration."""

    job: Job
    step: int
    model: nn.Module
    optimizer: Any
    loss: Callable[[], Tensor]


Meddle = Callable[[Turn], None]


def nothing(_turn: Turn) -> None: ...


def training(
    *,
    between: Meddle = nothing,
    before: Meddle = nothing,
    after: Meddle = nothing,
    make: Callable[[], nn.Module] | None = None,
    layers: Callable[[], nn.Sequential] = PROBLEM.model,
    steps: int = STEPS,
    **prepared: Any,
) -> Script:
    """``between`` backward and step, ``before`` backward, ``after`` the last step."""

    def script(job: Job, stage: Stage) -> Result:
        generator = torch.Generator().manual_seed(job.worker)

        def pause() -> None:
            stage.sleep(float(torch.rand(1, generator=generator)) * 1e-3)

        torch.manual_seed(3)
        model = Slow(layers(), pause) if make is None else make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = job.prepare(model, optimizer, **prepared)
        batches = PROBLEM.batches(
            size=BATCH, count=steps, part=job.worker, num_parts=job.num_workers
        )
        turn = None
        for step, (x, y) in enumerate(batches):

            def loss(x: Tensor = x, y: Tensor = y) -> Tensor:
                return nn.functional.cross_entropy(model(x), y)

            turn = Turn(job, step, model, optimizer, loss)
            optimizer.zero_grad()
            before(turn)
            loss().backward()
            between(turn)
            optimizer.step()
        result = {"parameters": flat(model), "clock": job.clock}
        assert turn is not None
        after(turn)
        return result

    return script


def run(
    script: Script,
    path: Path,
    *,
    overlap: str = "auto",
    groups: Sequence[tuple[int, ...]] = APART,
    hosts: tuple[int, ...] = (),
    servers: int = 2,
    seed: int = 0,
    link: LinkModel = LINK,
    **settings: object,
) -> Outcome:
    settings = {"record": True, "checksum_every": 1, "overlap": overlap, **settings}
    case = Case(
        name="overlap",
        script=script,
        groups=tuple(groups),
        hosts=hosts,
        servers=servers,
        settings=settings,
    )
    outcome = run_virtually(case, path, seed=seed, link=link)
    if settings["record"]:
        outcome.checked()
    return outcome


def parameters(outcome: Outcome) -> Tensor:
    first: Tensor = outcome.results[0]["parameters"]
    assert all(torch.equal(each["parameters"], first) for each in outcome.results)
    return first


def both(script: Script, tmp_path: Path, **options: Any) -> tuple[Outcome, Outcome]:
    """(with, without) overlap: the same bits, and nothing to correct."""
    auto = run(script, tmp_path / "auto", **options)
    off = run(script, tmp_path / "off", overlap="off", **options)
    assert torch.equal(parameters(auto), parameters(off))
    assert auto.results[0]["clock"] == off.results[0]["clock"]
    assert off.summary["early_pushes"] == 0
    return auto, off


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_sync_gives_the_same_bits_and_every_chunk_leaves_early(
    max_norm: float | None, seed: int, tmp_path: Path
) -> None:
    auto, _ = both(training(max_grad_norm=max_norm), tmp_path, seed=seed)
    assert auto.summary["early_pushes"] == 3 * NUM_CHUNKS * (STEPS - WATCHED)


def test_where_backward_is_too_short_to_hide_it_everything_leaves_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="psdist")
    monkeypatch.setattr("psdist.workers.early.overlap.BACKWARD_S", 60.0)
    auto, _ = both(training(), tmp_path)
    assert auto.summary["early_pushes"] == 0
    said = [text for text in caplog.messages if "overlap stays off: backward passes leave" in text]
    assert len(said) == 3
    assert "sending them before step() pays from 60000 ms on" in said[0]


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_in_ssp_and_async_chunks_leave_early_and_the_modes_rules_hold(
    mode: str, seed: int, tmp_path: Path
) -> None:
    outcome = run(training(), tmp_path, mode=mode, staleness=1, seed=seed)
    assert outcome.summary["early_pushes"] == 3 * NUM_CHUNKS * (STEPS - WATCHED)
    assert relative_distance(outcome.results[0]["parameters"], flat(PROBLEM.model())) > 0.01


class Attention(nn.Module):
    """Torch reads its out_proj.weight without calling the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PROBLEM.num_inputs, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.last = nn.Linear(32, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(0)
        return self.last(self.attention(x, x, x)[0][0])


class Checkpointed(nn.Module):
    """Its backward runs another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PROBLEM.num_inputs, 40), nn.Tanh(), nn.Linear(40, 40))
        self.last = nn.Linear(40, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        features: Any = checkpoint(self.body, x, use_reentrant=True)
        return self.last(features)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PROBLEM.num_inputs, 40)
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(x @ self.middle.weight))


@pytest.mark.parametrize("make", [Attention, Checkpointed, Tied])
def test_models_whose_backward_is_no_plain_chain_give_the_same_bits(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    auto, _ = both(training(make=make), tmp_path)
    assert auto.summary["early_pushes"] == 3 * auto.summary["chunks"] * (STEPS - WATCHED)


class Mixed(nn.Module):
    """Three dtypes, and weights with another memory order than their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 24, 3)
        self.image.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's
        self.turned = nn.Parameter(torch.randn(24 * 6, 40).t() * 0.1)
        self.middle = nn.Linear(40, 40, dtype=torch.bfloat16)
        self.last = nn.Linear(40, PROBLEM.num_classes, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.image(x.view(-1, 1, 4, 5)).flatten(1)
        x = torch.tanh(nn.functional.linear(x, self.turned))
        x = torch.tanh(self.middle(x.bfloat16()))
        return self.last(x.double())


def test_other_dtypes_and_layouts_in_memory_give_the_same_bits(tmp_path: Path) -> None:
    auto, _ = both(training(make=Mixed), tmp_path)
    assert auto.summary["early_pushes"] == 3 * auto.summary["chunks"] * (STEPS - WATCHED)


@pytest.mark.parametrize("seed", range(3))
def test_delays_and_second_deliveries_do_not_change_a_bit(seed: int, tmp_path: Path) -> None:
    wild = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.1, bytes_per_s=1e8)
    auto, _ = both(training(max_grad_norm=0.05), tmp_path, seed=seed, link=wild)
    assert auto.summary["early_pushes"] == 3 * NUM_CHUNKS * (STEPS - WATCHED)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_bits(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model: nn.Module = torch.compile(PROBLEM.model(), backend="aot_eager")  # type: ignore[assignment]
        return model

    auto, _ = both(training(make=make), tmp_path, groups=((0,), (1,)))
    assert auto.summary["early_pushes"] == 2 * NUM_CHUNKS * (STEPS - WATCHED)


class Branching(nn.Module):
    """Uses one of two branches, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(PROBLEM.num_inputs, 120)
        self.branch = nn.Linear(120, 120)
        self.last = nn.Linear(120, PROBLEM.num_classes)
        self.num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        x = torch.tanh(self.body(x))
        if self.num_passes % 2:
            x = torch.tanh(self.branch(x))
        return self.last(x)


def test_a_parameter_that_is_not_always_used_holds_back_what_is_behind_it(tmp_path: Path) -> None:
    auto, _ = both(training(make=Branching, steps=11), tmp_path)
    early = auto.summary["early_pushes"]
    assert 0 < early < 3 * auto.summary["chunks"] * (11 - WATCHED)


def test_what_is_frozen_and_thawed_leaves_when_it_has_a_gradient(tmp_path: Path) -> None:
    def freeze(turn: Turn) -> None:
        layers = next(iter(turn.model.children()))
        assert isinstance(layers, nn.Sequential)
        for parameter in layers[2].parameters():
            parameter.requires_grad_(turn.step % 5 < 3)

    auto, _ = both(training(before=freeze, steps=14), tmp_path)
    assert auto.summary["early_pushes"] > 3 * NUM_CHUNKS


def test_from_frozen_at_the_start_to_thawed(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = PROBLEM.model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        return model

    def thaw(turn: Turn) -> None:
        if turn.step == 7:
            for parameter in turn.model.parameters():
                parameter.requires_grad_(True)

    auto, _ = both(training(make=make, before=thaw, steps=14), tmp_path)
    # Those that have been frozen, two, are known to get a gradient after the first.
    assert auto.summary["early_pushes"] == 3 * (auto.summary["chunks"] * (14 - WATCHED) - 2)


# -- where it stays off ----------------------------------------------------------------------------


def accumulate(turn: Turn) -> None:
    turn.loss().backward()  # type: ignore[no-untyped-call]


def clamp_data(turn: Turn) -> None:
    for parameter in turn.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def clip_to_much(turn: Turn) -> None:
    nn.utils.clip_grad_norm_(turn.model.parameters(), 1e9)


def clip_in_the_job(turn: Turn) -> None:
    turn.job.clip_grad_norm_(0.05)


def lower_the_rate(turn: Turn) -> None:
    turn.optimizer.param_groups[0]["lr"] *= 0.9


def write_by_numpy(turn: Turn) -> None:
    for parameter in turn.model.parameters():
        assert parameter.grad is not None
        parameter.grad.numpy()[:] *= 0.5


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (accumulate, "does not come once a step"),
        (clamp_data, "changes between backward and step"),
        (clip_to_much, "changes between backward and step"),
        (write_by_numpy, "changes between backward and step"),
        (clip_in_the_job, "job.clip_grad_norm_"),
        (lower_the_rate, "hyperparameters or the batch change"),
    ],
)
def test_it_stays_off_where_gradients_are_not_left_alone(
    between: Meddle, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    auto, _ = both(training(between=between), tmp_path)
    assert auto.summary["early_pushes"] == 0
    said = [each.getMessage() for each in caplog.records if "overlap" in each.getMessage()]
    assert len(said) == 3, said  # once on each worker
    assert all("stays off" in each and reason in each for each in said)


class Unused(nn.Module):
    """A layer after the last that no forward pass uses: its gradient would leave first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PROBLEM.model()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def test_people_are_told_once_of_the_unused_parameter_that_keeps_everything_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto, _ = both(training(make=Unused), tmp_path)
    assert auto.summary["early_pushes"] == 0
    (told,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "parameter unused.weight has got no gradient" in told.getMessage()


def test_people_are_not_told_of_gradients_that_are_accumulated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both(training(between=accumulate), tmp_path)
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "prepared", "reason"),
    [
        ({"on_nonfinite": "skip"}, {}, "training.on_nonfinite = skip"),
        ({"mode": "ssp"}, {"max_grad_norm": 1.0}, "in ssp max_grad_norm"),
        ({"mode": "async"}, {"max_grad_norm": 1.0}, "in async max_grad_norm"),
    ],
)
def test_it_stays_off_where_a_step_is_all_or_nothing(
    settings: dict[str, Any],
    prepared: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    outcome = run(training(**prepared), tmp_path, **settings)
    assert outcome.summary["early_pushes"] == 0
    said = [each.getMessage() for each in caplog.records if "overlap" in each.getMessage()]
    assert len(said) == 3
    assert all(reason in each for each in said)


def test_with_a_scaler_of_gradients_it_stays_off(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for x, y in PROBLEM.batches(size=BATCH, count=6, part=job.worker, num_parts=3):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"parameters": flat(model), "clock": job.clock}

    auto, _ = both(script, tmp_path)
    assert auto.summary["early_pushes"] == 0


def test_the_call_wins_over_the_setting(tmp_path: Path) -> None:
    off = run(training(overlap="off"), tmp_path / "off", overlap="auto")
    auto = run(training(overlap="auto"), tmp_path / "auto", overlap="off")
    assert (off.summary["early_pushes"] > 0, auto.summary["early_pushes"] > 0) == (False, True)


def test_what_prepare_is_told_must_be_a_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"overlap='on'\): it must be auto, off, strict or full"):
        run(training(overlap="on"), tmp_path, record=False)


# -- what is sent too soon -------------------------------------------------------------------------


def late(meddle: Meddle, step: int = 6) -> Meddle:
    return lambda turn: meddle(turn) if turn.step == step else None


def drop(turn: Turn) -> None:
    turn.optimizer.zero_grad()


def drop_and_repeat(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    (2 * turn.loss()).backward()  # type: ignore[no-untyped-call]


LATE = {
    "second backward": accumulate,
    "clamped": clamp_data,
    "set to none": drop,
    "another backward": drop_and_repeat,
    "clipped in the job": clip_in_the_job,
    "learning rate": lower_the_rate,
}


class Linear(nn.Module):
    """Its loss is linear in its parameters: a gradient does not depend on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x], dim=1)
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def linear(between: Meddle) -> Script:
    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(1)
        model: nn.Module = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        for step, (x, _) in enumerate(
            PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=job.num_workers)
        ):

            def loss(x: Tensor = x) -> Tensor:
                return Pause.apply(model(x), lambda: stage.sleep(1e-3)).sum()

            optimizer.zero_grad()
            loss().backward()
            between(Turn(job, step, model, optimizer, loss))
            optimizer.step()
        return {"parameters": flat(model), "clock": job.clock}

    return script


SENT = r"iteration 6: .* had been sent.*; set transfer.overlap = off \(job\.prepare"


@pytest.mark.parametrize("name", list(LATE))
def test_what_changes_after_it_was_sent_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=SENT):
        run(training(between=late(LATE[name])), tmp_path, record=False)


def frozen_until_its_chunk_has_left(turn: Turn) -> None:
    for parameter in list(turn.model.parameters())[-4:]:
        if turn.step == 5:
            parameter.requires_grad_(False)
        elif turn.step == 6:
            assert parameter.grad is None
            parameter.requires_grad_(True).grad = torch.zeros_like(parameter)


def test_a_gradient_after_its_chunk_has_left_without_one_is_an_error_though_it_is_zero(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match=SENT):
        run(linear(frozen_until_its_chunk_has_left), tmp_path, record=False)


@pytest.mark.parametrize("index", range(6))
def test_a_single_write_behind_torchs_back_is_found_wherever_it_is(
    index: int, tmp_path: Path
) -> None:
    def clamp_one(turn: Turn) -> None:
        if turn.step == 6:
            gradient = list(turn.model.parameters())[index].grad
            assert gradient is not None
            gradient.data[-1:].zero_()

    name = list(PROBLEM.model().state_dict())[index]
    with pytest.raises(
        UsageError, match=f"iteration 6: the gradient of inner.{name} changed after"
    ):
        run(training(between=clamp_one), tmp_path, record=False)


def test_a_backward_that_no_step_follows_is_an_error(tmp_path: Path) -> None:
    def probe(turn: Turn) -> None:
        if turn.step == 6:
            (2 * turn.loss()).backward()  # type: ignore[no-untyped-call]
            turn.optimizer.zero_grad()

    with pytest.raises(UsageError, match=SENT):
        run(training(before=probe), tmp_path, record=False)


class Reused(nn.Module):
    """Its first layers are held until step(): the middle one gets its gradient twice."""

    def __init__(self, *, is_long: bool) -> None:
        super().__init__()
        self.first = nn.Linear(PROBLEM.num_inputs, 64)
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.behind = nn.Sequential(nn.Linear(64, 64)) if is_long else nn.Sequential()
        self.last = nn.Linear(64, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.middle, x, use_reentrant=True)  # type: ignore[assignment]
        return self.last(self.behind(x))


@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.parametrize("call", ["mean", "save"])
def test_gradients_that_one_worker_drops_hold_up_nobody_in_a_collective_or_are_an_error(
    call: str, is_long: bool, tmp_path: Path
) -> None:
    """An error if some have left (``is_long``)."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(3)
        model: nn.Module = Reused(is_long=is_long)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.prepare(model, made)
        for step, (x, y) in enumerate(
            PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=3)
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if step == 6 and job.worker == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
            if step == 6 and call == "mean":
                job.mean(1.0)
            elif step == 6:
                job.save(str(tmp_path / "model.safetensors"))
        return {"parameters": flat(model), "clock": job.clock}

    if is_long:
        with pytest.raises(UsageError, match=r"iteration 6: backward was not followed by step\(\)"):
            run(script, tmp_path / "run", record=False)
        return
    outcome = run(script, tmp_path / "run")
    assert outcome.summary["clocks"] == [STEPS, STEPS - 1, STEPS]
    assert outcome.summary["early_pushes"] == 0


def test_a_gradient_that_comes_twice_before_it_may_leave_is_sent_whole_in_step(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(3)
        model: nn.Module = PROBLEM.model()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.prepare(model, made)
        for step, (x, y) in enumerate(
            PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=3)
        ):
            first, *others = model.parameters()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            for _ in range(1 + (step == 6)):
                loss.backward(inputs=[first], retain_graph=True)  # type: ignore[no-untyped-call]
            loss.backward(inputs=others)  # type: ignore[no-untyped-call]
            optimizer.step()
        return {"parameters": flat(model), "clock": job.clock}

    both(script, tmp_path)


def test_a_batch_whose_backward_comes_after_gradients_have_left_is_an_error(
    tmp_path: Path,
) -> None:
    def use_another(turn: Turn) -> None:
        trainers_of(turn.job)[0].on_batch(2, 8.0)
        torch.autograd.grad(turn.loss(), list(turn.model.parameters()))

    with pytest.raises(UsageError, match=r"iteration 6: .* the weight of the batch changed"):
        run(training(between=late(use_another)), tmp_path, record=False)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("step", [WATCHED - 1, 6])
def test_a_backward_of_an_evaluation_sends_nothing(
    step: int, is_kept: bool, tmp_path: Path
) -> None:
    def attack(turn: Turn) -> None:
        if turn.step == step:
            turn.model.eval()
            turn.loss().backward()  # type: ignore[no-untyped-call]
            if not is_kept:
                turn.optimizer.zero_grad()
            turn.job.save(str(tmp_path / "model.safetensors"))
            turn.model.train()

    auto, _ = both(training(before=attack), tmp_path)
    early, most = auto.summary["early_pushes"], 3 * NUM_CHUNKS * (STEPS - WATCHED)
    # A gradient that is added to a kept one may wait for step(): it looks like an accumulated one.
    assert (0 < early <= most) if is_kept else early == most


def test_a_model_that_is_trained_as_it_is_evaluated_gives_the_same_bits(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return PROBLEM.model().eval()

    both(training(make=make), tmp_path)


def test_an_evaluation_between_backward_and_step_is_found(tmp_path: Path) -> None:
    def attack(turn: Turn) -> None:
        turn.model.eval()
        turn.loss().backward()  # type: ignore[no-untyped-call]
        turn.model.train()

    with pytest.raises(UsageError, match=SENT):
        run(training(between=late(attack)), tmp_path, record=False)


def test_a_gradient_that_is_not_finite_stays_and_step_says_so(tmp_path: Path) -> None:
    def spoil(turn: Turn) -> None:
        if turn.step == 6 and turn.job.worker == 1:
            with torch.no_grad():
                next(turn.model.parameters())[0, 0] = torch.nan

    with pytest.raises(NonFiniteGradientError, match=r"iteration 6: the gradient of .*NaN"):
        run(training(before=spoil), tmp_path, record=False)


# -- what else happens between backward and step ---------------------------------------------------


def test_means_and_barriers_go_on_between_backward_and_step(tmp_path: Path) -> None:
    def meet(turn: Turn) -> None:
        assert turn.job.mean(float(turn.job.worker)) == 1.0
        turn.job.barrier()
        assert turn.job.any(turn.job.worker == 1)
        turn.job.log(loss=1.0)

    auto, _ = both(training(between=meet), tmp_path)
    assert auto.summary["early_pushes"] == 3 * NUM_CHUNKS * (STEPS - WATCHED)


def test_who_sends_nothing_early_is_not_left_out_of_what_others_have_sent(tmp_path: Path) -> None:
    def meet(turn: Turn) -> None:
        if turn.job.worker == 1:
            clip_to_much(turn)  # it stays off there, and not a bit is another
        turn.job.mean(1.0)

    auto, _ = both(training(between=meet), tmp_path)
    assert auto.summary["early_pushes"] == 2 * NUM_CHUNKS * (STEPS - WATCHED)


@pytest.mark.parametrize("call", ["pull", "save", "set_parameters"])
def test_what_needs_a_whole_iteration_is_refused_between_backward_and_step(
    call: str, tmp_path: Path
) -> None:
    def interrupt(turn: Turn) -> None:
        path = [str(tmp_path / "model.safetensors")] if call == "save" else []
        getattr(turn.job, call)(*path)

    with pytest.raises(UsageError, match="overlap"):
        run(training(between=late(interrupt)), tmp_path / "run", record=False)


def look_at_parameters(turn: Turn) -> None:
    if turn.step > WATCHED and turn.job._config.overlap == "auto":
        before = flat(turn.model)
        for _ in range(20):  # the others have pushed, and replies have come
            turn.job.barrier()
        loop = loop_of(turn.job)
        assert loop.core.is_pushing
        assert not loop.core.is_awaiting
        assert torch.equal(flat(turn.model), before)


def test_parameters_stay_as_they_are_until_step_though_replies_have_come(tmp_path: Path) -> None:
    both(training(between=look_at_parameters), tmp_path)


def test_what_the_script_writes_is_replaced_as_without_overlap(tmp_path: Path) -> None:
    def write(turn: Turn) -> None:
        if turn.step in (5, 7):
            with torch.no_grad():
                next(turn.model.parameters()).mul_(0.5)

    both(training(between=write), tmp_path)


def test_values_that_the_chief_pushes_count_at_once(tmp_path: Path) -> None:
    def push(turn: Turn) -> None:
        if turn.step == 6:
            with torch.no_grad():
                for parameter in turn.model.parameters():
                    parameter.mul_(0.5)
            turn.job.set_parameters()

    both(training(before=push), tmp_path)


# -- several sets ----------------------------------------------------------------------------------


def gan(every: int) -> Script:
    """The discriminator's gradients also arrive in the generator's backward, but count for nothing
    there; the generator is trained once in ``every`` steps."""

    def script(job: Job, stage: Stage) -> Result:
        generator_of = torch.Generator().manual_seed(job.worker)

        def pause() -> None:
            stage.sleep(float(torch.rand(1, generator=generator_of)) * 1e-3)

        torch.manual_seed(5)
        make: nn.Module = Slow(nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 35)), pause)
        judge: nn.Module = Slow(nn.Sequential(nn.Linear(35, 50), nn.Linear(50, 1)), pause)
        makes: Any = torch.optim.SGD(make.parameters(), lr=0.05)
        judges: Any = torch.optim.SGD(judge.parameters(), lr=0.05)
        make, makes = job.prepare(make, makes)
        judge, judges = job.prepare(judge, judges)
        loss_of = nn.BCEWithLogitsLoss()
        ones = torch.ones(BATCH, 1)
        for step in range(WATCHED_OF_SETS + 6):
            fake = make(torch.randn(BATCH, 3, generator=generator_of))
            real = torch.randn(BATCH, 35, generator=generator_of)
            judges.zero_grad()
            (loss_of(judge(real), ones) + loss_of(judge(fake.detach()), 0 * ones)).backward()
            judges.step()
            if step % every == every - 1:
                makes.zero_grad()
                loss_of(judge(fake), ones).backward()
                makes.step()
        return {"parameters": torch.cat([flat(make), flat(judge)]), "clock": job.clock}

    return script


def test_a_gan_gives_the_same_bits_and_its_generator_leaves_early(tmp_path: Path) -> None:
    auto, _ = both(gan(every=1), tmp_path)
    makes, judges = auto.summary["sets"]
    assert makes["early_pushes"] == 3 * makes["chunks"] * 6
    assert judges["early_pushes"] == 0


def test_a_gan_whose_generator_comes_late_gives_the_same_bits(tmp_path: Path) -> None:
    """Its backward pass adds to the judge's last gradients, which is seen."""
    both(gan(every=20), tmp_path)


# -- broken on purpose -----------------------------------------------------------------------------


def test_without_memory_aside_replies_change_what_backward_may_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive_into = WorkerLoop.receive_into
    begun: list[WorkerLoop] = []

    def only_once(loop: WorkerLoop, parameter_frame: Callable[[Chunk], Frame]) -> None:
        if loop not in begun:
            begun.append(loop)
            receive_into(loop, parameter_frame)

    monkeypatch.setattr(WorkerLoop, "receive_into", only_once)
    with pytest.raises(AssertionError):
        both(training(between=look_at_parameters), tmp_path, record=False)
