"""What a run leaves on disk: logs by rank, and its directory."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from psdist.errors import ConfigError, HistoryError
from psdist.report.logs import start_logs, stop_logs
from psdist.report.run_directory import RunDirectory

# -- logs --------------------------------------------------------------------------------------


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger psdist, as it was before and is again afterwards."""
    found = logging.getLogger("psdist")
    level, propagate = found.level, found.propagate
    yield found
    stop_logs()
    found.setLevel(level)
    found.propagate = propagate


def test_every_line_of_a_log_names_its_rank(tmp_path: Path, logger: logging.Logger) -> None:
    start_logs(tmp_path, rank=3, who="worker 1 (rank 3 on n2)")
    logger.info("connected: %d ranks", 4)
    logger.debug("not for a log")
    (line,) = (tmp_path / "logs" / "rank-3.log").read_text().splitlines()
    assert line.endswith(" INFO worker 1 (rank 3 on n2): connected: 4 ranks")


def test_the_setting_names_the_lowest_level_and_whether_records_go_on(
    tmp_path: Path, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    lines = {}
    for rank, setting in enumerate(("debug", "warning", "error+propagate")):
        start_logs(tmp_path, rank=rank, who="server 0", setting=setting)
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "level %d", level)
        stop_logs()
        lines[setting] = len((tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines())
    assert lines == {"debug": 4, "warning": 2, "error+propagate": 1}
    assert caplog.messages == ["level 40"]


def test_before_the_first_job_records_reach_only_the_handlers_of_the_script() -> None:
    program = (
        "import logging, psdist.report.logs\n"
        "logger = logging.getLogger('psdist')\n"
        "logger.warning('unheard')\n"
        "logging.basicConfig(format='heard: %(message)s')\n"
        "logger.warning('by the script')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "heard: by the script\n")


def test_warnings_also_reach_people_and_other_lines_do_not(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logs(tmp_path, rank=0, who="server 0")
    logger.info("only in the file")
    logger.warning("chunk %d waits", 7)
    assert capsys.readouterr().err == "psdist: WARNING: server 0: chunk 7 waits\n"
    assert len((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) == 2


def test_a_host_with_a_percent_sign_in_its_name_breaks_no_line(
    tmp_path: Path, logger: logging.Logger
) -> None:
    start_logs(tmp_path, rank=0, who="server 0 (on 100%s)")
    logger.info("here")
    assert "server 0 (on 100%s): here" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_after_the_end_nothing_is_written_and_the_file_is_closed(
    tmp_path: Path, logger: logging.Logger
) -> None:
    start_logs(tmp_path, rank=0, who="server 0")
    logger.info("one")
    stop_logs()
    assert logger.handlers == []
    logger.info("two")
    assert len((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) == 1


def test_a_handler_of_the_script_outlives_the_job(
    tmp_path: Path, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    own = Kept()
    logger.addHandler(own)
    try:
        start_logs(tmp_path, rank=0, who="server 0")
        logger.warning("during")
        stop_logs()
        logger.warning("afterwards")
        assert logger.handlers == [own]
    finally:
        logger.removeHandler(own)
    assert seen == ["during", "afterwards"]
    assert caplog.messages == ["afterwards"]


def test_a_log_that_finds_no_space_is_told_once_and_nothing_else_is_lost(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "rank-0.log"
    path.symlink_to("/dev/full")
    start_logs(tmp_path, rank=0, who="server 0")
    for number in range(3):
        logger.info("line %d", number)
    logger.warning("chunk %d waits", 7)
    stop_logs()
    assert capsys.readouterr().err.splitlines() == [
        f"psdist: WARNING: server 0: the log {path} cannot be written: No space left on device; "
        "the job continues, and lines of it are lost",
        "psdist: WARNING: server 0: chunk 7 waits",
    ]


def test_a_folder_of_logs_that_cannot_be_made_is_a_warning(
    tmp_path: Path, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("")
    start_logs(tmp_path, rank=0, who="server 0")
    logger.info("here")
    assert "rank-0.log cannot be written: " in capsys.readouterr().err


# -- the run directory -------------------------------------------------------------------------


def test_a_run_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "a")
    assert run.path.is_dir()


def test_a_directory_that_holds_a_run_is_not_used_again(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path).write_json("ranks.json", [])
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(tmp_path)
    assert str(caught.value) == (
        f"run_dir = {tmp_path}: it holds a run already; choose another directory, remove this "
        "one, or continue it (--resume)"
    )


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir = .*file/run: cannot be made: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "run")


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    run.write_json("summary.json", {"exit": "failed"})
    run.write_json("summary.json", {"exit": "completed", "note": "äß"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "exit": "completed",
        "note": "äß",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_metrics_are_in_the_file_line_by_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    for epoch in range(2):
        run.append_metrics({"rank": 1, "epoch": epoch})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {"rank": 1, "epoch": epoch}
        assert len(lines) == epoch + 1
    run.close()
    run.close()


@pytest.mark.usefixtures("logger")
def test_metrics_that_find_no_space_are_counted_and_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logs(tmp_path, rank=0, who="server 0")
    run = RunDirectory.create(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for epoch in range(3):
        run.append_metrics({"epoch": epoch})
    run.close()
    assert (run.num_lost, run.why_lost) == (3, "No space left on device")
    assert capsys.readouterr().err == (
        f"psdist: WARNING: server 0: a line of {tmp_path}/metrics.jsonl was not written: No space "
        "left on device; training continues, and lines are lost until there is space\n"
    )


def test_lines_that_belong_to_the_history_are_not_lost_in_silence(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    (tmp_path / "decisions.jsonl").symlink_to("/dev/full")
    with pytest.raises(HistoryError) as caught:
        run.append("decisions.jsonl", {"round": 3})
    run.close()
    assert str(caught.value) == (
        f"cannot write {tmp_path}/decisions.jsonl: No space left on device; free some space, or "
        "leave report.record out"
    )


def test_a_file_that_finds_no_space_leaves_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path)
    run.write_json("summary.json", {"exit": "failed"})

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        run.write_json("summary.json", {"exit": "completed"})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit": "failed"}
