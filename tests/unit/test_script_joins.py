"""What the chief writes for a spare's script, and what the spare makes of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psdist.config.settings import RunConfig
from psdist.errors import CheckpointError, UsageError
from psdist.protocol.collected import JoinBrought, pack_join, unpack_join
from psdist.script_checkpoints import ScriptCheckpoints
from psdist.script_joins import ScriptJoins, require_one_set


class Meeting:
    """All that a script's end of it has to do with."""

    def __init__(self, path: Path, *, worker: int = 0, chief: int = 0) -> None:
        self.brought: list[tuple[str, JoinBrought | None]] = []
        self.welcome: Any = None
        seat = SimpleNamespace(worker=worker)
        loop = SimpleNamespace(
            core=SimpleNamespace(seat=seat, chief=chief), join_running=lambda _waiting: self.welcome
        )
        self.context = SimpleNamespace(
            run_directory=SimpleNamespace(path=path),
            config=SimpleNamespace(wait_timeout_s=0.05),
            rank=SimpleNamespace(waiting=lambda **_: None),
            joined={},
            replace=SimpleNamespace(worker=1),
        )
        self.joins = ScriptJoins(
            self.context,  # type: ignore[arg-type]
            loop,  # type: ignore[arg-type]
            collective=self.bring,
        )

    def bring(self, name: str, payload: bytes) -> Any:
        self.brought.append((name, unpack_join(payload)))

    def files(self) -> list[str]:
        return sorted(path.name for path in self.joins._folder.glob("*"))


STATE = {"clock": 12, "buffer": torch.arange(3), "nested": [{"lr": 0.1}]}


def test_what_the_chief_writes_the_spare_reads(tmp_path: Path) -> None:
    chief, spare = Meeting(tmp_path), Meeting(tmp_path, worker=3)
    chief.joins.meet([12], lambda: STATE)
    ((name, brought),) = chief.brought
    assert name == "join"
    assert brought == JoinBrought((12,), "state-12-0-1")
    spare.welcome = SimpleNamespace(worker=3, state="state-12-0-1")
    found = spare.joins.come()
    assert found is not None
    welcome, told = found
    assert welcome is spare.welcome
    assert spare.context.joined == {3: 1}
    assert torch.equal(told.pop("buffer"), STATE["buffer"])  # type: ignore[call-overload]
    assert told == {"clock": 12, "nested": [{"lr": 0.1}]}


def test_a_spare_has_trained_when_an_iteration_has_ended() -> None:
    """From then on its failure is the job's."""
    told: list[str] = []
    session = SimpleNamespace(exit=SimpleNamespace(note_iteration=lambda: told.append("exit")))
    checkpoints: Any = SimpleNamespace(
        _followed=None,
        _session=session,
        _files=SimpleNamespace(tell=lambda: told.append("files")),
        _loaders=SimpleNamespace(end_iteration=lambda: told.append("loaders")),
        _set_modes=None,
        _awaits_boundary=False,
    )
    ScriptCheckpoints.end_iteration(checkpoints)
    assert checkpoints.has_trained
    assert told == ["exit", "files", "loaders"]


def test_others_than_the_chief_bring_their_clocks_alone(tmp_path: Path) -> None:
    other = Meeting(tmp_path, worker=1)
    other.joins.meet([9], lambda: STATE)
    assert other.brought == [("join", JoinBrought((9,), ""))]
    assert other.files() == []


def test_a_state_is_there_until_the_next_and_not_behind_the_end(tmp_path: Path) -> None:
    chief = Meeting(tmp_path)
    chief.joins.meet([12], lambda: STATE)
    chief.joins.meet([14], lambda: STATE)
    assert chief.files() == ["state-14-0-2.safetensors"]
    chief.joins.forget()
    chief.joins.forget()
    assert chief.files() == []


def test_what_a_chief_has_left_that_has_died_goes_with_the_next_state(tmp_path: Path) -> None:
    Meeting(tmp_path).joins.meet([12], lambda: STATE)
    chief = Meeting(tmp_path, worker=0)
    chief.joins._num_written = 4
    chief.joins.meet([14], lambda: STATE)
    assert chief.files() == ["state-14-0-5.safetensors"]


def test_a_state_of_which_the_disk_takes_a_part_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space is left")

    monkeypatch.setattr("psdist.script_joins.write_tensors", write)
    chief = Meeting(tmp_path)
    chief.joins.meet([12], lambda: STATE)
    assert chief.brought == [("join", JoinBrought((12,), ""))]
    assert chief.files() == []


@pytest.mark.parametrize("problem", ["disk", "value"])
def test_a_state_that_cannot_be_written_is_a_line_and_nobody_joins(
    problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chief = Meeting(tmp_path)
    state: dict[str, Any] = {"what": object()} if problem == "value" else STATE
    if problem == "disk":
        (tmp_path / "joins").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="psdist"):
        chief.joins.meet([12], lambda: state)
    assert chief.brought == [("join", JoinBrought((12,), ""))]
    (record,) = caplog.records
    assert "spares cannot take a failed worker's place now: " in record.getMessage()


def test_who_comes_when_the_job_is_over_is_told_nothing(tmp_path: Path) -> None:
    spare = Meeting(tmp_path, worker=3)
    assert spare.joins.come() is None
    assert spare.context.joined == {}


@pytest.mark.parametrize(("wait_timeout_s", "shown_s"), [(0.05, 600.0), (600.0, 0.05)])
def test_a_state_that_is_not_there_is_an_error(
    wait_timeout_s: float, shown_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon: others wait."""
    monkeypatch.setattr("psdist.script_joins._SHOWN_S", shown_s)
    spare = Meeting(tmp_path, worker=3)
    spare.context.config.wait_timeout_s = wait_timeout_s
    spare.welcome = SimpleNamespace(worker=3, state="state-1-0-1")
    with pytest.raises(CheckpointError, match="state-1-0-1"):
        spare.joins.come()


def test_what_is_brought_is_read_again_and_nothing_else() -> None:
    assert unpack_join(pack_join([3, 0])) == JoinBrought((3, 0), "")
    assert unpack_join(pack_join([3], "state-3-0-1")) == JoinBrought((3,), "state-3-0-1")
    for data in (b"", b"3", b"3/A", b"3/../x", b"x/state", b"3/a/b", b"3/\xff", b"3/" + b"a" * 81):
        assert unpack_join(data) is None, data


def test_scripts_that_cannot_be_followed_are_refused_when_they_prepare() -> None:
    config = RunConfig(max_deaths=1, spares=1)
    shared = config.model_copy(update={"replication": "buddy"})
    require_one_set(config, 1)
    for each, remedy in (
        (config, "leave failures.spares out"),
        (shared, "set failures.max_deaths = 0"),
    ):
        told = "a second optimizer with spares for workers' places"
        with pytest.raises(UsageError, match=f"{told}.*or {remedy}"):
            require_one_set(each, 2)
