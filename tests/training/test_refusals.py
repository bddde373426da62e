"""Scripts that would train something else than plain torch, or end in a traceback: one line each.

The remedies that these lines name are compared with plain torch, and so are the nearest scripts
that are not refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import OptimizerRefusedError
from psdist.job import Job
from tests.support.bad_input import SCRIPT
from tests.support.forked_runs import ForkedRuns
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem()
GROUPS = [((0,),), ((0, 1),)]
STEPS = 8
SIZE = 8

# -- texts and statuses ----------------------------------------------------------------------------

WRAPPED = (
    ", or a part of it, is wrapped in DistributedDataParallel, which exchanges gradients or "
    "parameters itself; psdist does that: remove the line that wraps the model, and call the model "
    "that job.prepare returned"
)
REFUSED = {
    "prepares_a_lazy_model": "module 0 is a LazyLinear, which has no parameters yet; run one batch "
    "through the model before prepare()",
    "prepares_a_model_on_meta": "parameter weight is on the device meta, without values; call "
    "model.to_empty(device=job.device), initialise the model, and make the optimizer after that",
    "prepares_a_model_with_sync_batch_norm": "module 1 is a SyncBatchNorm, which would share "
    "statistics within a group of workers only; use nn.BatchNorm1d, 2d or 3d, which normalises "
    "each worker's batch, or nn.GroupNorm, which does not depend on the batch",
    "prepares_a_model_of_dtensors": "parameter weight is a DTensor; servers hold plain tensors: "
    "leave out the call that makes it one (distribute_module, parallelize_module, fully_shard, "
    "quantize_ ...)",
    "prepares_a_model_tied_by_memory": "parameter emb.weight and parameter out.weight share "
    "memory, which training on servers would separate; make them one object before the optimizer: "
    "out.weight = emb.weight",
    "prepares_a_list_of_models": "job.prepare(model, optimizer): the model is a list, not a "
    "module; pass nn.ModuleList([a, b]), and one optimizer of the parameters of both",
    "prepares_an_optimizer_with_another_step": "this SGD object has a step() of the script's own, "
    "which would never be called: servers run the step() of torch; to change gradients use "
    "optimizer.register_step_pre_hook(), or write a class of optimizers and name it in the setting "
    "training.optimizers",
    "creates_the_group_after_init": "dist.init_process_group() was called by the script: "
    "psdist.init() has already created the group; remove this call",
    "creates_the_group_before_init_by_variables": "dist.init_process_group() was called by the "
    "script: psdist.init() creates the group; remove this call",
    "creates_the_group_before_init": "dist.init_process_group() was called before psdist.init(), "
    "which creates the group; remove this call",
    "uses_the_group_before_init": "torch.distributed has no process group: psdist.init() creates "
    "it and job.close() ends it; use it only in between, and remove dist.destroy_process_group() "
    "from the script",
    "destroys_the_group": "torch.distributed has no process group: psdist.init() creates it and "
    "job.close() ends it; use it only in between, and remove dist.destroy_process_group() from the "
    "script",
    "wraps_the_model": f"the prepared model{WRAPPED}",
    "wraps_a_part_of_the_model": f"the prepared model{WRAPPED}",
    "prepares_a_model_with_a_wrapped_part": f"the model{WRAPPED}",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as driver:
        yield driver


def play(runs: ForkedRuns, mistake: str, tmp_path: Path) -> tuple[int, str]:
    words = ["--set", "progress=off", "--run-dir", str(tmp_path), str(SCRIPT)]
    done = runs.play("run", *words, mistake)
    return done.returncode, done.text


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_refused_script_ends_with_one_line_and_status_2(
    mistake: str, runs: ForkedRuns, tmp_path: Path
) -> None:
    status, text = play(runs, mistake, tmp_path)
    assert status == 2, text
    lines = [line for line in text.splitlines() if line.startswith("psdist: the only rank")]
    assert len(lines) == 1, text
    assert "Traceback" not in text
    assert re.search(rf"error at {SCRIPT.name} line \d+: {re.escape(REFUSED[mistake])}$", lines[0])


def test_a_group_of_one_may_be_destroyed_at_the_end(runs: ForkedRuns, tmp_path: Path) -> None:
    status, text = play(runs, "ends_with_destroying_the_group", tmp_path)
    assert status == 0, text


def test_a_worker_has_the_variables_of_torchrun_until_the_job_is_closed(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    status, text = play(runs, "shows_its_place", tmp_path)
    assert status == 0, text
    assert "worker 0: 0 1 0 1 - - then - - - - - -" in text.splitlines()


# -- values ----------------------------------------------------------------------------------------


def compare(
    scenario: Callable[[Any, int, int], nn.Module],
    groups: tuple[tuple[int, ...], ...],
    path: Path,
    *,
    limit: float = 1e-6,
    **settings: object,
) -> None:
    """``scenario(job, part, num_parts)`` on the joint batch in plain torch, and on its parts."""
    plain = flat(scenario(None, 0, 1))

    def script(job: Job, _stage: Stage) -> Result:
        return {"parameters": flat(scenario(job, job.worker, job.num_workers))}

    case = Case(name="like", script=script, groups=groups, settings={"mode": "sync", **settings})
    for result in run_virtually(case, path).results:
        assert relative_distance(result["parameters"], plain) <= limit


def train(
    job: Job | None,
    part: int,
    num_parts: int,
    model: Any,
    optimizer: Any,
    *,
    forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    after_step: Callable[[], None] = lambda: None,
) -> nn.Module:
    if job is not None:
        model, optimizer = job.prepare(model, optimizer)
    size = SIZE // num_parts
    for x, y in PROBLEM.batches(size=size, count=STEPS, part=part, num_parts=num_parts):
        optimizer.zero_grad()
        nn.functional.cross_entropy(forward(model, x), y).backward()
        optimizer.step()
        after_step()
    trained: nn.Module = model
    return trained


class Tied(nn.Module):
    """Tied by the remedy for two parameters that share memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(20, 20)
        self.second = nn.Linear(20, 20)
        self.last = nn.Linear(20, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return logits


class Transposed(Tied):
    """The remedy for a parameter made of a transpose."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(torch.tanh(self.first(x)), self.first.weight.t()))
        logits: Tensor = self.last(x)
        return logits


class Fused(nn.Module):
    """Parameters that are parts of one buffer, side by side, and columns of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        buffer = torch.randn(20 * 8 + 8 * 5) / 4
        self.first = nn.Parameter(buffer[: 20 * 8].view(20, 8))
        self.last = nn.Parameter(buffer[20 * 8 :].view(8, 5))
        columns = torch.randn(8, 8) / 4
        self.left, self.right = map(nn.Parameter, columns.split(4, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first)
        x = torch.tanh(torch.cat([x @ self.left, x @ self.right], dim=1))
        return x @ self.last


class Expanded(nn.Module):
    """A buffer whose rows are one row, and another that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(20, 5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 20).expand(3, 20))
        self.register_buffer("row", self.scale[0])
        self.still = nn.Parameter(torch.ones(1).expand(20), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x * self.scale[1] * self.still + self.row)
        return logits


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("make", [Tied, Transposed, Fused, Expanded])
def test_models_whose_tensors_are_tied_as_they_may_be_train_as_in_plain_torch(
    make: Callable[[], nn.Module], groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def scenario(job: Job | None, part: int, num_parts: int) -> nn.Module:
        model = make()
        wanted = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(wanted, lr=1e-2)
        return train(job, part, num_parts, model, optimizer)

    compare(scenario, groups, tmp_path, limit=1e-5)


@pytest.mark.parametrize("groups", GROUPS)
def test_hooks_and_schedulers_made_before_prepare_act_as_in_plain_torch(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    def scenario(job: Job | None, part: int, num_parts: int) -> nn.Module:
        model = PROBLEM.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        calls = []

        def halve(of: torch.optim.Optimizer, _arguments: object, _options: object) -> None:
            calls.append("before")
            for group in of.param_groups:
                for parameter in group["params"]:
                    parameter.grad *= 0.5

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        trained = train(job, part, num_parts, model, optimizer, after_step=scheduler.step)
        assert calls == ["before", "after"] * STEPS
        return trained

    compare(scenario, groups, tmp_path, overlap="off")


@pytest.mark.parametrize("groups", GROUPS)
def test_a_zero_grad_of_the_scripts_own_is_called(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """It keeps half of the last gradient."""

    def scenario(job: Job | None, part: int, num_parts: int) -> nn.Module:
        model = PROBLEM.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fade(self: torch.optim.Optimizer, _set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)

        optimizer.zero_grad = MethodType(fade, optimizer)  # type: ignore[method-assign]
        return train(job, part, num_parts, model, optimizer)

    compare(scenario, groups, tmp_path, overlap="off", limit=1e-5)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_list_of_modules_trains_as_in_plain_torch_with_a_short_last_batch(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """The remedy for a list of models."""
    x, y = (each[:44] for each in PROBLEM.data())
    dataset = torch.utils.data.TensorDataset(x, y)

    def scenario(job: Job | None, _part: int, num_parts: int) -> nn.Module:
        torch.manual_seed(4)
        body, head = nn.Linear(20, 8), nn.Linear(8, 5)
        model: Any = nn.ModuleList([body, head])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader: Any = torch.utils.data.DataLoader(dataset, batch_size=SIZE)
        if job is not None:
            model, optimizer = job.prepare(model, optimizer)
            loader = job.loader(dataset, batch_size=SIZE // num_parts)
        for _ in range(3):
            for inputs, classes in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(head(torch.tanh(body(inputs))), classes)
                loss.backward()
                optimizer.step()
        trained: nn.Module = model
        return trained

    compare(scenario, groups, tmp_path, limit=1e-5)


@pytest.mark.slow  # compiling takes minutes on a busy machine
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_that_steps_trains_as_in_plain_torch(
    groups: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """Nothing is compiled in a later iteration, whose clock and values are others."""
    num_compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        num_compiled[-1] += 1
        return graph.forward

    def scenario(job: Job | None, part: int, num_parts: int) -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(5)
        model: Any = nn.Linear(20, 5)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if job is not None:
            model, optimizer = job.prepare(model, optimizer)

        def iterate(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        compiled = torch.compile(iterate, backend=backend)
        size = SIZE // num_parts
        for batch in PROBLEM.batches(size=size, count=STEPS, part=part, num_parts=num_parts):
            num_compiled.append(0)
            compiled(*batch)
        assert num_compiled[-3:] == [0, 0, 0]
        trained: nn.Module = model
        return trained

    compare(scenario, groups, tmp_path)
    assert sum(num_compiled) > 0
    torch._dynamo.reset()


# -- optimizers ------------------------------------------------------------------------------------


class Half(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


def test_a_subclass_with_a_step_of_its_own_is_refused_until_servers_may_import_it(
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        with pytest.raises(
            OptimizerRefusedError,
            match=r'Half" to the setting '
            r"training.optimizers",
        ):
            job.prepare(model, Half(model.parameters(), lr=0.1))
        return {}

    run_virtually(Case(name="half", script=script), tmp_path)


def test_with_local_steps_a_replaced_step_is_the_one_that_runs(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def shrink(self: torch.optim.Optimizer, closure: Any = None) -> None:
            del closure
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)

        optimizer.step = MethodType(shrink, optimizer)  # type: ignore[method-assign]
        model, served = job.prepare(model, optimizer)
        for _ in range(2):
            served.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            served.step()
        return {"weight": model.weight.item()}

    settings = {"local_steps": 2, "outer": "average"}
    outcome = run_virtually(Case(name="local", script=script, settings=settings), tmp_path)
    assert outcome.results[0]["weight"] == pytest.approx(0.25)
