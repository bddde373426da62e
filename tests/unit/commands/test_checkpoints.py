"""psdist checkpoint list, verify and diff, psdist export: what they say, write and return."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from psdist.checkpoint.folder import Folder
from psdist.commands import cli
from tests.support import checkpoint_of_model
from tests.support.checkpoints import Made


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (100, 200):
        Made(step=step, seed=step).write(Folder(tmp_path / "run"))
    return tmp_path / "run"


def psdist(*words: object) -> int:
    """The exit status."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_list_has_a_line_for_each(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints" / "step-00000100" / "index.json").write_text("{")
    for path in (run_dir, run_dir / "checkpoints"):
        assert psdist("checkpoint", "list", path) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("step-00000100  damaged: ")
        assert second.startswith("step-00000200  2026-01-31T12:00:00Z  attempt 1  sync, 2 workers")
        assert "2 servers  clock 200 | 200  " in second
        assert second.endswith(" KB  latest")
    assert psdist("checkpoint", "list", run_dir / "checkpoints" / "step-00000200") == 0
    assert capsys.readouterr().out.startswith("step-00000200  2026")


def test_a_proof_says_what_is_damaged_and_returns_1(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert psdist("checkpoint", "verify", run_dir) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("step-00000200: whole: 4 files, ")
    path = run_dir / "checkpoints" / "step-00000200" / "server-1.safetensors"
    flip(path)
    assert psdist("checkpoint", "verify", run_dir) == 1
    assert f"step-00000200: {path}: damaged: its checksum is " in capsys.readouterr().out
    assert psdist("checkpoint", "verify", path.parent) == 1
    assert psdist("checkpoint", "verify", run_dir / "checkpoints" / "step-00000100") == 0
    capsys.readouterr()


def test_a_latest_that_names_none_is_no_proof(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "checkpoints" / "latest").unlink()
    assert psdist("checkpoint", "verify", run_dir) == 1
    assert "latest: it names no checkpoint that is here" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["checkpoint", "list"], ["checkpoint", "verify"], ["export"]])
def test_a_path_without_checkpoints_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    more = [tmp_path / "out.safetensors"] if command == ["export"] else []
    for path in (tmp_path, tmp_path / "none", tmp_path / "checkpoints"):
        assert psdist(*command, path, *more) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"psdist: error: {path} holds no checkpoint: give ")


def test_two_that_are_the_same_are_said_to_be(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Made(step=200, seed=200).write(Folder(tmp_path / "other"), servers=3)
    assert psdist("checkpoint", "diff", run_dir, tmp_path / "other") == 0
    assert capsys.readouterr().out == (
        "step-00000200 and step-00000200: 3 parameters and what 2 workers kept: the same, bit by "
        "bit\n"
    )


def test_a_difference_says_where_and_how_much(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(step=200, seed=200, workers=3)
    made.elements[0, 1, "value"][[3, 7]] += 0.5
    made.elements[0, 1, "state.exp_avg"][0] = float("nan")
    made.elements[0, 0, "value"][0] = 0.0
    made.states[1, 0] = {**made.states[1, 0], "counted": made.states[1, 0]["counted"]}
    made.trees[1]["state"]["epoch"] = 7
    made.trees[1]["state"]["more"] = [1]
    del made.trees[0]["rng"]
    made.trees[0]["models"][0]["norm.mean"] = torch.zeros(5)
    made.write(Folder(tmp_path / "other"))
    assert psdist("checkpoint", "diff", run_dir, tmp_path / "other") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "set 0: clocks [200, 200] against [200, 200, 200]" in lines
    assert "set 0: parameter first.weight: value: 2 of 210 elements differ, by 0.5 at most" in lines
    assert "set 0: parameter first.weight: exp_avg: 1 of 210 elements differ, by 0 at most" in lines
    assert any(
        line.startswith("set 0: parameter embedding: value: 1 of 400 elements") for line in lines
    )
    assert "worker 1: ['state']['epoch']: 20 against 7" in lines
    assert "worker 1: ['state']['more'] is in the second alone" in lines
    assert "worker 0: ['rng'] is in the first alone" in lines
    assert "worker 0: ['models'][0]['norm.mean']: 5 of 5 elements differ" in lines
    assert "worker 2 is in the second alone" in lines
    assert not any("half" in line and "clocks" not in line for line in lines)
    assert lines[-1].endswith(f"{len(lines) - 1} differences")


def test_other_parameters_are_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, width in (("one", 3), ("other", 4)):
        module = nn.ModuleDict({"same": nn.Linear(2, width), name: nn.Linear(2, 2, bias=False)})
        optimizer = torch.optim.SGD(module.parameters(), lr=width)
        checkpoint_of_model.write(Folder(tmp_path / name), module, [optimizer])
    assert psdist("checkpoint", "diff", tmp_path / "one", tmp_path / "other") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "parameter same.weight: float32 [3, 2] against float32 [4, 2]" in lines
    assert "parameter one.weight is in the first alone" in lines
    assert "parameter other.weight is in the second alone" in lines
    assert "lr 3 against 4 in optimizer group 0" in lines


class Model(nn.Module):
    """Tied weights, buffers, a frozen parameter, channels last, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).mean((2, 3))
        found: torch.Tensor = self.second(self.first(x)).sum() + self.narrow.sum().float()
        return found


def trained(*, num_optimizers: int = 1) -> tuple[Model, list[torch.optim.Optimizer]]:
    torch.manual_seed(3)
    module = Model()
    parameters = [each for each in module.parameters() if each.requires_grad]
    cut = len(parameters) if num_optimizers == 1 else 2
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": parameters[:1]}, {"params": parameters[1:cut], "lr": 0.3}], lr=0.1
        )
    ]
    if num_optimizers == 2:
        optimizers.append(torch.optim.SGD(parameters[cut:], lr=0.1, momentum=0.5))
    for seed in (1, 2):
        steps(module, optimizers, seed)
    return module, optimizers


def steps(module: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    module(x).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_an_export_is_what_a_save_writes_byte_by_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_optimizers: int
) -> None:
    module, optimizers = trained(num_optimizers=num_optimizers)
    checkpoint_of_model.write(Folder(tmp_path), module, optimizers)
    out = tmp_path / "exported" / "model.safetensors"
    assert psdist("export", tmp_path, out) == 0
    assert "11 tensors of" in capsys.readouterr().out
    state = module.state_dict()
    assert len(state) == 11
    save_file({name: each.contiguous().clone() for name, each in state.items()}, tmp_path / "own")
    assert out.read_bytes() == (tmp_path / "own").read_bytes()
    module.load_state_dict(load_file(out))


def test_an_export_of_a_run_takes_the_newest_that_is_whole(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run_dir / "checkpoints" / "step-00000200" / "server-0.safetensors")
    out = tmp_path / "out.safetensors"
    assert psdist("export", run_dir, out) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("psdist: checkpoint step-00000200 is not used: ")
    assert captured.out.endswith("step-00000100\n")
    made = Made(step=100, seed=100)
    found = load_file(out)
    assert torch.equal(found["half"], made.elements[1, 0, "value"].half())
    assert torch.equal(
        found["first.weight"], made.elements[0, 1, "value"].as_strided((30, 7), (1, 30))
    )
    assert torch.equal(found["tied"], found["first.weight"])
    assert psdist("export", run_dir / "checkpoints" / "step-00000200", out) == 2
    assert "damaged: its checksum is" in capsys.readouterr().err


def with_models(tmp_path: Path, models: Any) -> Path:
    made = Made()
    made.trees[0]["models"] = models
    return made.write(Folder(tmp_path / "run")).path


ONE = {"embedding": (0, 0)}


@pytest.mark.parametrize(
    ("models", "words", "line"),
    [
        ([ONE, ONE], [], "has 2 models: say which, --model 0 to 1, in the order of job.prepare"),
        ([ONE, ONE], ["--model", "2"], "has 2 models, counted from 0"),
        ([], [], "has 0 models"),
        (None, [], "worker 0 has not kept a model's names"),
        ([{"a": (0,)}], [], "worker 0 has not kept a model's names"),
        ([{"a": (0, -1)}], [], "worker 0 has not kept a model's names"),
        ([{3: (0, 0)}], [], "worker 0 has not kept a model's names"),
        ([{"a": (0, 2)}], [], "a name is of piece (0, 2), which it lacks"),
        ([{"a": (2, 0)}], [], "a name is of piece (2, 0), which it lacks"),
        ([ONE], ["--format", "zip"], "zip is neither safetensors nor dcp"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    models: Any,
    words: list[str],
    line: str,
) -> None:
    out = tmp_path / "out.safetensors"
    assert psdist("export", with_models(tmp_path, models), out, *words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert not out.exists()


def test_one_of_several_models_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = with_models(tmp_path, [ONE, {"half": (1, 0)}]), tmp_path / "out.safetensors"
    assert psdist("export", path, out, "--model", 1) == 0
    assert list(load_file(out)) == ["half"]
    capsys.readouterr()


def test_where_an_export_cannot_be_written_is_said(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for out, line in (
        (tmp_path / "file" / "out.safetensors", "cannot be written"),
        (tmp_path / "out.pt", "the file's name must end in .safetensors"),
    ):
        assert psdist("export", run_dir, out) == 2
        assert line in capsys.readouterr().err
    assert psdist("export", run_dir, run_dir, "--format", "dcp") == 2
    assert "is there: give a folder that is new" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_torch_goes_on_from_an_export_in_its_own_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_optimizers: int
) -> None:
    module, optimizers = trained(num_optimizers=num_optimizers)
    checkpoint_of_model.write(Folder(tmp_path), module, optimizers)
    assert psdist("export", tmp_path, tmp_path / "dcp", "--format", "dcp") == 0
    capsys.readouterr()
    other, others = trained(num_optimizers=num_optimizers)
    steps(other, others, 5)
    model_state, optimizer_state = get_state_dict(other, others)
    state = {"model": model_state, "optim": optimizer_state}
    load(state, checkpoint_id=str(tmp_path / "dcp"))
    set_state_dict(other, others, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert same(module, other)
    steps(module, optimizers, 6)
    steps(other, others, 6)
    assert same(module, other)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(
        name == its and torch.equal(each, other_each) for (name, each), (its, other_each) in pairs
    )


def test_a_list_and_a_proof_load_no_torch(run_dir: Path) -> None:
    program = (
        "import sys\n"
        "from psdist.commands.checkpoints import list_all, verify\n"
        "from pathlib import Path\n"
        f"status = list_all(Path({str(run_dir)!r})) + verify(Path({str(run_dir)!r}))\n"
        "sys.exit(repr([status, {'torch', 'mpi4py'} & set(sys.modules)]))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stderr == "[0, set()]\n"
