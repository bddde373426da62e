"""Chooses how a parameter set is trained on a worker: who clips its gradients, if they may leave
before ``step()``, and which step strategy it gets. Everything is decided once, from the settings.

    clipping = Clipping.of(config, max_norm=1.0)
    early = EarlyChoice.of(config, "auto", clipping, device="cpu", ...)
    strategy = strategy_of(request, parts, early, driver=...)

psdist.workers.assembly builds what is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from psdist.config.codec_rounds import codecs_that_may_come
from psdist.config.codec_specs import text_of
from psdist.config.compatibility import has
from psdist.config.modes import judging_mode
from psdist.config.outer import counted_steps, has_rounds, steps_on_workers
from psdist.config.settings import RunConfig
from psdist.protocol.partition import Partition
from psdist.protocol.send_order import backward_order, round_order
from psdist.workers.assembly import SetMemory
from psdist.workers.blocking import Blocking, Parts
from psdist.workers.early.group_overlap import GroupEarlyPush, Sums
from psdist.workers.early.overlap import EarlyPush
from psdist.workers.early.progress import Driver
from psdist.workers.group.channel import GroupChannel
from psdist.workers.late.pipelined import Pipelined
from psdist.workers.late.steps import LateWait, say_as_auto, why_not_late_here
from psdist.workers.loop import WorkerLoop
from psdist.workers.missed_rounds import MissedRounds, WorkerRule
from psdist.workers.model.description import ModelDescription
from psdist.workers.rounds.differences import LocalDifferences
from psdist.workers.rounds.local_steps import LocalSteps, Rounds
from psdist.workers.rounds.sums import SummedGradients
from psdist.workers.tables.follower import Tables

Setting = Literal["auto", "off", "strict", "full"]
"""The setting ``overlap``."""

ORDERS: Final[dict[Setting, Callable[[Partition], Sequence[int]]]] = {
    "off": lambda _partition: (),
    "auto": backward_order,
    "strict": backward_order,
    "full": round_order,
}
"""The order in which all groups send: known before anything was watched, so it is the same on all
of them."""


class SetRequest(NamedTuple):
    """The arguments of job.prepare for one parameter set."""

    module: torch.nn.Module
    description: ModelDescription
    original: torch.optim.Optimizer
    """The script's optimizer."""
    on_servers: torch.optim.Optimizer
    """The optimizer that servers run: the script's, or with local steps the outer optimizer."""
    max_norm: float
    """max_grad_norm; 0 for none."""
    overlap: Setting
    tables: Tables | None = None
    """The tables that follow its steps."""


class Clipping(NamedTuple):
    """Where ``max_grad_norm`` clips, and the norm; 0: it does not clip there."""

    in_step: float
    """Every step clips the gradient of the group, or with local steps of this worker's group."""
    in_push: float
    """The group's sum of several steps is clipped before it is pushed."""
    on_servers: float
    """Servers clip the joint gradient of all groups."""
    why_own: str
    """Why each group clips its own gradient in sync, for people; "" if none does."""

    @classmethod
    def of(cls, config: RunConfig, max_norm: float) -> Clipping:
        mode = judging_mode(config)
        why = ""
        # Servers receive coded gradients: their joint norm is not known. And if groups may miss
        # rounds, no server waits for the norm of other groups.
        if codecs := [push for push, _ in codecs_that_may_come(config) if not push.is_none]:
            why = f"codec.push = {text_of(codecs[0])} changes its norm on the way"
        if has(config, "backup groups"):
            why = "groups may miss rounds (backup)"
        own = max_norm if mode != "sync" or why else 0.0
        on_servers = 0.0 if why and mode == "sync" else max_norm
        why_own = why if max_norm and mode == "sync" else ""
        if steps_on_workers(config):
            return cls(max_norm, 0.0, 0.0, why_own)
        if has_rounds(config):
            return cls(0.0, own, on_servers, why_own)
        return cls(own, 0.0, on_servers, why_own)


class EarlyChoice(NamedTuple):
    """If gradients of a set may leave before ``step()``."""

    setting: Setting
    """The setting ``overlap``; "off" if no gradient of the job may leave early."""
    why_not: str
    """Why no gradient of this worker leaves early, for people; "" if it may."""

    @property
    def is_on(self) -> bool:
        return self.setting != "off" and not self.why_not


def why_never(config: RunConfig, *, clips_to: float, is_alone: bool, reforms: bool) -> str:
    """Return why no gradient of the job may leave before step(), or "". ``clips_to``: the norm to
    which workers clip, 0 for none; ``is_alone``: one process is the job; ``reforms``: groups
    continue without failed workers."""
    if is_alone:
        return "one process has no communication to hide"
    if config.pipeline:
        return "with consistency.pipeline = 1 everything has the next iteration to hide behind"
    if has_rounds(config):
        return "gradients of local steps stay in the group; what is pushed is made in step()"
    if has(config, "skipped pushes"):
        return "with skip step() decides which chunks are pushed"
    if has(config, "backup groups"):
        return "with backup groups a round closes when gradients are sent in step()"
    if reforms:
        return "a group that may shrink reduces in step() alone"
    if config.on_nonfinite == "skip":
        return "training.on_nonfinite = skip leaves out whole iterations, which step() decides"
    if clips_to:
        mode = judging_mode(config)
        where = f"in {mode}" if mode != "sync" else "with a push codec"
        return f"{where} max_grad_norm clips the whole gradient of the group before it leaves"
    return ""


def why_not_here(*, device: str, group_size: int, has_thread: bool) -> str:
    """Return why no gradient of this worker may leave early, while those of other groups may, or
    "". ``has_thread``: a thread besides the script's may drive the loop."""
    if device == "cpu":
        return ""
    if group_size > 1:
        return (
            f"the model is on {device}; in groups of several gradients leave early on the CPU only"
        )
    if not has_thread:
        return (
            f"the model is on {device}, where gradients come in a thread of autograd's, and this "
            "MPI gives no MPI_THREAD_MULTIPLE, with which another thread could send them"
        )
    return ""


def rule_of(
    config: RunConfig,
    memory: SetMemory,
    loop: WorkerLoop,
    tables: Tables | None,
    on_missed: Callable[[int], None],
) -> WorkerRule:
    """Return the rule for rounds that close without this worker's group, which tables never
    miss. ``on_missed(rounds)``: see :class:`MissedRounds`."""
    if tables is not None:
        return tables
    if has(config, "backup groups"):
        return MissedRounds(memory.group, loop, memory.values.uses, on_missed=on_missed)
    return WorkerRule()


def strategy_of(
    request: SetRequest,
    parts: Parts,
    early: EarlyChoice,
    *,
    driver: Driver | None,
    another_end: Callable[[], GroupChannel],
    sums: Sums | None,
    free_s: Callable[[], float],
    newest: Sequence[torch.Tensor],
) -> Blocking:
    """Return how gradients leave and replies come in. ``driver``: of the loop while the script
    computes, None if nothing is under way then; ``another_end()``: of the group; ``sums``: of a
    group that reduces gradients during backward; ``free_s``: see :class:`GroupEarlyPush`;
    ``newest``: see :class:`Pipelined`."""
    if early.setting == "off":
        return Blocking(parts) if driver is None else Pipelined(parts, driver=driver, newest=newest)
    module = request.module

    def is_training() -> bool:
        return module.training

    if early.setting == "full" and driver is not None:
        why = why_not_late_here(
            group_size=parts.group.channel.size, has_mirrors=parts.flat.transfers.has_mirrors
        )
        if not why:
            return LateWait(parts, driver=driver, is_training=is_training, module=module)
        say_as_auto(parts.loop.core.set_index, why)
    if sums is None or driver is None:
        return EarlyPush(parts, driver=driver, is_training=is_training)
    return GroupEarlyPush(
        parts,
        driver=driver,
        is_training=is_training,
        other_end=another_end(),
        sums=sums,
        free_s=free_s,
    )


def with_rounds(
    config: RunConfig,
    inner: Blocking,
    rounds: Rounds,
    *,
    step: Callable[[], Any],
    has_pending: Callable[[], bool],
    clips_to: float,
    share: float,
    anchor: Sequence[torch.Tensor],
) -> LocalSteps:
    """Return the strategy whose rounds of several steps ``inner`` exchanges. ``step``, ``anchor``
    and ``share`` (the weight): see :class:`LocalDifferences`; ``has_pending`` and ``clips_to``: see
    :class:`SummedGradients`."""
    if steps_on_workers(config):
        return LocalDifferences(inner, rounds, step=step, weight=share, anchor=anchor)
    return SummedGradients(
        inner,
        rounds,
        steps=counted_steps(config),
        has_pending=has_pending,
        clips_to=clips_to,
    )
