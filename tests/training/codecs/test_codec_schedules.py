"""Codecs that change within a run, in whole jobs on the virtual network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs.training.cases import Outcome
from tests.support.programs.training.low_rank_task import learn

STEPS = 24
WARM = "0: sync none; 4: sync topk:0.05/int4; 10: sync sign; 14: sync lowrank:1/sign; 18: sync none"
STORY = "0: ssp:3 topk:0.1/int8; 9: ssp:1 int8; 17: sync none"


def play(path: Path, **settings: Any) -> Outcome:
    def pause(worker: int, step: int) -> float:
        return 1e-3 * (1 + (worker + step) % 3)

    return learn(path, steps=STEPS, pause=pause, **settings)


def test_in_sync_the_same_bits_with_any_number_of_servers_across_changes(tmp_path: Path) -> None:
    runs = [play(tmp_path / f"run-{at}", servers=at, schedule=WARM) for at in (1, 3)]
    plain = play(tmp_path / "plain")
    first, other = (each.results[0] for each in runs)
    assert other["losses"] == first["losses"]
    for name, tensor in first["saved"].items():
        assert torch.equal(other["saved"][name], tensor)
    for outcome in runs:
        outcome.checked()
    uncoded = plain.results[0]["losses"]
    # Before the fourth push all is as without a codec, and its reply has none either.
    assert first["losses"][:5] == uncoded[:5]
    assert first["losses"][6:] != uncoded[6:]
    assert first["losses"][-1] < 0.3 * first["losses"][0]
    coding = runs[0].summary["coding"]
    assert coding["bytes_pushed_before"] == plain.summary["bytes_pushed"]
    assert coding["errors"][-1] is None, "in the last quarter nothing is coded"
    assert 0 < coding["error"] < 1
    codecs = [(each["round"], each["push"], each["pull"]) for each in runs[0].summary["codecs"]]
    assert codecs == [
        *((0, "none", "none"), (4, "topk:0.05", "int4"), (10, "sign", "none")),
        *((14, "lowrank:1", "sign"), (18, "none", "none")),
    ]


def test_bytes_are_those_of_each_rounds_codec(tmp_path: Path) -> None:
    """A run that changes at 12 sends half the sum of the two runs that do not."""
    whole = [
        play(tmp_path / codec.replace(":", "-"), schedule=f"0: sync {codec}; 1000: sync none")
        for codec in ("int8/int8", "topk:0.05")
    ]
    changed = play(tmp_path / "changed", schedule="0: sync int8/int8; 12: sync topk:0.05")
    changed.checked()
    for way in ("bytes_pushed", "bytes_pulled"):
        expected = sum(each.summary[way] for each in whole) / 2
        assert changed.summary[way] == pytest.approx(expected, rel=0.02)


def test_modes_and_codecs_change_together(tmp_path: Path) -> None:
    """The story of docs/guides/modes.md: copies while groups hold different versions, then sync."""
    outcome = play(tmp_path / "run", schedule=STORY, pull_copies="on")
    outcome.checked()
    losses = outcome.results[0]["losses"]
    assert losses[-1] < 0.7 * losses[0]
    told = outcome.summary
    assert [(each["round"], each["mode"]) for each in told["modes"]] == [
        *((0, "ssp"), (9, "ssp"), (17, "sync")),
    ]
    assert [each["round"] for each in told["codecs"]] == [0, 9, 17]
    assert told["bytes_pulled"] < 0.8 * told["coding"]["bytes_pulled_before"]


def test_casts_of_pulls_change_with_the_mode_and_without_copies(tmp_path: Path) -> None:
    schedule = "0: async int8/fp16; 8: sync int4/bf16; 16: ssp:2 none"
    outcome = play(tmp_path / "run", schedule=schedule)
    outcome.checked()
    assert outcome.results[0]["losses"][-1] < 0.7 * outcome.results[0]["losses"][0]


def test_the_check_notices_a_run_that_was_coded_otherwise(tmp_path: Path) -> None:
    outcome = play(tmp_path / "run", schedule="0: sync none; 9: sync topk:0.05")
    outcome.checked()
    file = next((tmp_path / "run").glob("history/**/run.json"))
    record = json.loads(file.read_text())
    assert [each["push_code"] for each in record["codecs"]] == [11, 7]
    record["codecs"][1]["round"] = 10
    file.write_text(json.dumps(record))
    with pytest.raises(AssertionError, match=r"came by codec 7; run.json says 11 of its round"):
        outcome.checked()
