"""Activation checkpointing and offload to the CPU: the bits are those of a model that keeps all.

docs/guides/activation-checkpointing.md names the functions of torch that are used here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.support.programs.training.cases import Outcome
from tests.training.overlap.test_overlap import (
    PROBLEM,
    STEPS,
    WATCHED,
    parameters,
    run,
    training,
)

WIDTH = 40


class Blocks(nn.Module):
    """Three blocks. ``how`` says what is kept of them between forward and backward."""

    def __init__(self, how: str, dropout: float) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(PROBLEM.num_inputs, WIDTH)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
                for _ in range(3)
            )
        )
        self.last = nn.Linear(WIDTH, PROBLEM.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through_blocks(self.first(x)))

    def through_blocks(self, x: Any) -> Any:
        if self.how == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        if self.how == "offloaded":
            with save_on_cpu():
                return self.blocks(x)
        for block in self.blocks:
            x = self.through_block(block, x)
        return x

    def through_block(self, block: nn.Module, x: Any) -> Any:
        if self.how == "kept":
            return block(x)
        if self.how == "reentrant":
            return checkpoint(block, x, use_reentrant=True)
        if self.how == "selective":
            return checkpoint(block, x, use_reentrant=False, context_fn=keep_products)
        if self.how == "checkpointed and offloaded":
            with save_on_cpu():
                return checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False)


def keep_products() -> Any:
    def policy(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        kept = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


WAYS = (
    "checkpointed",
    "reentrant",
    "sequential",
    "selective",
    "offloaded",
    "checkpointed and offloaded",
)


def trained(
    how: str, path: Path, *, overlap: str = "off", dropout: float = 0.0, **options: Any
) -> Outcome:
    script = training(make=lambda: Blocks(how, dropout))
    return run(script, path / f"{how} {overlap}", overlap=overlap, **options)


@pytest.mark.parametrize("overlap", ["off", "auto", "full"])
@pytest.mark.parametrize("how", WAYS)
def test_recomputed_and_offloaded_activations_give_the_same_bits(
    how: str, overlap: str, tmp_path: Path
) -> None:
    kept = trained("kept", tmp_path)
    found = trained(how, tmp_path, overlap=overlap)
    assert torch.equal(parameters(found), parameters(kept))
    early = 0 if overlap == "off" else 3 * found.summary["chunks"] * (STEPS - WATCHED)
    assert found.summary["early_pushes"] == early


@pytest.mark.parametrize("how", WAYS)
def test_dropout_is_recomputed_as_it_was(how: str, tmp_path: Path) -> None:
    """With one worker: those of a virtual job share torch's random numbers."""
    alone = {"groups": ((0,),), "dropout": 0.2}
    kept = trained("kept", tmp_path, **alone)
    found = trained(how, tmp_path, overlap="auto", **alone)
    assert torch.equal(parameters(found), parameters(kept))
    without = trained("kept", tmp_path, overlap="auto", groups=alone["groups"])
    assert not torch.equal(parameters(without), parameters(kept))


@pytest.mark.parametrize("how", WAYS)
def test_a_group_of_two_workers_gets_the_same_bits(how: str, tmp_path: Path) -> None:
    groups = ((0, 1), (2,))
    kept = trained("kept", tmp_path, groups=groups)
    found = trained(how, tmp_path, overlap="auto", groups=groups)
    assert torch.equal(parameters(found), parameters(kept))


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("how", ["checkpointed", "offloaded"])
def test_in_ssp_and_async_chunks_leave_early(how: str, mode: str, tmp_path: Path) -> None:
    outcome = trained(how, tmp_path, overlap="auto", mode=mode, staleness=1)
    assert outcome.summary["early_pushes"] > 0
