"""``psdist bench convergence``: what schemes cost and bring, against sync without a codec.

    mpirun -n 5 psdist bench convergence --task chars --steps 300 --scheme codec=int4/sign

All on the same ranks, one after another, with the same samples: the steps alone, without any
exchange; then each scheme as a job of its own (RUN_DIR, RUN_DIR-2 ...); then DDP over gloo, with
its hooks. The chief keeps the model's values every few steps, and computes the validation loss
afterwards, so that takes no time of the run.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from psdist.commands.bench import Counts, HostCpu, sent
from psdist.commands.bench.between import (
    alone,
    between_ranks,
    leave_job,
    lobby_of,
    start_torch,
    wait_for_all,
)
from psdist.commands.bench.convergence_report import ConvergenceOptions, report, result_of
from psdist.commands.bench.schemes import Rival, Scheme
from psdist.config.sources import Resolved
from psdist.errors import ConfigError, LaunchError
from psdist.protocol.ids import is_worker, worker_of
from psdist.ranks.agreement import allgather
from psdist.ranks.lobby import leave, wait_for_job
from psdist.ranks.rank import Rank
from psdist.ranks.server import serve_job

if TYPE_CHECKING:  # at run time only inside functions: importing them takes seconds, or starts MPI
    import torch
    from mpi4py import MPI

    from psdist.commands.bench.learning import Task

_REST_S: Final = 1e-3
_ALONE_STEPS: Final = 20
_WARM_UP: Final = 3
_POWER_SGD_FROM: Final = 10
"""DDP's PowerSGD begins behind so many plain iterations."""
_ONE_BUCKET_MB: Final = 1024
"""With several buckets PowerSGD's collectives of two of them are begun by threads, on each rank in
an order of its own: over gloo that ends the process ("Received data size doesn't match", torch
2.13)."""


def convergence(options: ConvergenceOptions) -> int:
    """Run the benchmark on all ranks; the exit status."""
    common = {"report.progress": "off", "seed": str(options.seed)}
    if options.servers is not None:
        common["servers"] = str(options.servers)
    resolved: list[Resolved] = []

    def why_not(context: Rank) -> str:
        try:
            resolved.extend(each.resolved(common, os.environ) for each in options.schemes)
        except ConfigError as error:
            return str(error)
        return alone("bench convergence", "mpirun -n 5")(context)

    return between_ranks(
        common, why_not=why_not, run=lambda context: _measure(context, options, resolved)
    )


def _measure(context: Rank, options: ConvergenceOptions, resolved: list[Resolved]) -> int:
    import torch

    torch.set_num_threads(context.num_threads)
    assert context.comms.world is not None
    between = context.comms.world.Dup()  # its barriers never meet psdist's messages
    among = between.Split(int(is_worker(context.me)), context.number)
    meet = _Meeting(context, between)
    side: _Worker | _Server
    if is_worker(context.me):
        side = _Worker(context, among, options, meet)
    else:
        side = _Server(context, options, meet)
    mine = side.measure(resolved)
    everybody = [json.loads(each) for each in allgather(between, json.dumps(mine).encode())]
    if context.number == 0:
        report(result_of(context, options, everybody), options)
    side.leave()
    return 0


class _Meeting:
    """Between what is measured: all ranks wait for each other, asleep, and what this
    rank's host has sent is read."""

    def __init__(self, context: Rank, between: MPI.Comm) -> None:
        self._between = between
        host = context.roles.places[context.number].host
        ranks = [place.rank for place in context.roles.places if place.host == host]
        self._counts_for_host = context.number == min(ranks)
        self._counts: list[Counts] = []

    def __call__(self) -> None:
        wait_for_all(self._between, _REST_S)
        self._counts.append(sent() if self._counts_for_host else Counts())
        wait_for_all(self._between, _REST_S)

    @property
    def sent(self) -> list[Counts]:
        """Bytes and packets between one meeting and the next."""
        return [after - before for before, after in pairwise(self._counts)]


class _Server:
    def __init__(self, context: Rank, options: ConvergenceOptions, meet: _Meeting) -> None:
        self._context, self._options, self._meet = context, options, meet
        self._lobby = lobby_of(context)

    def measure(self, resolved: list[Resolved]) -> dict[str, Any]:
        context, summaries = self._context, []
        self._meet()
        for each in resolved:
            context.use_settings(each)
            if not wait_for_job(context, self._lobby):
                raise LaunchError("bench convergence: the workers have gone before the last scheme")
            serve_job(context)
            context.session.end()
            if self._lobby is not None:
                path = context.session.run_directory.path / "summary.json"
                summaries.append(json.loads(path.read_text(encoding="utf-8")))
            self._meet()
        for _ in self._options.rivals:
            self._meet()
        return {"summaries": summaries, "sent": self._meet.sent}

    def leave(self) -> None:
        leave_job(self._context, self._lobby)


class _Worker:
    def __init__(
        self,
        context: Rank,
        among: MPI.Comm,
        options: ConvergenceOptions,
        meet: _Meeting,
    ) -> None:
        from psdist.commands.bench.learning import task_of

        self._context, self._among, self._options, self._meet = context, among, options, meet
        self._worker = worker_of(context.me)
        self._task: Task = task_of(options.task, options.width)
        self._cpu = HostCpu(context.roles, context.number)
        self._scratch = self._task.make_model(options.seed)

    def measure(self, resolved: list[Resolved]) -> dict[str, Any]:
        alone_s = self._alone()
        self._meet()
        rows = []
        for scheme, each in zip(self._options.schemes, resolved, strict=True):
            self._context.use_settings(each)
            rows.append(self._scheme(scheme))
            self._meet()
        gloo = start_torch(self._context, self._among) if self._options.rivals else ""
        for rival in self._options.rivals:
            rows.append(self._rival(rival))
            self._meet()
        return {
            "alone_s": alone_s,
            "rows": rows,
            "gloo": gloo,
            "sent": self._meet.sent,
            "unit": self._task.unit,
            "parameters": sum(each.numel() for each in self._scratch.parameters()),
        }

    def leave(self) -> None:
        leave(self._context)

    def _alone(self) -> float:
        """Return the seconds of a step without exchange, while all workers measure theirs."""
        model = self._task.make_model(self._options.seed)
        optimizer = self._task.make_optimizer(model)
        batches = self._batches()
        times = []
        for step in range(_WARM_UP + _ALONE_STEPS):
            self._among.Barrier()
            began_s = time.perf_counter()
            self._gradient(model, optimizer, *next(batches))
            optimizer.step()
            if step >= _WARM_UP:
                times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    def _scheme(self, scheme: Scheme) -> dict[str, Any]:
        from safetensors.torch import load_file

        from psdist import joining

        if self._worker == 0:
            print(f"{scheme.name}:", flush=True)
        job = joining.init()
        model = self._task.make_model(self._options.seed)
        model, optimizer = job.prepare(model, self._task.make_optimizer(model))

        row = self._train(model, optimizer, last=job.barrier)  # then every update is in
        # Workers lack what a pull codec left out; in ssp and async also the last updates of others.
        file = self._context.session.run_directory.path / "model.safetensors"
        job.save(file)
        job.close()
        if self._worker == 0:
            row["curve"].append(self._last(row["seconds"], load_file(file)))
        return row

    def _rival(self, rival: Rival) -> dict[str, Any]:
        import torch

        if self._worker == 0:
            print(f"{rival.name}:", flush=True)
        model = self._task.make_model(self._options.seed)
        ddp = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=_ONE_BUCKET_MB if rival.hook == "powersgd" else None
        )
        sent_values = _with_hook(ddp, rival)
        row = self._train(ddp, self._task.make_optimizer(ddp), last=lambda: None)
        if self._worker == 0:
            row["curve"].append(self._last(row["seconds"], _values(ddp)))
        return row | {"values": sent_values(self._options.steps)}

    def _train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        last: Callable[[], None],
    ) -> dict[str, Any]:
        """Time the steps, and ``last`` after them. On the chief also return the loss at points
        before the end."""
        import torch

        options, steps = self._options, self._options.steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self._task.rate_factor(step, steps)
        )
        batches, kept = self._batches(), list[tuple[int, float, dict[str, torch.Tensor]]]()
        self._among.Barrier()
        began_s, began_cpu_s = time.perf_counter(), self._cpu.seconds()
        for step in range(1, steps + 1):
            self._gradient(model, optimizer, *next(batches))
            optimizer.step()
            scheduler.step()
            if self._worker == 0 and step % options.every == 0 and step < steps:
                kept.append((step, time.perf_counter() - began_s, _values(model)))
        last()
        self._among.Barrier()
        seconds, cpu_s = time.perf_counter() - began_s, self._cpu.seconds() - began_cpu_s
        curve = [(at, passed_s, self._loss(values)) for at, passed_s, values in kept]
        return {"seconds": seconds, "cpu_s": cpu_s, "curve": curve}

    def _last(self, seconds: float, values: dict[str, torch.Tensor]) -> tuple[int, float, float]:
        """The end of the curve, which is told at once."""
        loss = self._loss(values)
        print(f"  {self._task.unit} {loss:.4f} in {seconds:.2f} s", flush=True)
        return self._options.steps, seconds, loss

    def _loss(self, values: dict[str, torch.Tensor]) -> float:
        self._scratch.load_state_dict(values)
        return self._task.validation(self._scratch)

    def _batches(self) -> Any:
        options = self._options
        return self._task.batches(
            seed=options.seed, worker=self._worker, batch_size=options.batch_size
        )

    def _gradient(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any
    ) -> None:
        optimizer.zero_grad()
        self._task.loss(model(x), y).backward()  # type: ignore[no-untyped-call] # torch's


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by the names of the model that DDP may wrap."""
    inner: torch.nn.Module = getattr(model, "module", model)
    found: Mapping[str, torch.Tensor] = inner.state_dict()
    return {name: each.detach().clone() for name, each in found.items()}


def _with_hook(ddp: Any, rival: Rival) -> Callable[[int], float]:
    """Register the hook. Return a function: steps -> number of float32 values whose bytes are
    reduced in them."""
    num = sum(each.numel() for each in ddp.parameters())
    if rival.hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        ddp.register_comm_hook(None, fp16_compress_hook)
        return lambda steps: 0.5 * num * steps
    if rival.hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        state = PowerSGDState(
            None,
            matrix_approximation_rank=rival.rank,
            start_powerSGD_iter=_POWER_SGD_FROM,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        return lambda steps: float(
            min(steps, _POWER_SGD_FROM) * num + state.total_numel_after_compression
        )
    return lambda steps: float(num * steps)
