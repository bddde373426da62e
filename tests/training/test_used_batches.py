"""A batch weighs in the iteration of its backward, in whatever order a script takes batches.

The last joint batch is short, and its parts differ. Every script is compared with one process that
trains on the joint batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from psdist.errors import UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.problems import Batch, Problem, flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually

NUM_SAMPLES, BATCH, EPOCHS = 45, 4, 2
PROBLEM = Problem(num_samples=NUM_SAMPLES)
JOINT = [list(range(at, min(at + 2 * BATCH, NUM_SAMPLES))) for at in range(0, NUM_SAMPLES, 8)]
"""Joint batches of two workers; their parts of the last one have 2 and 3 samples."""
GROUPS = [((0, 1),), ((0,), (1,))]
Loop = Callable[[Job, Any, nn.Module, Any], None]
"""Of (job, loader, model, optimizer): an epoch, or more where it keeps batches."""


def dataset() -> TensorDataset:
    return TensorDataset(*PROBLEM.data())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def step(model: nn.Module, optimizer: Any, *batches: Batch) -> None:
    optimizer.zero_grad()
    for x, y in batches:
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def ahead(batches: Iterable[Any], *, by: int = 1) -> Iterator[Any]:
    """A prefetcher: ``by`` batches are fetched before one is given."""
    coming = iter(batches)
    fetched = list(itertools.islice(coming, by))
    for batch in coming:
        fetched.append(batch)
        yield fetched.pop(0)
    yield from fetched


def run(
    loop: Loop,
    tmp_path: Path,
    groups: tuple[tuple[int, ...], ...],
    *,
    make: Callable[[], nn.Module] = PROBLEM.model,
    is_prepared: bool = False,
    epochs: int = EPOCHS,
    **settings: Any,
) -> Outcome:
    def script(job: Job, _stage: Stage) -> Result:
        model = make()
        if is_prepared:
            own = DataLoader(dataset(), batch_size=BATCH)
            model, optimizer, loader = job.prepare(model, sgd(model), own)
        else:
            model, optimizer = job.prepare(model, sgd(model))
            loader = job.loader(dataset(), batch_size=BATCH)
        for _ in range(epochs):
            loop(job, loader, model, optimizer)
        return {"parameters": flat(model), "clock": job.clock}

    case = Case(
        name="used",
        script=script,
        groups=groups,
        servers=2,
        settings={"record": True, "checksum_every": 1, **settings},
    )
    outcome = run_virtually(case, tmp_path / "run")
    outcome.checked()
    return outcome


def one_process(
    joint: Iterable[list[int]], make: Callable[[], nn.Module] = PROBLEM.model
) -> Tensor:
    model = make()
    x, y = PROBLEM.data()
    train(model, sgd(model), [(x[chosen], y[chosen]) for chosen in joint])
    return flat(model)


def assert_as_one_process(outcome: Outcome, joint: list[list[int]], **options: Any) -> None:
    plain = one_process(joint, **options)
    for result in outcome.results:
        assert result["clock"] == len(joint)
        assert relative_distance(result["parameters"], plain) < 1e-6
    samples = sum(map(len, joint))
    assert outcome.summary["samples"] == samples


# -- loops that fetch ahead ------------------------------------------------------------------------


def direct(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in loader:
        step(model, optimizer, batch)


def prefetched(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in ahead(loader):
        step(model, optimizer, batch)


def listed(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in list(loader):
        step(model, optimizer, batch)


def moved(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """As a prefetcher that copies to a device: the model sees other storages."""
    for x, y in ahead((x.clone(), y.clone()) for x, y in loader):
        step(model, optimizer, (x, y))


def cast(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for x, y in ahead(loader, by=3):
        step(model, optimizer, (x.double().float(), y))


def in_views(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """Micro-batches of 2: also the size of the short batch of one worker."""
    for x, y in ahead(loader):
        optimizer.zero_grad()
        for part in range(0, len(x), 2):
            some = slice(part, part + 2)
            (loss_of(model, x[some], y[some]) * len(x[some]) / len(x)).backward()
        optimizer.step()


def in_copies(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for x, y in ahead(loader):
        optimizer.zero_grad()
        for part in range(0, len(x), 2):
            some = slice(part, part + 2)
            (loss_of(model, x[some] * 1, y[some]) * len(x[some]) / len(x)).backward()
        optimizer.step()


def seen_twice(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """Two passes over a batch, the first over other tensors; as in SAM its gradient is dropped."""
    for x, y in ahead(loader):
        loss_of(model, x + 0.1, y).backward()  # type: ignore[no-untyped-call]
        step(model, optimizer, (x, y))


def skips_losses(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """The loss of other tensors is dropped before that which counts is computed."""
    for x, y in loader:
        loss_of(model, x * torch.nan, y)
        step(model, optimizer, (x.clone(), y))


def closed_over(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for x, y in ahead(loader):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)


FETCHING = [
    direct,
    prefetched,
    listed,
    moved,
    cast,
    in_views,
    seen_twice,
    skips_losses,
    closed_over,
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("loop", FETCHING, ids=lambda loop: loop.__name__)
def test_a_loop_that_fetches_ahead_trains_as_one_process(
    loop: Loop, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    assert_as_one_process(run(loop, tmp_path, groups), JOINT * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("overlap", ["off", "full"])
def test_a_prefetcher_over_a_prepared_loader_trains_as_one_process(
    overlap: str, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    outcome = run(prefetched, tmp_path, groups, is_prepared=True, overlap=overlap)
    assert_as_one_process(outcome, JOINT * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_cached_batches_weigh_in_every_epoch_what_they_are(
    is_reversed: bool, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        batches = list(loader)
        for epoch in range(EPOCHS):
            for batch in reversed(batches) if is_reversed and epoch else batches:
                step(model, optimizer, batch)

    second = JOINT[::-1] if is_reversed else JOINT
    plain = one_process([*JOINT, *second])
    for result in run(loop, tmp_path, groups, epochs=1).results:
        assert relative_distance(result["parameters"], plain) < 1e-6


@pytest.mark.parametrize("groups", GROUPS)
def test_batches_that_a_script_skips_do_not_shift_the_others(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        for number, (x, y) in enumerate(loader):
            if number in (1, 4):
                continue
            step(model, optimizer, (x.clone(), y))

    outcome = run(loop, tmp_path, groups)
    kept = [part for number, part in enumerate(JOINT) if number not in (1, 4)]
    assert_as_one_process(outcome, kept * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
def test_batches_that_become_one_forward_pass_weigh_together(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        coming = iter(loader)
        for (x, y), (other_x, other_y) in zip(coming, coming, strict=True):
            step(model, optimizer, (torch.cat([x, other_x]), torch.cat([y, other_y])))

    pairs = [one + other for one, other in zip(JOINT[::2], JOINT[1::2], strict=True)]
    assert_as_one_process(run(loop, tmp_path, groups), pairs * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
def test_batches_of_two_loaders_weigh_together(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        more = job.loader(TensorDataset(*PROBLEM.data()), batch_size=BATCH)
        for (x, y), (other_x, other_y) in ahead(zip(loader, more, strict=True)):
            step(model, optimizer, (torch.cat([x, other_x]), torch.cat([y, other_y])))

    assert_as_one_process(run(loop, tmp_path, groups), [part * 2 for part in JOINT * EPOCHS])


class TimeFirst(nn.Module):
    """Takes (inputs, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PROBLEM.model()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x.T)
        return output


@pytest.mark.parametrize("groups", GROUPS)
def test_inputs_whose_first_dimension_is_not_that_of_samples_are_taken_in_order(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        for x, y in ahead(loader):
            step(model, optimizer, (x.T.clone(), y))

    assert_as_one_process(run(loop, tmp_path, groups, make=TimeFirst), JOINT * EPOCHS)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Nested:
    parts: dict[str, list[Tensor]]


def as_dict(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return {"x": x, "y": y}


def as_named(samples: list[Any]) -> Any:
    return Named(*default_collate(samples))


def as_nested(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return Nested({"x": [x], "y": [y]})


class Reads(nn.Module):
    """A model of whole batches, which returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PROBLEM.model()

    def forward(self, *, batch: Any) -> Nested:
        if isinstance(batch, Nested):
            (x,) = batch.parts["x"]
        else:
            x = batch["x"] if isinstance(batch, dict) else batch.x
        return Nested({"logits": [self.layers(x)]})


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("collate", [as_dict, as_named, as_nested])
def test_batches_may_be_any_objects_with_tensors(
    collate: Callable[[list[Any]], Any], groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(job: Job, _loader: Any, model: nn.Module, optimizer: Any) -> None:
        loader = job.loader(dataset(), batch_size=BATCH, collate_fn=collate)
        for batch in reversed(list(loader)):
            optimizer.zero_grad()
            (logits,) = model(batch=batch).parts["logits"]
            y = batch["y"] if isinstance(batch, dict) else getattr(batch, "y", None)
            y = batch.parts["y"][0] if y is None else y
            nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()

    outcome = run(loop, tmp_path, groups, make=Reads)
    assert_as_one_process(outcome, JOINT[::-1] * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
def test_each_of_two_models_counts_the_batches_of_its_own_passes(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """The second model trains on what the first makes of a batch, fetched ahead."""

    def train_both(
        models: list[nn.Module], optimizers: list[Any], batches: Iterable[Batch]
    ) -> None:
        first, second = models
        for x, y in batches:
            step(first, optimizers[0], (x, y))
            optimizers[1].zero_grad()
            loss_of(second, first(x).detach(), y).backward()  # type: ignore[no-untyped-call]
            optimizers[1].step()

    def made() -> tuple[list[nn.Module], list[Any]]:
        models = [PROBLEM.model(), nn.Linear(5, 5)]
        return models, [sgd(each) for each in models]

    def script(job: Job, _stage: Stage) -> Result:
        models, optimizers = made()
        both = zip(models, optimizers, strict=True)
        optimizers = [job.prepare(model, optimizer)[1] for model, optimizer in both]
        loader = job.loader(dataset(), batch_size=BATCH)
        for _ in range(EPOCHS):
            train_both(models, optimizers, ahead(loader))
        return {"parameters": torch.cat([flat(each) for each in models])}

    models, optimizers = made()
    x, y = PROBLEM.data()
    train_both(models, optimizers, [(x[part], y[part]) for part in JOINT * EPOCHS])
    plain = torch.cat([flat(each) for each in models])
    outcome = run_virtually(Case(name="two", script=script, groups=groups), tmp_path / "run")
    for result in outcome.results:
        assert relative_distance(result["parameters"], plain) < 1e-6


def reordered(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for x, y in reversed([(x.clone(), y) for x, y in loader]):
        step(model, optimizer, (x, y))


@pytest.mark.parametrize("loop", [in_copies, reordered])
def test_a_pass_that_may_be_of_batches_of_different_weight_is_an_error(
    loop: Loop, tmp_path: Path
) -> None:
    """Their number of samples is that of the short batch, and another was handed out before it."""
    with pytest.raises(UsageError, match=r"optimizer\.step: it is unknown which of .*drop_last"):
        run(loop, tmp_path, GROUPS[0])


def test_batches_of_equal_weight_in_any_order_are_none(tmp_path: Path) -> None:
    def loop(job: Job, _loader: Any, model: nn.Module, optimizer: Any) -> None:
        loader = job.loader(dataset(), batch_size=BATCH, drop_last=True)
        for x, y in reversed([(x.clone(), y) for x, y in loader]):
            step(model, optimizer, (x, y))

    outcome = run(loop, tmp_path, GROUPS[0])
    assert_as_one_process(outcome, JOINT[-2::-1] * EPOCHS)


# -- forward passes without backward ---------------------------------------------------------------


def validates(job: Job, loader: Any, model: nn.Module, optimizer: Any, **options: Any) -> None:
    """Between the steps, through a loader of the job's, with gradients enabled."""
    held_out = job.loader(
        TensorDataset(*(part[:21] for part in PROBLEM.data())), batch_size=3, **options
    )
    kept = []
    for batch in loader:
        kept = [loss_of(model, x, y) for x, y in held_out]
        step(model, optimizer, batch)
    del kept


def validates_in_eval(job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    for batch in loader:
        model.eval()
        validates(job, [], model, optimizer)
        model.train()
        step(model, optimizer, batch)


def validates_whole(job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    validates(job, loader, model, optimizer, shard=False)


def logs(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """The last batch is passed once more, for its loss, before each step."""
    before = None
    for batch in loader:
        if before is not None:
            loss_of(model, *before).item()
        step(model, optimizer, batch)
        before = batch


def drops_losses(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """Passes over other batches, fetched ahead, are dropped: as where a loss is NaN."""
    for batch, other in itertools.zip_longest(batches := list(loader), batches[1:]):
        loss_of(model, *(other or batch))
        step(model, optimizer, batch)


def fails(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """A pass that raises, as where memory is short; it is made again in halves of a copy."""
    for x, y in ahead(loader):
        with pytest.raises(RuntimeError):
            model(x[:, 1:])
        step(model, optimizer, (x * 1, y))


UNUSED = [validates, validates_in_eval, validates_whole, logs, drops_losses, fails]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("loop", UNUSED, ids=lambda loop: loop.__name__)
def test_a_pass_without_backward_neither_weighs_nor_counts(
    loop: Loop, groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    assert_as_one_process(run(loop, tmp_path, groups), JOINT * EPOCHS)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_model_that_is_trained_in_eval_mode_counts(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return PROBLEM.model().eval()

    assert_as_one_process(run(prefetched, tmp_path, groups, make=make), JOINT * EPOCHS)


def unseen(model: Any, optimizer: Any, batch: Batch) -> None:
    """The model itself is not called."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model.layers(batch[0].T), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("groups", GROUPS)
def test_without_a_pass_that_is_seen_a_direct_loop_trains_as_one_process(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        for x, y in loader:
            unseen(model, optimizer, (x.T, y))

    assert_as_one_process(run(loop, tmp_path, groups, make=TimeFirst), JOINT * EPOCHS)


def test_without_a_pass_that_is_seen_a_prefetcher_is_an_error(tmp_path: Path) -> None:
    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        for x, y in ahead(loader):
            unseen(model, optimizer, (x.T, y))

    with pytest.raises(UsageError, match=r"the prepared model was not called.*drop_last"):
        run(loop, tmp_path, GROUPS[0], make=TimeFirst)


# -- backward passes without a step ----------------------------------------------------------------


def skipped_steps(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
    """Every second batch is left out after its backward, as where its loss is too large."""
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(model, *batch).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            optimizer.step()


@pytest.mark.parametrize("groups", GROUPS)
def test_a_batch_without_a_step_weighs_nowhere(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    joint = [each for number, each in enumerate(JOINT[:-1]) if number % 2]

    def loop(_job: Job, loader: Any, model: nn.Module, optimizer: Any) -> None:
        skipped_steps(_job, itertools.islice(loader, len(JOINT) - 1), model, optimizer)
        list(loader)

    outcome = run(loop, tmp_path, groups, epochs=1)
    assert_as_one_process(outcome, joint)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_batch_without_a_step_before_a_short_one_ends_the_job_with_a_remedy(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"has left no gradient .* \(drop_last=True\)"):
        run(skipped_steps, tmp_path, groups)
