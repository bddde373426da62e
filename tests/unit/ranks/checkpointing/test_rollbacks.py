"""RUN_DIR/rollbacks.jsonl, and what the next attempt makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptSteps, Rollback, TuningState, rolled_back, within
from psdist.controller.rollback import Rise
from psdist.errors import ConfigError
from psdist.ranks.checkpointing.resuming import choose
from psdist.ranks.checkpointing.rollbacks import (
    ROLLBACKS,
    Record,
    add_rollback,
    in_words,
    read_rollbacks,
)
from psdist.ranks.checkpointing.tuning_state import tuning_state_of
from psdist.ranks.failure import is_requeue, requeue
from tests.support.checkpoints import Made
from tests.unit.ranks.checkpointing.test_tuning_state import AUTO, CODECS, STEPS

NAMES = CODECS.codecs.names if CODECS.codecs is not None else ()


def rollback(good: int, lossiest: int = 4, names: tuple[str, ...] = NAMES) -> Rollback:
    return rolled_back(good + 50, Rise(9.5, 0.25, good), lossiest, names=names)


def test_records_are_read_as_they_were_added(tmp_path: Path) -> None:
    assert read_rollbacks(tmp_path) == []
    records = [Record(1, rollback(40)), Record(3, rollback(30, 8, ()))]
    for each in records:
        add_rollback(tmp_path, each)
    assert read_rollbacks(tmp_path) == records
    with (tmp_path / ROLLBACKS).open("a") as file:
        file.write('{"attempt": 4, "roll')
    assert read_rollbacks(tmp_path) == records, "a last line that a crash has cut is left out"
    records.append(Record(4, rollback(20, 4, ())))
    add_rollback(tmp_path, records[-1])
    assert read_rollbacks(tmp_path) == records, "and goes before the next one comes"


@pytest.mark.parametrize(
    "damaged", ["", "5", "{}", '{"attempt": 1}', '{"attempt": 1, "rollback": 2}']
)
def test_damage_is_one_line_that_names_the_file(damaged: str, tmp_path: Path) -> None:
    (tmp_path / ROLLBACKS).write_text(f"{damaged}\n")
    with pytest.raises(ConfigError, match=r"rollbacks.jsonl cannot be read .*repair or remove it"):
        read_rollbacks(tmp_path)


def made(folder: Path, *steps: int, attempt: int = 1) -> Folder:
    for step in steps:
        Made(step=step).write(Folder(folder), attempt=attempt, keep=9)
    return Folder(folder)


def test_checkpoints_of_after_the_loss_began_to_rise_are_set_aside_once(tmp_path: Path) -> None:
    folder, said = made(tmp_path, 100, 200, 300), list[str]()
    records = [Record(1, rollback(200))]
    checkpoint, _ = choose(tmp_path, said.append, records)
    assert checkpoint is not None
    assert checkpoint.name == folder.latest() == "step-00000200"
    assert said[0] == (
        "resume: the loss had blown up: step-00000300 of after it began to rise is set aside "
        "(*.rolled-back-1)"
    )
    assert (folder.path / "step-00000300.rolled-back-1" / "index.json").exists()
    said.clear()
    made(tmp_path, 300, attempt=2)
    checkpoint, _ = choose(tmp_path, said.append, records)
    assert checkpoint is not None
    assert checkpoint.name == "step-00000300", "from an attempt after it"
    assert not any("blown up" in line for line in said)
    checkpoint, _ = choose(tmp_path, said.append, [*records, Record(2, rollback(99))])
    assert checkpoint is None
    assert "step-00000100, step-00000200, step-00000300 of after it began to rise are" in said[1]
    assert folder.latest() == ""


def test_a_checkpoint_that_is_not_whole_stays_where_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path, 100, 200)
    (folder.path / "step-00000200" / "index.json").write_text("{}")
    choose(tmp_path, lambda _line: None, [Record(1, rollback(100))])
    assert folder.names() == ["step-00000100", "step-00000200"]


def test_the_newest_good_one_is_kept_beyond_the_newest(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        Made(step=step).write(Folder(tmp_path), keep=1, good=250)
    assert Folder(tmp_path).names() == ["step-00000200", "step-00000400"]


def test_what_goes_on_is_less_lossy() -> None:
    said: list[str] = []
    found = tuning_state_of(AUTO, None, said.append, [Record(1, rollback(40, 3))])
    assert found is not None
    assert found.codecs is not None
    assert (found.codecs.starts, found.codecs.lossiest) == (((0, 0),), 2)
    assert said == ["resume: psdist continues with codec none, int8/int8 at most"]
    by_loss = RunConfig(steps_by="loss", local_steps=16)
    found = tuning_state_of(by_loss, None, said.append, [Record(1, rollback(40, 16, ()))])
    kept = KeptSteps(starts=((0, 8),), num_fixed=0, first_loss=None, totals=(0.0,), count=0)
    assert found == TuningState(steps=kept)
    assert said[1:] == ["resume: psdist continues with at most 8 local steps"]
    assert tuning_state_of(by_loss, None, said.append, [Record(1, rollback(40, 3))]) is None
    assert tuning_state_of(RunConfig(), None, said.append, [Record(1, rollback(40, 3))]) is None
    assert STEPS.steps is not None


def test_where_nothing_less_lossy_was_left_checkpoints_are_set_aside_and_nothing_is_limited(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path, 100, 200)
    record = Record(1, rollback(100, 1, ()))
    assert record.rollback.allowed == -1
    checkpoint, _ = choose(tmp_path, lambda _line: None, [record])
    assert checkpoint is not None
    assert checkpoint.name == folder.latest() == "step-00000100"
    assert within(STEPS, record.rollback) == STEPS
    assert within(CODECS, rollback(100, 0)) == CODECS
    by_loss = RunConfig(steps_by="loss", local_steps=16)
    assert tuning_state_of(by_loss, None, lambda _line: None, [record]) is None


@pytest.mark.parametrize(("most", "goes"), [(16, True), (12, True), (8, True), (7, False)])
def test_who_sets_what_is_allowed_goes_on(most: int, *, goes: bool, tmp_path: Path) -> None:
    """A rollback allows 8 of 16 steps: the first loss continues with them."""
    assert STEPS.steps is not None
    checkpoint = Made().write(Folder(tmp_path))
    was = TuningState(steps=replace(STEPS.steps, starts=((0, 16), (3, 6))))
    checkpoint = Checkpoint(checkpoint.path, replace(checkpoint.index, fidelity=was))
    said: list[str] = []
    config = RunConfig(steps_by="loss", local_steps=most)
    found = tuning_state_of(config, checkpoint, said.append, [Record(1, rollback(40, 16, ()))])
    left = TuningState(steps=replace(STEPS.steps, starts=((0, 8), (3, 6))))
    assert found == (left if goes else None)
    assert ("dropped: they are of more than 7 local steps" in said[0]) != goes


def test_words() -> None:
    assert in_words(rollback(40)) == (
        "the loss was 9.5, its least 0.25, and good up to iteration 40; from a checkpoint of "
        "that time, with codec int4/int4 at most instead of codec int4/sign"
    )
    assert in_words(rollback(40, 2, ())).endswith(
        "with 1 local step at most instead of 2 local steps"
    )
    assert in_words(rollback(40, 0)).endswith(
        "that was with codec none, and nothing less lossy is left: lower the "
        "learning rate, or leave training.rollback out"
    )
    assert is_requeue(*requeue("why"))
    assert requeue("why") == ("requeue: why", 75)
