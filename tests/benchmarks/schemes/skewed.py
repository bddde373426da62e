"""The training script of ``tests.benchmarks.schemes.skew``: a job for each seed and mode, in which
every step sleeps as its pattern says."""

from __future__ import annotations

import argparse
import functools
import itertools
import time

import torch

import psdist
from psdist.commands.bench.sleeping import Sleepers, layer_sizes
from psdist.examples.chars import (
    CharTransformer,
    bits_per_char,
    learning_rate_factor,
    load_text,
    windows,
)
from tests.benchmarks.schemes.skew import BOUND, EVERY, MODES, pattern

LENGTH, BATCH = 64, 8
MORE = 1.25
"""Steps that ssp makes of the character model, by those of sync."""
VALIDATED = 96
"""Windows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("sleeping", "chars"), default="sleeping")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--usual", type=float, required=True)
    options = parser.parse_args()
    train = train_chars if options.model == "chars" else sleep
    for seed in range(options.seeds):
        for mode in MODES:
            is_longer = options.model == "chars" and mode == "ssp"
            steps = round(options.steps * (MORE if is_longer else 1))
            with psdist.init(mode=mode, staleness=BOUND) as job:
                times = pattern(seed, job.worker, steps)
                train(job, [each * options.usual for each in times], seed, options.optimizer)


def sleep(job: psdist.Job, seconds: list[float], _seed: int, _optimizer: str) -> None:
    model = Sleepers(layer_sizes(1 << 20, 4))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(5):  # overlap = auto watches, memory is new
        iterate(model, optimizer, torch.zeros(()))
    job.barrier()
    began_s = time.monotonic()
    for each in seconds:
        model.seconds = each
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
