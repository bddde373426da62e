"""Servers step torch's optimizers without torch._dynamo, and get torch's bits all the same."""

from __future__ import annotations

import sys

from tests.support.mpirun import run_program

PROGRAM = """
import sys

import torch

import psdist.servers.loop
import psdist.servers.shard.tensors
from psdist.protocol.optimizers import ACCEPTED, traits
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec

SHAPE = (7, 11)
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
HYPER = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "Adam": {"weight_decay": 0.1},
}
NAMES = [name.rpartition(".")[2] for name in ACCEPTED if hasattr(torch.optim, name[12:])]

def start():
    return torch.linspace(-1.0, 1.0, 77)

def grads():
    return [(start() * (number + 1.3)).cos() for number in range(5)]

def on_a_server(name):
    full, values = f"torch.optim.{name}", start()
    hyper = {"lr": 0.05, **HYPER.get(name, {})}
    segment = SegmentSpec(piece=0, offset=0, length=77, shape=SHAPE)
    optimizer = ChunkOptimizer(
        name=full, traits=traits(full), hyper=hyper, values=values, segments=[segment]
    )
    for grad in grads():
        optimizer.step(values=values, grad=grad, hyper=hyper, lr_scale=1.0, absent=frozenset())
    return values

def in_plain_torch(name):
    parameter = torch.nn.Parameter(start().view(SHAPE))
    optimizer_class = getattr(torch.optim, name)
    how = {"fused": True} if name in FUSED else {}
    optimizer = optimizer_class([parameter], lr=0.05, **how, **HYPER.get(name, {}))
    for grad in grads():
        parameter.grad = grad.view(SHAPE)
        optimizer.step()
    return parameter.detach().view(-1)

def is_dynamo_here():
    return "torch._dynamo" in sys.modules
"""

SERVER_FIRST = """
ours = {name: on_a_server(name) for name in NAMES}
print("optimizers", len(NAMES) >= 12, {"SGD", "Adam", "AdamW"} <= set(NAMES))
print("dynamo", is_dynamo_here())
torch.optim.SGD([torch.nn.Parameter(start())])
print("dynamo for a script's own optimizer", is_dynamo_here())
print("differ", [name for name in NAMES if not torch.equal(ours[name], in_plain_torch(name))])
"""


def test_a_server_steps_every_optimizer_without_dynamo_and_gets_torchs_bits() -> None:
    lines = printed(SERVER_FIRST)
    assert lines == [
        "optimizers True True",
        "dynamo False",
        "dynamo for a script's own optimizer True",
        "differ []",
    ]


UNKNOWN_WRAPPERS = """
for function in (torch.optim.Optimizer.add_param_group, torch.optim.SGD.step):
    del function.__wrapped__
ours = on_a_server("SGD")
print("dynamo", is_dynamo_here())
print("equal", torch.equal(ours, in_plain_torch("SGD")))
"""


def test_a_torch_with_other_wrappers_imports_dynamo_and_steps_as_ever() -> None:
    assert printed(UNKNOWN_WRAPPERS) == ["dynamo True", "equal True"]


def printed(rest: str) -> list[str]:
    """Return the program's lines. It starts as a user starts it, without tests/support/startup."""
    done = run_program(
        [sys.executable, "-c", PROGRAM + rest], timeout_s=120, env={"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.text
    return done.stdout.splitlines()
