"""A job's checkpoints as its script meets them: when one is made, what of the script is in it, and
how the script resumes from it.

    checkpoints = ScriptCheckpoints(session, loop, sets, loaders, device=device, ...)
    checkpoints.begin()                    # restore from the checkpoint, if the job resumes
    checkpoints.on_boundary(a_pass)        # the script asks for a batch
    checkpoints.make()                     # all workers, between iterations: "step-00000100"
    checkpoints.end_iteration()

The form of a script's values in a checkpoint belongs to psdist.workers.script, the worker's file
and signals to psdist.ranks.checkpointing, and the meeting of all workers to
psdist.workers.protocol.meetings.

Longer than other modules: what is kept and what is given back are read side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from psdist.config.compatibility import misses_rounds
from psdist.config.modes import describe_mode, describe_modes, judging_mode
from psdist.errors import UsageError
from psdist.prepared import ParameterSets
from psdist.protocol.checkpoints import WRITTEN
from psdist.protocol.collected import JOIN, Brought
from psdist.protocol.ids import worker_of
from psdist.ranks.checkpointing.resuming import Restored
from psdist.ranks.checkpointing.script_signals import ScriptSignals, end_behind
from psdist.ranks.checkpointing.worker_files import WorkerCheckpoints
from psdist.ranks.session import JobSession
from psdist.script_joins import ScriptJoins
from psdist.workers.data.epochs import Epochs
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.seen import Pass
from psdist.workers.loop import WorkerLoop
from psdist.workers.script.followed import FollowedScript
from psdist.workers.script.occasions import Occasions
from psdist.workers.script.set_modes import SetModes
from psdist.workers.script.state import ScriptState

logger = logging.getLogger("psdist")

RESIDUALS: Final = "residuals"
"""Key in a worker's checkpoint: the values that codecs have left out of pushes."""
PENDING: Final = "pending gradients"
"""Key: accumulated gradients that no step has used."""
MISSED: Final = "missed"
"""Key: batches to skip, because rounds were closed without this worker's group."""
SET_MODES: Final = "set modes"
"""Key: the calls of ``set_mode``, if it is allowed."""


class ScriptCheckpoints:
    def __init__(
        self,
        session: JobSession,
        loop: WorkerLoop,
        sets: ParameterSets,
        loaders: Loaders,
        *,
        device: torch.device,
        collective: Callable[[str, bytes], Brought],
        checkpoint: Callable[[], str],
    ) -> None:
        """``checkpoint()``: ``job.checkpoint``, for those that are made without the script's
        call."""
        self._session = session
        self._config = session.config
        self._worker = worker_of(session.rank.me)
        self._loop = loop
        self._sets = sets
        self._loaders = loaders
        self._collective = collective
        self._checkpoint = checkpoint
        self.epochs = Epochs(
            on_boundary=lambda: self.on_boundary(None),
            on_start=self._start_epoch,
            on_resume=self._go_on,
        )
        self.script = ScriptState(
            device=device,
            loaders=loaders,
            epochs=self.epochs,
            is_chief=self._worker == 0,
            tell=self._tell_chief,
        )
        self._files = WorkerCheckpoints(session, collect=self._collect)
        self._joins = ScriptJoins(session, loop, collective=collective)
        self._followed = FollowedScript() if session.roles.num_substitutes else None
        self._set_modes = SetModes() if self._config.set_mode == "allowed" else None
        self._cut_at: Pass | None = None
        self._is_at_boundary = False
        """Whether a checkpoint that is made now is one of psdist's own, at ``_cut_at``."""
        self._pending: dict[str, dict[int, torch.Tensor | None]] = {}
        """Gradients of the checkpoint, by set, until training continues."""
        self.has_trained = False
        """Whether an iteration was made in this process."""
        self._awaits_boundary = self._config.checkpoint_every is not None
        """Whether checkpoint.every is set, and the script has come to no boundary yet."""
        self.occasions = Occasions(
            every=self._config.checkpoint_every,
            is_leading=judging_mode(self._config) == "sync" or self._worker == 0,
            now_s=session.rank.now_s(),
        )
        self._signals = ScriptSignals(
            self.occasions.ask,
            on_usr1=self._config.on_usr1,
            grace_s=self._config.grace_s,
            parent=session.exit.parent,
        )

    @property
    def is_resuming(self) -> bool:
        """Whether the script has still to come to where its checkpoint was made."""
        return self.script.is_resuming

    def begin(self) -> None:
        """Restore this script from the checkpoint, if the job resumes, and handle signals."""
        self._restore()
        self._signals.begin()

    def end(self) -> None:
        """The job is closed, or has failed."""
        self._signals.end()
        self._joins.forget()

    # -- spares that take failed workers' places ---------------------------------------------------

    def called(self, collective: str) -> None:
        """All workers are called together, by the script or by psdist between iterations."""
        if self._followed is not None and not self._is_at_boundary and collective != "prepare":
            self._followed.call(collective)

    def join(self) -> bool:
        """On a spare, when its script has come to job.prepare: join the job, and take the chief's
        state. False if the job ends before."""
        found = self._joins.come()
        if found is None:
            return False
        welcome, told = found
        self._sets.expect(told["cuts"])
        num_skipped = max(0, welcome.clocks[0] - told["clock"])
        self._loaders.skip(num_skipped * told["batches_per_round"])
        self.script.restore(told["script"], name=welcome.state)
        return True

    def _state_for_a_spare(self) -> dict[str, Any]:
        """Return the state of the chief's script at this boundary."""
        self.script.is_chief = True
        told = self.script.collect(at=self._cut_at)
        del told["random"]  # a spare draws its own
        return {
            "script": told,
            "cuts": self._sets.cuts(),
            "clock": self._clocks[0],
            "batches_per_round": self._loaders.batches_per_round,
        }

    # -- what is in one ------------------------------------------------------------------------

    def _collect(self) -> dict[str, Any]:
        at = self._cut_at if self._is_at_boundary else self._loaders.seen.open_pass
        self.script.is_chief = self._is_chief
        found = {
            **self.script.collect(at=at),
            RESIDUALS: self._sets.residuals(),
            PENDING: self._sets.pending_gradients(),
        }
        if self._set_modes is not None:
            found[SET_MODES] = self._set_modes.collect()
        if misses_rounds(self._config) and self._sets.sets:
            found[MISSED] = self._loaders.collect_missed(clock=self._clocks[0])
        return found

    def _restore(self) -> None:
        restored = self._session.restored
        tree = self._files.restored()
        if restored is not None and tree is not None:
            self._require_same_assignments(restored)
            self.script.restore(tree, name=restored.checkpoint.name, is_moved=self._files.is_moved)
            if self._files.is_moved and self._config.global_batch is None:
                self._tell_chief(
                    f"the checkpoint is of {len(restored.checkpoint.workers)} workers, the job of "
                    f"{self._session.roles.num_beginning}: batch sizes are per worker, so a joint "
                    "batch has another number of samples; --global-batch N keeps it at N"
                )
            if self._set_modes is not None and SET_MODES in tree:
                has_place = bool(tree["epochs"]) or self._loaders.seen.awaits_pass
                self._set_modes.restore(tree[SET_MODES], has_place=has_place)
            self._pending = tree.get(PENDING, {})
            if MISSED in tree:
                self._restore_missed(tree[MISSED], restored)
            if not self._files.is_moved:
                self._sets.go_on_with(tree.get(RESIDUALS, {}))
            elif tree.get(RESIDUALS):
                self._tell_chief(
                    f"checkpoint {restored.checkpoint.name} is of other workers: what codecs have "
                    "left out of their pushes is dropped"
                )

    def _require_same_assignments(self, restored: Restored) -> None:
        """Raises :class:`UsageError` if each group was at its own place of a pass, and cannot
        continue there in this run."""
        index = restored.checkpoint.index
        paces = index.fidelity.paces if index.fidelity is not None else None
        if paces is None or not paces.are_groups_apart:
            return
        if not restored.is_same_layout or self._config.steps_by != "speed":
            raise UsageError(
                f"checkpoint {restored.checkpoint.name}: made in mode {index.mode}, local.steps_by "
                f"= speed, groups of the workers {_by_group(index.groups)}, where each group is at "
                "its own place of a pass; expected the same of this run, which is in mode "
                f"{describe_modes(self._config)}, local.steps_by = {self._config.steps_by}, groups "
                f"of the workers {_by_group(restored.groups)}: resume it as it was, or from a "
                "checkpoint of mode sync"
            )

    def _restore_missed(self, tree: Mapping[str, Any], restored: Restored) -> None:
        share, first = 1.0, restored.first(0)
        if self._files.is_moved and self._config.global_batch is None:
            share = len(restored.checkpoint.workers) / self._session.roles.num_beginning
        assert first is not None  # there is no checkpoint without a set
        self._loaders.restore_missed(tree, clock=first.clocks[0], share=share)

    # -- making them ---------------------------------------------------------------------------

    def require_may_be_cut(self) -> None:
        """Raises :class:`UsageError` where the script calls for one that would harm a gradient."""
        if not self._loaders.seen.is_between_assignments:
            raise UsageError(
                "job.checkpoint with local.steps_by = speed within a round: a pass is assigned "
                "round by round, and the rest of an unfinished round would be lost; call it "
                "after the loop over the loader, or set checkpoint.every"
            )
        if not self._is_at_boundary:
            for trainer in self._sets.trainers:
                trainer.strategy.require_may_be_cut("job.checkpoint")

    def make(self) -> str:
        """Make a checkpoint and return its name. Collective over all workers, between iterations.
        A resumed run makes no other checkpoint before it reaches the place of its first one,
        because the script does not continue from its values until then. Raises
        :class:`UsageError` for values that no checkpoint can store."""
        restored = self._session.restored
        if restored is not None and self.script.is_resuming and not self.has_trained:
            self._tell_chief(
                f"no training since {restored.checkpoint.name}, the checkpoint of the resumed "
                "run: job.checkpoint() makes no other"
            )
            return restored.checkpoint.name
        for each in self._sets.sets:
            if each.history is not None:
                each.history.flush()
        clocks = [*self._clocks, *(each.clock for each in self._sets.tables)]
        return self._files.make(self._collective, clocks)

    def sets_mode(self, mode: str, staleness: int) -> bool:
        """Whether a call of ``set_mode``, which the settings allow, counts: in a resumed run not
        what the script calls once more on its way to where its checkpoint was made."""
        assert self._set_modes is not None
        if self._set_modes.counts(mode, staleness, is_resuming=self.is_resuming):
            return True
        assert self._session.restored is not None
        self._tell_chief(
            f"the script had set mode {describe_mode(mode, staleness)} before "
            f"{self._session.restored.checkpoint.name}; the resumed run continues with the mode "
            "that was set last: job.set_mode changes nothing here"
        )
        return False

    def tell(self) -> None:
        """Report a file of this worker that is complete to the coordinator."""
        self._files.tell()

    def finish(self) -> None:
        """No file is being written any more."""
        self._files.finish()

    def end_iteration(self) -> None:
        """One of any set has ended."""
        if self._followed is not None:
            self._followed.end_iteration()
        self.has_trained = True
        self._session.exit.note_iteration()
        if self._set_modes is not None:
            self._set_modes.end_iteration()
        self._files.tell()
        self._loaders.end_iteration()
        if self._awaits_boundary:
            self._warn_if_overdue()

    def _warn_if_overdue(self) -> None:
        now_s = self._session.rank.now_s()
        if self.occasions.reason(clock=self._clocks[0], now_s=now_s) == "checkpoint":
            self._awaits_boundary = False
            self._tell_chief(
                f"checkpoint.every = {self._config.checkpoint_every} makes no checkpoint: the "
                "script uses no psdist loader and no job.epochs; call job.checkpoint()"
            )

    def on_boundary(self, a_pass: Pass | None) -> None:
        """The script has done all that belongs to its last iteration, and asks for the next batch
        of this pass, or (None) begins one."""
        if a_pass is not None and a_pass.is_resume_point:
            a_pass.is_resume_point = False
            self._go_on()
        elif a_pass is None and not self._loaders.seen.awaits_pass:
            self._go_on()
        if a_pass is not None and self._followed is not None:
            self._followed.ask_for_batch(a_pass)
        if self._sets.sets:
            self._awaits_boundary = False
        if self._sets.sets and not self.script.is_resuming:
            self._signals.has_boundary()
            may_be_cut = all(each.strategy.may_be_cut for each in self._sets.trainers)
            if may_be_cut and self._loaders.seen.is_between_assignments:
                self._hold_if_wanted(a_pass)

    def _hold_if_wanted(self, a_pass: Pass | None) -> None:
        clock = self._clocks[0]
        if self._is_chief:
            self.occasions.lead(clock=clock, now_s=self._session.rank.now_s())
        reason = self.occasions.reason(clock=clock, now_s=self._session.rank.now_s())
        if not reason and not self._loop.core.meetings.is_open:
            return
        self._sets.wait_pending_pulls()  # who waits for others must not hold
        found = self._loop.hold(reason or JOIN, self._clocks)
        if found is None and self._loop.core.meetings.is_open:
            return  # others wait for this worker: it holds at its next boundary
        if found != JOIN:
            self.occasions.have_met(clock=clock, now_s=self._session.rank.now_s())
        if found is None:
            return
        self._is_at_boundary, self._cut_at = True, a_pass
        try:
            if found == JOIN:
                self._joins.meet(self._clocks, self._state_for_a_spare)
            else:
                self._checkpoint()
        finally:
            self._is_at_boundary, self._cut_at = False, None
        if found not in ("checkpoint", JOIN):
            self._files.finish()
            self._collective(WRITTEN, b"")
            end_behind(found, self._session.folder.latest())

    # -- resuming from one ---------------------------------------------------------------------

    def _start_epoch(self, is_again: bool) -> None:
        if self._followed is not None:
            self._followed.begin_epoch(num_loops=self.epochs.num_loops)
        if not is_again:
            self._go_on()
        self._loaders.seen.start_epoch(is_resumed=is_again)

    def _go_on(self) -> None:
        """Training continues where the checkpoint was made."""
        if not self.script.is_resuming:
            return
        self.script.resume()
        if self._files.is_moved:
            self._drop_pending("is of other workers")
        else:
            self._sets.accumulate(self._pending)
        self._pending = {}

    def _drop_pending(self, why: str) -> None:
        if self._pending:
            assert self._session.restored is not None
            sets = " and ".join(sorted(self._pending, key=int))
            self._tell_chief(
                f"checkpoint {self._session.restored.checkpoint.name} {why}: gradients that were "
                f"accumulated when it was made, and that no step had used (parameter set {sets}), "
                "are dropped"
            )

    def on_use(self) -> None:
        """A forward pass with gradients begins."""
        if self.script.is_resuming:
            self._go_on_elsewhere()

    def _go_on_elsewhere(self) -> None:
        """The script trains before it has come to where the checkpoint was made."""
        if self._loaders.seen.awaits_pass:
            self._tell_chief(
                "the script trains before it comes to the loader's pass in which the checkpoint "
                "was made: batches may be seen twice; loop over job.epochs(n) and over loaders of "
                "job.prepare or job.loader, as the run that is resumed did"
            )
        self.script.resume()
        # The script may compute again, from the iteration's beginning, what they are of.
        self._drop_pending("was made where the script has no loop of psdist's")
        self._pending = {}

    # -- this worker ---------------------------------------------------------------------------

    @property
    def _clocks(self) -> list[int]:
        of_tables = [each.clock for each in self._sets.tables]
        return [*(trainer.clock for trainer in self._sets.trainers), *of_tables]

    @property
    def _is_chief(self) -> bool:
        return self._loop.core.chief == self._worker

    def _tell_chief(self, line: str) -> None:
        if self._is_chief:
            logger.warning("%s", line)


def _by_group(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(" ".join(map(str, workers)) for workers in groups)
