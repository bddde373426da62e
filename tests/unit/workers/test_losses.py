"""What a script reports of its loss, until the coordinator is told."""

from __future__ import annotations

import math

import pytest

from psdist.controller.loss_steps import MOST_LOSS
from psdist.errors import UsageError
from psdist.workers.progress_reports import Losses


def made(*, skips_nonfinite: bool = False, may_be_negative: bool = False) -> Losses:
    return Losses(skips_nonfinite=skips_nonfinite, may_be_negative=may_be_negative)


def test_reports_are_counted_and_summed_until_they_are_taken() -> None:
    losses = made()
    assert losses.take() == (0, 0.0)
    for loss in (0.5, 0.0, 1.5, MOST_LOSS):
        losses.add(loss)
    assert losses.take() == (4, 2.0 + MOST_LOSS)
    assert losses.take() == (0, 0.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2 * MOST_LOSS])
def test_what_is_no_loss_is_an_error_or_left_out(loss: float) -> None:
    losses = made()
    with pytest.raises(UsageError, match=r"job.report: a loss of .*training.on_nonfinite = skip"):
        losses.add(loss)
    losses = made(skips_nonfinite=True)
    losses.add(loss)
    losses.add(1.0)
    assert losses.take() == (1, 1.0)


@pytest.mark.parametrize("loss", [-1e-9, -math.inf])
def test_a_loss_below_nothing_is_refused(loss: float) -> None:
    with pytest.raises(UsageError, match=r"job.report: a loss of -.*expected 0 or more"):
        made(skips_nonfinite=True).add(loss)


def test_losses_below_nothing_are_taken_where_only_their_fall_counts() -> None:
    losses = made(may_be_negative=True)
    losses.add(-2.0)
    losses.add(-MOST_LOSS)
    assert losses.take() == (2, -2.0 - MOST_LOSS)
    for loss in (-math.inf, -2 * MOST_LOSS):
        with pytest.raises(UsageError, match=r"job.report: a loss of -.*by which nothing can be"):
            losses.add(loss)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2 * MOST_LOSS])
def test_where_a_rise_is_looked_for_a_loss_that_is_none_is_the_largest(loss: float) -> None:
    losses = Losses(skips_nonfinite=True, may_be_negative=False, counts_nonfinite=True)
    losses.add(loss)
    losses.add(1.0)
    assert losses.take() == (2, MOST_LOSS + 1.0)
    with pytest.raises(UsageError, match=r"expected 0 or more"):
        losses.add(-math.inf)
