"""What starting a rank costs: what is imported, and what the garbage collector looks at."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.support.mpirun import run_program

PROGRAM = """
import gc, sys
import psdist
psdist.init
print("collects", gc.isenabled(), "never looks at many", gc.get_freeze_count() > 100_000)

import torch
parameter = torch.nn.Parameter(torch.ones(2))
parameter.sum().backward()
torch.optim.SGD([parameter], lr=1.0).step()
print("trained", parameter.tolist(), "dynamo", "torch._dynamo.eval_frame" in sys.modules)
doubled = torch.compile(lambda x: 2 * x, backend="eager")
print("compiled", doubled(parameter).tolist(), "dynamo", "torch._dynamo.eval_frame" in sys.modules)
"""


def test_what_scripts_import_is_frozen_and_tests_import_dynamo_only_where_it_is_used() -> None:
    done = run_program([sys.executable, "-c", PROGRAM], timeout_s=120)
    assert done.returncode == 0, done.text
    assert done.stdout.splitlines() == [
        "collects True never looks at many True",
        "trained [0.0, 0.0] dynamo False",
        "compiled [0.0, 0.0] dynamo True",
    ]


ROOMS = """
import sys
import {module}
rooms = ("psdist.workers.loop", "psdist.servers.loop", "psdist.servers.shard.tensors")
print([room for room in (*rooms, "torch._dynamo") if room in sys.modules])
"""


@pytest.mark.parametrize(
    ("module", "rooms"),
    [
        ("psdist.ranks.server", ["psdist.servers.loop", "psdist.servers.shard.tensors"]),
        ("psdist.joining", ["psdist.workers.loop"]),
    ],
)
def test_a_rank_imports_what_its_role_needs(module: str, rooms: list[str]) -> None:
    done = run_program([sys.executable, "-c", ROOMS.format(module=module)], timeout_s=120)
    assert done.returncode == 0, done.text
    assert done.stdout == f"{rooms}\n"


def test_the_collector_works_in_tests_and_never_looks_at_what_was_there_before() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
