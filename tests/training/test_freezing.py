"""Parameters that are frozen for a while: they train as in plain torch, and cost no payload."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from psdist.errors import ModelError, UsageError
from psdist.job import Job
from tests.support.jobs import loop_of
from tests.support.programs.training import freezing_cases as cases
from tests.support.programs.training.cases import Case, Outcome, Result
from tests.support.programs.training.problems import flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "freezing_cases"
LAYOUTS = list(cases.LAYOUTS)
OPTIMIZERS = list(cases.OPTIMIZERS)
Groups = tuple[tuple[int, ...], ...]
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.1)


def plain_parameters(optimizer: str) -> Tensor:
    model = cases.model_with_frozen_backbone()
    made = cases.OPTIMIZERS[optimizer](model.parameters())
    cases.train_both_stages(model, made, cases.batches())
    return flat(model)


def parameters(outcome: Outcome) -> Tensor:
    first: Tensor = outcome.results[0]["parameters"]
    for worker, result in enumerate(outcome.results):
        assert torch.equal(result["parameters"], first), f"worker {worker} has other parameters"
    return first


def moved(outcome: Outcome) -> list[list[int]]:
    """Bytes that were pushed and pulled by all workers: by the end of prepare, in the iterations
    with a frozen backbone, and in those after."""
    total = torch.tensor([result["moved"] for result in outcome.results]).sum(dim=0)
    by_stage: list[list[int]] = total.diff(dim=0, prepend=torch.zeros(1, 2, dtype=int)).tolist()
    return by_stage


def assert_frozen_cost_nothing(outcome: Outcome, num_groups: int) -> None:
    head, everything = cases.head_bytes() * num_groups, cases.all_bytes() * num_groups
    assert head * 5 < everything
    num = cases.FROZEN
    assert moved(outcome) == [[0, everything], [num * head] * 2, [num * everything] * 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_backbone_that_is_unfrozen_later_trains_as_in_plain_torch(
    optimizer: str, layout: str, tmp_path: Path
) -> None:
    outcome = run_virtually(cases.case("sync", layout=layout, optimizer=optimizer), tmp_path)
    ratio = relative_distance(parameters(outcome), plain_parameters(optimizer))
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"
    assert_frozen_cost_nothing(outcome, len(cases.LAYOUTS[layout]))
    report = outcome.checked()
    assert report.num_checksums == report.num_uses > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_in_other_modes_the_check_proves_it_and_frozen_chunks_cost_nothing_either(
    mode: str, seed: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"staleness": 2} if mode == "ssp" else {}
    case = cases.case(mode, layout="groups-of-one-and-two", mode=mode, **settings)
    outcome = run_virtually(case, tmp_path, seed=seed, link=WILD)
    report = outcome.checked()
    assert report.num_checksums == report.num_uses > 0
    # The others may unfreeze theirs before, so more may be pulled; it is pushed by each for itself.
    frozen, after = (stage[0] for stage in moved(outcome)[1:])
    assert frozen == cases.FROZEN * cases.head_bytes() * 2
    assert after == cases.FROZEN * cases.all_bytes() * 2


@pytest.mark.mpi
def test_over_mpi_it_is_the_same_to_the_bit(outcomes: dict[str, Outcome], tmp_path: Path) -> None:
    real = outcomes["sync"]
    virtual = run_virtually(cases.case("sync", layout="groups-of-one-and-two"), tmp_path)
    assert torch.equal(parameters(real), parameters(virtual))
    assert_frozen_cost_nothing(real, 2)
    for outcome in outcomes.values():
        report = outcome.checked()
        assert report.num_checksums == report.num_uses > 0


def run(
    script: Callable[[Job], Result], path: Path, *, groups: Groups = ((0,),), **settings: object
) -> Outcome:
    case = Case(
        name="freezing",
        script=lambda job, _stage: script(job),
        servers=2,
        groups=groups,
        settings=settings,
    )
    return run_virtually(case, path)


def proved(script: Callable[[Job], Result], path: Path, **settings: Any) -> Outcome:
    outcome = run(script, path, record=True, checksum_every=1, **settings)
    outcome.checked()
    return outcome


@pytest.mark.parametrize("groups", [((0,),), ((0,), (1,)), ((0, 1),)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_frozen_while_training_keeps_its_values_and_its_state(
    optimizer: str, groups: Groups, tmp_path: Path
) -> None:
    """Momentum and Adam's averages wait, weight decay too, as torch leaves out what has no
    gradient."""

    def train_freeze_train(model: nn.Sequential, made: Any, given: Any) -> None:
        for index, batch in enumerate(given):
            cases.set_frozen(model, 5 <= index < 12)
            train(model, made, [batch])

    def script(job: Job) -> Result:
        model = cases.PROBLEM.model()
        model, made = job.prepare(model, cases.OPTIMIZERS[optimizer](model.parameters()))
        train_freeze_train(model, made, cases.batches(part=job.worker, num_parts=job.num_workers))
        return {"parameters": flat(model)}

    model = cases.PROBLEM.model()
    plain = cases.OPTIMIZERS[optimizer](model.parameters())
    train_freeze_train(model, plain, cases.batches())
    ratio = relative_distance(parameters(proved(script, tmp_path, groups=groups)), flat(model))
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


class Adapted(nn.Module):
    """Frozen layers, each with a small trained one, as with low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(20, 20).requires_grad_(False) for _ in range(8))
        self.pairs = nn.ModuleList(nn.ModuleList([each, nn.Linear(20, 1)]) for each in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in self.pairs.children():
            x = torch.tanh(layer(x) + adapter(x))
        return x


def test_frozen_parameters_between_trained_ones_cost_nothing_even_in_one_chunk(
    tmp_path: Path,
) -> None:
    def script(job: Job) -> Result:
        torch.manual_seed(0)
        model = Adapted()
        model, made = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = loop_of(job).core.counts()
        train(model, made, cases.PROBLEM.batches(size=8, count=10))
        after = loop_of(job).core.counts()
        return {
            "pushed": after.bytes_pushed - before.bytes_pushed,
            "pulled": after.bytes_pulled - before.bytes_pulled,
        }

    (result,) = proved(script, tmp_path, chunk_bytes=1 << 20).results
    adapters = 4 * 64 * 2 * 8
    assert result == {"pushed": 10 * adapters, "pulled": 10 * adapters}


def test_what_a_script_writes_to_frozen_parameters_is_replaced_as_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(job: Job) -> Result:
        model = cases.model_with_frozen_backbone()
        before = flat(model[: cases.HEAD])
        model, made = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = cases.batches()
        train(model, made, batches[:2])
        pulled = loop_of(job).core.counts().bytes_pulled
        with torch.no_grad():
            model[0].weight.add_(1.0)
        train(model, made, batches[2:3])
        pulled = loop_of(job).core.counts().bytes_pulled - pulled
        is_back = torch.equal(flat(model[: cases.HEAD]), before)
        with torch.no_grad():
            model[2].bias.zero_()
        job.pull()
        return {"is_back": [is_back, torch.equal(flat(model[: cases.HEAD]), before)], "n": pulled}

    with caplog.at_level(logging.WARNING, logger="psdist"):
        (result,) = run(script, tmp_path).results  # the check would find what a forward pass used
    assert result["is_back"] == [True, True]
    assert "has written to parameter 0.weight" in caplog.text
    # The chunks that hold it, and the head.
    assert cases.head_bytes() < result["n"] < cases.all_bytes()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_parameter_that_no_server_holds_cannot_be_unfrozen(is_held: bool, tmp_path: Path) -> None:
    """It is in no optimizer, or of a dtype that servers do not train."""

    def script(job: Job) -> Result:
        model = cases.PROBLEM.model()
        model.register_parameter("other", nn.Parameter(torch.ones(3, dtype=torch.complex64), False))
        given = [p for name, p in model.named_parameters() if is_held or name != "other"]
        model, made = job.prepare(model, torch.optim.SGD(given, lr=0.1))
        train(model, made, cases.batches()[:1])
        model.other.requires_grad_(True)
        train(model, made, cases.batches()[:1])
        return {}

    told = (
        r"^iteration 1: parameter other was frozen at job\.prepare\(\) but now requires gradients, "
        r"and servers do not train it: .* float32, float64, float16, bfloat16; give it to the "
        r"optimizer before job\.prepare\(\)"
    )
    with pytest.raises(UsageError, match=told):
        run(script, tmp_path)


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)])
def test_workers_that_freeze_different_parameters_at_prepare_are_told_which(
    groups: Groups, tmp_path: Path
) -> None:
    def script(job: Job) -> Result:
        model = cases.PROBLEM.model()
        model[2].bias.requires_grad_(job.worker == 0)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return {}

    told = r"between workers 0 and 1 .*: 'parameter 2\.bias: .* group 0' against '.*, frozen'; all"
    with pytest.raises(ModelError, match=told):
        run(script, tmp_path, groups=groups)


def test_a_saved_file_has_frozen_parameters_as_the_chief_had_them(tmp_path: Path) -> None:
    def script(job: Job) -> Result:
        torch.manual_seed(job.worker)
        model = nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 5)).to(torch.bfloat16)
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        model, made = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        given = cases.PROBLEM.batches(size=8, count=3)
        train(model, made, [(x.to(torch.bfloat16), y) for x, y in given])
        job.save(tmp_path / "model.safetensors")
        return {"before": before, "after": model[0].weight.detach().clone()}

    chief, other = proved(script, tmp_path / "run", groups=((0,), (1,))).results
    saved = load_file(tmp_path / "model.safetensors")["0.weight"]
    assert torch.equal(saved, chief["before"])
    assert torch.equal(saved, chief["after"])
    assert torch.equal(saved, other["after"])
    assert not torch.equal(saved, other["before"])


@pytest.mark.parametrize("groups", [((0,),), ((0,), (1, 2))])
def test_an_optimizer_of_its_own_for_a_frozen_backbone_trains_as_in_plain_torch(
    groups: Groups, tmp_path: Path
) -> None:
    """Its set makes no step before it is unfrozen; the other's watch does not mind."""

    def train_both(model: nn.Sequential, made: Sequence[torch.optim.Optimizer], given: Any) -> None:
        for index, (x, y) in enumerate(given):
            cases.set_frozen(model, index < 5)
            for each in made:
                each.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for each in made:
                each.step()

    def make(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        layers = model[cases.HEAD], model[: cases.HEAD]
        return [cases.OPTIMIZERS["adamw"](each.parameters()) for each in layers]

    def script(job: Job) -> Result:
        model = cases.model_with_frozen_backbone()
        model, optimizers = job.prepare(model, make(model))
        given = cases.batches(part=job.worker, num_parts=job.num_workers)[:15]
        train_both(model, optimizers, given)
        return {"parameters": flat(model)}

    model = cases.model_with_frozen_backbone()
    train_both(model, make(model), cases.batches()[:15])
    ratio = relative_distance(parameters(proved(script, tmp_path, groups=groups)), flat(model))
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


def test_a_prepare_in_which_everything_is_frozen_is_refused(tmp_path: Path) -> None:
    def script(job: Job) -> Result:
        model = cases.PROBLEM.model().requires_grad_(False)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return {}

    with pytest.raises(ModelError, match="no parameters to train"):
        run(script, tmp_path)
