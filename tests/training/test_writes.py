"""Writes of a script to parameters: refused unless job.set_parameters() follows, and
then trained on as in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from psdist.errors import ModelError, UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually

Groups = tuple[tuple[int, ...], ...]
APART: Groups = ((0,), (1,))
TOGETHER: Groups = ((0, 1),)
ALONE: Groups = ((0,),)
PROBLEM = Problem()
BATCH = 8
STEPS = 12
Write = Callable[[nn.Module], None]


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.24, 0.24)


def clip_seen_by_torch(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.24, 0.24)


def normalise_rows(model: nn.Module) -> None:
    weight = model[0].weight
    weight.data.div_(weight.data.norm(dim=1, keepdim=True).clamp(min=0.5) / 0.5)


def decay_with_foreach(model: nn.Module) -> None:
    torch._foreach_mul_([each.data for each in model.parameters()], 1 - 1e-3)


def prune_with_numpy(model: nn.Module) -> None:
    model[2].weight.detach().numpy()[::3, 1] = 0.0


def mask(model: nn.Module) -> None:
    weight = model[2].weight.data
    weight.mul_(weight.abs() > 0.01)


def limit_the_spectral_norm(model: nn.Module) -> None:
    weight = model[2].weight.data
    weight.div_(max(1.0, float(torch.linalg.matrix_norm(weight, 2)) / 0.9))


def center(model: nn.Module) -> None:
    """Through another tensor of the same memory."""
    bias = model[4].bias
    same = torch.empty(0).set_(bias.untyped_storage(), 0, bias.shape, bias.stride())
    same.sub_(same.mean())


WRITES: list[Write] = [
    *(clip, clip_seen_by_torch, normalise_rows, decay_with_foreach, prune_with_numpy, mask),
    *(limit_the_spectral_norm, center),
]


def small_lr(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def batches(job: Job | None = None, groups: Groups = APART) -> Iterator[tuple[Tensor, Tensor]]:
    """A worker's part of the joint batches; all of them without ``job``."""
    num_parts = sum(map(len, groups))
    if job is None:
        return PROBLEM.batches(size=BATCH * num_parts, count=STEPS)
    return PROBLEM.batches(size=BATCH, count=STEPS, part=job.worker, num_parts=num_parts)


def train(
    model: nn.Module, optimizer: Any, data: Iterator[tuple[Tensor, Tensor]], write: Write
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        write(model)


def writing(write: Write, *, pushes: bool, groups: Groups) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        model: Any = PROBLEM.model()
        model, optimizer = job.prepare(model, small_lr(model))

        def after_step(model: nn.Module) -> None:
            write(model)
            if pushes:
                job.set_parameters()

        train(model, optimizer, batches(job, groups), after_step)
        return {"parameters": flat(model)}

    return script


def run(script: Script, path: Path, groups: Groups, **settings: object) -> Outcome:
    settings = {"mode": "sync", **settings}
    case = Case(name="writes", script=script, groups=groups, servers=2, settings=settings)
    return run_virtually(case, path)


def told_of_writes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "has written" in each]


def plain(write: Write, groups: Groups) -> Tensor:
    model = PROBLEM.model()
    train(model, small_lr(model), batches(groups=groups), write)
    return flat(model)


@pytest.mark.parametrize("groups", [APART, TOGETHER])
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_are_pushed_train_as_in_one_process(
    write: Write, groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain(write, groups)
    assert relative_distance(plain(lambda _model: None, groups), expected) > 1e-4
    outcome = run(writing(write, pushes=True, groups=groups), tmp_path, groups)
    for result in outcome.results:
        assert relative_distance(result["parameters"], expected) < 1e-5
    assert not told_of_writes(caplog)


@pytest.mark.parametrize("groups", [APART, TOGETHER])
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_are_not_pushed_end_the_job_with_the_parameters_name(
    write: Write, groups: Groups, tmp_path: Path
) -> None:
    told = (
        r"iteration \d+: the script has written to parameter \d\.\w+ .*call job\.set_parameters\(\)"
    )
    with pytest.raises(UsageError, match=told):
        run(writing(write, pushes=False, groups=groups), tmp_path, groups)


SETTINGS: list[dict[str, object]] = [
    *({"overlap": each} for each in ("auto", "strict", "full", "off")),
    *({"mode": "ssp", "pipeline": 1}, {"mode": "async"}, {"backup": 1}),
    *({"push_codec": "topk:0.5"}, {"pull_codec": "int8"}),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_clip_that_is_not_pushed_ends_the_job_however_it_communicates(
    settings: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"has written to parameter .*call job\.set_parameters\(\)"
    ):
        run(writing(clip, pushes=False, groups=APART), tmp_path, APART, **settings)


@pytest.mark.parametrize("settings", SETTINGS)
def test_training_without_writes_is_told_of_none(
    settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = APART if "overlap" in settings else ((0, 1), (2,))
    run(writing(lambda _model: None, pushes=False, groups=groups), tmp_path, groups, **settings)
    assert not told_of_writes(caplog)


def test_a_hook_of_the_optimizer_that_writes_ends_the_job(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model: Any = PROBLEM.model()
        optimizer: Any = small_lr(model)
        optimizer.register_step_post_hook(lambda *_arguments: clip(model))
        model, optimizer = job.prepare(model, optimizer)
        train(model, optimizer, batches(job), lambda _model: None)
        return {}

    with pytest.raises(UsageError, match="has written to parameter"):
        run(script, tmp_path, APART)


def test_averages_that_stay_after_an_evaluation_end_the_job(tmp_path: Path) -> None:
    """Exponential moving averages, swapped in through ``p.data.copy_`` in every iteration."""

    def swap_in(average: nn.Module) -> Write:
        def write(model: nn.Module) -> None:
            for own, its in zip(average.parameters(), model.parameters(), strict=True):
                own.data.lerp_(its.data, 0.5)
                its.data.copy_(own.data)

        return write

    def script(job: Job, _stage: Stage) -> Result:
        model: Any = PROBLEM.model()
        average = copy.deepcopy(model)
        model, optimizer = job.prepare(model, small_lr(model))
        train(model, optimizer, batches(job), swap_in(average))
        return {}

    with pytest.raises(UsageError, match="has written to parameter"):
        run(script, tmp_path, APART)


@pytest.mark.parametrize(
    "assign",
    [
        lambda model: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters()
        ),
        lambda model: setattr(model[0].weight, "data", model[0].weight.detach() * 0.9),
    ],
)
def test_parameters_whose_memory_is_replaced_end_the_job_with_a_line_that_fits(
    assign: Write, tmp_path: Path
) -> None:
    told = r"0\.weight no longer uses .* write `with torch\.no_grad\(\): p\.copy_\(values\)`"
    with pytest.raises(UsageError, match=told):
        run(writing(assign, pushes=False, groups=APART), tmp_path / "step", APART)
    with pytest.raises(UsageError, match=told):
        run(writing(assign, pushes=True, groups=APART), tmp_path / "push", APART)


# -- values that the script restores -----------------------------------------------------------


def perturb(model: nn.Module) -> list[Tensor]:
    """To where the loss is largest nearby, as sharpness-aware minimisation (Foret et al. 2021)."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients]))
    changes = [0.05 * each / norm for each in gradients]
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), changes, strict=True):
            parameter.add_(change)
    return changes


def sharpness_aware(
    model: nn.Module, x: Tensor, y: Tensor, *, restores: str, scale: float = 1.0
) -> None:
    """The gradient of a SAM step, added to ``p.grad``."""
    kept = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    saved = [each.detach().clone() for each in model.parameters()]
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    changes = perturb(model)
    model.zero_grad()
    (scale * nn.functional.cross_entropy(model(x), y)).backward()
    with torch.no_grad():
        for parameter, value, change in zip(model.parameters(), saved, changes, strict=True):
            if restores == "copy_":
                parameter.copy_(value)
            elif restores == "sub_":
                parameter.sub_(change)
            else:
                parameter.data = value
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        if gradient is not None:
            assert parameter.grad is not None
            parameter.grad.add_(gradient)


def sam(restores: str, groups: Groups) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        model: Any = PROBLEM.model()
        model, optimizer = job.prepare(model, small_lr(model))
        for x, y in batches(job, groups):
            optimizer.zero_grad()
            sharpness_aware(model, x, y, restores=restores)
            optimizer.step()
        return {"parameters": flat(model)}

    return script


def plain_sam(num_workers: int) -> Tensor:
    """In one process: the mean gradient of the parts of a batch, each perturbed by its own."""
    model = PROBLEM.model()
    optimizer = small_lr(model)
    for x, y in PROBLEM.batches(size=BATCH * num_workers, count=STEPS):
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(num_workers), y.chunk(num_workers), strict=True):
            sharpness_aware(model, part_x, part_y, restores="copy_", scale=1 / num_workers)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("overlap", ["auto", "full", "off"])
@pytest.mark.parametrize("groups", [ALONE, APART, TOGETHER])
@pytest.mark.parametrize("restores", ["copy_", "sub_"])
def test_sharpness_aware_minimisation_trains_as_in_one_process(
    restores: str,
    groups: Groups,
    overlap: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_workers = sum(map(len, groups))
    expected = plain_sam(num_workers)
    outcome = run(sam(restores, groups), tmp_path, groups, overlap=overlap)
    for result in outcome.results:
        assert relative_distance(result["parameters"], expected) < 1e-5
    assert not told_of_writes(caplog)


def test_sharpness_aware_minimisation_that_restores_other_memory_ends_the_job(
    tmp_path: Path,
) -> None:
    told = r"0\.weight no longer uses .* write `with torch\.no_grad\(\): p\.copy_\(values\)`"
    with pytest.raises(UsageError, match=told):
        run(sam("data", APART), tmp_path, APART)


def swap_averages(model: nn.Module) -> None:
    saved = [each.data.clone() for each in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    for parameter, value in zip(model.parameters(), saved, strict=True):
        parameter.data.copy_(value)


def test_averages_that_are_swapped_in_and_out_are_no_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(writing(swap_averages, pushes=False, groups=APART), tmp_path, APART)
    for result in outcome.results:
        assert relative_distance(result["parameters"], plain(swap_averages, APART)) < 1e-5
    assert not told_of_writes(caplog)


def test_modules_of_torch_that_compute_their_weight_are_no_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> nn.Module:
        model = PROBLEM.model()
        nn.utils.parametrizations.spectral_norm(model[0]).eval()  # its buffers stay
        nn.utils.parametrizations.weight_norm(model[2])
        prune.l1_unstructured(model[4], "weight", amount=0.3)
        return model

    def script(job: Job, _stage: Stage) -> Result:
        model: Any = make()
        model, optimizer = job.prepare(model, small_lr(model))
        train(model, optimizer, batches(job), lambda _model: None)
        return {"parameters": flat(model)}

    expected = make()
    train(expected, small_lr(expected), batches(), lambda _model: None)
    for result in run(script, tmp_path, APART).results:
        assert relative_distance(result["parameters"], flat(expected)) < 1e-5
    assert not told_of_writes(caplog)


# -- embeddings with max_norm ------------------------------------------------------------------

MAX_NORM = 0.7
WORDS = 30


def embedding(max_norm: float | None) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(WORDS, 8, max_norm=max_norm), nn.Flatten(), nn.Linear(16, 5))


def words(*, part: int = 0, num_parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Part ``part`` of joint batches."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(WORDS, (2 * BATCH, 2), generator=generator)
        y = torch.randint(5, (2 * BATCH,), generator=generator)
        yield x.chunk(num_parts)[part], y.chunk(num_parts)[part]


def renormalise(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.renorm_(2, 0, MAX_NORM)


def test_an_embedding_with_max_norm_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = embedding(MAX_NORM)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        return {}

    with pytest.raises(
        ModelError, match=r"module 0 \(Embedding\) has max_norm = 0\.7.*0\.weight in forward"
    ):
        run(script, tmp_path, APART)


@pytest.mark.parametrize("groups", [APART, TOGETHER])
def test_an_embedding_that_is_renormalised_after_each_step_trains_as_with_max_norm(
    groups: Groups, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As its error says. torch renormalises a row when it is read, which is later."""

    def script(job: Job, _stage: Stage) -> Result:
        model: Any = embedding(None)
        renormalise(model)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

        def after_step(model: nn.Module) -> None:
            renormalise(model)
            job.set_parameters()

        train(model, optimizer, words(part=job.worker, num_parts=2), after_step)
        return {"parameters": flat(model)}

    expected, free = embedding(MAX_NORM), embedding(None)
    for model in (expected, free):
        train(model, torch.optim.SGD(model.parameters(), lr=0.5), words(), lambda _model: None)
    renormalise(expected)
    assert relative_distance(flat(free), flat(expected)) > 0.1
    for result in run(script, tmp_path, groups).results:
        assert relative_distance(result["parameters"], flat(expected)) < 1e-5
    assert not told_of_writes(caplog)


def test_an_embedding_function_with_max_norm_ends_the_job(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = embedding(None)

        def forward(self, x: Tensor) -> Tensor:
            rows = nn.functional.embedding(x, self.model[0].weight, max_norm=MAX_NORM)
            return self.model[1:](rows)

    def script(job: Job, _stage: Stage) -> Result:
        model: Any = Words()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        train(model, optimizer, words(part=job.worker, num_parts=2), lambda _model: None)
        return {}

    with pytest.raises(UsageError, match=r"has written to parameter model\.0\.weight since"):
        run(script, tmp_path, APART)
