"""Steps that return before their replies: the same bits, for every way to read a parameter."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import TensorDataset

from psdist.errors import ModelError, UsageError
from psdist.job import Job
from psdist.workers.late.steps import LateWait
from tests.support.jobs import occasions_of, run_directory_of, trainers_of
from tests.support.programs.training.cases import Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance
from tests.support.virtual.network import LinkModel
from tests.training.overlap.test_overlap import (
    BATCH,
    LATE,
    PROBLEM,
    STEPS,
    WATCHED,
    Attention,
    Branching,
    Checkpointed,
    Linear,
    Meddle,
    Mixed,
    Tied,
    Turn,
    late,
    linear,
    parameters,
    run,
    training,
)

ALL_LATE = STEPS - WATCHED
SLOW = LinkModel(latency_s=3e-4, jitter_s=1e-3, bytes_per_s=2e7)
"""Replies are still on their way when the next forward pass begins."""


def counted(script: Script) -> Script:
    """With the steps that have returned early, by set."""

    def with_count(job: Job, stage: Stage) -> Result:
        result = script(job, stage)
        result["late"] = [trainer.strategy.num_late for trainer in trainers_of(job)]
        return result

    return with_count


def both(script: Script, tmp_path: Path, **options: Any) -> Outcome:
    """With ``full``; the bits are those of ``off``."""
    options = {"link": SLOW, **options}
    full = run(counted(script), tmp_path / "full", overlap="full", **options)
    off = run(script, tmp_path / "off", overlap="off", **options)
    assert torch.equal(parameters(full), parameters(off))
    assert full.results[0]["clock"] == off.results[0]["clock"]
    assert full.results[0].get("seen") == off.results[0].get("seen")
    assert full.summary["max_staleness_seen"] == 0
    return full


def num_late(outcome: Outcome) -> set[int]:
    """Late steps of each worker."""
    return {sum(each["late"]) for each in outcome.results}


# -- ways to read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_sync_gives_the_same_bits_and_every_step_returns_early(
    max_norm: float | None, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psdist.workers.early.overlap.BACKWARD_S", 60.0)  # for auto alone
    full = both(training(max_grad_norm=max_norm), tmp_path, seed=seed)
    assert num_late(full) == {ALL_LATE}
    assert full.summary["early_pushes"] == 3 * full.summary["chunks"] * ALL_LATE


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_in_ssp_and_async_steps_return_early_and_the_modes_rules_hold(
    mode: str, seed: int, tmp_path: Path
) -> None:
    full = run(
        counted(training()), tmp_path, overlap="full", mode=mode, staleness=1, seed=seed, link=SLOW
    )
    assert num_late(full) == {ALL_LATE}
    assert relative_distance(full.results[0]["parameters"], flat(PROBLEM.model())) > 0.01


class Listed(nn.Module):
    """Parameters in a list of torch's, in a plain one and in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(40, PROBLEM.num_inputs) / 5])
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, PROBLEM.num_classes)
        cached = [self.middle.weight, self.middle.bias]
        self.with_cached = lambda x: nn.functional.linear(x, *cached)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(x, self.listed[0]))
        return nn.functional.linear(
            torch.tanh(self.with_cached(x)), self.last.weight, self.last.bias
        )


class Recurrent(nn.Module):
    """Torch keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(5, 24, num_layers=2, batch_first=True)
        self.last = nn.Linear(24, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.recurrent(x.view(len(x), 4, 5))[0]
        return self.last(found[:, -1])


class Product(torch.autograd.Function):
    """A product as an extension in C++ makes it: what it is given is not torch's to look at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class Extended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PROBLEM.num_inputs, 40, bias=False)
        self.last = nn.Linear(40, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = Product.apply(x, self.first.weight)
        return self.last(torch.tanh(x))


class Functional(nn.Module):
    """Which calls itself with its parameters as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PROBLEM.num_inputs, 40), nn.Tanh())
        self.last = nn.Linear(40, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        given = {name: each * 1.0 for name, each in self.body.named_parameters()}
        features: Any = torch.func.functional_call(self.body, given, (x,))
        weights = dict(self.last.named_parameters())
        logits: Tensor = torch.func.functional_call(self.last, weights, (features,))
        return logits


@pytest.mark.parametrize(
    "make",
    [Attention, Checkpointed, Tied, Mixed, Listed, Recurrent, Extended, Functional],
)
def test_however_a_model_reads_its_parameters_the_bits_are_the_same(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    full = both(training(make=make), tmp_path)
    assert num_late(full) == {ALL_LATE}


def test_a_model_that_leaves_layers_out_gives_the_same_bits(tmp_path: Path) -> None:
    assert num_late(both(training(make=Branching, steps=11), tmp_path)) == {11 - WATCHED}


def ema(turn: Turn) -> list[Tensor]:
    averages: list[Tensor] = turn.job.__dict__.setdefault("averages", [])
    if not averages:
        averages += [each.detach().clone() for each in turn.model.parameters()]
    for average, each in zip(averages, turn.model.parameters(), strict=True):
        average.mul_(0.9).add_(each.detach(), alpha=0.1)
    return averages


def copied(turn: Turn) -> list[Tensor]:
    twin = copy.deepcopy(turn.model)
    assert all(type(each) is nn.Parameter for each in twin.parameters())
    assert all(type(each._parameters) is dict for each in twin.modules())
    twin(torch.ones(1, PROBLEM.num_inputs)).sum().backward()  # without a notice
    return list(twin.parameters())


def pickled(turn: Turn) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(turn.model[1:], file)  # type: ignore[index] # it is a Sequential
    file.seek(0)
    twin: nn.Module = torch.load(file, weights_only=False)  # what stands two lines above
    assert all(type(each._parameters) is dict for each in twin.modules())
    return list(twin.parameters())


def evaluated(turn: Turn) -> list[Tensor]:
    turn.model.eval()
    with torch.no_grad():
        logits = turn.model(torch.linspace(-1, 1, PROBLEM.num_inputs).unsqueeze(0))
    turn.model.train()
    return [logits]


def stated(turn: Turn) -> list[Tensor]:
    return [each.clone() for each in turn.model.state_dict().values()]


def stated_with_variables(turn: Turn) -> list[Tensor]:
    return [each.detach() for each in turn.model.state_dict(keep_vars=True).values()]


def saved_by_torch(turn: Turn) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(turn.model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def by_data(turn: Turn) -> list[Tensor]:
    return [each.data.clone() for each in turn.model.parameters()]


def by_numpy(turn: Turn) -> list[Tensor]:
    return [torch.tensor(each.detach().numpy()) for each in turn.model.parameters()]


def by_foreach(turn: Turn) -> list[Tensor]:
    with torch.no_grad():
        return list(torch._foreach_mul(list(turn.model.parameters()), 1.0))


def by_out(turn: Turn) -> list[Tensor]:
    found = [torch.empty_like(each) for each in turn.model.parameters()]
    with torch.no_grad():
        for into, each in zip(found, turn.model.parameters(), strict=True):
            torch.add(input=each, other=each, out=into)
    return found


def as_text(turn: Turn) -> list[Tensor]:
    words = "".join(map(repr, turn.model.parameters()))
    return [torch.tensor(list(words.encode()))]


def inferred(turn: Turn) -> list[Tensor]:
    with torch.inference_mode():
        logits = turn.model(torch.linspace(-1, 1, PROBLEM.num_inputs).unsqueeze(0))
    return [torch.from_numpy(logits.numpy().copy())]


def for_each_sample(turn: Turn) -> list[Tensor]:
    def loss(x: Tensor) -> Tensor:
        return turn.model(x.unsqueeze(0)).square().sum()

    return [torch.func.vmap(torch.func.grad(loss))(torch.linspace(-1, 1, 60).view(3, 20))]


def as_fakes(turn: Turn) -> list[Tensor]:
    """A reader of shapes alone still brings the values."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        turn.model(torch.ones(1, PROBLEM.num_inputs))
    return by_data(turn)


def traced(turn: Turn) -> list[Tensor]:
    x = torch.linspace(-1, 1, PROBLEM.num_inputs).unsqueeze(0)
    if turn.step < 6:
        return [turn.model(x)]
    if turn.step == 6:
        with torch.no_grad():
            turn.job.__dict__["traced"] = torch.jit.trace(turn.model, x)  # type: ignore[no-untyped-call]
        assert "copy_" not in str(turn.job.__dict__["traced"].inlined_graph)
    return [turn.job.__dict__["traced"](x)]


def kept_views(turn: Turn) -> list[Tensor]:
    """Made once: no hook runs when they are read."""
    if turn.step == 6:
        turn.job.__dict__["kept"] = [each.detach() for each in turn.model.parameters()]
    return [each.clone() for each in turn.job.__dict__.get("kept", [])]


def in_the_job(turn: Turn) -> list[Tensor]:
    means = turn.job.mean([each.detach() for each in turn.model.parameters()])
    turn.job.barrier()
    turn.job.log(step=turn.step)
    return list(means)


def after_a_pull(turn: Turn) -> list[Tensor]:
    turn.job.pull()
    return by_data(turn)


def in_a_fork(turn: Turn) -> list[Tensor]:
    """The child reads: its values are compared with the parent's."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(into, "wb") as pipe:
            pipe.write(flat(turn.model).numpy().tobytes())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return [torch.frombuffer(bytearray(found), dtype=torch.float32)]


READERS = [
    *(ema, copied, pickled, evaluated, stated, stated_with_variables, saved_by_torch, by_data),
    *(by_numpy, by_foreach, by_out, as_text, in_the_job, after_a_pull, in_a_fork),
    *(inferred, for_each_sample, as_fakes, traced, kept_views),
]


def seen_by(read: Callable[[Turn], list[Tensor]]) -> Script:
    """The training loop, in which ``read`` looks at the model between the steps."""
    seen: list[bytes] = []

    def before(turn: Turn) -> None:
        found = read(turn)
        if not turn.job.worker:
            seen.extend(each.detach().numpy().tobytes() for each in found)

    def script(job: Job, stage: Stage) -> Result:
        if not job.worker:
            seen.clear()
        result = training(before=before, make=PROBLEM.model)(job, stage)
        result["seen"] = list(seen) if not job.worker else []
        return result

    return script


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("read", READERS)
def test_who_reads_between_two_steps_sees_the_new_values(
    read: Callable[[Turn], list[Tensor]], tmp_path: Path
) -> None:
    groups = ((0,), (1,)) if read is not traced else ((0,),)  # torch traces in one thread
    is_recorded = read is not for_each_sample  # no memory is looked at within torch.func
    full = both(seen_by(read), tmp_path, groups=groups, record=is_recorded)
    assert num_late(full) == {6 - WATCHED if read in (traced, kept_views) else ALL_LATE}


def test_a_view_that_is_kept_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(seen_by(kept_views), tmp_path, overlap="full", link=SLOW, groups=((0,),))
    said = [each for each in caplog.messages if "while a view, .data or a graph" in each]
    assert len(said) == 1


def penalty_first(job: Job, _stage: Stage) -> Result:
    """A norm of a list of parameters that was made once, before the model is called."""
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    known = list(model.parameters())
    for x, y in PROBLEM.batches(
        size=BATCH, count=STEPS, part=job.worker, num_parts=job.num_workers
    ):
        optimizer.zero_grad()
        penalty = sum(each.abs().sum() for each in known)
        (nn.functional.cross_entropy(model(x), y) + 0.01 * penalty).backward()
        optimizer.step()
    return {"parameters": flat(model), "clock": job.clock}


def test_a_penalty_over_a_list_of_parameters_sees_the_new_values(tmp_path: Path) -> None:
    assert num_late(both(penalty_first, tmp_path)) == {ALL_LATE}


# -- what reads nothing does not wait --------------------------------------------------------------


def test_looking_at_shapes_and_gradients_waits_for_nothing(tmp_path: Path) -> None:
    pending: list[bool] = []

    def look(turn: Turn) -> None:
        turn.model.zero_grad()
        for parameter in turn.model.parameters():
            assert parameter.grad is None
            assert parameter.requires_grad
            assert parameter.numel() == parameter.shape.numel()
        pending.append(trainers_of(turn.job)[0].strategy.is_pending)

    run(training(before=look), tmp_path, overlap="full", link=SLOW, groups=((0,),))
    assert pending == [False] * (WATCHED + 1) + [True] * (ALL_LATE - 1)


def test_a_layer_waits_for_its_own_chunks_alone(tmp_path: Path) -> None:
    """Otherwise nothing would be gained."""
    left: list[int] = []

    def script(job: Job, _stage: Stage) -> Result:
        layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(16)))
        model, optimizer = job.prepare(layers, torch.optim.SGD(layers.parameters(), lr=1e-3))
        for layer in layers:
            layer.register_forward_hook(lambda *_: left.append(num_left()))

        def num_left() -> int:
            strategy = trainers_of(job)[0].strategy
            assert isinstance(strategy, LateWait)
            return strategy.num_awaited

        for _ in range(WATCHED + 2):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sum().backward()
            left.clear()
            optimizer.step()
        left.clear()
        model(torch.ones(2, 40))
        return {"parameters": flat(model), "clock": job.clock}

    narrow = LinkModel(latency_s=1e-5, jitter_s=0.0, bytes_per_s=1e7)
    run(script, tmp_path, overlap="full", groups=((0,),), chunk_bytes=4096, link=narrow)
    assert len(left) == 16
    assert left[0] > 0
    assert left == sorted(left, reverse=True)


# -- the end of an iteration's tail ----------------------------------------------------------------


def old_graph(turn: Turn) -> None:
    if turn.step == 6:
        turn.job.__dict__["old"] = turn.loss()


def backward_through_it(turn: Turn) -> None:
    if turn.step == 7:
        turn.job.__dict__["old"].backward()


def test_a_backward_through_the_values_of_before_a_step_raises_as_without(tmp_path: Path) -> None:
    script = training(between=old_graph, before=backward_through_it)
    for overlap in ("off", "full"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(script, tmp_path / overlap, overlap=overlap, record=False, link=SLOW)


def twice(turn: Turn) -> None:
    if turn.step > 5:
        turn.optimizer.step()


def test_a_step_without_a_backward_waits_for_the_one_before(tmp_path: Path) -> None:
    full = both(training(before=twice), tmp_path)
    assert num_late(full) == {ALL_LATE + STEPS - 6}


def unused_forward(turn: Turn) -> None:
    turn.loss()


def test_a_forward_pass_that_no_backward_follows_is_the_same_use(tmp_path: Path) -> None:
    full = both(training(before=unused_forward), tmp_path)
    assert num_late(full) == {ALL_LATE}


def accumulate(turn: Turn) -> None:
    turn.loss().backward()  # type: ignore[no-untyped-call]


def test_where_gradients_accumulate_full_stays_off_as_auto_does(tmp_path: Path) -> None:
    assert num_late(both(training(between=accumulate), tmp_path)) == {0}


@pytest.mark.parametrize("name", [name for name in LATE if name != "learning rate"])
def test_a_gradient_that_changes_after_it_was_sent_is_an_error(name: str, tmp_path: Path) -> None:
    script = linear(late(LATE[name]))
    with pytest.raises(UsageError, match=r"iteration 6: .* changed after it had been sent"):
        run(script, tmp_path, overlap="full", link=SLOW, record=False)


def write(turn: Turn) -> None:
    if turn.step in (5, 7):
        with torch.no_grad():
            for parameter in turn.model.parameters():
                parameter.mul_(0.5)


def test_what_the_script_writes_is_replaced_as_without(tmp_path: Path) -> None:
    for name, script in (
        ("before", training(before=write)),
        ("between", training(between=write)),
    ):
        full = both(script, tmp_path / name, record=False)
        assert num_late(full) == {ALL_LATE}


def halve_and_push(turn: Turn) -> None:
    write(turn)
    if turn.step in (5, 7):
        turn.job.set_parameters()


def save(turn: Turn) -> None:
    turn.job.save(run_directory_of(turn.job) / "model.safetensors")
    turn.job.optimizer_state()


@pytest.mark.parametrize("call", [halve_and_push, save])
def test_calls_of_the_job_finish_what_is_pending(call: Meddle, tmp_path: Path) -> None:
    assert num_late(both(training(before=call), tmp_path)) == {ALL_LATE}


def test_the_model_is_plain_and_complete_when_the_job_has_ended(tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def script(job: Job, stage: Stage) -> Result:
        def keep(turn: Turn) -> None:
            models.append(turn.model)

        return training(after=keep)(job, stage)

    full = run(script, tmp_path, overlap="full", link=SLOW)
    for model in models:
        assert all(type(each) is nn.Parameter for each in model.parameters())
        assert all(type(each._parameters) is dict for each in model.modules())
        assert torch.equal(flat(model), parameters(full))


def test_the_last_step_of_a_script_is_finished_at_its_end(tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in PROBLEM.batches(size=BATCH, count=6, part=job.worker, num_parts=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        models.append(model)
        return {"clock": job.clock}

    run(script, tmp_path / "full", overlap="full", link=SLOW)
    run(script, tmp_path / "off", overlap="off", link=SLOW)
    assert all(torch.equal(flat(each), flat(models[-1])) for each in models)


def test_what_goes_wrong_while_values_are_awaited_ends_the_job(tmp_path: Path) -> None:
    def read_elsewhere(turn: Turn) -> None:
        if turn.step == 6:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(flat, turn.model).result()

    with pytest.raises(UsageError, match=r"parameter inner\.0\.weight is read in another thread"):
        run(training(before=read_elsewhere), tmp_path, overlap="full", link=SLOW, record=False)


# -- what torch and the record are told ------------------------------------------------------------


def pull_behind_a_forward_pass(turn: Turn) -> None:
    """A use of the values that are pending, which the step's own is not."""
    turn.loss()
    turn.job.pull()


def test_a_use_counts_though_other_values_come_before_the_step(tmp_path: Path) -> None:
    script = training(before=pull_behind_a_forward_pass)
    outcomes = [
        run(counted(script), tmp_path / overlap, overlap=overlap, link=SLOW)
        for overlap in ("full", "off")
    ]
    full, off = outcomes
    assert torch.equal(parameters(full), parameters(off))
    assert num_late(full) == {ALL_LATE}
    assert full.checked().num_uses == off.checked().num_uses
    # Two uses of each chunk in every iteration, but the first values are not pulled again.
    assert full.summary["staleness_seen"] == off.summary["staleness_seen"]


def test_torch_is_told_of_a_step_at_once_and_again_of_the_values(tmp_path: Path) -> None:
    """A graph or a cache that knows a version never takes other values for it."""
    grown: list[tuple[bool, bool]] = []

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in PROBLEM.batches(size=BATCH, count=STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = versions(model)
            optimizer.step()
            stepped, is_late = versions(model), trainers_of(job)[0].strategy.is_pending
            flat(model)
            if is_late:
                grown.append((less(before, stepped), less(stepped, versions(model))))
        return {"parameters": flat(model), "clock": job.clock}

    run(script, tmp_path, overlap="full", link=SLOW, groups=((0,),))
    assert grown == [(True, True)] * ALL_LATE


def versions(model: nn.Module) -> list[int]:
    return [parameter._version for parameter in model.parameters()]


def less(before: list[int], after: list[int]) -> bool:
    return all(one < other for one, other in zip(before, after, strict=True))


def parts_alone(pending: list[bool]) -> Script:
    """The model itself is never called, and one of its layers not in every iteration."""

    def script(job: Job, _stage: Stage) -> Result:
        torch.manual_seed(6)
        sizes = (PROBLEM.num_inputs, 40, 40, PROBLEM.num_classes)
        model = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def look(_parameter: Tensor) -> None:
            pending.append(trainers_of(job)[0].strategy.is_pending)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        batches = PROBLEM.batches(
            size=BATCH, count=STEPS, part=job.worker, num_parts=job.num_workers
        )
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            x = torch.tanh(model[0](x))
            if step < WATCHED or step % 2:
                x = torch.tanh(model[1](x))
            nn.functional.cross_entropy(model[2](x), y).backward()
            optimizer.step()
        return {"parameters": flat(model), "clock": job.clock}

    return script


def test_what_no_forward_pass_has_read_is_there_before_the_first_new_gradient(
    tmp_path: Path,
) -> None:
    pending: list[bool] = []
    full = both(parts_alone(pending), tmp_path)
    assert num_late(full) == {ALL_LATE}
    assert pending
    assert not any(pending)


# -- where it is as auto ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    """By the tests before these, in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(PROBLEM.model(), backend="aot_eager")  # type: ignore[assignment]
    return model


def partly_compiled() -> nn.Module:
    model = PROBLEM.model()
    model[0].compile(backend="aot_eager")
    return model


class OwnParameter(nn.Parameter):
    pass


def of_own_class() -> nn.Module:
    model = PROBLEM.model()
    model[0].bias = OwnParameter(model[0].bias.detach())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (compiled, "torch.compile"),
        (partly_compiled, "torch.compile"),
        (of_own_class, "a parameter is a OwnParameter"),
    ],
)
def test_a_model_whose_reads_cannot_be_told_is_trained_as_with_auto(
    make: Callable[[], nn.Module],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    full = both(training(make=make), tmp_path, groups=((0,), (1,)))
    assert num_late(full) == {0}
    assert full.summary["early_pushes"] == 2 * full.summary["chunks"] * ALL_LATE
    said = [text for text in caplog.messages if "transfer.overlap = full is as auto" in text]
    assert len(said) == 2, said  # once on each worker
    assert all(reason in each for each in said)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_what_is_compiled_later_finds_the_values_and_full_becomes_auto(tmp_path: Path) -> None:
    model_of: dict[int, Any] = {}

    def before(turn: Turn) -> None:
        if turn.step == 6:
            inner = turn.model
            model_of[turn.job.worker] = torch.compile(lambda x: inner(x), backend="aot_eager")
        if turn.step >= 8:  # no table is awaited any more
            assert all(type(each._parameters) is dict for each in turn.model.modules())
        if turn.step >= 6:
            x = torch.linspace(-1, 1, PROBLEM.num_inputs).unsqueeze(0)
            with torch.no_grad():
                logits = model_of[turn.job.worker](x)
            turn.job.__dict__.setdefault("seen", []).append(logits.clone())

    def script(job: Job, stage: Stage) -> Result:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        result = training(before=before, make=PROBLEM.model)(job, stage)
        result["seen"] = [each.numpy().tobytes() for each in job.__dict__["seen"]]
        return result

    full = both(script, tmp_path, groups=((0,),))
    assert num_late(full) == {6 - WATCHED}


def test_workers_that_differ_in_it_are_told_so(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        return training(overlap="full" if job.worker == 1 else "auto")(job, stage)

    with pytest.raises(
        ModelError, match=r"workers 0 and 1 .*'overlap auto' against 'overlap full'"
    ):
        run(script, tmp_path, record=False)


# -- several sets ----------------------------------------------------------------------------------

STEPS_OF_SETS = STEPS + 13
"""Sets of several are watched for 13 iterations more."""


def two_models(job: Job, _stage: Stage) -> Result:
    """As a GAN trains: each model has a turn, and the second is read in the first one's, too."""
    torch.manual_seed(4)
    maker = nn.Sequential(nn.Linear(PROBLEM.num_inputs, 60), nn.Tanh(), nn.Linear(60, 20))
    judge = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))
    maker, of_maker = job.prepare(maker, torch.optim.SGD(maker.parameters(), lr=0.05))
    judge, of_judge = job.prepare(judge, torch.optim.Adam(judge.parameters(), lr=0.01))
    for x, _ in PROBLEM.batches(
        size=BATCH, count=STEPS_OF_SETS, part=job.worker, num_parts=job.num_workers
    ):
        of_judge.zero_grad()
        (judge(maker(x).detach()).mean() - judge(x[:, :20]).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judge(maker(x)).mean()).backward()
        of_maker.step()
    return {"parameters": torch.cat([flat(maker), flat(judge)]), "clock": job.clock}


def test_two_models_that_take_turns_give_the_same_bits(tmp_path: Path) -> None:
    full = both(two_models, tmp_path)
    assert num_late(full) == {ALL_LATE}  # of the first; the second has two backward passes a step


def two_sets(job: Job, _stage: Stage) -> Result:
    torch.manual_seed(5)
    model: nn.Module = Linear()
    halves = [list(model.parameters())[:3], list(model.parameters())[3:]]
    model, optimizers = job.prepare(model, [torch.optim.SGD(half, lr=0.01) for half in halves])
    for x, _ in PROBLEM.batches(
        size=BATCH, count=STEPS_OF_SETS, part=job.worker, num_parts=job.num_workers
    ):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"parameters": flat(model), "clock": job.clock}


def test_two_optimizers_of_one_model_have_each_a_tail(tmp_path: Path) -> None:
    assert num_late(both(two_sets, tmp_path)) == {2 * ALL_LATE}


def looping(job: Job, stage: Stage) -> Result:
    """With a loader of the job's; workers may pause after its batches."""
    torch.manual_seed(3)
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(*PROBLEM.data())
    for _ in range(2):
        for x, y in job.loader(data, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            stage.sleep(30e-3 * job.worker)
            job.log(hears_of=1)
    return {"parameters": flat(model), "clock": job.clock}


def test_workers_meet_for_checkpoints_behind_steps_that_have_returned_early(
    tmp_path: Path,
) -> None:
    full = both(looping, tmp_path, checkpoint_every="2")
    assert full.summary["checkpoints"] > 2


@pytest.mark.parametrize("worker", range(3))
def test_who_holds_alone_for_a_checkpoint_does_not_wait_for_what_others_hold_back(
    worker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is signalled, as it were, at any boundary; the others are elsewhere."""

    def script(job: Job, stage: Stage) -> Result:
        def reason(*, clock: int, now_s: float) -> str:  # noqa: ARG001
            return "checkpoint" if job.worker == worker and clock > WATCHED and clock % 2 else ""

        monkeypatch.setattr(occasions_of(job), "reason", reason)
        return looping(job, stage)

    full = both(script, tmp_path)
    assert full.summary["checkpoints"] > 2
