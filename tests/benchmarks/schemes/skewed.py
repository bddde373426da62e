"""The training script of ``tests.benchmarks.schemes.skew``: a job for each seed and way, in which
every step sleeps as its pattern says. The job of the way ddp trains with DDP instead."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import psdist
from psdist.commands.bench.sleeping import Sleepers, layer_sizes
from psdist.examples.chars import (
    CharTransformer,
    bits_per_char,
    learning_rate_factor,
    load_text,
    windows,
)
from tests.benchmarks.schemes.skew import BOUND, EVERY, WORKERS, in_turn, pattern

LENGTH, BATCH = 64, 8
MORE = 1.25
"""Steps that ssp makes of the character model, by those of sync."""
VALIDATED = 96
"""Windows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("sleeping", "chars"), default="sleeping")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--ways", nargs="+", required=True)
    parser.add_argument("--store", required=True, help="a file in which DDP's workers meet")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--usual", type=float, required=True)
    options = parser.parse_args()
    for seed in options.seeds:
        for way in in_turn(options.ways, seed):
            is_longer = options.model == "chars" and way == "ssp"
            steps = round(options.steps * (MORE if is_longer else 1))
            with psdist.init(mode="sync" if way == "ddp" else way, staleness=BOUND) as job:
                seconds = [each * options.usual for each in pattern(seed, job.worker, steps)]
                if options.model == "chars":
                    train_chars(job, seconds, seed, options.optimizer)
                elif way == "ddp":
                    with all_workers(f"{options.store}-{seed}", job.worker):
                        sleep(job, way, seconds)
                else:
                    sleep(job, way, seconds)


@contextlib.contextmanager
def all_workers(store: str, worker: int) -> Iterator[None]:
    """Make torch's default process group, which is of this worker's group alone, all workers'."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=WORKERS)
    yield
    dist.destroy_process_group()


def sleep(job: psdist.Job, way: str, seconds: list[float]) -> None:
    sleepers = Sleepers(layer_sizes(1 << 20, 4))
    model: torch.nn.Module = sleepers
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == "ddp":
        model = DistributedDataParallel(sleepers)
    else:
        model, optimizer = job.prepare(model, optimizer)
    for _ in range(5):  # overlap = auto watches, memory is new
        iterate(model, optimizer, torch.zeros(()))
    job.barrier()
    began_s = time.monotonic()
    for each in seconds:
        sleepers.seconds = each
        iterate(model, optimizer, torch.zeros(()))
    job.log(took_s=time.monotonic() - began_s)


def iterate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def train_chars(job: psdist.Job, seconds: list[float], seed: int, optimizer_name: str) -> None:
    torch.manual_seed(seed)
    train, valid = load_text()
    model = CharTransformer(length=LENGTH, width=64, num_blocks=1)
    made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer_name == "adamw":
        made = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.8, 0.98))
    model, optimizer = job.prepare(model, made)
    schedule = functools.partial(learning_rate_factor, num_steps=len(seconds))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = job.loader(windows(train, LENGTH), batch_size=BATCH, shuffle=True)
    batches = itertools.islice(
        itertools.chain.from_iterable(itertools.repeat(loader)), len(seconds)
    )
    kept: list[tuple[float, torch.Tensor]] = []
    backward_s = 0.0
    job.barrier()
    began_s = time.monotonic()
    for step, ((x, y), each) in enumerate(zip(batches, seconds, strict=True)):
        ends_s = time.monotonic() + each
        optimizer.zero_grad()
        loss = bits_per_char(model(x), y)
        # Before backward, in which gradients leave.
        time.sleep(max(0.0, ends_s - backward_s - time.monotonic()))
        before_s = time.monotonic()
        loss.backward()
        backward_s = time.monotonic() - before_s
        optimizer.step()
        scheduler.step()
        if job.is_chief and (step + 1) % EVERY == 0:
            values = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            kept.append((time.monotonic() - began_s, values))
    job.barrier()
    if job.is_chief:
        model = CharTransformer(length=LENGTH, width=64, num_blocks=1)
        chars, following = (tensor[:VALIDATED] for tensor in windows(valid, LENGTH).tensors)
        with torch.no_grad():
            for at_s, values in kept:
                torch.nn.utils.vector_to_parameters(values, model.parameters())
                job.log(at_s=at_s, bits=bits_per_char(model(chars), following))


if __name__ == "__main__":
    main()
