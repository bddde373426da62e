"""A training of one worker with two optimizers, the second of which steps in every third iteration
only, with the gradients of all three: ``accumulates.py [NAME=VALUE ...]``.

``steps``: iterations; ``zero``: none or zeros, what zero_grad() leaves; ``loop``: loader, epochs
(one iteration each), clock (``job.checkpoint()`` behind iteration ``at``); ``die``: ends as killed
behind so many, when ``checkpoints``, a folder, has one; ``out``: where the model goes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import psdist


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def batches(job: Any, loop: str, steps: int) -> Iterator[torch.Tensor]:
    samples = Samples()
    if loop == "loader":
        loader = job.loader(samples, batch_size=4, shuffle=True)
        for _ in job.epochs(steps // 10 + 1):
            for batch in loader:
                if job.clock == steps:
                    return
                yield batch
    elif loop == "epochs":
        for epoch in job.epochs(steps):
            yield samples[epoch][None]
    else:
        while job.clock < steps:
            yield samples[job.clock][None]


def main(given: dict[str, str]) -> None:
    torch.manual_seed(0)
    job = psdist.init()
    body, head = nn.Linear(8, 16), nn.Linear(16, 3)
    model = nn.Sequential(body, nn.Tanh(), head)
    sgd = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (body, head)]
    served: Any
    model, served = job.prepare(model, sgd)
    to_none = given.get("zero", "none") == "none"
    print(f"begins at {job.clocks}", flush=True)
    for batch in batches(job, given.get("loop", "loader"), int(given["steps"])):
        served[0].zero_grad(set_to_none=to_none)
        model(batch).square().mean().backward()
        served[0].step()
        if job.clock % 3 == 0:
            served[1].step()
            served[1].zero_grad(set_to_none=to_none)
        if str(job.clock) == given.get("at"):
            job.checkpoint()
        if str(job.clock) == given.get("die"):
            while not (Path(given["checkpoints"]) / "latest").exists():
                job.barrier()  # takes word of the files that are there
            os._exit(9)
    job.save(given["out"])


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
