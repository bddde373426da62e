"""Choices of psdist that a run takes over from its checkpoint, and the lines about them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.index import decode, encode
from psdist.checkpoint.reading import Checkpoint
from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptSteps, TuningState
from psdist.errors import ProtocolError
from psdist.ranks.checkpointing.tuning_state import (
    codec_control,
    levels_of,
    packed,
    tuning_state_of,
    unpacked,
)
from psdist.ranks.wire import codecs_of_rounds, wire_of
from tests.support.checkpoints import Made

AUTO = RunConfig(codec="auto")
CODECS = TuningState(
    codecs=dataclasses.replace(codec_control(AUTO, 2).kept(0), starts=((0, 3), (120, 4)))
)
STEPS = TuningState(
    steps=KeptSteps(starts=((0, 6),), num_fixed=3, first_loss=2.5, totals=(0.1, 0.2), count=4)
)


def taken(folder: Path, tuning_state: TuningState | None, **settings: Any) -> tuple[Any, list[str]]:
    checkpoint = Made().write(Folder(folder))
    index = dataclasses.replace(checkpoint.index, fidelity=tuning_state)
    said: list[str] = []
    found = tuning_state_of(RunConfig(**settings), Checkpoint(checkpoint.path, index), said.append)
    return found, said


BY_LOSS = {"steps_by": "loss", "local_steps": 8}


@pytest.mark.parametrize(
    ("tuning_state", "settings", "line"),
    [
        (CODECS, {"codec": "auto"}, "psdist continues with codec int4/sign"),
        (STEPS, BY_LOSS, "psdist continues with at most 6 local steps"),
    ],
)
def test_a_run_with_the_same_settings_goes_on_with_it(
    tuning_state: TuningState, settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    assert taken(tmp_path, tuning_state, **settings) == (tuning_state, [f"resume: {line}"])


@pytest.mark.parametrize(
    ("tuning_state", "settings", "words"),
    [
        (CODECS, {}, "the codecs that psdist had chosen are dropped: codec.push = auto is not set"),
        (
            CODECS,
            {"codec": "auto", "pull_codec": "int8"},
            "they are of the codecs none, fp16/fp16, in",
        ),
        (
            STEPS,
            {"local_steps": 8},
            "the local steps that psdist had chosen are dropped: local.steps_by",
        ),
        (STEPS, {"steps_by": "loss", "local_steps": 5}, "they are of more than 5 local steps"),
    ],
)
def test_with_others_nothing_goes_on_and_a_line_says_why(
    tuning_state: TuningState, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found, (said,) = taken(tmp_path, tuning_state, **settings)
    assert found is None
    assert words in said


def test_of_a_checkpoint_without_any_and_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert taken(tmp_path, None, codec="auto") == (None, [])
    assert tuning_state_of(AUTO, None, lambda line: pytest.fail(line)) is None


@pytest.mark.parametrize("tuning_state", [CODECS, STEPS, None])
def test_it_is_the_same_on_other_ranks_and_in_the_index(tuning_state: TuningState | None) -> None:
    assert unpacked(packed(tuning_state)) == tuning_state
    index = dataclasses.replace(Made().index([], servers=1), fidelity=tuning_state)
    text = encode(index)
    assert decode(text, where="a test") == index
    assert ('"fidelity"' in text) == (tuning_state is not None)


def test_damage_on_the_way_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=r"the tuning state that rank 0 sent is damaged"):
        unpacked('{"codecs": 5}')


def test_messages_and_run_json_begin_with_the_level_that_ruled() -> None:
    assert levels_of(None) == levels_of(STEPS) == ((0, 0),)
    levels = levels_of(CODECS)
    turns = wire_of(AUTO, levels).of_set().turns
    assert turns is not None
    assert [turns.at(each) for each in (0, 119, 120)] == [3, 3, 4]
    begins = [(each.round, each.push, each.pull) for each in codecs_of_rounds(AUTO, levels)]
    assert begins == [(0, "int4", "int4"), (120, "int4", "sign")]
    alone = wire_of(AUTO).of_set().turns
    assert alone is not None
    assert alone.at(500) == 0
