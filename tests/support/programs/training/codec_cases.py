"""Jobs with codecs, for tests/training/codecs: pushes of which every fifth has no codec, and pulls
that bring what no codec has been at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, train

PROBLEM = Problem()
ITERATIONS = 18
PUSH_CODEC = "topk:0.05+burst:5"


def learn_by(make: Callable[..., torch.optim.Optimizer], lr: float) -> Script:
    """Each worker's result has what it holds in the end."""

    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, served = job.prepare(model, make(model.parameters(), lr=lr))
        train(
            model,
            served,
            PROBLEM.batches(size=24, count=ITERATIONS, part=job.worker, num_parts=job.num_workers),
        )
        return {"parameters": flat(model), "clock": job.clock}

    return run


def looking(*, every: int, steps: int = ITERATIONS) -> Script:
    """Every so many steps (0: never) all workers look at what servers have: the results have what
    they held before, then, and behind the next pull, and what ``job.save`` has written."""

    def run(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, served = job.prepare(model, optimizer)
        seen: dict[str, list[torch.Tensor]] = {"held": [], "exact": [], "after": [], "saved": []}
        losses = []
        for x, y in PROBLEM.batches(
            size=8, count=steps, part=job.worker, num_parts=job.num_workers
        ):
            served.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            served.step()
            losses.append(loss.item())
            stage.sleep(1e-3 * (1 + job.worker))
            if every and job.clock % every == 0:
                job.barrier()
                seen["held"].append(flat(model))
                job.pull(exact=True)
                seen["exact"].append(flat(model))
                with torch.no_grad():
                    model(x)
                file = stage.path / f"seen-{job.clock}.safetensors"
                job.save(file)
                tensors = load_file(file)
                saved = [tensors[name].flatten() for name, _ in model.named_parameters()]
                seen["saved"].append(torch.cat(saved))
                job.pull()
                seen["after"].append(flat(model))
        job.save(stage.path / "end.safetensors")
        return {"losses": losses, "parameters": flat(model), **seen}

    return run


GROUPS = ((0,), (1,))
CODED = {"push_codec": PUSH_CODEC, "codec_exact": (), "record": True}

CASES = [
    Case(
        name="sgd-sync",
        script=learn_by(torch.optim.SGD, 0.1),
        groups=GROUPS,
        settings={**CODED, "pull_codec": "int8"},
    ),
    Case(
        name="adam-async",
        script=learn_by(torch.optim.Adam, 1e-3),
        servers=2,
        groups=GROUPS,
        settings={**CODED, "mode": "async"},
    ),
    Case(
        name="exact-sync",
        script=looking(every=6),
        servers=2,
        groups=((0,), (1, 2)),
        settings={"codec": "int4/sign", "codec_exact": (), "record": True},
    ),
]
