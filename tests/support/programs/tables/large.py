"""Touches every row of a large table once, on a worker with little memory.

    psdist run -n 2 large.py ROWS BATCH [--limit MIB] [--dense]

``--limit``: data that a worker may allocate from the first iteration on, in MiB (RLIMIT_DATA).
``--dense``: a table of torch's of the same size, which does not fit. Prints the growth of each
worker's resident memory from the first to the last iteration, in MiB.
"""

from __future__ import annotations

import argparse
import resource

import torch

import psdist

DIM = 16
WARM_UP = 5


def field_mib(name: str) -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        found = next(line for line in status if line.startswith(f"{name}:"))
    return int(found.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dense", action="store_true")
    options = parser.parse_args()
    job = psdist.init()
    torch.manual_seed(0)
    optimizer_of_rows = psdist.RowWiseAdagrad(lr=0.1)
    model = torch.nn.Sequential(
        psdist.Embedding(options.rows, DIM, optimizer=optimizer_of_rows), torch.nn.Linear(DIM, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.prepare(model, optimizer)
    share = options.rows // job.num_workers
    before = 0.0
    for step in range(-(-share // options.batch)):
        if step == WARM_UP:
            before = field_mib("VmRSS")
            if options.limit is not None:
                most = int((field_mib("VmData") + options.limit) * 2**20)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            if options.dense:
                torch.nn.Embedding(options.rows, DIM)
        first = job.worker * share + step * options.batch
        ids = torch.arange(first, min(first + options.batch, (job.worker + 1) * share))
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    print(f"worker {job.worker}: grew {field_mib('VmRSS') - before:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
