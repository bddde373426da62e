"""Checkpoints from end to end, of jobs in one process: right, used wrongly, and with changed files.

tests/support/programs/resuming/alone.py is the script.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_runs import ForkedRuns
from tests.support.mpirun import Completed
from tests.support.programs.forked import MOST_BYTES

SCRIPT = str(Path(__file__).parents[1] / "support" / "programs" / "resuming" / "alone.py")
KEPT = "step-00000003"


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as found:
        yield found


@pytest.fixture(scope="module")
def kept(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations with a checkpoint after three, left unchanged."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    done = train(runs, run_dir, f"out={run_dir}.safetensors", words=("--record",))
    assert done.returncode == 0, done.text
    return run_dir


@pytest.fixture
def again(kept: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(kept, tmp_path / "run"))


def train(
    runs: ForkedRuns,
    run_dir: Path | None,
    *given: str,
    case: str = "nothing",
    words: tuple[str, ...] = (),
) -> Completed:
    where = () if run_dir is None else ("--run-dir", str(run_dir))
    driver = tuple(word for word in words if word.startswith(MOST_BYTES))
    options = tuple(word for word in words if word not in driver)
    return runs.play("run", *driver, *where, *options, SCRIPT, case, *given)


def resume(runs: ForkedRuns, run_dir: Path | None, *given: str, **more: Any) -> Completed:
    words = ("--resume", *more.pop("words", ()))
    return train(runs, run_dir, *given, words=words, **more)


def refused(done: Completed, *wanted: str) -> str:
    """The one line of the error."""
    assert done.returncode == 2, done.text
    lines = [line for line in done.stdout.splitlines() if ": error" in line]
    assert len(lines) == 1, done.text
    for each in wanted:
        assert each in lines[0]
    return lines[0]


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
    return found


def test_a_resumed_run_ends_with_the_same_bits(runs: ForkedRuns, kept: Path, again: Path) -> None:
    done = resume(runs, again, f"out={again}.safetensors", words=("--record",))
    assert done.returncode == 0, done.text
    assert "begins at [3]" in done.stdout
    assert Path(f"{again}.safetensors").read_bytes() == Path(f"{kept}.safetensors").read_bytes()
    assert summary(again)["resumed_from"] == KEPT
    checked = runs.play("check", str(again))
    assert checked.returncode == 0, checked.text


@pytest.mark.parametrize("outer", ["nesterov", "accumulate"])
def test_so_does_one_with_rounds_of_local_steps(
    outer: str, runs: ForkedRuns, tmp_path: Path
) -> None:
    rounds = ("--record", "--local-steps", "2", "--outer", outer)
    given = ("loop=epochs", "steps=13")
    whole = tmp_path / "whole"
    assert train(runs, whole, *given, f"out={whole}.safetensors", words=rounds).returncode == 0
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    done = resume(runs, again, *given, f"out={again}.safetensors", words=rounds)
    assert done.returncode == 0, done.text
    assert "begins at [4]" in done.stdout  # a checkpoint at 3, and one that cut the next round
    assert Path(f"{again}.safetensors").read_bytes() == Path(f"{whole}.safetensors").read_bytes()
    checked = runs.play("check", str(again))
    assert checked.returncode == 0, checked.text
    refused(resume(runs, again, *given, "optimizer=sgd", words=rounds), "torch.optim.AdamW")


def test_so_does_one_whose_codecs_change_on_both_sides_of_the_checkpoint(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """The rest from topk is due when the checkpoint is made."""
    schedule = "0: sync topk:0.05/sign; 2: sync int8/int4; 5: sync none"
    words = ("--record", "--schedule", schedule, "--set", "codec_exact=no_such_name")
    whole = tmp_path / "whole"
    assert train(runs, whole, f"out={whole}.safetensors", words=words).returncode == 0
    assert summary(whole)["coding"]["error"] > 0
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    done = resume(runs, again, f"out={again}.safetensors", words=words)
    assert done.returncode == 0, done.text
    assert "begins at [3]" in done.stdout
    assert Path(f"{again}.safetensors").read_bytes() == Path(f"{whole}.safetensors").read_bytes()
    checked = runs.play("check", str(again))
    assert checked.returncode == 0, checked.text


def test_the_learning_rate_of_local_steps_goes_on_from_attempt_to_attempt(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """It follows what was set before, and every attempt has loaded the optimizer's state."""
    rounds = ("--local-steps", "2")
    given = ("loop=epochs", "decay=0.8", "at=2,5")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(runs, whole, *given, "steps=15", f"out={whole}.safetensors", words=rounds)
    train(runs, parts, *given, "steps=5", words=rounds)
    assert resume(runs, parts, *given, "steps=10", words=rounds).returncode == 0
    done = resume(runs, parts, *given, "steps=15", f"out={parts}.safetensors", words=rounds)
    assert done.returncode == 0, done.text
    assert "begins at [6]" in done.stdout
    assert Path(f"{parts}.safetensors").read_bytes() == Path(f"{whole}.safetensors").read_bytes()


def test_a_third_attempt_is_told_apart_and_metrics_go_on(runs: ForkedRuns, again: Path) -> None:
    assert resume(runs, again, "at=5").returncode == 0
    done = resume(runs, again)
    assert "begins at [5]" in done.stdout, done.text
    assert summary(again)["attempts"] == 3
    assert summary(again)["resumed_from"] == "step-00000005"
    for attempt in ("attempt-1", "attempt-2"):
        assert (again / attempt / "summary.json").exists()


def test_values_of_the_script_go_on(runs: ForkedRuns, tmp_path: Path) -> None:
    assert "state {'count': 6}" in train(runs, tmp_path / "run", case="count").stdout
    # Three iterations before the checkpoint, three after it.
    assert "state {'count': 6}" in resume(runs, tmp_path / "run", case="count").stdout


def test_another_model_is_one_line_that_says_what_differs(runs: ForkedRuns, again: Path) -> None:
    line = refused(resume(runs, again, "model=wide"), KEPT)
    assert "0.weight" in line
    refused(resume(runs, again, "model=renamed"), "body.weight")


def test_another_optimizer_is_refused(runs: ForkedRuns, again: Path) -> None:
    refused(resume(runs, again, "optimizer=sgd"), "torch.optim.AdamW", "torch.optim.SGD")


def test_more_or_fewer_optimizers_are_refused(runs: ForkedRuns, again: Path) -> None:
    refused(resume(runs, again, "sets=2"), KEPT)


def test_another_mode_goes_on(runs: ForkedRuns, again: Path) -> None:
    done = resume(runs, again, words=("--mode", "async", "--record"))
    assert done.returncode == 0, done.text
    assert "begins at [3]" in done.stdout
    checked = runs.play("check", str(again))
    assert checked.returncode == 0, checked.text


def test_resume_without_a_run_directory_is_refused(runs: ForkedRuns) -> None:
    refused(resume(runs, None), "run_dir")


def test_resume_where_there_is_no_checkpoint_starts_afresh(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    done = resume(runs, tmp_path / "run")
    assert done.returncode == 0, done.text
    assert "this run starts afresh" in done.stdout
    assert "begins at [0]" in done.stdout


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("checkpoint_before_prepare", "job.checkpoint() was called before job.prepare()"),
        ("attach_late", "after training had begun"),
        ("attach_twice", "one is attached already"),
        ("attach_a_number", "a int has no state_dict()"),
        ("attach_an_optimizer", "servers hold the state of a prepared optimizer"),
        ("keep_a_function", "nested"),
        ("epochs_within_epochs", "in a loop over job.epochs"),
        ("fewer_than_no_epochs", "a whole number >= 0, got -1"),
    ],
)
def test_a_call_that_is_wrong_is_one_line(
    case: str, wanted: str, runs: ForkedRuns, tmp_path: Path
) -> None:
    line = refused(train(runs, tmp_path / "run", case=case), "alone.py line", wanted)
    assert len(line) < 400


def test_between_backward_and_step_it_is_of_the_iteration_before(
    runs: ForkedRuns, kept: Path, tmp_path: Path
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out.safetensors"
    done = train(runs, run_dir, "steps=5", "at=", case="checkpoint_before_step")
    assert done.returncode == 0, done.text
    done = resume(runs, run_dir, f"out={out}")
    assert "begins at [4]" in done.stdout, done.text
    assert out.read_bytes() == Path(f"{kept}.safetensors").read_bytes()


def test_before_a_resumed_run_trains_there_is_no_other(
    runs: ForkedRuns, kept: Path, again: Path, tmp_path: Path
) -> None:
    """Its draws until then are not those that it continues with."""
    out = tmp_path / "out.safetensors"
    done = resume(runs, again, f"out={out}", case="checkpoint_before_training")
    assert done.returncode == 0, done.text
    assert f"has {KEPT}" in done.stdout
    assert f"no training since {KEPT}" in done.stdout
    assert out.read_bytes() == Path(f"{kept}.safetensors").read_bytes()


def test_what_is_attached_now_and_was_not_begins_anew_with_a_line(
    runs: ForkedRuns, again: Path
) -> None:
    done = resume(runs, again, case="attach_counter")
    assert done.returncode == 0, done.text
    assert "counter is not in the checkpoint" in done.stdout


def test_what_was_attached_and_is_not_now_is_dropped_with_a_line(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    assert train(runs, tmp_path / "run", case="attach_counter").returncode == 0
    done = resume(runs, tmp_path / "run", words=("--checkpoint-every", "100"))
    assert done.returncode == 0, done.text


def test_an_object_that_refuses_its_state_is_named(runs: ForkedRuns, tmp_path: Path) -> None:
    assert train(runs, tmp_path / "run", case="attach_counter").returncode == 0
    done = resume(runs, tmp_path / "run", case="attach_narrow")
    refused(done, "counter, a Narrow, does not take the state", "too wide for this one")


def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_run(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    again = tmp_path / "run"
    assert train(runs, again, "model=large").returncode == 0
    done = resume(runs, again, "model=large", "at=4,5", words=(MOST_BYTES + "100000",))
    assert done.returncode == 0, done.text
    assert "checkpoint step-00000004 was not written: " in done.stdout
    assert "File too large" in done.stdout
    assert f"{KEPT} stays the newest, and training continues" in done.stdout
    found = summary(again)
    assert (found["checkpoints"], found["checkpoints_failed"]) == (0, 2)
    assert "begins at [3]" in resume(runs, again, "model=large").stdout


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(
    runs: ForkedRuns, again: Path
) -> None:
    assert resume(runs, again, "at=5").returncode == 0
    newest = again / "checkpoints" / "step-00000005" / "server-0.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    done = resume(runs, again)
    assert done.returncode == 0, done.text
    assert "checkpoint step-00000005 is not used: " in done.stdout
    assert "its checksum is" in done.stdout
    assert "begins at [3]" in done.stdout


@pytest.mark.parametrize("name", ["index.json", "worker-0.safetensors", "server-0.safetensors"])
def test_with_no_whole_checkpoint_left_the_run_starts_afresh(
    name: str, runs: ForkedRuns, again: Path
) -> None:
    path = again / "checkpoints" / KEPT / name
    path.write_bytes(path.read_bytes()[:-7])
    done = resume(runs, again)
    assert done.returncode == 0, done.text
    assert f"checkpoint {KEPT} is not used: " in done.stdout
    assert "this run starts afresh" in done.stdout
    assert "begins at [0]" in done.stdout


def test_usr1_makes_a_checkpoint_at_the_next_boundary_and_training_goes_on(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    done = train(runs, tmp_path / "run", "loop=epochs", "at=", case="usr1")
    assert done.returncode == 0, done.text
    names = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert names == ["step-00000003"]
    assert summary(tmp_path / "run")["exit"] == "completed"


def test_usr1_may_end_the_job_so_that_it_is_started_again(
    runs: ForkedRuns, kept: Path, tmp_path: Path
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out.safetensors"
    words = ("--set", "on_usr1=requeue")
    done = train(runs, run_dir, "loop=epochs", "at=", case="usr1", words=words)
    assert done.returncode == 75, done.text
    assert "requeue: ended by SIGUSR1; --resume continues from step-00000003" in done.stdout
    assert summary(run_dir)["exit"] == "requeue"
    done = resume(runs, run_dir, "loop=epochs", "at=", f"out={out}", words=words)
    assert done.returncode == 0, done.text
    assert "begins at [3]" in done.stdout
    assert out.read_bytes() == Path(f"{kept}.safetensors").read_bytes()


def test_a_checkpoint_that_cannot_be_written_does_not_keep_a_job_that_is_to_end(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    words = ("--set", "on_usr1=requeue", MOST_BYTES + "100000")
    given = ("model=large", "loop=epochs", "at=")
    done = train(runs, tmp_path / "run", *given, case="usr1", words=words)
    assert done.returncode == 75, done.text
    assert "requeue: ended by SIGUSR1; --resume starts afresh" in done.stdout
    assert summary(tmp_path / "run")["checkpoints_failed"] == 1


def test_only_so_many_stay_as_the_setting_says(runs: ForkedRuns, tmp_path: Path) -> None:
    words = ("--set", "checkpoint_keep=1")
    assert train(runs, tmp_path / "run", "at=1,2,4", words=words).returncode == 0
    names = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert names == ["step-00000004"]
    assert summary(tmp_path / "run")["checkpoints"] == 3


def test_the_commands_read_what_a_run_has_kept(
    runs: ForkedRuns, kept: Path, again: Path, tmp_path: Path
) -> None:
    listed = runs.play("checkpoint", "list", str(kept))
    assert KEPT in listed.stdout
    assert runs.play("checkpoint", "verify", str(kept)).returncode == 0
    assert runs.play("checkpoint", "diff", str(kept), str(again)).returncode == 0
    assert resume(runs, again, "at=6", f"out={tmp_path}/saved.safetensors").returncode == 0
    assert runs.play("checkpoint", "diff", str(kept), str(again)).returncode == 1
    exported = runs.play("export", str(again), str(tmp_path / "exported.safetensors"))
    assert exported.returncode == 0, exported.text
    assert (tmp_path / "exported.safetensors").read_bytes() == (
        tmp_path / "saved.safetensors"
    ).read_bytes()


def test_a_model_of_two_optimizers_is_exported_as_it_is_saved(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    saved, exported = tmp_path / "saved.safetensors", tmp_path / "exported.safetensors"
    done = train(runs, tmp_path / "run", "sets=2", "at=6", f"out={saved}")
    assert done.returncode == 0, done.text
    assert runs.play("export", str(tmp_path / "run"), str(exported)).returncode == 0
    assert exported.read_bytes() == saved.read_bytes()
