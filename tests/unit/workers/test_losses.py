"""What a script reports of its loss, until the registrar is told."""

from __future__ import annotations

import math

import pytest

from psdist.controller.loss_steps import MOST_LOSS
from psdist.errors import UsageError
from psdist.workers.losses import Losses


def test_reports_are_counted_and_summed_until_they_are_taken() -> None:
    losses = Losses(skips_nonfinite=False)
    assert losses.take() == (0, 0.0)
    for loss in (0.5, 0.0, 1.5, MOST_LOSS):
        losses.add("job.report", loss)
    assert losses.take() == (4, 2.0 + MOST_LOSS)
    assert losses.take() == (0, 0.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2 * MOST_LOSS])
def test_what_is_no_loss_is_an_error_or_left_out(loss: float) -> None:
    losses = Losses(skips_nonfinite=False)
    with pytest.raises(UsageError, match=r"job.report: a loss of .*on_nonfinite = skip"):
        losses.add("job.report", loss)
    losses = Losses(skips_nonfinite=True)
    losses.add("job.report", loss)
    losses.add("job.report", 1.0)
    assert losses.take() == (1, 1.0)


@pytest.mark.parametrize("loss", [-1e-9, -math.inf])
def test_a_loss_below_nothing_is_refused(loss: float) -> None:
    with pytest.raises(UsageError, match=r"job.log\(loss=...\): a loss of -.*must not be below 0"):
        Losses(skips_nonfinite=True).add("job.log(loss=...)", loss)
