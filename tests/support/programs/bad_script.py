"""A training script that makes the mistake named by its first argument.

    mpirun -n 3 psdist run --group rank tests/support/programs/bad_script.py raises_on_one_worker

Each mistake is a function; tests/mpi/test_bad_input.py says how each of them must end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

LONG_S = 600.0
"""Longer than any test waits: a worker that sleeps so long must be ended by the job."""


def raises_before_init_on_all() -> None:
    raise RuntimeError("no data on this host")


def raises_before_init_on_one_worker() -> None:
    from psdist.ranks.connecting import current

    context = current()
    assert context is not None
    if context.number == context.roles.worker_ranks[-1]:
        raise RuntimeError("no data on this host")
    time.sleep(LONG_S)


def raises_on_one_worker() -> None:
    job, _, _, train = prepared()
    train()
    if job.worker == 1:
        raise RuntimeError(f"lost at iteration {job.clock}, in caf\udce9")
    while True:
        train()


def exits_with_3_on_one_worker() -> None:
    import psdist

    job = psdist.init()
    if job.worker == 1:
        sys.exit(3)
    job.barrier()


def exits_with_a_text() -> None:
    import psdist

    psdist.init()
    sys.exit("the learning rate is missing")


def does_not_call_init() -> None:
    print("trained without psdist")


def is_killed() -> None:
    job, _, _, train = prepared()
    train()
    if job.worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        train()


def saves_on_the_chief_only() -> None:
    job, _, _, train = prepared()
    train()
    if job.is_chief:
        job.save(sys.argv[2])


def saves_on_the_chief_only_and_trains_on() -> None:
    """For ever, over job.loader: the job must end them at the first iteration too many."""
    import torch

    job, model, optimizer, _ = prepared()
    samples = torch.utils.data.TensorDataset(torch.ones(64, 4))
    loader = job.loader(samples, batch_size=8)
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if job.is_chief:
            job.save(sys.argv[2])


def saves_where_nothing_can_be_written() -> None:
    job, _, _, train = prepared()
    train()
    job.save("/proc/model.safetensors")


def clips_past_torch() -> None:
    _, model, _, train = prepared()
    for _ in range(64):
        train()
        model[0].weight.data.clamp_(-0.1, 0.1)


def has_an_embedding_with_max_norm() -> None:
    import torch

    import psdist

    job = psdist.init()
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=1.0))
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def drops_a_gradient_that_has_left() -> None:
    """From iteration 10 on, when gradients have left during backward for a while."""
    for model, optimizer in _trained_with_overlap():
        model[1].weight.grad = None
        optimizer.step()


def makes_a_backward_pass_more_than_steps() -> None:
    next(_trained_with_overlap())


def _trained_with_overlap() -> Iterator[tuple[Any, Any]]:
    """After the eleventh backward pass, when its gradients have left."""
    import torch

    job, model, optimizer, _ = prepared(torch.optim.AdamW)
    for step in range(11):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        time.sleep(0.02)  # long enough for a group to hide its buckets behind
        if step < 10:
            optimizer.step()
    while not job._sets.trainers[0].strategy.is_half_pushed:
        time.sleep(0.02)
    time.sleep(0.2)  # a sum of the group is pushed after that
    yield model, optimizer


def calls_barrier_and_mean() -> None:
    import psdist

    job = psdist.init()
    if job.worker == 0:
        job.barrier()
    else:
        job.mean(1.0)


def uses_different_schedules() -> None:
    job, _, optimizer, train = prepared()
    while True:
        train()
        if job.worker == 1:
            optimizer.param_groups[0]["lr"] = 0.25


def has_a_gradient_with_nan() -> None:
    """On the last worker, in iteration 1; with on_nonfinite = "skip" the script continues."""
    import torch

    from psdist.errors import NonFiniteGradientError

    job, model, _, train = prepared()
    train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        train(spoil=job.worker == job.num_workers - 1)
    except NonFiniteGradientError:
        job.pull()
        say_whether_equal(job, before, model)
        raise
    say_whether_equal(job, before, model)
    train()
    assert job.clock == 3
    moved = any(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    print(f"worker {job.worker} continued and moved: {moved}", flush=True)


def say_whether_equal(job: Any, before: list[Any], model: Any) -> None:
    import torch

    same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    told = "untouched" if same else "changed"
    print(f"worker {job.worker} at clock {job.clock}: parameters {told}", flush=True)


def sends_bytes_that_are_no_message() -> None:
    import psdist
    from psdist.ranks.connecting import current

    psdist.init()
    context = current()
    assert context is not None
    assert context.comms.world is not None
    context.comms.world.Send(bytes(int(sys.argv[2])), dest=0, tag=1)
    time.sleep(LONG_S)


def speaks_another_protocol_version() -> None:
    from psdist.protocol import header as layout

    _, _, _, train = prepared()
    layout.PROTOCOL_VERSION = 99
    while True:
        train()


def uses_an_optimizer_that_breaks_on_the_server() -> None:
    from tests.support.programs.bad_optimizer import Exploding

    _, _, _, train = prepared(Exploding)
    while True:
        train()


def one_worker_sleeps() -> None:
    """Worker 1 in iteration 1, for argv[2] seconds; prints a line when it begins."""
    job, _, _, train = prepared()
    train()
    if job.worker == 1:
        time.sleep(float(sys.argv[2]))
    train()


def sleeps() -> None:
    """On all workers, having touched the file argv[2].<worker>."""
    import psdist

    job = psdist.init()
    open(f"{sys.argv[2]}.{job.worker}", "w").close()
    # Not at once: a signal that comes just before a sleep is seen behind it.
    for _ in range(int(LONG_S / 0.05)):
        time.sleep(0.05)


def makes_one_mistake_after_another() -> None:
    """Each is caught, its text printed by every worker, and the job continues to the next; at last
    it makes one step and ends well."""
    import torch

    import psdist
    from psdist.errors import UserError

    job = psdist.init()

    def mistake(name: str, make: Callable[[], object]) -> None:
        try:
            make()
        except UserError as error:
            print(f"{name} | worker {job.worker} | {error}", flush=True)
        else:
            raise AssertionError(f"{name} was no mistake")

    def sgd(model: torch.nn.Module, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})

    def prepare(
        model: torch.nn.Module, optimizer_of: Callable[..., torch.optim.Optimizer] = sgd
    ) -> Any:
        return job.prepare(model, optimizer_of(model))

    is_other = job.worker == 1
    linear = torch.nn.Linear(4, 2)

    mistake("step before prepare", lambda: job.pull())
    mistake("save before prepare", lambda: job.save("never"))
    mistake(
        "shapes", lambda: prepare(torch.nn.Sequential(torch.nn.Linear(4, 3 if is_other else 2)))
    )
    named = torch.nn.ModuleDict({"b" if is_other else "a": torch.nn.Linear(4, 2)})
    mistake("names", lambda: prepare(named))
    more = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(2 if is_other else 1)])
    mistake("more parameters", lambda: prepare(more))
    mistake(
        "dtypes",
        lambda: prepare(torch.nn.Linear(4, 2, dtype=torch.float64 if is_other else None)),
    )

    def split(model: Any) -> torch.optim.Optimizer:
        first, second = model.weight, model.bias
        groups = [[first, second]] if is_other else [[first], [second]]
        return torch.optim.SGD([{"params": each} for each in groups], lr=0.1)

    mistake("optimizer groups", lambda: prepare(linear, split))
    mistake(
        "hyperparameters",
        lambda: prepare(linear, lambda model: sgd(model, lr=0.2 if is_other else 0.1)),
    )
    mistake(
        "optimizers",
        lambda: prepare(
            linear, lambda model: (torch.optim.Adam if is_other else torch.optim.SGD)(
                model.parameters(), lr=0.1
            )
        ),
    )  # fmt: skip
    mistake(
        "refused optimizer",
        lambda: prepare(linear, lambda model: torch.optim.LBFGS(model.parameters())),
    )
    mistake(
        "refused in this mode",
        lambda: prepare(linear, lambda model: torch.optim.Adafactor(model.parameters())),
    )
    mistake("foreign parameters", lambda: job.prepare(linear, sgd(torch.nn.Linear(2, 2))))
    mistake(
        "nothing to train",
        lambda: prepare(torch.nn.Linear(4, 2).requires_grad_(False)),
    )

    mistake("list", lambda: job.prepare([linear], sgd(linear)))
    mistake("swapped", lambda: job.prepare(sgd(linear), linear))
    mistake("lazy", lambda: prepare(lazy_model(), lambda _model: sgd(linear)))
    mistake("meta", lambda: prepare(model_on_meta()))
    mistake("normalised", lambda: prepare(model_with_sync_batch_norm()))
    mistake("tied", lambda: prepare(model_tied_by_memory()))
    stepped = sgd(linear)
    stepped.step = stepped.zero_grad  # type: ignore[method-assign,assignment]
    mistake("step", lambda: job.prepare(linear, stepped))

    torch.manual_seed(job.worker)
    model, optimizer = prepare(torch.nn.Linear(4, 2))  # values may differ: the chief's are used
    torch.manual_seed(0)
    assert torch.equal(model.weight, torch.nn.Linear(4, 2).weight)

    mistake("prepare twice", lambda: prepare(model))
    samples = torch.utils.data.TensorDataset(torch.ones(1, 4))
    mistake("few samples", lambda: job.loader(samples, batch_size=1))
    mistake("batch size", lambda: job.loader(samples, batch_size=0, shard=False))
    mistake("state_dict", lambda: optimizer.state_dict())
    mistake("log", lambda: job.log(loss=torch.ones(2)))
    mistake("save", lambda: job.save("/proc/model.safetensors"))
    mistake("save into a file", lambda: job.save("/dev/null/model.safetensors"))

    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def prepares(make: Callable[[], Any]) -> Callable[[], None]:
    """A script that prepares this model with SGD."""

    def run() -> None:
        import torch

        import psdist

        job = psdist.init()
        model = make()
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return run


def lazy_model() -> Any:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    return torch.nn.Sequential(torch.nn.LazyLinear(2))


def model_on_meta() -> Any:
    import torch

    return torch.nn.Linear(4, 2, device="meta")


def model_with_sync_batch_norm() -> Any:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)


def model_of_dtensors() -> Any:
    import torch
    import torch._dynamo.eval_frame  # tests/support/startup: not in the middle of the next import
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(torch.nn.Linear(4, 2), init_device_mesh("cpu", (1,)))


def model_tied_by_memory() -> Any:
    import torch

    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(6, 4), "out": torch.nn.Linear(4, 6)})
    model["out"].weight.data = model["emb"].weight.data
    return model


prepares_a_lazy_model = prepares(lazy_model)
prepares_a_model_on_meta = prepares(model_on_meta)
prepares_a_model_with_sync_batch_norm = prepares(model_with_sync_batch_norm)
prepares_a_model_of_dtensors = prepares(model_of_dtensors)
prepares_a_model_tied_by_memory = prepares(model_tied_by_memory)


def prepares_a_list_of_models() -> None:
    import torch

    import psdist

    job = psdist.init()
    models: Any = [torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)]
    parameters = [each for model in models for each in model.parameters()]
    job.prepare(models, torch.optim.SGD(parameters, lr=0.1))


def prepares_an_optimizer_with_another_step() -> None:
    from types import MethodType

    import torch

    import psdist

    job = psdist.init()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = MethodType(lambda _self, _closure=None: None, optimizer)  # type: ignore[method-assign]
    job.prepare(model, optimizer)


def creates_the_group_after_init() -> None:
    import torch.distributed as dist

    import psdist

    psdist.init()
    dist.init_process_group("gloo")


def creates_the_group_before_init_by_variables() -> None:
    import torch.distributed as dist

    import psdist

    dist.init_process_group("gloo")
    psdist.init()


def creates_the_group_before_init() -> None:
    import torch.distributed as dist

    import psdist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # not in __all__
    psdist.init()


def uses_the_group_before_init() -> None:
    import torch.distributed as dist

    import psdist

    rank = dist.get_rank(dist.group.WORLD)
    dist.barrier()
    print(rank)
    psdist.init()


def destroys_the_group() -> None:
    import torch.distributed as dist

    job, _, _, train = prepared()
    train()
    dist.destroy_process_group()
    dist.barrier()
    job.close()


def ends_with_destroying_the_group() -> None:
    import torch.distributed as dist

    _, _, _, train = prepared()
    train()
    dist.destroy_process_group()


def wraps_the_model() -> None:
    import torch

    _, model, optimizer, _ = prepared()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer.zero_grad()
    wrapped(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def wraps_a_part_of_the_model() -> None:
    import torch

    _, model, optimizer, _ = prepared()
    wrapped = torch.nn.parallel.DistributedDataParallel(model[0])
    model[1:](wrapped(torch.ones(3, 4))).sum().backward()
    optimizer.step()


def prepares_a_model_with_a_wrapped_part() -> None:
    import torch

    import psdist

    job = psdist.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    wrapped = torch.nn.parallel.DistributedDataParallel(model[0])
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[1](wrapped(torch.ones(3, 4))).sum().backward()


def shows_its_place() -> None:
    """Print the variables that torchrun sets, during a job and after it."""
    import psdist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    job = psdist.init()
    during = [os.environ.get(name, "-") for name in names]
    job.close()
    after = [os.environ.get(name, "-") for name in names]
    print(f"worker {job.worker}:", *during, "then", *after, flush=True)


def prepared(optimizer_class: Any = None) -> tuple[Any, Any, Any, Callable[..., None]]:
    """The job, a small model, its optimizer, and a function that makes one iteration."""
    import torch

    import psdist

    job = psdist.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    make = optimizer_class or torch.optim.SGD
    model, optimizer = job.prepare(model, make(model.parameters(), lr=0.1))

    def train(*, spoil: bool = False) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        if spoil:
            model[1].bias.grad[0] = float("nan")
        optimizer.step()

    return job, model, optimizer, train


if __name__ == "__main__":
    globals()[sys.argv[1]]()
