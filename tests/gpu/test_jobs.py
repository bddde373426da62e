"""Whole jobs of workers, and servers, that share one GPU: over the virtual network, and over MPI.

PSDIST_REQUIRE_MPI=1 python -m pytest -n 0 -rs tests/gpu
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.group_plans import plan_of_groups
from tests.support.mpirun import REPOSITORY, Completed, environment_prefix, require, run_program
from tests.support.programs.training.cases import Outcome
from tests.training.overlap.test_overlap import PROBLEM, parameters, run, training

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # torch's, of the first matrix product in a thread of autograd
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA"),
]

MPI = pytest.mark.mpi
ON_A_GPU = ("-m", "tests.support.programs.on_a_gpu")


# -- over the virtual network: nothing hides what streams do in another order ----------------------


class OnAGpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = PROBLEM.model().cuda()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cuda()).cpu()


def train(path: Path, **options: Any) -> Outcome:
    made = {"overlap": "off", "codec_exact": ("vectors",), **options}
    if made.get("codec", "none") == "none":
        del made["codec_exact"]
    return run(training(make=OnAGpu), path, **made)


@pytest.mark.parametrize(
    "codec", ["fp16", "bf16", "int8", "int4/sign", "int2", "sign", "topk:0.05", "int8+burst:3/int8"]
)
def test_what_a_gpu_encodes_trains_to_the_bits_of_what_the_host_encodes(
    codec: str, tmp_path: Path
) -> None:
    there, here = (train(tmp_path / on, codec=codec, encode_on=on) for on in ("device", "host"))
    assert torch.equal(parameters(there), parameters(here))
    coded = [each.summary["coding"] for each in (there, here)]
    assert [each["encodes_on_device"] for each in coded] == [3, 0]
    assert coded[0]["bytes_to_host"] < coded[1]["bytes_to_host"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "ssp", "staleness": 1},
        {"mode": "async"},
        {"pipeline": 1, "mode": "ssp"},
        {"local_steps": 2, "outer": "nesterov:lr=0.7,momentum=0.9"},
        {"codec": "int4/sign", "encode_on": "device", "mode": "ssp", "pull_copies": "on"},
    ],
    ids=str,
)
@pytest.mark.parametrize("server_device", ["cpu", "cuda"])
def test_the_modes_rules_hold_on_a_gpu(
    server_device: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """run() proves it, checksums of each push and each pull included."""
    outcome = train(tmp_path, server_device=server_device, **options)
    first = outcome.results[0]["parameters"]
    assert first.is_cuda
    assert not torch.equal(first.cpu(), train_nothing())


def train_nothing() -> Tensor:
    return torch.cat([each.detach().cpu().flatten() for each in OnAGpu().parameters()])


# -- over MPI --------------------------------------------------------------------------------------


def job(
    path: Path, *words: str, program: str, ranks: int = 3, script: tuple[str, ...] = (), **env: str
) -> Completed:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "-n", str(ranks), "--servers", "1"]
    argv += [
        "--run-dir",
        str(path),
        "--set=report.progress=off",
        *words,
        *ON_A_GPU,
        program,
        *script,
    ]
    env = {"PYTHONPATH": str(REPOSITORY), **env}
    return run_program(argv, timeout_s=150, env=env)


def log_of(path: Path) -> str:
    return "\n".join(each.read_text("utf-8") for each in sorted((path / "logs").iterdir()))


def proved(path: Path) -> None:
    report = check_run(path, read_histories(path))
    assert report.proved, report


RESUMABLE = "tests.support.programs.resuming.resumable"


def seen(path: Path) -> list[Any]:
    return [json.loads(Path(f"{path}.out-{worker}.json").read_text()) for worker in (0, 1)]


@MPI
@pytest.mark.parametrize(
    "settings",
    [
        ("--set=hosts.server_device=cuda",),
        ("--set=codec=int4/sign", "--set=codec.encode_on=device", "--group=rank"),
        ("--set=hosts.group_tier=torch", "--group=node", "--record"),
    ],
    ids=["server on a GPU", "encoded there", "over NCCL"],
)
def test_who_is_killed_and_resumed_ends_with_the_bits_of_who_was_not(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Dropout draws on the GPU, and batch norm counts there."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = job(whole, *settings, program=RESUMABLE, script=(f"{whole}.out",))
    assert done.returncode == 0, done.text
    every = (*settings, "--checkpoint-every", "4", "--resume")
    of = (f"{killed}.out", "--die-at", "14")
    assert job(killed, *every, program=RESUMABLE, script=of).returncode != 0
    again = job(killed, *every, program=RESUMABLE, script=(f"{killed}.out",))
    assert again.returncode == 0, again.text
    assert re.search("resumes from checkpoint step-000000(08|12)", again.text), again.text
    assert seen(killed) == seen(whole)
    if "--record" in settings:
        proved(killed)


@MPI
def test_a_group_over_nccl_has_the_bits_of_groups_of_one(tmp_path: Path) -> None:
    """Of two workers the sum is the same in any order, so NCCL's own, too."""
    digests = set()
    for name, words in {
        "rank": ("--group=rank",),
        "slices": ("--group=node",),
        "nccl": ("--group=node", "--set=hosts.group_tier=nccl"),
    }.items():
        path = tmp_path / name
        done = job(path, *words, "--record", program="tests.support.programs.group_of_three")
        assert done.returncode == 0, done.text
        digests |= set(re.findall("parameters ([0-9a-f]{64})", done.stdout))
        proved(path)
        said = {
            "rank": "",
            "slices": "the group's 2 workers reduce over NCCL: the model is on a GPU",
            "nccl": "the group's 2 workers reduce by NCCL, which adds in its own order",
        }
        assert said[name] in log_of(path)
    assert len(digests) == 1, digests


@MPI
@pytest.mark.parametrize("dies", ["1 pushing 8, 0 reducing 13", "2 gathering 6, 1 agreeing 12"])
def test_a_group_over_nccl_goes_on_without_its_dead(dies: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = {
        "placement": plan_of_groups(tmp_path / "plan.json", [3, 1], servers=1),
        "on_group_death": "reform",
        "max_deaths": 4,
        "chunk_bytes": 4096,
    }
    words = ["--record", *(f"--set={key}={value}" for key, value in settings.items())]
    done = job(
        path,
        *words,
        program="tests.support.programs.deaths.goes_on",
        ranks=5,
        DIES=dies,
        ITERATIONS="20",
        PSDIST_RUN_DIR=str(path),
    )
    assert done.returncode == 0, done.text
    assert done.stdout.count("killed at") == 2, done.text
    assert len(set(re.findall(r"clock 20 has (\w+)", done.stdout))) == 1, done.text
    proved(path)


@MPI
def test_mpi_is_refused_for_a_groups_memory_on_a_gpu_where_it_does_not_take_it(
    tmp_path: Path,
) -> None:
    words = ("--group=node", "--set=hosts.group_tier=mpi")
    done = job(tmp_path / "run", *words, program="tests.support.programs.group_of_three")
    is_taken = "reduce over MPI" in (log_of(tmp_path / "run") if done.returncode == 0 else "")
    assert is_taken or "does not say that it takes memory of a GPU" in done.text, done.text
    assert (done.returncode == 0) == is_taken
