"""codec = auto under mpirun: codecs change while a model trains that takes longer to send than to
compute; tests/support/programs/schemes/auto_codec_script.py is the script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from psdist.commands import check
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "schemes" / "auto_codec_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}


def run_script(folder: Path, *options: str, passed: tuple[str, ...]) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--group", "rank", "--servers", "2", *options]
    words += ["--run-dir", str(folder / "run"), SCRIPT, str(folder), *passed]
    return run_mpi(4, words, timeout_s=120, env=QUIET)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="sync", marks=pytest.mark.slow),
        pytest.param(
            ("--mode", "ssp", "--staleness", "2", "--set", "pull_copies=on"), id="ssp, copies"
        ),
        pytest.param(("--mode", "async"), id="async", marks=pytest.mark.slow),
        pytest.param(("--local-steps", "2"), id="local steps", marks=pytest.mark.slow),
    ],
)
def test_codecs_change_and_the_check_proves_every_change_and_every_message(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_script(tmp_path, "--codec", "auto", *options, passed=("60",))
    assert done.returncode == 0, done.text
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("seen.*")))
    assert "--mode" in options or first == second
    run = tmp_path / "run"
    codecs = json.loads((run / "summary.json").read_text())["codecs"]
    assert codecs[0] == {"round": 0, "push": "none", "pull": "none", "why": "auto"}
    assert len(codecs) > 1, "no change: nothing is tested"
    assert "ms of them waiting" in codecs[1]["why"]
    log = (run / "logs" / "rank-0.log").read_text()
    assert f"from iteration {codecs[1]['round']} on ({codecs[1]['why']})" in log
    assert check.main(run) == 0
    lines = (run / "decisions.jsonl").read_text()
    assert '{"sized": {"sizes": [' in lines
    longer = re.sub(
        r'(?<="waits_us": \[)[^\]]*', lambda waits: re.sub(r"\d+", r"9\g<0>", waits[0]), lines
    )
    for forged in (lines.replace('"level": ', '"level": 1'), longer):
        assert forged != lines
        (run / "decisions.jsonl").write_text(forged)
        assert check.main(run) == 1
