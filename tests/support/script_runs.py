"""A worker's script without a network: what it sees and draws, cut at any boundary and continued.

whole = play(script)
first = play(script, cut_at=3)                  # ends at its third boundary
rest = resume(script, first.tree)
assert first.trace + rest.trace == whole.trace
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from psdist.checkpoint import tree as tree_codec
from psdist.protocol.collected import Brought
from psdist.workers.data.epochs import Epochs
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.seen import Pass
from psdist.workers.model.description import ModelDescription
from psdist.workers.script.state import ScriptModel, ScriptState


class Cut(Exception):
    """Raised where a checkpoint is made, instead of kill -9."""


@dataclass
class Worker:
    """The part of a Job that these scripts use."""

    worker: int = 0
    num_workers: int = 1
    cut_at: int | None = None
    global_batch: int | None = None
    trace: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tree: dict[str, Any] | None = None
    num_boundaries: int = 0
    clock: int = 0
    checkpoint_at: int | None = None
    num_checkpoints: int = 0
    looked_at: list[Any] = field(default_factory=list)
    """Batches that the script has evaluated: it may do so twice."""

    def __post_init__(self) -> None:
        self.loaders = Loaders(
            seed=3,
            worker=self.worker,
            num_workers=self.num_workers,
            on_batch=lambda *_: None,
            on_end=lambda: None,
            collective=_alone,
            is_training=torch.is_grad_enabled,
            on_boundary=self._on_boundary,
            num_epochs=lambda: self.epoch_loops.current,
            epoch_now=lambda: self.epoch_loops.within,
            global_batch=self.global_batch,
        )
        self.epoch_loops = Epochs(
            on_boundary=lambda: self._on_boundary(None),
            on_start=self._start_epoch,
            on_resume=lambda: self.script.resume(),
        )
        self.script = ScriptState(
            device=torch.device("cpu"),
            loaders=self.loaders,
            epochs=self.epoch_loops,
            is_chief=self.worker == 0,
            tell=self.lines.append,
        )
        self.state = self.script.values

    def loader(self, dataset: Any, **options: Any) -> Any:
        defaults: dict[str, Any] = {
            "batch_size": 2,
            "shuffle": True,
            "drop_last": False,
            "shard": True,
            "epoch": None,
            "epochs": None,
        }
        given = {key: options.pop(key, value) for key, value in defaults.items()}
        return self.loaders.make(dataset, **given, options=options)

    def epochs(self, count: int) -> Any:
        return self.epoch_loops.loop(count)

    def attach(self, **objects: Any) -> None:
        self.script.attached.add(objects, has_begun=False)

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        description = ModelDescription.of(model, optimizer)

        def names() -> dict[str, Any]:
            saved = description.saved_names(model, skips_others=True)
            return {
                name: (0, value) if isinstance(value, int) else value
                for name, value in saved.items()
            }

        self.script.before_prepare(model)
        self.script.prepared(
            ScriptModel(module=model, names=names, groups=[optimizer.param_groups])
        )

    def step(self, *seen: Any) -> None:
        """One iteration: what it has seen, and what its dropout draws."""
        drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))
        self.trace.append((*map(_plain, seen), drawn))
        self.clock += 1
        self.loaders.seen.end_iteration()

    def checkpoint(self) -> None:
        """The script calls for one."""
        if self.checkpoint_at == self.num_checkpoints:
            self.cut(self.loaders.seen.open_pass)
        self.num_checkpoints += 1

    def _start_epoch(self, is_again: bool) -> None:
        if not is_again:
            self.script.resume()
        self.loaders.seen.start_epoch(is_resumed=is_again)

    def _on_boundary(self, a_pass: Pass | None) -> None:
        if a_pass is not None and a_pass.is_resume_point:
            a_pass.is_resume_point = False
            self.script.resume()
            return
        if a_pass is None and not self.loaders.seen.awaits_pass:
            self.script.resume()
        if self.script.is_resuming:
            return
        if self.cut_at == self.num_boundaries:
            self.cut(a_pass)
        self.num_boundaries += 1

    def cut(self, a_pass: Pass | None) -> None:
        self.tree = through_files(self.script.collect(at=a_pass))
        self.tree["clock"] = self.clock  # servers have it
        raise Cut


Script = Callable[[Worker], None]


def through_files(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree_codec.unpack(*tree_codec.pack(tree))
    return found


def play(
    script: Script,
    *,
    cut_at: int | None = None,
    checkpoint_at: int | None = None,
    share: tuple[int, int] = (0, 1),
    global_batch: int | None = None,
) -> Worker:
    """A run from the start, up to the cut."""
    worker = Worker(*share, cut_at=cut_at, checkpoint_at=checkpoint_at, global_batch=global_batch)
    seed_all(share[0])
    _run(script, worker)
    return worker


def resume(
    script: Script,
    tree: dict[str, Any],
    *,
    cut_at: int | None = None,
    share: tuple[int, int] = (0, 1),
    is_moved: bool = False,
    global_batch: int | None = None,
) -> Worker:
    """In what is another process: its random numbers are others."""
    worker = Worker(*share, cut_at=cut_at, clock=tree["clock"], global_batch=global_batch)
    seed_all(99)
    worker.script.restore(tree, name="step-00000007", is_moved=is_moved)
    _run(script, worker)
    return worker


def _run(script: Script, worker: Worker) -> None:
    with contextlib.suppress(Cut):
        script(worker)


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _alone(_name: str, payload: bytes) -> Brought:
    return Brought((payload,), ((0, 1),), b"")
