"""The parameter sets of a worker's job, which ``job.prepare`` makes.

A set is the parameters of one optimizer. It has clocks, servers' memory and a history of its own;
no set waits for another. A model may have several, and a job several models.

    sets = ParameterSets(context, loop, group, standing, collective=...)
    served = sets.prepare(model, [optimizer], max_norm=0.0)        # a collective
    sets.trainers[0].clock
    sets.write(sets.model_of(None), path)

Longer than other modules: a set is made in one exchange of all workers, told in its order.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, Final

import torch

from psdist.checkpoint.reading import Checkpoint
from psdist.config.codec_rounds import codecs_that_may_come, why_on_host
from psdist.config.compatibility import refusal
from psdist.config.modes import is_mixed, judging_mode, row_staleness
from psdist.config.outer import ACCUMULATE, counted_steps, has_rounds, steps_on_workers
from psdist.errors import ModelError, OptimizerRefusedError, UsageError
from psdist.history.writers import WorkerHistory, history_folder
from psdist.protocol.collected import PREPARED, Brought
from psdist.protocol.control import Setup
from psdist.protocol.memory import as_bytes
from psdist.protocol.optimizer_state import PieceState, pack_states, parts_of
from psdist.protocol.optimizers import (
    canonical_name,
    check_mode,
    has_second_moment,
    hyperparameters,
    traits,
)
from psdist.protocol.partition import Partition
from psdist.ranks.checkpointing.tuning_state import levels_of
from psdist.ranks.failure import printable
from psdist.ranks.session import JobSession
from psdist.ranks.wire import credits_of, link_of_chunks, wire_of
from psdist.set_assembly import (
    ORDERS,
    Clipping,
    EarlyChoice,
    SetRequest,
    Setting,
    rule_of,
    strategy_of,
    why_never,
    why_not_here,
    with_rounds,
)
from psdist.table_assembly import TablePlan, caches_of
from psdist.tracing import Span
from psdist.workers.assembly import Layout, SetMemory, lay_out
from psdist.workers.batches import Batches, Storage
from psdist.workers.blocking import Blocking, Iteration, Parts
from psdist.workers.early.group_overlap import Sums
from psdist.workers.early.progress import BackgroundProgress, Driver, PollingProgress
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import WorkerLoop
from psdist.workers.model.description import (
    ModelDescription,
    agree_on_model,
    packed_hyperparameters,
)
from psdist.workers.model.forward_hooks import EndHook, OutputHook, UseHook
from psdist.workers.model.optimizer import ServedOptimizer
from psdist.workers.model.optimizer_state import (
    OwnState,
    ServersState,
    all_parts,
    describe_state,
)
from psdist.workers.model.refusals import WrappedParts, WrapperCheck, entered, refuse_renormalised
from psdist.workers.model.saving import copy_of_pieces, write_tensors
from psdist.workers.model.ties import Ties
from psdist.workers.model.watch import ModelWatch
from psdist.workers.progress_reports import ProgressReports
from psdist.workers.rounds.inner import LocalOptimizer, digest_of_state, make_outer
from psdist.workers.rounds.lengths import EqualSteps, RoundLength
from psdist.workers.rounds.local_steps import Rounds
from psdist.workers.script.state import ScriptModel
from psdist.workers.tables.follower import Tables
from psdist.workers.tables.loop import TableLoop
from psdist.workers.tables.modules import LocalRows
from psdist.workers.tables.uses import RowUses
from psdist.workers.traced import Passes, traced
from psdist.workers.trainer import Trainer, WorkerStatistics

logger = logging.getLogger("psdist")

_MOVES_BY_LR_TIMES_GRADIENT: Final = "torch.optim.SGD"


@dataclass(frozen=True, kw_only=True)
class ParameterSet:
    description: ModelDescription
    partition: Partition
    optimizer: ServedOptimizer
    """The optimizer that the script steps."""
    trainer: Trainer
    loop: WorkerLoop
    history: WorkerHistory | None
    watch: ModelWatch
    max_norm: float
    """max_grad_norm; 0 for none."""

    def clip(self, max_norm: float) -> float:
        """See :meth:`Trainer.clip`. Raises :class:`UsageError` if every step clips already."""
        self.trainer.strategy.require_clippable(max_norm)
        if self.max_norm:
            raise UsageError(
                f"job.prepare(max_grad_norm={self.max_norm:g}) clips in every step; leave "
                "job.clip_grad_norm_ out"
            )
        return self.trainer.clip(max_norm)

    def require_pushable(self) -> None:
        """Raises :class:`UsageError` if the model is no longer the prepared one."""
        self.watch.require_same(clock=self.trainer.clock)
        self.trainer.flat.require_in_place()

    def copy(self) -> list[torch.Tensor]:
        """Return the newest values of the pieces, from the servers."""
        return copy_of_pieces(
            self.partition,
            copy=lambda frames: self.loop.copy(frames, clock=self.trainer.clock),
        )

    def show_exact(self) -> None:
        """Put the servers' own values in place, without a codec, until the next pull."""
        if self.loop.replies.is_coded:
            self.trainer.strategy.values.show(self.copy())

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state from the servers, as torch's ``state_dict()``; on the chief,
        while all workers are in a collective. Raises :class:`OptimizerRefusedError`."""
        found = ServersState(self.partition)
        self.loop.fetch_state(all_parts(self.partition), found)
        states = found.by_piece(self.description.optimizer)
        parameters = self.description.parameters
        return self.optimizer.as_plain({parameters[each]: its for each, its in states.items()})


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    module: torch.nn.Module
    sets: list[ParameterSet]
    """The sets that train its parameters."""

    def write(self, path: Path) -> None:
        """Write the whole model as safetensors; on the chief, while all workers are in a
        collective."""
        copies = {each.loop.core.set_index: each.copy() for each in self.sets}
        names = self._names(skips_others=False).items()
        write_tensors(
            path,
            {
                name: copies[value[0]][value[1]] if isinstance(value, tuple) else value
                for name, value in names
            },
        )

    def for_checkpoints(self) -> ScriptModel:
        """Return what a checkpoint keeps of the model."""
        own = [each.optimizer for each in self.sets]
        return ScriptModel(
            module=self.module,
            names=lambda: self._names(skips_others=True),
            groups=[each.param_groups for each in own],
            own=[each if isinstance(each, LocalOptimizer) else None for each in own],
        )

    def _names(self, *, skips_others: bool) -> dict[str, tuple[int, int] | torch.Tensor]:
        """Return (set, piece) of each trained name of the state_dict as it is now, and the tensor
        of each other name. ``skips_others``: see :meth:`ModelDescription.saved_names`."""
        names: dict[str, tuple[int, int] | torch.Tensor] = {}
        for each in self.sets:
            saved = each.description.saved_names(self.module, skips_others=skips_others)
            for name, value in saved.items():
                if isinstance(value, int):
                    names[name] = each.loop.core.set_index, value
                else:
                    names.setdefault(name, value)
        return names

    def set_values(self) -> None:
        """Make the values in memory the servers'; on the chief, while all workers are in a
        collective."""
        for each in self.sets:
            each.trainer.set_values()


def _watch_backward(batches: Batches, nodes: Sequence[torch.autograd.graph.Node] | None) -> None:
    """Count the batch of a finished forward pass once backward runs one of ``nodes``; None:
    the pass has failed, and its batch does not count."""
    if nodes is None:
        batches.drop()
    elif nodes and (confirm := batches.await_backward()) is not None:
        for node in nodes:
            node.register_prehook(confirm)


def _cut_of(partition: Partition, description: ModelDescription, max_norm: float) -> list[Any]:
    return [description.optimizer, zlib.crc32(partition.encode()), max_norm]


def refuse_another_model(checkpoint: Checkpoint, index: int, here: ModelDescription) -> None:
    """Raises :class:`ModelError` unless the checkpoint is of this model: parameter set ``index`` of
    the script, its parameters and its optimizer."""
    sets = checkpoint.index.sets
    difference = f"it has {len(sets)} prepared optimizers, the script prepares more"
    if index < len(sets):
        there = sets[index]
        difference = there.difference(here.pieces, optimizer=here.optimizer)
        for mine, its in zip(there.pieces, here.pieces, strict=False):
            if not difference and mine.stride != its.stride:
                difference = (
                    f"parameter {its.name}: its elements lie as stride {mine.stride} there, "
                    f"{its.stride} here"
                )
    if difference:
        raise ModelError(
            f"the script's model is not that of checkpoint {checkpoint.path}: {difference}; resume "
            "with the script that wrote it, or start in another run_dir"
        )


class ParameterSets:
    def __init__(
        self,
        context: JobSession,
        loop: WorkerLoop,
        group: GroupChannel,
        standing: ProgressReports,
        *,
        collective: Callable[[str, bytes], Brought],
        on_iteration: Callable[[], None],
        on_use: Callable[[], None],
        on_missed: Callable[[int], None],
        peek: Callable[[int], Any] = lambda _number: None,
        length: RoundLength | None = None,
    ) -> None:
        """``on_iteration()``: an iteration of any set has ended; ``on_use()``: before a forward
        pass with gradients of any prepared model; ``on_missed(rounds)``: the group misses this
        many rounds after an iteration that is about to end; ``peek(n)``: return the n-th of the
        loader's next batches; ``length``: of rounds of local steps,
        if they differ."""
        self._length = length
        self._tell_missed = on_missed
        self._on_iteration = on_iteration
        self._on_use = on_use
        self.sets: list[ParameterSet] = []
        self.models: list[PreparedModel] = []
        self.tables: list[Tables] = []
        """The set of tables, if a model has any; it is the last set."""
        self._peek = peek
        self._context = context
        self._config = context.config
        self._loop = loop
        self._group = group
        self._end = group
        """The last of this worker's ends of its group."""
        self._standing = standing
        self._collective = collective
        self._held = [0] * context.roles.num_servers
        """Bytes of the sets so far, by server."""
        self._at_end: list[Callable[[], None]] = []
        self._ties = Ties()
        self._wrapped_parts = WrappedParts(self._is_held)
        self._at_end.append(self._wrapped_parts.stop)
        self._restored_residuals: Mapping[str, Any] = {}
        self._cuts: list[list[Any]] = []
        self._expected: list[list[Any]] | None = None
        self._progress: Driver | None = None
        LocalRows.refusal = (
            "a table is used that was not prepared: call model, optimizer = job.prepare(model, "
            "optimizer) first, with a model that contains it (a copy is another table)"
        )
        self._at_end.append(partial(setattr, LocalRows, "refusal", ""))
        self._passes: Passes | None = None
        if context.tracer is not None:
            self._passes = Passes(context.tracer, clock=lambda: self.trainers[0].clock)

    # -- what codecs have left out ----------------------------------------------------------

    def residuals(self) -> dict[str, Any]:
        """Return what codecs have left out of pushes, by set; for a checkpoint."""
        found: dict[str, Any] = {}
        for each in self.sets:
            encoder = each.loop.pushes.encoding.encoder
            if encoder is not None:
                found[str(each.loop.core.set_index)] = encoder.collect()
        return found

    def go_on_with(self, residuals: Mapping[str, Any]) -> None:
        """Restore a checkpoint's :meth:`residuals` in the sets that are prepared later."""
        self._restored_residuals = residuals

    def _restore_residuals(self, loop: WorkerLoop) -> None:
        index, encoder = loop.core.set_index, loop.pushes.encoding.encoder
        kept = self._restored_residuals.get(str(index))
        if kept and (encoder is None or not encoder.restore(kept)):
            logger.warning(
                "parameter set %d: what codecs had left out of pushes before the checkpoint is of "
                "other chunks, or codecs are off now: it is dropped",
                index,
            )

    # -- for who joins ---------------------------------------------------------------------------

    def cuts(self) -> list[list[Any]]:
        """Return the optimizer of each set, a checksum of its partition, and the limit for the norm
        of its gradients, as a tree of plain values."""
        return self._cuts

    def expect(self, cuts: list[list[Any]]) -> None:
        """Require the chief's :meth:`cuts` of the sets that this substitute prepares."""
        self._expected = cuts

    # -- what no step has used yet ---------------------------------------------------------------

    def pending_gradients(self) -> dict[str, dict[int, torch.Tensor | None]]:
        """Return accumulated gradients by set, for a checkpoint; see :class:`PendingGradients`."""
        found = {str(n): each.optimizer.pending.collect() for n, each in enumerate(self.sets)}
        pending = {id(each) for its in found.values() for each in its.values()}
        for each in self.tables:
            found[str(len(self.sets))] = each.pending_gradients(pending)
        return {index: its for index, its in found.items() if its}

    def accumulate(self, pending: Mapping[str, Mapping[int, torch.Tensor | None]]) -> None:
        """Restore what :meth:`pending_gradients` has returned."""
        for index, its in pending.items():
            if int(index) < len(self.sets):
                self.sets[int(index)].optimizer.pending.restore(its)
        for each in self.tables:
            each.accumulate(pending.get(str(len(self.sets)), {}))

    # -- who uses the loop ---------------------------------------------------------------------

    def take_over(self) -> None:
        """Give the loop to the script. Raises what went wrong since its last use."""
        if self._progress is not None:
            self._progress.take_over()

    def take_over_for(self, call: str) -> None:
        """As :meth:`take_over`, before ``call``, which waits for the other workers."""
        self.take_over()
        for trainer in self.trainers:
            trainer.finish_late()
        for trainer in self.trainers:
            trainer.abort_iteration(call)
        for each in self.tables:
            each.finish()

    def wait_pending_pulls(self) -> None:
        """As :meth:`take_over`; also wait for what the last steps have left to other groups."""
        self.take_over()
        for trainer in self.trainers:
            trainer.wait_pending_pulls()
        for each in self.tables:
            each.finish()

    def resume(self) -> None:
        """The script has used the loop, and computes again."""
        for trainer in self.trainers:
            trainer.strategy.resume()

    def _driver(self) -> Driver:
        """Return the driver of the loop during backward, one for all sets."""
        if self._progress is None:
            if self._context.rank.comms.may_use_threads:
                self._progress = BackgroundProgress(
                    self._push_and_turn,
                    is_awaiting=lambda: any(
                        each.loop.core.is_awaiting or each.trainer.strategy.is_under_way
                        for each in self.sets
                    ),
                )
            else:
                self._progress = PollingProgress(self._push_and_turn)
            self._context.exit.before_failure(self._progress.pause)
        return self._progress

    def _push_and_turn(self) -> bool:
        has_pushed = [trainer.strategy.push_ready() for trainer in self.trainers]
        return self._loop.turn() or any(has_pushed)

    def end(self) -> None:
        """Release models and optimizers: the job is closed."""
        if self._progress is not None:
            self._progress.stop()
        for end in [*self._at_end, *(each.end for each in self.tables)]:
            end()
        self._at_end.clear()

    @property
    def trainers(self) -> list[Trainer]:
        return [each.trainer for each in self.sets]

    def statistics(self) -> list[WorkerStatistics]:
        """Return the statistics of all sets of the job, tables last."""
        of_tables = [
            WorkerStatistics(
                clock=each.clock,
                samples=0,
                bytes_pushed=each.loop.core.counts().bytes_pushed,
                bytes_pulled=each.loop.core.counts().bytes_pulled,
                max_staleness_seen=max(each.uses.staleness, default=0),
                staleness=dict(sorted(each.uses.staleness.items())),
            )
            for each in self.tables
        ]
        return [*(trainer.statistics() for trainer in self.trainers), *of_tables]

    @property
    def has_unused_gradients(self) -> bool:
        """True if the script has trained past the servers: it has computed gradients and no
        prepared optimizer has made a step, or another optimizer has stepped since the last one."""
        if any(each.optimizer.is_bypassed for each in self.sets):
            return True
        has_stepped = any(trainer.clock for trainer in self.trainers)
        return not has_stepped and any(each.optimizer.has_unused_gradients for each in self.sets)

    # -- what the script names -----------------------------------------------------------------

    def model_of(self, module: torch.nn.Module | None, call: str) -> PreparedModel:
        """The prepared model that is ``module``; None: the only one. ``call``: what the script has
        called, for people."""
        if module is None and len(self.models) == 1:
            return self.models[0]
        for each in self.models:
            if each.module is module:
                return each
        if module is None:
            raise UsageError(
                f"{len(self.models)} models were prepared: name one, "
                f"job.{call}({'path, ' * (call == 'save')}model=...)"
            )
        raise UsageError(f"job.{call}: this model was not prepared; pass what job.prepare returned")

    def set_of(self, optimizer: torch.optim.Optimizer | None, call: str, why: str) -> ParameterSet:
        """The set that is trained by ``optimizer``; None: the only one. ``call``: what the script
        has called and ``why`` that must be one, with what to write, for people."""
        if optimizer is None and len(self.sets) == 1:
            return self.sets[0]
        for each in self.sets:
            if each.optimizer is optimizer:
                return each
        if optimizer is None:
            raise UsageError(f"job.{call}: {len(self.sets)} optimizers were prepared, and {why}")
        raise UsageError(
            f"job.{call}: this optimizer was not prepared; pass what job.prepare returned"
        )

    # -- prepare -------------------------------------------------------------------------------

    def prepare(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        max_norm: float,
        overlap: Setting,
    ) -> list[ServedOptimizer]:
        """A set for each of ``optimizers``; see :meth:`psdist.job.Job.prepare`."""
        for optimizer in optimizers:
            if isinstance(optimizer, ServedOptimizer):
                raise UsageError("job.prepare was given an optimizer that it has returned itself")
        clips_itself = "call job.clip_grad_norm_ before each step, or "
        if self._config.outer == ACCUMULATE:  # there a step's gradient is a part of one
            clips_itself = ""
        if max_norm:
            refuse_call_of_group(self._context, "job.prepare(max_grad_norm=...)")
        if max_norm and self._context.rank.bootstrap.buddies and self._has_joint_norm:
            raise UsageError(
                "job.prepare(max_grad_norm=...) with failures.replication = buddy in mode sync: "
                "servers delay an iteration until they have its joint norm, and could not recover "
                f"from the failure of one meanwhile; {clips_itself}set failures.replication = none"
            )
        if max_norm and is_mixed(self._config):
            raise UsageError(
                "job.prepare(max_grad_norm=...) in a run whose mode may change between sync, where "
                "servers clip the joint gradient, and others, where each group clips its own: call "
                "job.clip_grad_norm_ before each step, or keep to one of them"
            )
        restored, weights = self._context.restored, self._context.roles.shard_weights
        plan = TablePlan.of(model, optimizers, self._config, weights)
        self._refuse_tables(plan)
        on_servers = [self._on_servers(optimizer) for optimizer in optimizers]
        descriptions = [ModelDescription.of(model, optimizer) for optimizer in on_servers]
        self._refuse_what_settings_exclude(descriptions, on_servers)
        self._refuse_what_is_trained_twice(descriptions)
        self._wrapped_parts.require_none(model)
        refuse_renormalised(model, [p for each in descriptions for p in each.parameters])
        moving = self._ties.require_none(
            model,
            [each for one in descriptions for each in one.trained],
            earlier=[each.module for each in self.models],
            held=self._trained_ids(),
        )
        described = zip(descriptions, on_servers, strict=True)
        if self._loop.core.membership.welcome is not None:
            request = SetRequest(
                model, descriptions[0], optimizers[0], optimizers[0], max_norm, overlap
            )
            return self._join(request)
        agree_on_model(
            [
                f"max_grad_norm {max_norm or None}",
                f"overlap {overlap}",
                *(line for each, optimizer in described for line in each.lines(optimizer)),
                *self._lines_of_rounds(optimizers),
                *(plan.lines() if plan is not None else ()),
            ],
            worker=self._loop.core.seat.worker,
            ranks=self._context.roles.worker_ranks,
            collective=lambda payload: self._collective("prepare", payload),
        )
        if all(piece.is_frozen for each in descriptions for piece in each.pieces):
            raise ModelError(
                "the model has no parameters to train: the optimizer holds no parameter that "
                "requires a gradient"
            )
        for index, description in enumerate(descriptions, start=len(self.sets)):
            if restored is not None:
                refuse_another_model(restored.checkpoint, index, description)
        if restored is not None and plan is not None:
            plan.refuse_others(restored.checkpoint, len(self.sets) + len(descriptions))
        states = self._states_of_chief(descriptions, on_servers)
        self._ties.leave(moving)
        tables = None if plan is None else self._tables_of(plan)
        followed = None if plan is None else optimizers[plan.optimizer]
        added = [
            self._add(
                SetRequest(
                    *(model, description, original, served, max_norm, overlap),
                    tables if original is followed else None,
                ),
                state,
            )
            for description, original, served, state in zip(
                descriptions, optimizers, on_servers, states, strict=True
            )
        ]
        if tables is not None and plan is not None:
            self._begin_tables(plan, tables)
        self._copy_untrained(descriptions[0])
        for each in added:
            each.trainer.pull()
        self._collective("prepare", PREPARED)
        return self._take_in(model, optimizers, added, overlap=overlap)

    def _join(self, request: SetRequest) -> list[ServedOptimizer]:
        """Make the set of a substitute that has joined; the servers have it already."""
        added = self._add(request, state={})
        added.trainer.pull()
        return self._take_in(request.module, [request.original], [added], overlap=request.overlap)

    def _take_in(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        added: list[ParameterSet],
        *,
        overlap: Setting,
    ) -> list[ServedOptimizer]:
        """Follow the model's passes from now on: these sets are ready."""
        for each in added:
            use = UseHook(self._use_of(each.trainer))
            handle = model.register_forward_pre_hook(use, with_kwargs=True)
            self._at_end += [handle.remove, each.optimizer.end]
            output = OutputHook(partial(_watch_backward, each.trainer.iteration.batches))
            handle = model.register_forward_hook(output, always_call=True)
            self._at_end.append(handle.remove)
            if overlap == "full":
                end = EndHook(each.trainer.strategy.finish_reads)
                handle = model.register_forward_hook(end, always_call=True)
                self._at_end.append(handle.remove)
        for module in entered(model):
            handle = module.register_forward_pre_hook(WrapperCheck(type(module)))
            self._at_end.append(handle.remove)
        if self._passes is not None and all(each.module is not model for each in self.models):
            self._at_end += [handle.remove for handle in self._passes.attach(model)]
        if not self._steps_here:
            for optimizer in optimizers:
                optimizer.state.clear()  # the servers have it
        known = [each for each in self.models if each.module is model]
        if known:
            known[0].sets.extend(added)
        else:
            self.models.append(PreparedModel(module=model, sets=added))
        return [each.optimizer for each in added]

    def _use_of(self, trainer: Trainer) -> Callable[[int, Sequence[Storage]], None]:
        """Return the hook before a forward pass with gradients."""
        has_mirrors = trainer.flat.transfers.has_mirrors

        def use(num_samples: int, storages: Sequence[Storage]) -> None:
            self._on_use()
            trainer.record_use(num_samples, storages)
            if has_mirrors and self._progress is not None:
                self._progress.open()  # hooks of a GPU's gradients run in another thread

        # torch.compile would recompile the model for each value of the clock.
        uncompiled: Callable[[int, Sequence[Storage]], None]
        uncompiled = torch.compiler.disable(use)  # type: ignore[no-untyped-call] # torch's
        return uncompiled

    def bring(self, prepared: PreparedModel) -> None:
        """Bring the servers' values of the model, and the chief's values of the rest; all workers
        together."""
        for each in prepared.sets:
            each.trainer.pull()
            each.watch.accept()
        self._copy_untrained(prepared.sets[0].description)

    def _copy_untrained(self, description: ModelDescription) -> None:
        """Buffers and what no set trains become the chief's."""
        trained = self._trained_ids()
        for _, tensor in description.untrained:
            if id(tensor) not in trained:
                self._copy_from_chief(tensor)

    def _refuse_what_settings_exclude(
        self, descriptions: Sequence[ModelDescription], on_servers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Raises :class:`UsageError` or :class:`OptimizerRefusedError` if the settings do not work
        with what is prepared."""
        num_sets = len(self.sets) + len(descriptions)
        of_script: dict[str, str] = {}
        if num_sets > 1:
            of_script["several optimizers"] = f"{num_sets} prepared optimizers"
        if any(piece.dtype == "float64" for each in descriptions for piece in each.pieces):
            of_script["float64 parameters"] = "parameters of float64"
        if wrong := refusal(self._config, script=of_script):
            raise UsageError(wrong)
        of_optimizers: dict[str, str] = {}
        for description, optimizer in zip(descriptions, on_servers, strict=True):
            name = f"{description.optimizer} on servers"
            if description.optimizer != _MOVES_BY_LR_TIMES_GRADIENT:
                of_optimizers["optimizer other than SGD"] = name
            if not has_second_moment(description.optimizer, optimizer.param_groups):
                of_optimizers["optimizer without a second moment"] = name
        if wrong := refusal(self._config, script=of_optimizers):
            raise OptimizerRefusedError(wrong)

    def _states_of_chief(
        self, descriptions: Sequence[ModelDescription], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[dict[int, PieceState]]:
        """Return the optimizer state with which servers continue, by set; empty except on the
        chief. Raises :class:`OptimizerRefusedError` on every worker if it cannot be cut."""
        for each in descriptions:
            marks = traits(each.optimizer, extra=self._config.optimizers)
            check_mode(marks, judging_mode(self._config))
        states: list[dict[int, PieceState]] = [{} for _ in descriptions]
        problem = b""
        if self._context.restored is not None:
            return states  # servers have what the checkpoint has
        if self._loop.core.seat.is_chief:
            try:
                states = list(map(describe_state, optimizers, descriptions))
            except OptimizerRefusedError as error:
                problem = printable(str(error)).encode()
        if problem := self._collective("prepare", problem).payloads[0]:  # the chief's
            raise OptimizerRefusedError(problem.decode())
        return states

    def _refuse_what_is_trained_twice(self, descriptions: Sequence[ModelDescription]) -> None:
        trained = self._trained_ids()
        for description in descriptions:
            for piece, parameter in zip(description.pieces, description.parameters, strict=True):
                if id(parameter) in trained:
                    raise ModelError(
                        f"parameter {piece.name} is in two prepared optimizers; servers train it "
                        "by one: give each parameter to one optimizer, and prepare that once"
                    )
                trained.add(id(parameter))

    def _trained_ids(self) -> set[int]:
        return {id(each) for one in self.sets for each in one.description.parameters}

    def _is_held(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self._trained_ids()

    @property
    def _has_joint_norm(self) -> bool:
        """True if servers wait for the norm of all groups' gradients before they step."""
        has_codecs = any(not push.is_none for push, _ in codecs_that_may_come(self._config))
        return judging_mode(self._config) == "sync" and not has_codecs

    def _add(self, request: SetRequest, state: Mapping[int, PieceState]) -> ParameterSet:
        """Make the next set, on the servers and in flat memory. ``state``: on the chief the
        optimizer state with which servers continue."""
        config, index, description = self._config, len(self.sets), request.description
        first_clock = self._first_clock(index)
        partition = self._cut(request, index)
        history = self._history_of(index)
        watch = self._watch(request)
        clipping = Clipping.of(config, request.max_norm)
        early = self._early_choice(request, clipping, index)
        layout = Layout(
            partition=partition,
            owners=self._owners_of(partition),
            order=ORDERS[early.setting](partition),
        )
        loop = self._loop.next_set() if index else self._loop
        memory = lay_out(
            loop,
            self._group,
            layout,
            description.parameters,
            credits=credits_of(config, self._context.roles.num_workers, partition),
            wire=wire_of(config, levels_of(self._context.tuning_state)),
            first_clock=first_clock,
            history=history,
            reduces_early=early.is_on and self._group.size > 1,
        )
        self._restore_residuals(loop)
        self._say_who_encodes(memory, loop)
        iteration = Iteration(
            first_clock,
            hyperparameters=partial(packed_hyperparameters, request.original),
            on_end=partial(self._tell_standing if self._has_rounds else self._end_iteration, index),
        )
        rule = rule_of(config, memory, loop, request.tables, self._on_missed)
        parts = Parts(iteration, memory.group, memory.flat, loop, memory.values, rule)
        strategy = self._strategy(
            request,
            parts,
            early,
            sums=memory.sums,
            clipping=clipping,
        )
        trainer = Trainer(
            *parts[:5],
            strategy,
            look_for_changes=partial(watch.look, is_local=self._steps_here),
            skips_nonfinite=config.on_nonfinite == "skip",
            clips_to=clipping.in_step,
        )
        kind = LocalOptimizer if self._steps_here else ServedOptimizer
        step = self._step_of(trainer, index)
        if request.tables is not None:
            step = request.tables.following(step)
        served = kind(request.original, step=step)
        self._set_up(request, loop, partition, state, max_norm=clipping.on_servers)
        added = ParameterSet(
            description=description,
            partition=partition,
            optimizer=served,
            trainer=trainer,
            loop=loop,
            history=history,
            watch=watch,
            max_norm=request.max_norm,
        )
        self.sets.append(added)
        return added

    def _refuse_tables(self, plan: TablePlan | None) -> None:
        """Raises :class:`UsageError` for tables that do not work with the settings, and for a model
        after one with tables."""
        if self.tables:
            raise UsageError(
                "job.prepare was called after a model with tables had been prepared; prepare it "
                "last"
            )
        if plan is not None and (wrong := refusal(self._config, script={"tables": "tables"})):
            raise UsageError(wrong)

    def _tables_of(self, plan: TablePlan) -> Tables:
        return plan.make(
            self._config,
            group=self._another_end(),
            peek=self._peek,
            take_over=self.take_over,
            resume=self.resume,
        )

    def _begin_tables(self, plan: TablePlan, tables: Tables) -> None:
        """Make the set of tables, after the sets that were made before."""
        config, index = self._config, self._loop.core.sets[-1].set_index + 1
        first = self._context.first_clocks(index)
        loop, partition = TableLoop.after(self._loop), plan.specs.partition()
        loop.take_tables(
            plan.specs,
            wire_of(config, levels_of(self._context.tuning_state)),
            owners=plan.specs.owners(self._context.roles.shard_weights),
            credits=credits_of(config, self._context.roles.num_workers, partition),
            first_clock=0 if first is None else first.clocks[loop.core.seat.group],
        )
        setup = plan.setup(restore=first.checkpoint if first is not None else "")
        loop.join(setup if loop.core.seat.is_chief else None)
        history = self._history_of(index)
        uses = RowUses(loop.core.transfers.owners, history, kept=row_staleness(config))
        tables.begin(loop, uses, caches_of(config, plan.specs))
        self.tables.append(tables)

    def _first_clock(self, index: int) -> int:
        """Return the clock with which a set begins, also of a checkpoint."""
        seat, welcome = self._loop.core.seat, self._loop.core.membership.welcome
        first = self._context.first_clocks(index)
        clock = first.clocks[seat.group] if first is not None else 0
        if welcome is not None:
            clock = welcome.clocks[index]
        if not index:
            self._standing.begin_at(clock)
        return clock

    def _cut(self, request: SetRequest, index: int) -> Partition:
        config, description = self._config, request.description
        partition = description.cut(
            chunk_bytes=None if config.chunk_bytes == "auto" else config.chunk_bytes,
            link_bytes_per_s=link_of_chunks(
                config, self._context.rank.bootstrap.plan, request.max_norm
            ),
            mode=judging_mode(config),
            extra_optimizers=config.optimizers,
        )
        self._cuts.append(cut := _cut_of(partition, description, request.max_norm))
        if self._expected is not None and cut != self._expected[index]:
            raise ModelError(
                "the script of a spare has prepared another model, optimizer or max_grad_norm than "
                f"the job's: {cut}, where the chief has {self._expected[index]}"
            )
        return partition

    def _history_of(self, index: int) -> WorkerHistory | None:
        if not self._config.record:
            return None
        folder = history_folder(self._context.run_directory.path, index)
        history = WorkerHistory(folder, self._loop.core.seat.worker)
        self._context.exit.flushes.append(history.flush)
        return history

    def _watch(self, request: SetRequest) -> ModelWatch:
        description = request.description
        watch = ModelWatch(
            request.module,
            parameters=description.parameters,
            names=[piece.name for piece in description.pieces],
            frozen=description.frozen,
            is_held=self._is_held,
        )
        self._at_end.append(watch.stop)
        return watch

    def _owners_of(self, partition: Partition) -> Sequence[int]:
        weights = self._context.roles.shard_weights
        owners = partition.shard(weights, self._held)
        self._held = list(map(add, self._held, partition.bytes_by_server(owners, len(weights))))
        return owners

    def _early_choice(self, request: SetRequest, clipping: Clipping, index: int) -> EarlyChoice:
        if clipping.why_own:
            logger.info(
                "parameter set %d: max_grad_norm clips each group's own gradient, not the joint "
                "one: %s",
                index,
                clipping.why_own,
            )
        never = why_never(
            self._config,
            clips_to=clipping.in_step,
            is_alone=self._is_alone,
            reforms=self._context.reforms_groups,
        )
        why_not = never or why_not_here(
            device=request.description.parameters[0].device.type,
            group_size=self._group.size,
            has_thread=self._context.rank.comms.may_use_threads,
        )
        if why_not and request.overlap != "off":
            logger.info("parameter set %d: overlap stays off: %s", index, why_not)
        return EarlyChoice("off" if never else request.overlap, why_not)

    def _say_who_encodes(self, memory: SetMemory, loop: WorkerLoop) -> None:
        is_coded = any(not push.is_none for push, _ in codecs_that_may_come(self._config))
        if is_coded and memory.flat.transfers.has_mirrors:
            logger.info(
                "parameter set %d: pushes are encoded on %s",
                loop.core.set_index,
                "the device"
                if loop.pushes.encoding.on_device is not None
                else f"the host: {why_on_host(self._config)}",
            )

    @property
    def _is_alone(self) -> bool:
        """True if this process is the whole job."""
        return self._context.rank.network is not None

    def _strategy(
        self,
        request: SetRequest,
        parts: Parts,
        early: EarlyChoice,
        *,
        sums: Sums | None,
        clipping: Clipping,
    ) -> Blocking:
        is_pipelined = self._config.pipeline > 0 and not self._is_alone
        values = parts.flat.values
        newest = [flat.clone() for flat in values] if self._steps_here else values
        strategy = strategy_of(
            request,
            parts,
            early,
            driver=self._driver() if early.is_on or is_pipelined else None,
            another_end=self._another_end,
            sums=sums,
            free_s=self._context.rank.free_s,
            newest=newest,
        )
        if not self._has_rounds:
            return strategy
        roles, config = self._context.roles, self._config
        rounds = Rounds(
            length=self._length or EqualSteps(counted_steps(config)),
            hyperparameters=partial(packed_hyperparameters, request.on_servers),
            on_step=self._on_iteration,
            skips_nonfinite=config.on_nonfinite == "skip",
        )
        # All groups weigh the same; their sum is the number of workers. A step that servers make
        # on arrival has a share of that.
        share = roles.num_workers / len(roles.groups) / self._group.size
        index = parts.loop.core.set_index
        return with_rounds(
            config,
            strategy,
            rounds,
            step=request.original.step,
            has_pending=lambda: self.sets[index].optimizer.pending.is_any,
            clips_to=clipping.in_push,
            share=share,
            anchor=newest,
        )

    def _set_up(
        self,
        request: SetRequest,
        loop: WorkerLoop,
        partition: Partition,
        state: Mapping[int, PieceState],
        *,
        max_norm: float,
    ) -> None:
        """Tell the servers of the set, except as a substitute, and send them ``state``."""
        description, optimizer = request.description, request.on_servers
        first = self._context.first_clocks(loop.core.set_index)
        setup = Setup(
            partition=partition.encode(),
            optimizer=description.optimizer,
            hyper=packed_hyperparameters(optimizer),
            max_norm=max_norm,
            state=pack_states(state),
            restore=first.checkpoint if first is not None else "",
        )
        if loop.core.membership.welcome is None:
            loop.join(setup if loop.core.seat.is_chief else None)
        if state:
            parts = [
                (part.chunk, part.start)
                for chunk in partition.chunks
                for part in parts_of(chunk, state)
            ]
            loop.send_state(parts, OwnState(partition, description.parameters, optimizer, state))

    def _step_of(self, trainer: Trainer, index: int) -> Callable[[float, bool, bool], None]:
        tracer = self._context.tracer
        if tracer is None:
            return trainer.step
        return traced(tracer, Span.STEP, clock=lambda: trainer.clock, set_index=index)(trainer.step)

    def _end_iteration(self, set_index: int) -> None:
        self._tell_standing(set_index)
        self._on_iteration()

    def _on_missed(self, rounds: int) -> None:
        self._standing.miss(rounds)
        self._tell_missed(rounds)

    def _tell_standing(self, set_index: int) -> None:
        self._standing.end_iteration(self.trainers, set_index)

    # -- rounds of local steps -----------------------------------------------------------------

    @property
    def _has_rounds(self) -> bool:
        return has_rounds(self._config)

    @property
    def _steps_here(self) -> bool:
        return steps_on_workers(self._config)

    def _on_servers(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that servers run: this one, or the outer one with local steps."""
        return make_outer(self._config.outer, optimizer) if self._steps_here else optimizer

    def _lines_of_rounds(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """Return the lines on which all workers must agree, of optimizers that step on them."""
        if not self._steps_here:
            return []
        return [
            f"local optimizer {canonical_name(type(each))}: "
            f"{hyperparameters(each.param_groups, known=each.defaults)}, "
            f"state {digest_of_state(each) or 'none'}"
            for each in optimizers
        ]

    def _another_end(self) -> GroupChannel:
        """Return another end of this worker's group, for one set."""
        self._end = self._end.duplicate()
        return self._end

    def _copy_from_chief(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            host = tensor.detach().cpu().contiguous().clone()
            self._context.rank.comms.broadcast_among_workers(
                as_bytes(host.view(-1)), dead=self._loop.core.dead
            )
            # An expanded buffer repeats elements; torch writes only where it does not.
            distinct = tuple(slice(None if step else 1) for step in tensor.stride())
            tensor[distinct].copy_(host[distinct])


def refuse_call_of_group(context: JobSession, call: str) -> None:
    """Raises :class:`UsageError` if ``call``, which the workers of a group make together, does not
    work with the settings."""
    script = {"call of a whole group": call}
    if context.reforms_groups and (wrong := refusal(context.config, script=script)):
        raise UsageError(wrong)
