"""A worker's part in the set of tables: it follows the steps of the set of the dense parameters.

The rows of a forward pass come with the replies to the push before (their ids were known then), or
are pulled. ``optimizer.step()`` pushes the gradients of rows next to the dense gradients, with the
same weight, and returns without their replies: the next look-up awaits them, or the next push.

    tables = Tables(modules, hyperparameters=..., ...)
    tables.begin(loop)                        # when the sets before have theirs
    rows = tables.look_up(0, ids, given=tensor, is_training=True)
    step = tables.following(trainer.step)     # before the step, gradients of rows are taken
    yield from tables.before_push(clock, reduced)    # right before the dense push
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psdist.protocol.partition import Span
from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import Contribution
from psdist.tables.payloads import pack_push, read_push
from psdist.tables.specs import Ids, Rows, TableSpec, TableSpecs
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import Wait
from psdist.workers.missed_rounds import WorkerRule
from psdist.workers.reduction import CALL, Reduced, in_group
from psdist.workers.tables.cache import RowCaches
from psdist.workers.tables.foresight import Foresight
from psdist.workers.tables.gradients import RowGradient
from psdist.workers.tables.loop import TableLoop, counts_within
from psdist.workers.tables.modules import Table
from psdist.workers.tables.uses import RowUses

Step = Callable[[float, bool, bool], None]
"""``step(gradient_scale, is_skipped, has_scaler)``: see :meth:`Trainer.step`."""
Found = list[tuple[Ids, Rows]]
"""By table."""


class Tables(WorkerRule):
    def __init__(
        self,
        modules: Sequence[Table],
        *,
        hyperparameters: Callable[[], bytes],
        foresight: Foresight,
        group: GroupChannel,
        take_over: Callable[[], None],
        resume: Callable[[], None],
        lag: int,
    ) -> None:
        """``hyperparameters()``: packed, a group for each table; ``group``: an end of this worker's
        group; ``take_over()`` and ``resume()``: of the loop by the script's thread; ``lag``:
        iterations from a push to the use of its replies, beyond the next."""
        self.loop: TableLoop
        self.specs: TableSpecs
        self.modules = modules
        self._hyperparameters = hyperparameters
        self._foresight = foresight
        self._group = group
        self._take_over = take_over
        self._resume = resume
        self._lag = lag
        self._gradients: list[list[RowGradient]] = [[] for _ in modules]
        self._known: list[tuple[int, Found]] = []
        """Rows of replies and pulls, with the last iteration that may use them."""
        self._planned: list[Ids] = []
        """By table: ids of the next forward passes whose rows no reply brings."""
        self._is_pending = False
        """True if replies to the last push are outstanding."""
        self.num_looked_up = self.num_pulled = 0
        """Distinct rows of forward passes with gradients; those that were not there."""
        self.uses: RowUses
        self._caches: RowCaches | None = None

    def begin(self, loop: TableLoop, uses: RowUses, caches: RowCaches | None) -> None:
        """The tables are on the servers from now on."""
        self.loop, self.specs = loop, loop.specs
        self.uses, self._caches = uses, caches
        for number, (each, spec) in enumerate(zip(self.modules, self.specs.tables, strict=True)):
            each.attach(self, number, spec)

    @property
    def clock(self) -> int:
        """Iterations that were pushed."""
        return self.loop.core.clock

    # -- forward -------------------------------------------------------------------------------

    def look_up(self, table: int, ids: Ids, *, given: torch.Tensor, is_training: bool) -> Rows:
        """See :class:`psdist.workers.tables.modules.RowSource`."""
        if not is_training:
            return self._pulled(self._of_one(table, ids), is_fresh=True)[table][1]
        self._foresight.used(table, given)
        self.num_looked_up += len(ids)
        rows, is_missing = self._find(table, ids)
        if is_missing.any() and self._is_pending:
            self._land_now()
            rows, is_missing = self._find(table, ids)
        if is_missing.any() and self._caches is not None:
            self._find_kept(self._caches, table, ids, rows, is_missing)
        if is_missing.any():
            missing = ids[is_missing]
            self.num_pulled += len(missing)
            planned, self._planned = self._planned or self._of_one(table, ids[:0]), []
            planned[table] = np.union1d(planned[table], missing)
            there, values = self._pulled(planned, is_fresh=False)[table]
            rows[is_missing] = values[np.searchsorted(there, missing)]
            self.uses.use(self.clock)
        return rows

    def on_batch(self, batch: Any) -> None:
        """The script receives this batch of a loader."""
        self._foresight.batch(batch)

    def prefetch(self, table: int, ids: Ids) -> None:
        self._foresight.announce(table, ids)

    def _find(self, table: int, ids: Ids) -> tuple[Rows, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the rows that are here, and True for each id whose row is not."""
        rows = np.empty((len(ids), self.specs.tables[table].dim), np.float32)
        is_missing = np.ones(len(ids), bool)
        for clock, found in self._known:
            there, values = found[table]
            if not len(there):
                continue
            if len(there) == len(ids) and np.array_equal(there, ids):
                self.uses.use(clock)
                return values, np.zeros(len(ids), bool)
            at = np.minimum(np.searchsorted(there, ids), len(there) - 1)
            is_here = there[at] == ids
            rows[is_here] = values[at[is_here]]
            is_missing &= ~is_here
            if is_here.any():
                self.uses.use(clock)
        return rows, is_missing

    def _find_kept(
        self, caches: RowCaches, table: int, ids: Ids, rows: Rows, is_missing: npt.NDArray[np.bool_]
    ) -> None:
        """Fill in missing ``rows`` that this worker has kept."""
        (missing,) = np.nonzero(is_missing)
        found = caches.find(table, ids[missing], clock=self.clock)
        at = missing[found.at]
        rows[at], is_missing[at] = found.rows, False
        if len(at):
            self.uses.use_kept(found.clocks, found.parts)

    def _of_one(self, table: int, ids: Ids) -> list[Ids]:
        """Return, by table, ``ids`` of one of them."""
        return [ids if each == table else ids[:0] for each in range(len(self.modules))]

    def _pulled(self, ids: Sequence[Ids], *, is_fresh: bool) -> Found:
        """Bring these rows, by table; no more than ``max_rows`` in one message. Those of the
        newest, ``is_fresh``, are for no iteration."""
        self._land_now()
        self._take_over()
        parts, left = list[Found](), list(ids)
        while not parts or any(map(len, left)):
            counts = counts_within(left, self.specs.max_rows)
            first = [each[:num] for each, num in zip(left, counts, strict=True)]
            left = [each[num:] for each, num in zip(left, counts, strict=True)]
            self.loop.begin_pull_of_rows(first, is_fresh=is_fresh)
            self.loop.carry_on(self.loop.wait_for_replies())
            parts.append(self.loop.take_rows() if is_fresh else self._take(self.clock))
        self._resume()
        if len(parts) == 1:
            return parts[0]
        rows = [np.concatenate([each[table][1] for each in parts]) for table in range(len(ids))]
        return list(zip(ids, rows, strict=True))

    # -- step() --------------------------------------------------------------------------------

    def following(self, step: Step) -> Step:
        """Return ``step``, of the set that the tables follow, with the gradients of rows."""

        def followed(gradient_scale: float, is_skipped: bool, has_scaler: bool) -> None:
            self._gradients = [each.gradients.take(scale=gradient_scale) for each in self.modules]
            step(gradient_scale, is_skipped, has_scaler)

        return followed

    def before_push(self, clock: int, reduced: Reduced) -> Generator[Wait, None, None]:
        """Push the rows of iteration ``clock`` with the weight of the dense push."""
        yield from self.land()
        taken, self._gradients = self._gradients, [[] for _ in self.modules]
        rows = None if reduced.is_skipped else list(map(_merged, taken, self.specs.tables))
        self.uses.commit(clock, reduced, pushed=self.loop.core.mine)
        if rows is not None and self._group.size > 1:
            rows = yield from self._together(rows, reduced.weight / reduced.group_weight)
        wanted = self._wanted()
        yield from self.loop.push_rows(
            clock=clock,
            hyper=self._hyperparameters(),
            weight=reduced.group_weight,
            rows=rows,
            wanted=wanted,
        )
        self._known = [(last, found) for last, found in self._known if last > clock]
        self._is_pending = True

    def _together(self, rows: Found, share: float) -> Generator[Wait, None, Found]:
        """Return the weighted mean of the group's rows. ``share``: the part of this worker."""
        whole = replace(self.specs, num_parts=1, max_rows=2**31 - 1, codec="none")
        own = pack_push(whole, rows, [ids[:0] for ids, _ in rows])
        table = yield from in_group(self._group.agree(CALL, [len(own), share]), CALL)
        ends = np.cumsum([int(num) for num, _ in table]).tolist()
        spans = [Span(0, start, end) for start, end in pairwise([0, *ends])]
        flat, mine = torch.empty(ends[-1], dtype=torch.uint8), spans[self._group.place]
        flat[mine.start : mine.stop] = torch.frombuffer(own, dtype=torch.uint8)
        gathered = self._group.all_gather([flat], [[span] for span in spans])
        yield from in_group(gathered, CALL)
        memory = flat.numpy().data
        pushes = [read_push(whole, memory[each.start : each.stop], part=0) for each in spans]
        return [
            row_kernels().merge(
                [
                    Contribution(push.ids[number], push.rows[number], part)
                    for push, (_, part) in zip(pushes, table, strict=True)
                ],
                spec.dim,
            )
            for number, spec in enumerate(self.specs.tables)
        ]

    def _wanted(self) -> list[Ids]:
        """Return, by table, the ids of the batch that the replies are for. Others are planned: in a
        group of several workers each one pulls its own rows, of the next batch."""
        is_alone = self._group.size == 1
        ahead = 1 + self._lag * is_alone
        found = self._foresight.wanted(ahead)
        known = [each.only_known(ids) for each, ids in zip(self.modules, found, strict=True)]
        if self._caches is not None:
            clock = self.clock + ahead
            known = [self._caches.missing(n, ids, clock=clock) for n, ids in enumerate(known)]
        if not is_alone:
            self._planned, known = known, [ids[:0] for ids in known]
        counts = counts_within(known, self.specs.max_rows)
        return [ids[:num] for ids, num in zip(known, counts, strict=True)]

    def land(self) -> Generator[Wait, None, None]:
        """Wait for the replies to the last push."""
        if self._is_pending:
            yield self.loop.wait_for_replies()
            self._is_pending = False
            self._take(self.clock + self._lag)

    def _take(self, clock: int) -> Found:
        """Take the rows of replies, which are for iteration ``clock``."""
        versions = {part: self.loop.core.versions[part] for part in self.loop.awaited}
        self.uses.bring(clock, versions, self.loop.num_awaited)
        found = self.loop.take_rows()
        self._known.append((clock, found))
        if self._caches is not None:
            for table, (ids, rows) in enumerate(found):
                self._caches.put(table, ids, rows, clock=clock)
        return found

    def _land_now(self) -> None:
        if self._is_pending:
            self._take_over()
            for wait in self.land():
                self.loop.carry_on(wait)
            self._resume()

    def pending_gradients(self, pending: Collection[int]) -> dict[int, torch.Tensor | None]:
        """Return the ids and the gradients of rows that no step has used, at 2 n and 2 n + 1 for
        table n. ``pending``: addresses (``id``) of the gradients of parameters for which that is
        so."""
        found: dict[int, torch.Tensor | None] = {}
        for number, (each, spec) in enumerate(zip(self.modules, self.specs.tables, strict=True)):
            if id(each.rows_on_servers.grad) in pending:
                ids, rows = _merged(each.gradients.take(scale=1.0), spec)
                found |= {2 * number: torch.from_numpy(ids), 2 * number + 1: torch.from_numpy(rows)}
        return found

    def accumulate(self, pending: Mapping[int, torch.Tensor | None]) -> None:
        """Restore what :meth:`pending_gradients` has returned."""
        for number, each in enumerate(self.modules):
            ids, rows = pending.get(2 * number), pending.get(2 * number + 1)
            if ids is not None and rows is not None:
                each.gradients.restore(ids.numpy(), rows)

    def finish(self) -> None:
        """Wait for what is outstanding; the script's thread has the loop."""
        for wait in self.land():
            self.loop.carry_on(wait)

    def end(self) -> None:
        """The job is closed."""
        for each in self.modules:
            each.detach()


def _merged(gradients: Sequence[RowGradient], table: TableSpec) -> tuple[Ids, Rows]:
    """Return the ids of all gradients, and the sums of their rows in the order of backward."""
    found = [
        Contribution(each.ids, each.rows.cpu().float().contiguous().numpy(), each.factor)
        for each in gradients
    ]
    if len(found) == 1 and found[0].weight == 1.0:
        return found[0].ids, found[0].rows
    return row_kernels().merge(found, table.dim)
