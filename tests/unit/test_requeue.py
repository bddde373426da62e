"""slurm/requeue.sbatch without Slurm: a stand-in for srun ends as it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SRUN = """#!/usr/bin/env bash
if [[ $* == *printenv* ]]; then  # on how many hosts can a task be started?
    printf 'n%d\\n' $(seq "$ANSWERING")
    exit 0
fi
number=$(($(cat "$PLAN.number" 2>/dev/null || echo 0) + 1))
echo "$number" >"$PLAN.number"
read -r status checkpoint <<<"$(sed -n "${number}p" "$PLAN")"
trap 'came=yes' USR1
if [[ $checkpoint == wait ]]; then
    echo waits
    while [[ -z ${came:-} ]]; do sleep 0.01; done
elif [[ -n $checkpoint ]]; then
    mkdir -p "$RUN_DIR/checkpoints" && echo "$checkpoint" >"$RUN_DIR/checkpoints/latest"
fi
[[ $status != lost ]] || exit 0
exit=failed
[[ $status != 0 ]] || exit=completed
mkdir -p "$RUN_DIR" && printf '{"exit": "%s"}\\n' "$exit" >"$RUN_DIR/summary.json"
exit "$status"
"""


def play(tmp_path: Path, *plan: str, answering: int = 2) -> tuple[int, str, int]:
    """The job script's status and output, and how many attempts it made. Each line of ``plan`` is
    an attempt: its status, or ``lost`` for a launcher that loses a host and ends with 0, and the
    checkpoint that it makes, or ``wait`` for the signal. ``answering``: hosts of two, behind it."""
    (tmp_path / "plan").write_text("\n".join(plan) + "\n")
    (tmp_path / "train.py").touch()
    programs = {
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "scontrol $*"\n',
        "psdist": "#!/bin/sh\n",
    }
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PLAN": str(tmp_path / "plan"),
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "ANSWERING": str(answering),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "VENV": str(tmp_path / "venv"),
    }
    job = subprocess.Popen(
        ["bash", str(REPOSITORY / "slurm" / "requeue.sbatch"), "train.py"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if any(each.endswith("wait") for each in plan):
        assert job.stdout is not None
        for line in job.stdout:
            if line == "waits\n":
                break
        job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=30)
    return job.returncode, text, int((tmp_path / "plan.number").read_text())


@pytest.mark.parametrize(
    ("plan", "status", "said", "attempts"),
    [
        (["0"], 0, "", 1),
        (["1 a", "1 b", "1 c", "1 d", "0"], 0, "attempt again from checkpoint d", 5),
        (["1", "1", "1", "0"], 2, "3 times in a row without a new checkpoint", 3),
        (["1 a", "1", "137", "0"], 2, "status 137, 3 times in a row", 3),
        (["2", "0"], 2, "another attempt would end so", 1),
        (["75 wait"], 0, "scontrol requeue 7", 1),
        (["1 a", "75 wait"], 0, "requeued at checkpoint a\n", 2),
        (["1 a", "75 b"], 0, "requeued\n", 2),
        (["1 a", "0 wait"], 0, "", 2),
        (["lost a", "0"], 0, "status 0 of a launcher whose job is not complete; attempt again", 2),
        (["143 wait", "0"], 2, "when the time was nearly over", 1),
    ],
)
def test_what_the_job_script_makes_of_an_attempts_end(
    plan: list[str], status: int, said: str, attempts: int, tmp_path: Path
) -> None:
    found = play(tmp_path, *plan)
    assert found[0] == status, found
    assert said in found[1]
    assert found[2] == attempts


def test_with_a_host_less_the_job_is_requeued_with_as_many_tasks_as_fit(tmp_path: Path) -> None:
    status, said, attempts = play(tmp_path, "1 a", "0", answering=1)
    assert (status, attempts) == (0, 1)
    assert "status 1; 1 of 2 hosts answer: requeued at checkpoint a" in said
    assert "scontrol requeue 7\nscontrol update JobId=7 NumTasks=1\n" in said
