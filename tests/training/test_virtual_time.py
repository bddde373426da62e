"""A job over the virtual network is the same each time for one seed, message by message, however
long it really takes: everything that decides what is sent when has the job's own clock."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import TensorDataset

from psdist.checkpoint.tensors import write_tensors
from psdist.job import Job
from psdist.protocol.control import Control
from psdist.protocol.events import Frame
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import VirtualNetwork

GROUPS = ((0,), (1,), (2, 3))
BATCH = 4
PROBLEM = Problem(num_samples=20 * BATCH * 4)
JUMPS_S = {"stands still": (0.0,), "jumps": (1e-4, 1e-3, 0.3)}
"""By which real time advances from one look at it to the next; progress is told every 0.25 s."""


def script(job: Job, stage: Stage) -> Result:
    model = PROBLEM.model(seed=0)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    data = TensorDataset(*PROBLEM.data())
    paces = random.Random(job.group)
    for x, y in job.loader(data, batch_size=BATCH):
        stage.sleep(paces.choice((0.01, 0.01, 0.2)))  # now this group is slow, and now that one
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}


@contextmanager
def passing(how: str) -> Iterator[None]:
    """Real time continues so; where it jumps files take long, too."""
    jumps, now_s = random.Random(how), [1000.0]

    def look() -> float:
        now_s[0] += jumps.choice(JUMPS_S[how])
        return now_s[0]

    def write(*given: Any) -> Any:
        time.sleep(0.03 * (how == "jumps"))
        return write_tensors(*given)

    writes = mock.patch("psdist.ranks.checkpointing.worker_files.write_tensors", write)
    with writes, mock.patch("time.monotonic", look), mock.patch("time.perf_counter", look):
        yield


@contextmanager
def noted() -> Iterator[list[tuple[object, ...]]]:
    """All that is sent, in order: when, by whom, to whom, and what."""
    messages: list[tuple[object, ...]] = []
    transmit, transmit_control = VirtualNetwork.transmit, VirtualNetwork.transmit_control

    def send(network: VirtualNetwork, sender: int, peer: int, frame: Frame) -> None:
        payload = memoryview(frame.payload or b"")[: frame.num_payload_bytes()]
        header = bytes(frame.header)
        messages.append((network.now_s, sender, peer, header, zlib.crc32(payload)))
        transmit(network, sender, peer, frame)

    def send_control(
        network: VirtualNetwork, sender: int, peer: int, message: Control, set_index: int
    ) -> int:
        messages.append((network.now_s, sender, peer, message, set_index))
        return transmit_control(network, sender, peer, message, set_index)

    with (
        mock.patch.object(VirtualNetwork, "transmit", send),
        mock.patch.object(VirtualNetwork, "transmit_control", send_control),
    ):
        yield messages


def play(path: Path, time_: str, **settings: Any) -> list[tuple[object, ...]]:
    case = Case(name=time_, script=script, servers=2, groups=GROUPS, settings=settings)
    with noted() as messages, passing(time_):
        outcome = run_virtually(case, path / time_, seed=3)
    assert (outcome.summary["early_pushes"] > 0) == ("pipeline" not in settings)
    return messages


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "auto", "staleness": 3, "checkpoint_every": "1s"},
        {"mode": "ssp", "staleness": 2, "pipeline": 1, "checkpoint_every": "5"},
        {"codec": "auto", "overlap": "full"},
    ],
)
def test_messages_leave_in_the_same_order_however_long_things_really_take(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks leave early whatever a backward pass takes that takes no time of the job's clock.
    monkeypatch.setattr("psdist.workers.early.group_overlap.BUCKET_S", 1e9)
    first = play(tmp_path, "stands still", **settings)
    again = play(tmp_path, "jumps", **settings)
    differing = [pair for pair in zip_longest(first, again) if pair[0] != pair[1]]
    assert not differing[:1]
    kinds = {type(message).__name__ for _, _, _, message, _ in first}
    assert kinds >= {"Progress", "Done"}
    assert ("CommitMode" in kinds) == (settings.get("mode") == "auto")
    assert ("Written" in kinds) == ("checkpoint_every" in settings)
