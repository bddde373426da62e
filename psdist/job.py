"""The public API: what ``psdist.init()`` returns. docs/dev/design.md has the contract.

    job = psdist.init()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in job.loader(dataset, batch_size=64, shuffle=True): ...
    job.save("model.safetensors")
    job.close()                     # or nothing: the script's end is the job's; or: with ... as job

A Job holds no logic of its own: psdist.job_parts makes its parts, an iteration is
psdist.workers.trainer, messages are psdist.workers.loop, saving is psdist.workers.model.saving.
Longer than other modules: every method of the contract, with what its user must know.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader

from psdist.config.compatibility import reads_losses, without_substitutes
from psdist.config.modes import ModeFrom, schedule_of
from psdist.config.outer import steps_on_workers
from psdist.config.settings import allowed_values, contradiction
from psdist.errors import ConfigError, OptimizerRefusedError, UsageError, UserError
from psdist.job_parts import (
    device_of_job,
    let_group_shrink,
    loop_of,
    losses_of,
    standing_of,
    start_group,
)
from psdist.mode_names import MODES
from psdist.prepared import ParameterSets, refuse_call_of_group
from psdist.protocol.checkpoints import CHECKPOINT
from psdist.protocol.collected import SET_MODE, Brought, pack_mode
from psdist.protocol.ids import describe_workers, worker_of
from psdist.ranks.failure import flush_output, format_error, printable
from psdist.ranks.session import JobSession
from psdist.script_checkpoints import ScriptCheckpoints
from psdist.script_joins import require_one_set
from psdist.script_steps import LossSteps, ScriptPasses, SpeedSteps
from psdist.set_assembly import ORDERS, Setting
from psdist.tracing import Span
from psdist.tracing.tracer import Tracer
from psdist.worker_variables import restore_variables
from psdist.workers import metrics
from psdist.workers.data.loader import EpochLoader
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.position import Position
from psdist.workers.data.samplers import WorkerSampler
from psdist.workers.group import tier as group_tier
from psdist.workers.model.forward_hooks import storages_in
from psdist.workers.model.optimizer import ServedOptimizer, refuse_untrained
from psdist.workers.model.refusals import optimizers_of, refuse_untrainable
from psdist.workers.model.replaced_step import refuse_replaced_step
from psdist.workers.model.saving import check_suffix
from psdist.workers.progress_reports import tell_losses
from psdist.workers.tables.saving import save_rows
from psdist.workers.traced import TracedChannel, span_of_call

logger = logging.getLogger("psdist")

_Module = TypeVar("_Module", bound=torch.nn.Module)


def _tracer_of(job: Job) -> Tracer | None:
    return job._session.tracer


class Job:
    """A worker's part in the job. Every worker must call the collectives (prepare, set_parameters,
    save, checkpoint, optimizer_state, set_mode, mean, any, all, barrier, close) in the same order,
    and all workers of a group must call pull and ``clip_grad_norm_``."""

    def __init__(self, session: JobSession) -> None:
        if wrong := contradiction(session.config):
            raise ConfigError(wrong)
        roles, number = session.roles, worker_of(session.rank.me)
        self._session, self._config, self._number = session, session.config, number
        self.worker = number if session.replace is None else session.replace.worker
        """Index of this worker, 0 .. num_workers - 1. A spare has the index of the failed worker
        whose place it has taken."""
        self.num_workers = roles.num_beginning
        """Number of workers at the start of the job."""
        self.rank = self.worker
        """The same as ``worker``, under the name that scripts for torchrun use."""
        self.world_size = self.num_workers
        """The same as ``num_workers``: servers do not count."""
        self.local_rank = roles.local_index(number)
        """Index of this worker among the workers of its host."""
        self.mpi_rank = session.rank.number
        """Rank of this process in MPI_COMM_WORLD, which includes servers."""
        self.group = roles.group_of_worker[self.worker]
        """Index of this worker's group, 0 .. num_groups - 1."""
        self.num_groups = roles.num_groups_beginning
        """Number of groups at the start of the job."""
        self.num_servers = self.servers = roles.num_servers
        """Number of ranks that serve."""
        torch.set_num_threads(session.rank.num_threads)
        self.device = device_of_job(session)
        """Device for the model of this worker: its own GPU, else the CPU."""
        self._mode: ModeFrom | None = None
        """Mode that the script has set in the run, also in attempts before."""
        if self._config.set_mode == "allowed" and session.tuning_state is not None:
            self._mode = session.modes_of(0)[-1]
        self.failure: BaseException | None = None
        """Error that ended this worker's part before the end of the job; it ends the script."""
        self._is_finished = False
        self._has_warned_of_clipping = self._has_warned_of_push = False
        self._has_warned_of_rows = False
        self._has_batches = self._config.global_batch is None
        """True once psdist has shared out a batch, if the settings give its size."""
        group = start_group(session, self.device)
        self._loop = loop_of(session)
        self._group = let_group_shrink(
            session, group, self._loop, self.device, lambda: self._sets.trainers
        )
        self._losses = losses_of(self._config)
        self._steps = self._make_steps()
        self._loaders = self._make_loaders()
        self._standing = standing_of(session, self._loop, self._losses)
        self._sets = self._make_sets()
        self._checkpoints = ScriptCheckpoints(
            session,
            self._loop,
            self._sets,
            self._loaders,
            device=self.device,
            collective=self._collective,
            checkpoint=self.checkpoint,
        )
        self._prepared_s = session.rank.now_s()
        self._checkpoints.begin()

    def _make_steps(self) -> SpeedSteps | LossSteps | ScriptPasses | None:
        """Return the rule for the lengths of rounds; None if all rounds are alike."""
        session, loop = self._session, self._loop
        if self._config.steps_by == "speed":
            return SpeedSteps(
                session,
                loop,
                worker=self.worker,
                group=self.group,
                is_leader=loop.core.seat.members[0] == self.worker,
                sets=lambda: self._sets,
                is_training=self._is_training,
                require_open=self._require_open,
            )
        if self._config.steps_by == "loss":
            return LossSteps(session, loop, self._losses, worker=self.worker, group=self.group)
        if self._config.local_steps == "epoch":
            return ScriptPasses(
                session,
                worker=self.worker,
                is_in_pass=lambda: self._loaders.seen.open_pass is not None,
                sets=lambda: self._sets,
            )
        return None

    def _make_loaders(self) -> Loaders:
        steps = self._steps
        return Loaders(
            seed=self._config.seed,
            worker=self.worker,
            num_workers=self.num_workers,
            on_batch=self._on_batch,
            on_end=self._sit_out,
            collective=self._collective,
            is_training=self._is_training,
            on_boundary=lambda a_pass: self._checkpoints.on_boundary(a_pass),
            on_trained=steps.end if isinstance(steps, ScriptPasses) else lambda *_: None,
            num_epochs=lambda: self._checkpoints.epochs.current,
            epoch_now=lambda: self._checkpoints.epochs.within,
            global_batch=self._config.global_batch,
            allocation=steps.allocation if isinstance(steps, SpeedSteps) else None,
            dropped=self._dropped,
        )

    def _make_sets(self) -> ParameterSets:
        tracer = self._session.tracer
        return ParameterSets(
            self._session,
            self._loop,
            self._group if tracer is None else TracedChannel(self._group, tracer),
            self._standing,
            collective=self._collective,
            on_iteration=self._end_iteration,
            on_use=lambda: self._checkpoints.on_use(),
            on_missed=self._loaders.miss,
            peek=self._loaders.peek,
            length=None if self._steps is None else self._steps.length,
        )

    @property
    def is_chief(self) -> bool:
        """True on the first worker that has not failed: the worker that writes files and prints."""
        return self._loop.core.chief == self._number

    @property
    def mode(self) -> str:
        """Mode of the next iteration: sync, ssp or async; after ``set_mode`` the mode that was set.
        ``auto`` if psdist chooses it, because workers do not receive its choice."""
        if self._config.mode == "auto" and self._config.schedule is None:
            return "auto"
        return self._mode_now.mode

    @property
    def staleness(self) -> int | None:
        """Bound of mode ssp, None in other modes. With a range (``staleness_to``) the upper end."""
        if self._config.staleness_to is not None and self.mode == "ssp":
            return self._config.staleness_to
        now = self._mode_now
        return now.staleness if self.mode == "ssp" else None

    @property
    def _mode_now(self) -> ModeFrom:
        if self._mode is not None:
            return self._mode
        parts = schedule_of(self._config)
        clock = self.clock if len(parts) > 1 else 0
        return next(part for part in reversed(parts) if part.round <= clock)

    # -- set-up --------------------------------------------------------------------------------

    @overload
    def prepare(
        self,
        model: _Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        overlap: Setting | None = None,
    ) -> tuple[_Module, ServedOptimizer]: ...

    @overload
    def prepare(
        self,
        model: _Module,
        optimizer: Sequence[torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        overlap: Setting | None = None,
    ) -> tuple[_Module, list[ServedOptimizer]]: ...

    @overload
    def prepare(
        self,
        model: _Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *loaders: DataLoader[Any],
        max_grad_norm: float | None = None,
        overlap: Setting | None = None,
    ) -> tuple[Any, ...]: ...

    def prepare(
        self,
        model: _Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *loaders: DataLoader[Any],
        max_grad_norm: float | None = None,
        overlap: Setting | None = None,
    ) -> tuple[Any, ...]:
        """Move the parameters of ``model`` to the servers, and return what to train with.

        Returns the model, the optimizer to use from now on, and a loader for each loader:
        ``model, optimizer, loader = job.prepare(model, optimizer, loader)``.

        - The model is the same object. Its parameters have the chief's values.
        - The optimizer shares ``param_groups`` with yours, whose ``step()`` is an error from now
          on. Optimizer state of the chief moves to the servers, and ``optimizer.state`` is empty
          then, except with local steps. State of other workers may differ. Hyperparameters must
          agree on all workers.
        - Each loader gives this worker's part of the data. Its batch size is per worker.

        Pass several optimizers, for parts of the model, as a list; they return as a list. Each is a
        parameter set with its own clock. Call ``prepare`` again for another model.

        ``max_grad_norm``: every step clips the gradient of each optimizer's parameters to this L2
        norm. In sync it clips the gradient of the joint batch, in ssp and async the mean gradient
        of the worker's group.

        ``overlap``: replaces the setting ``transfer.overlap`` for this model.

        Raises :class:`ModelError` if models or optimizers differ between workers, if two optimizers
        hold a parameter, if a trained parameter shares memory with another tensor, or if servers
        cannot hold the model. Raises :class:`OptimizerRefusedError` for an optimizer that servers
        refuse, an optimizer whose ``step`` was replaced, and state that cannot be cut by element
        (Adafactor's). Raises :class:`UsageError` for a wrapped model (DistributedDataParallel,
        fully_shard), and for loaders and norms that cannot be used.
        """
        self._require_open("prepare")
        self._require_between_steps("prepare")
        if dead := self._loop.core.dead:
            raise UsageError(
                f"job.prepare was called after {describe_workers(dead)} had failed; it needs every "
                "worker: prepare all models before training, or restart the job"
            )
        optimizers = optimizers_of(model, optimizer)
        refuse_untrainable(model)
        if not steps_on_workers(self._config):
            for each in optimizers:
                refuse_replaced_step(each)
        self._session.rank.reach("preparing")
        shared = [self._loaders.share_out(loader) for loader in loaders]
        max_norm = 0.0 if max_grad_norm is None else self._checked_norm("prepare", max_grad_norm)
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        if self._session.roles.num_substitutes:
            require_one_set(self._config, len(self._sets.sets) + len(optimizers))
        if self._session.rank.is_substitute and not self._checkpoints.join():
            logger.info("the job was over before this spare had joined it")
            self._end()
            raise SystemExit(0)
        is_first = not self._sets.sets
        chosen = self._config.overlap if overlap is None else overlap
        if chosen not in ORDERS:
            raise UsageError(
                f"job.prepare(overlap={overlap!r}): it must be {allowed_values('overlap')}"
            )
        self._checkpoints.script.before_prepare(model)
        served = self._sets.prepare(model, optimizers, max_norm=max_norm, overlap=chosen)
        prepared = self._sets.model_of(model, "prepare")
        self._checkpoints.script.prepared(prepared.for_checkpoints())
        if is_first:
            self._prepared_s = self._session.rank.now_s()
            self._checkpoints.occasions.begin_at(self.clock)
        self._session.rank.reach("training")
        return model, (served[0] if is_one else served), *shared

    # -- what a checkpoint has of the script ---------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Values of the script that every checkpoint contains; a resumed run starts with them.

        A dict of dicts, lists, tuples, strings, numbers, bools, None, bytes, tensors and numpy
        arrays. Each worker has its own. docs/guides/checkpoints.md says when psdist restores them.
        """
        return self._checkpoints.script.values

    def attach(self, **objects: Any) -> None:
        """Keep the state of these objects in every checkpoint, under the names given here.

        For schedulers, a GradScaler, and other objects with ``state_dict()`` and
        ``load_state_dict()``. Call it after ``prepare``, before the loop, on every worker. In a
        resumed run each object gets its state at once. Raises :class:`UsageError` for an object
        without these methods, and after training has begun.
        """
        self._require_open("attach")
        self._checkpoints.script.attached.add(objects, has_begun=self._checkpoints.has_trained)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Return the epochs to train: ``for epoch in job.epochs(10)`` gives 0 to 9.

        A resumed run starts with the epoch of the checkpoint, and its loader gives the batches that
        are left.
        """
        self._require_open("epochs")
        return self._checkpoints.epochs.loop(num_epochs)

    def _end_iteration(self) -> None:
        if not self._has_batches:
            raise UsageError(
                f"training.global_batch = {self._config.global_batch}: the script trains with "
                "batches that no loader of psdist's has shared out, so their size is unknown; "
                "let job.loader or job.prepare share them out, or unset it"
            )
        self._checkpoints.end_iteration()

    # -- training ------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """Iterations that this worker's group has finished, for the first parameter set."""
        return self.clocks[0] if self._sets.sets else 0

    @property
    def clocks(self) -> list[int]:
        """Iterations that this worker's group has finished, for each parameter set."""
        return [trainer.clock for trainer in self._sets.trainers]

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        shard: bool = True,
        epoch: int | None = None,
        epochs: int | None = None,
        **options: Any,
    ) -> EpochLoader:
        """Return a DataLoader over this worker's part of ``dataset``.

        Each epoch has every sample once, in an order that follows from the seed and the epoch, and
        the same number of batches on every worker.

        - ``batch_size``: samples per worker. The setting ``training.global_batch``, the samples of
          all workers together, replaces it.
        - ``shard``: with False every worker gets all samples.
        - ``epoch``: the epoch whose order to use; by default each pass has another one.
        - ``epochs``: the number of passes that the script will make. Only the display uses it.
        - Other options go to torch.utils.data.DataLoader.
        """
        self._require_open("loader")
        return self._loaders.make(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            shard=shard,
            epoch=epoch,
            epochs=epochs,
            options=options,
        )

    def sampler(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        epoch: int | None = None,
    ) -> WorkerSampler:
        """Return a sampler of this worker's part of ``dataset``, for a DataLoader of your own.

        All workers get the same number of samples. As with torch's DistributedSampler, some samples
        occur twice at the end of a pass; with ``drop_last`` some are left out instead.
        """
        self._require_open("sampler")
        return self._loaders.sampler(dataset, shuffle=shuffle, drop_last=drop_last, epoch=epoch)

    def _on_batch(self, position: Position, num_samples: int, nominal: float, batch: Any) -> None:
        # Batches of a validation loop are no part of an iteration.
        if self._is_training():
            self._has_batches = True
            storages = storages_in(batch)
            for trainer in self._sets.trainers:
                trainer.on_batch(num_samples, nominal, source=position, storages=storages)
            for tables in self._sets.tables:
                tables.on_batch(batch)
            position.use_batch()
            is_by_speed = isinstance(self._steps, SpeedSteps)
            self._standing.on_batch(position, is_of_equal_passes=not is_by_speed)

    # -- what is decided by the loss -----------------------------------------------------------

    def report(self, loss: float | torch.Tensor) -> None:
        """Report the loss of a batch or of a validation: ``job.report(loss.item())``.

        ``local.steps_by = loss``, ``training.loss_patience`` and ``training.rollback`` use it. This
        is no collective: each worker may report, or the chief alone, as often as it likes. psdist
        uses the mean of all reports since its last decision. ``loss`` is a number or a tensor of
        one value; reading a tensor on a GPU waits for the GPU.

        Raises :class:`UsageError` for a loss below 0 with ``local.steps_by = loss``, and for NaN
        and infinity unless ``training.on_nonfinite = skip``.
        """
        self._require_open("report")
        value = metrics.number("job.report", loss)
        # A resumed script repeats reports that its checkpoint has already.
        if reads_losses(self._config) and not self._checkpoints.is_resuming:
            self._losses.add(value)

    def _sit_out(self) -> None:
        if self._is_training():
            self._sets.take_over()
            first, *others = self._sets.trainers
            first.sit_out(others)

    def _dropped(self) -> Collection[int]:
        """Return the failed workers, and the workers of their groups that ended with them."""
        failed, roles = self._loop.core.dead, self._session.roles
        if not failed or self._session.reforms_groups:
            return failed
        return {each for worker in failed for each in roles.groups[roles.group_of_worker[worker]]}

    def _is_training(self) -> bool:
        return bool(self._sets.sets) and torch.is_grad_enabled() and not self._is_finished

    @span_of_call(Span.PULL_ALL, _tracer_of)
    def pull(self, *, exact: bool = False) -> None:
        """Get the newest parameters that the mode allows. All workers of a group must call it.

        With a pull codec, workers hold encoded and decoded parameters. ``exact`` gets the servers'
        own values, as ``job.save`` writes them, for an evaluation. Call ``job.pull()`` before
        training continues: until then ``step()`` and a forward pass with gradients raise
        :class:`UsageError`.
        """
        sets = self._prepared_between_steps("pull")
        refuse_call_of_group(self._session, "job.pull")
        for trainer in sets.trainers:
            trainer.pull()
        if exact:
            for each in sets.sets:
                each.show_exact()

    def clip_grad_norm_(
        self, max_norm: float, optimizer: ServedOptimizer | None = None
    ) -> torch.Tensor:
        """Clip the mean gradient of this worker's group to the L2 norm ``max_norm``.

        Returns the norm before clipping (float64, no dimension), the same on every worker of the
        group. It replaces ``torch.nn.utils.clip_grad_norm_``, which sees the gradient of one worker
        only. Call it last before ``step()``, on every worker of the group; ``p.grad`` keeps its
        values. In sync with several groups each group clips its own gradient, not the gradient of
        the joint batch: use ``max_grad_norm`` of :meth:`prepare` for that. With several optimizers,
        ``optimizer`` names the one whose gradients to clip.
        """
        refuse_call_of_group(self._session, "job.clip_grad_norm_")
        why = "a norm is of the gradients of one: job.clip_grad_norm_(max_norm, optimizer)"
        clipped = self._prepared("clip_grad_norm_").set_of(optimizer, "clip_grad_norm_", why)
        norm = self._checked_norm("clip_grad_norm_", max_norm)
        if self.mode == "sync" and self.num_groups > 1 and not self._has_warned_of_clipping:
            self._has_warned_of_clipping = True
            logger.warning(
                "job.clip_grad_norm_ clips the gradient of this worker's group: with %d groups in "
                "sync that is not the norm of the joint batch; job.prepare(..., max_grad_norm=%g) "
                "clips that",
                self.num_groups,
                norm,
            )
        return torch.tensor(clipped.clip(norm), dtype=torch.float64)

    def _checked_norm(self, call: str, norm: float) -> float:
        if not 0 < float(norm) < math.inf:
            raise UsageError(f"job.{call}: the norm to clip to must be above 0, got {norm!r}")
        return float(norm)

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Write one line to metrics.jsonl: numbers, tensors of one value, and strings.

        Use a dict for names that are no identifiers: ``job.log({"loss/train": x}, epoch=1)``.
        """
        self._require_open("log")
        plain = metrics.logged({} if values is None else values, more)
        line = {
            "time_s": round(time.monotonic() - self._session.started_s, 3),
            "rank": self.mpi_rank,
            "worker": self._number,
            "group": self._loop.core.seat.group,
            "clock": self.clock,
        }
        self._sets.take_over()
        self._loop.log({**line, "values": plain})
        self._send_progress()
        self._sets.resume()

    # -- collectives ---------------------------------------------------------------------------

    def mean(self, tree: Any) -> Any:
        """Return the mean over all workers of a number, a tensor, or a tree of them.

        Dicts, lists and tuples keep their structure. A tensor with dimensions stays a tensor;
        everything else becomes a float. All workers get the same bits. Raises
        :class:`CollectiveError` if the trees of workers differ.
        """
        described, values = metrics.pack(tree, num_workers=self.num_workers)
        return metrics.mean_of(tree, self._collective("mean", described, values=values))

    def any(self, flag: Any) -> bool:
        """Return True on all workers if ``flag`` is true on any worker.

        For decisions that all workers must take in the same iteration, such as to stop. ``flag`` is
        a bool, a number or a tensor of one value; other values raise :class:`UsageError`.
        """
        return bool(self._collective("any", metrics.packed_flag("any", flag)).unlike(metrics.FALSE))

    def all(self, flag: Any) -> bool:
        """Return True on all workers if ``flag`` is true on each of them; see :meth:`any`."""
        return not self._collective("all", metrics.packed_flag("all", flag)).unlike(metrics.TRUE)

    def set_mode(self, mode: str, *, staleness: int | None = None) -> None:
        """Change the mode of the run: ``job.set_mode("ssp", staleness=3)``.

        A collective: every worker must call it between two iterations, with the same values. The
        setting ``consistency.schedule = script`` must allow it.

        The mode changes after the next iteration, because the parameters for that iteration have
        arrived already. If groups are at different iterations, it changes after the next iteration
        of the fastest group. A resumed run continues with the mode that was set last; calls that
        the script repeats before the place of its checkpoint have no effect.

        Raises :class:`UsageError` if the setting does not allow it, and for an unknown mode.
        """
        if self._config.set_mode != "allowed":
            raise UsageError(
                "job.set_mode: the mode of this run is fixed; start the run with --set "
                "consistency.schedule=script"
            )
        known = next((each for each in MODES if each == mode), None)
        if known is None or (known == "ssp") != (staleness is not None):
            raise UsageError(
                f"job.set_mode({mode!r:.80}, staleness={staleness!r:.80}): sync and async have no "
                'staleness, ssp needs one: job.set_mode("ssp", staleness=3)'
            )
        if type(staleness or 0) is not int or not 0 <= (staleness or 0) < 2**31:
            raise UsageError(
                f"job.set_mode(staleness={staleness!r:.80}): the bound is a whole number from 0 to "
                f"{2**31 - 1}"
            )
        self._prepared_between_steps("set_mode")
        if not self._checkpoints.sets_mode(known, staleness or 0):
            return
        self._collective(SET_MODE, pack_mode(known, staleness or 0))
        self._mode = ModeFrom(self.clock, known, staleness or 0)

    def barrier(self) -> None:
        """Wait until every worker has called it."""
        self._collective("barrier")

    @span_of_call(Span.SAVE, _tracer_of)
    def save(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        tables: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the whole model as safetensors, under the names of its own ``state_dict()``.

        ``path`` must end in ``.safetensors``; missing folders are made. Trained parameters come
        from the servers, with every update pushed before the call; buffers and frozen parameters
        come from the chief. Returns on all workers when the file is complete. With several models,
        ``model`` names the one to save.

        ``state_dict()`` has no rows of tables (psdist.Embedding). ``tables`` names a second
        safetensors file, for the rows that were trained: for each table NAME.ids, int64 [n], and
        NAME.rows, float32 [n, dim]. Servers send them block by block, so no rank holds a table.
        Without ``tables`` a warning says that rows are not saved. Checkpoints always have them.
        """
        sets = self._prepared_between_steps("save")
        check_suffix(path)
        if tables is not None:
            check_suffix(tables)
            if not sets.tables or Path(tables) == Path(path):
                problem = "no model has tables" if not sets.tables else "it is the model's file"
                raise UsageError(f"job.save(..., tables={os.fspath(tables)!r}): {problem}")
        prepared = sets.model_of(model, "save")
        which = b"%d%s " % (sets.models.index(prepared), b" with rows" * (tables is not None))
        brought = self._collective("save", which + b"x" * sets.has_unused_gradients)
        unlike = {worker: brought.of(worker) or b"x" for worker in brought.unlike(which)}
        if untrained := [worker for worker, its in unlike.items() if its.endswith(b"x")]:
            raise refuse_untrained("job.save", untrained)
        if unlike:
            raise UsageError(
                f"job.save({str(path)!r}): {describe_workers(unlike)} saves another model than "
                "this worker, or no rows of tables; all workers must save the same"
            )

        def write() -> None:
            prepared.write(Path(path))
            if tables is not None:
                save_rows(Path(tables), sets.tables[0].loop)
            elif sets.tables and not self._has_warned_of_rows:
                self._has_warned_of_rows = True
                logger.warning("job.save: %s has no rows of tables; tables=FILE saves them", path)

        failed = (OSError, SafetensorError, UserError)
        call = f"job.save({str(path)!r})"
        if problem := self._by_chief("save", write, failed, call):
            raise UsageError(problem)

    def _by_chief(
        self,
        name: str,
        do: Callable[[], object],
        failed: tuple[type[Exception], ...] = (),
        call: str = "",
    ) -> str:
        """Call ``do()`` on the chief, and on the next chief if that one fails meanwhile. Collective
        over all workers. Return on all of them the text of an error of the types ``failed``, after
        ``call``; "" without an error."""
        problem = ""
        while True:
            chief = self._loop.core.chief
            if self.is_chief:
                try:
                    do()
                except failed as error:
                    problem = printable(f"{call}: {error}")
            (first, *_) = self._collective(name, problem.encode()).payloads  # the chief's
            if chief not in self._loop.core.dead:
                return first.decode()

    @span_of_call(Span.OPTIMIZER_STATE, _tracer_of)
    def optimizer_state(self, optimizer: ServedOptimizer | None = None) -> dict[str, Any] | None:
        """Return the optimizer state on the chief, as torch's ``state_dict()``; None elsewhere.

        It contains every update pushed before the call. A plain optimizer of the same class and
        parameter groups continues from it with ``load_state_dict``, and so does the next job whose
        ``prepare`` gets that optimizer. Parameter groups are those of ``optimizer.param_groups``
        now. Tensors are new, on the CPU, in the dtype that servers compute in (float32 for float16
        and bfloat16). In ssp and async the state of each chunk is the newest one of its server.
        With several optimizers, ``optimizer`` names the one to return.

        Raises :class:`OptimizerRefusedError` for state that cannot be put together (Adafactor's).
        """
        sets = self._prepared_between_steps("optimizer_state")
        why = "this is the state of one: job.optimizer_state(optimizer)"
        chosen = sets.set_of(optimizer, "optimizer_state", why)
        if steps_on_workers(self._config):
            raise UsageError(
                "job.optimizer_state with local steps: the optimizer steps on each worker, and its "
                "state is there: optimizer.state_dict()"
            )
        which = b"%d" % chosen.loop.core.set_index
        if unlike := self._collective("optimizer_state", which).unlike(which):
            raise UsageError(
                f"job.optimizer_state: {describe_workers(unlike)} asks for another optimizer's "
                "state than this worker; all workers must ask for the same one"
            )
        found: list[dict[str, Any]] = []
        problem = self._by_chief(
            "optimizer_state",
            lambda: found.append(chosen.optimizer_state()),
            (OptimizerRefusedError,),
            "job.optimizer_state",
        )
        if problem:
            raise OptimizerRefusedError(problem)
        return found[-1] if found else None

    @span_of_call(Span.CHECKPOINT, _tracer_of)
    def checkpoint(self) -> str:
        """Write a checkpoint to RUN_DIR/checkpoints and return its name.

        Every worker must call it, between two iterations. Training waits while servers copy
        parameters and optimizer state in memory; psdist writes the files while training continues.
        If a checkpoint cannot be written (a full disk), a warning says so and the previous one
        stays the newest. ``psdist run --resume --run-dir RUN_DIR`` starts from the newest complete
        checkpoint, on any number of servers and workers. ``checkpoint.keep`` says how many stay.

        Raises :class:`UsageError` between backward() and step() if gradients have left, and where a
        round of accumulated gradients would end. With ``local.steps_by = speed`` it raises that
        error within a round, and in other modes than sync.
        """
        self._prepared("checkpoint")
        self._checkpoints.require_may_be_cut()
        self._require_between_steps("checkpoint")
        return self._checkpoints.make()

    @span_of_call(Span.SET_VALUES, _tracer_of)
    def set_parameters(self, model: torch.nn.Module | None = None) -> None:
        """Send the chief's values of the whole model to the servers and to every worker.

        Call it after the script has written parameters, with load_state_dict() or otherwise. Values
        that other workers have written are replaced. The servers keep the optimizer state. With
        several models, ``model`` names the one to send.
        """
        refuse_call_of_group(self._session, "job.set_parameters")
        if self._session.roles.num_substitutes:
            raise UsageError(
                "job.set_parameters with spares for workers' places: a spare would not receive "
                f"what servers do not hold; {without_substitutes(self._config)}, or write the "
                "values before job.prepare"
            )
        sets = self._prepared_between_steps("set_parameters")
        prepared = sets.model_of(model, "set_parameters")
        for each in prepared.sets:
            each.require_pushable()
        which = b"%d" % sets.models.index(prepared)
        brought = self._collective("set_parameters", which)
        if unlike := brought.unlike(which):
            raise UsageError(
                f"job.set_parameters: {describe_workers(unlike)} names another model than this "
                "worker; all workers must name the same model"
            )
        self._by_chief("set_parameters", prepared.set_values)
        sets.bring(prepared)

    def push(self, model: torch.nn.Module | None = None) -> None:
        """Deprecated name of :meth:`set_parameters`."""
        if self.is_chief and not self._has_warned_of_push:
            self._has_warned_of_push = True
            logger.warning("job.push is deprecated; write job.set_parameters")
        self.set_parameters(model)

    def _collective(self, name: str, payload: bytes = b"", *, values: bytes = b"") -> Brought:
        self._require_open(name)
        self._sets.take_over_for(name)
        self._checkpoints.called(name)
        self._checkpoints.tell()
        self._loop.begin_waiting(self.clock)
        self._loop.wait_for(self._group.agree(name), name)
        if name == CHECKPOINT and self._config.steps_by == "loss":
            # It keeps all that was reported; what others have still to tell of a block, too.
            tell_losses(self._losses, self.worker, self.clock, self._session.transport)
        self._send_progress()  # the coordinator judges by it who has missed the call
        return self._loop.collective(name, payload, values=values)

    def _require_open(self, what: str) -> None:
        if self._is_finished:
            raise UsageError(
                f"job.{what}() was called after job.close(), which has ended this job; "
                "psdist.init() begins another one"
            )

    def _prepared(self, what: str) -> ParameterSets:
        self._require_open(what)
        if not self._sets.sets:
            raise UsageError(
                f"job.{what}() was called before job.prepare(): call model, optimizer = "
                "job.prepare(model, optimizer) first"
            )
        return self._sets

    def _prepared_between_steps(self, what: str) -> ParameterSets:
        sets = self._prepared(what)
        self._require_between_steps(what)
        return sets

    def _require_between_steps(self, what: str) -> None:
        self._sets.take_over_for(what)
        has_left = any(trainer.strategy.is_half_pushed for trainer in self._sets.trainers)
        if has_left or self._loop.core.is_half_pushed:
            raise UsageError(
                f"job.{what}() was called between backward() and optimizer.step(), when gradients "
                "have left already; call it after optimizer.step(), or prepare the model with "
                'job.prepare(..., overlap="off")'
            )

    def _send_progress(self) -> None:
        self._standing.send(self._sets.trainers)

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True after :meth:`close`, and after the end of the script."""
        return self._is_finished

    def close(self) -> None:
        """End the job and wait until all workers have called it. The script continues.

        Afterwards the files of the run are complete, and the next psdist.init() starts another job
        of the same ranks. The end of the script does the same if the script does not call it. The
        model keeps its values; calls to the job are errors, except reading its numbers. A second
        call has no effect.
        """
        if self.failure is not None:
            raise UsageError(
                f"job.close() was called after the job had failed: {type(self.failure).__name__}"
            )
        self._refuse_untrained("job.close")
        try:
            self.finish()
        except BaseException as error:
            self.failure = error  # others may have ended the job, or wait
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Close the job; an error is the end of the job, as that of a script is.

        Where other ranks take part they learn of it when it ends the script, which it does even if
        something catches it. One process without a launcher may begin another job.
        """
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        elif not self._is_finished:
            self.failure = error
            if self._session.rank.is_alone:
                self._session.exit.write_last_files(*format_error(error))
                self._end()

    def finish(self) -> int:
        """Report to the others and wait for them; psdist calls it at the script's end, once."""
        if self._is_finished:
            return 0
        if self._session.rank.is_substitute and self._loop.core.membership.welcome is None:
            self._end()
            return 0
        self._refuse_untrained("the script has ended")
        trained_s = self._session.rank.now_s() - self._prepared_s
        for trainer in self._sets.trainers:
            trainer.close()
        for tables in self._sets.tables:
            tables.finish()
        self._loop.begin_waiting(self.clock)
        self._loop.wait_for(self._group.agree("finish"), "finish")
        self._checkpoints.finish()
        for each in self._sets.sets:
            if each.history is not None:
                each.history.close()
        for tables in self._sets.tables:
            tables.uses.close()
        if self._steps is not None:
            self._steps.close()
        statistics = self._sets.statistics()
        report = {
            "trained_s": trained_s,
            "samples": max((each.samples for each in statistics), default=0),
            "dropped_samples": self._loaders.num_dropped,
            "bytes_sent": self._loop.transport.bytes_sent,
            "sets": [each.as_told() for each in statistics],
        }
        self._send_progress()
        flush_output()  # what the script has printed comes before the report of the run
        self._loop.finish(report)
        self._loop.wait_until_stopped(self._session.rank.waiting(has_deadline=False))
        self._end()
        return 0

    def _refuse_untrained(self, where: str) -> None:
        if self._sets.has_unused_gradients and not self._is_finished:
            raise refuse_untrained(where, [self.worker])

    def _end(self) -> None:
        self._is_finished = True
        self._checkpoints.end()
        self._sets.end()
        group_tier.stop(self._group)
        restore_variables()
        self._session.end()
