"""Codecs that know matrices, of users, and with zstd, in whole jobs on the virtual network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from psdist.errors import CodecError
from tests.support.programs.training.cases import Outcome
from tests.support.programs.training.low_rank_task import learn

STEPS = 25
OWN = "tests.support.own_codecs:Squeezed"


def play(path: Path, **settings: Any) -> Outcome:
    return learn(path, steps=STEPS, pause=lambda worker, _step: 1e-3 * (1 + worker % 2), **settings)


@pytest.mark.parametrize("codec", ["lowrank:2/int8", f"{OWN}/{OWN}"], ids=["lowrank", "own"])
def test_in_sync_the_same_bits_with_any_number_of_servers_and_as_low_a_loss(
    codec: str, tmp_path: Path
) -> None:
    runs = [play(tmp_path / f"run-{at}", servers=at, codec=codec) for at in (1, 3)]
    plain = play(tmp_path / "plain")
    first, other = (each.results[0] for each in runs)
    assert other["losses"] == first["losses"]
    for name, tensor in first["saved"].items():
        assert torch.equal(other["saved"][name], tensor)
    assert first["losses"] != plain.results[0]["losses"], "the codec has changed nothing"
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    assert first["losses"][-1] < 1.6 * plain.results[0]["losses"][-1]
    for outcome in runs:
        outcome.checked()
    coding = runs[0].summary["coding"]
    assert 0 < coding["error"] < 1
    assert coding["bytes_pushed_before"] == plain.summary["bytes_pushed"]
    assert runs[0].summary["bytes_pushed"] < plain.summary["bytes_pushed"] / 1.8


def test_with_zstd_the_same_bits_come_from_fewer_bytes(tmp_path: Path) -> None:
    plain, packed = (
        play(tmp_path / name, codec=codec)
        for name, codec in (("plain", "int4/bf16"), ("packed", "int4+zstd/bf16+zstd"))
    )
    packed.checked()
    one, other = (each.results[0] for each in (plain, packed))
    assert other["losses"] == one["losses"]
    assert all(torch.equal(other["saved"][name], one["saved"][name]) for name in one["saved"])
    for key in ("bytes_pushed", "bytes_pulled"):
        assert packed.summary[key] < 0.95 * plain.summary[key]


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_do_not_wait_push_columns_and_rows(mode: str, tmp_path: Path) -> None:
    outcome = play(tmp_path / "run", mode=mode, staleness=2, push_codec="lowrank:2")
    outcome.checked()
    losses = outcome.results[0]["losses"]
    assert losses[-1] < 0.6 * losses[0]
    assert outcome.summary["bytes_pushed"] < outcome.summary["coding"]["bytes_pushed_before"] / 4


def test_a_users_codec_that_breaks_in_the_run_ends_it_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        CodecError, match=r"^codec tests\..*:Tiring: encode of \d+ values raised Val"
    ):
        play(tmp_path / "run", push_codec="tests.support.own_codecs:Tiring", record=False)
