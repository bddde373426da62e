"""Backward passes that lead to no step of a parameter set: a generator's through its critic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.job import Job
from tests.support.programs.training.cases import Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance
from tests.training.overlap.test_overlap import Slow, run

PROBLEM = Problem()
BATCH = 4
IN_GROUPS = pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 1),)], ids=["1", "2"])
Pause = Callable[[], None]


def noise(step: int, width: int, part: int, num_parts: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    joint = torch.randn(2 * BATCH, width, generator=generator, dtype=torch.float64)
    return joint.chunk(num_parts)[part]


def train_wgan(
    prepare: Callable[..., Any],
    *,
    num_critic: int,
    num_steps: int,
    zero_first: bool,
    part: int = 0,
    num_parts: int = 1,
    pause: Pause = lambda: None,
) -> Tensor:
    """A Wasserstein GAN (Arjovsky et al. 2017), whose gradients in the critic count for nothing
    in the generator's turn. In float64: RMSprop divides small gradients by their size."""
    torch.manual_seed(5)
    generator: Any = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 35))
    layers = [nn.Linear(35, 48), *(nn.Linear(48, 48) for _ in range(6)), nn.Linear(48, 1)]
    critic: Any = Slow(nn.Sequential(*layers), pause)
    generator.double(), critic.double()
    rms = torch.optim.RMSprop
    generator, generates = prepare(generator, rms(generator.parameters(), lr=1e-3))
    critic, criticises = prepare(critic, rms(critic.parameters(), lr=1e-3))

    def step_of(optimizer: Any, loss: Tensor) -> None:
        if zero_first:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not zero_first:
            generates.zero_grad()
            criticises.zero_grad()

    for step in range(num_steps):
        real = noise(2 * step, 35, part, num_parts)
        fake = generator(noise(2 * step + 1, 3, part, num_parts))
        step_of(criticises, critic(fake.detach()).mean() - critic(real).mean())
        if step % num_critic == num_critic - 1:
            step_of(generates, -critic(fake).mean())
    return torch.cat([flat(generator), flat(critic)])


def wgan(**options: Any) -> Script:
    def script(job: Job, stage: Stage) -> Result:
        result = train_wgan(
            job.prepare, part=job.worker, num_parts=2, pause=lambda: stage.sleep(1e-3), **options
        )
        return {"parameters": result, "clock": job.clock}

    return script


@IN_GROUPS
@pytest.mark.parametrize(
    ("num_critic", "num_steps", "zero_first"), [(5, 22, True), (5, 22, False), (20, 24, True)]
)
def test_a_wasserstein_gan_trains_as_in_one_process(
    num_critic: int,
    num_steps: int,
    zero_first: bool,
    groups: tuple[tuple[int, ...], ...],
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {
        "num_critic": num_critic,
        "num_steps": num_steps,
        "zero_first": zero_first,
    }
    expected = train_wgan(lambda model, optimizer: (model, optimizer), **options)
    outcome = run(wgan(**options), tmp_path, groups=groups, overlap="auto")
    for result in outcome.results:
        assert relative_distance(result["parameters"], expected) < 1e-6
    if num_critic == 20:
        assert outcome.summary["sets"][1]["early_pushes"] > 0
