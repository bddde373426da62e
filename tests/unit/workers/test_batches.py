"""What an iteration weighs: the batches that its forward passes have used."""

from __future__ import annotations

import pytest

from psdist.workers.batches import Batches


def test_an_iteration_weighs_what_its_forward_passes_have_used() -> None:
    batches = Batches()
    for num_samples in (8, 4):
        batches.hand_out(num_samples, 8.0)
        batches.use(0)
    batches.end_forwards()
    assert batches.weight == 12 / 16
    batches.end_iteration()
    assert batches.samples == 12


def test_a_batch_fetched_ahead_of_the_step_is_of_the_next_iteration() -> None:
    batches = Batches()
    batches.hand_out(8, 8.0)
    batches.use(0)
    batches.hand_out(2, 8.0)
    assert batches.weight == 1.0
    batches.end_forwards()
    assert batches.weight == 1.0
    batches.end_iteration()
    assert batches.samples == 8
    batches.use(0)
    assert batches.weight == 0.25
    batches.end_iteration()
    assert batches.samples == 10


def test_without_a_forward_pass_that_is_seen_the_step_uses_what_was_handed_out() -> None:
    batches = Batches()
    batches.hand_out(4, 8.0)
    assert batches.weight == 0.5
    batches.end_forwards()
    assert batches.weight == 0.5
    batches.end_iteration()
    assert batches.samples == 4


@pytest.mark.parametrize("is_forward", [True, False])
def test_without_a_loader_an_iteration_weighs_one(is_forward: bool) -> None:
    batches = Batches()
    if is_forward:
        batches.use(5)
    batches.end_forwards()
    assert batches.weight == 1.0
    batches.end_iteration()
    assert batches.samples == 5 * is_forward
