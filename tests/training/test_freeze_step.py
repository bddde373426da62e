"""Adam with a second moment that stays, in whole jobs on the virtual network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psdist.errors import OptimizerRefusedError
from tests.support.programs.training.low_rank_task import learn

STEPS = 24
SCHEDULE = "0: sync none; 8: sync sign"


def test_the_same_bits_with_any_number_of_servers_and_none_but_from_that_step_on(
    tmp_path: Path,
) -> None:
    runs = [
        learn(
            tmp_path / f"run-{freeze}-{servers}",
            steps=STEPS,
            optimizer=torch.optim.AdamW,
            servers=servers,
            schedule=SCHEDULE,
            freeze_step=freeze,
        )
        for freeze, servers in ((8, 1), (8, 3), (0, 2))
    ]
    one, other, free = (each.results[0] for each in runs)
    assert one["losses"] == other["losses"]
    assert all(torch.equal(one["saved"][name], other["saved"][name]) for name in one["saved"])
    assert one["losses"][:9] == free["losses"][:9], "eight steps, and what the ninth begins with"
    assert one["losses"][9:] != free["losses"][9:]
    assert one["losses"][-1] < 0.5 * one["losses"][0]
    runs[0].checked()


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_do_not_wait_have_it_too(mode: str, tmp_path: Path) -> None:
    outcome = learn(
        tmp_path / "run", steps=STEPS, optimizer=torch.optim.Adam, mode=mode, freeze_step=8
    )
    losses = outcome.results[0]["losses"]
    assert losses[-1] < 0.7 * losses[0]
    outcome.checked()


def test_what_has_no_second_moment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptimizerRefusedError,
        match=r"SGD on servers with training.freeze_step = 5",
    ):
        learn(tmp_path / "run", steps=1, freeze_step=5, record=False)
