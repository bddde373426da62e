"""The modules of a script whose rows live on the servers: ``psdist.Embedding``, ``EmbeddingBag``.

    self.items = psdist.Embedding(10_131_227, 16, optimizer=psdist.RowWiseAdagrad(lr=0.01))
    self.users = psdist.EmbeddingBag(None, 16, mode="sum", admit=2, evict="lfu:50_000_000")

``job.prepare`` finds them in the model. ``forward`` brings the distinct rows of its ids, and is
torch's own function on them. A module has no weight: ``rows_on_servers`` is one element, which is
never used; it puts the table into a group of the optimizer (psdist.workers.tables.gradients).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.nn import functional

from psdist.errors import UsageError
from psdist.tables.kernels import row_kernels
from psdist.tables.optimizers import RowOptimizer
from psdist.tables.retention import parse_eviction
from psdist.tables.specs import Ids, Rows, TableSpec
from psdist.tables.store import RowStore
from psdist.workers.tables.gradients import RowGradients

_T = TypeVar("_T")
_INTEGERS: Final = (torch.int64, torch.int32)


class RowSource(Protocol):
    """Where a prepared table finds its rows."""

    def look_up(self, table: int, ids: Ids, *, given: torch.Tensor, is_training: bool) -> Rows:
        """Return the rows of ``ids``, which are strictly ascending. ``given``: the ids as the
        script has passed them."""
        ...

    def prefetch(self, table: int, ids: Ids) -> None:
        """The next batch has these ids."""
        ...


class LocalRows:
    """The rows of tables outside of a job: first values, which nothing trains."""

    refusal = ""
    """Why there are no such rows now, with the remedy; "" if there are."""

    def __init__(self, spec: TableSpec) -> None:
        self._store = RowStore(replace(spec, optimizer="RowSGD", arguments={}))

    def look_up(self, _table: int, ids: Ids, *, given: torch.Tensor, is_training: bool) -> Rows:
        del given, is_training
        if self.refusal:
            raise UsageError(self.refusal)
        return self._store.gather(ids)

    def prefetch(self, _table: int, ids: Ids) -> None:
        pass


class _Bring(torch.autograd.Function):
    """Rows in the graph of a forward pass."""

    @staticmethod
    def forward(
        ctx: Any, handle: torch.Tensor, rows: torch.Tensor, ids: Ids, gradients: RowGradients
    ) -> torch.Tensor:
        del handle
        ctx.ids, ctx.gradients = ids, gradients
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return ctx.gradients.add(ctx.ids, gradient), None, None, None


class _Gather(torch.autograd.Function):
    """As ``functional.embedding`` after :class:`_Bring`, on the host, with the same bits. torch's
    own backward pass takes three times as long."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: torch.Tensor,
        rows: torch.Tensor,
        ids: Ids,
        gradients: RowGradients,
        at: torch.Tensor,
    ) -> torch.Tensor:
        del handle
        ctx.ids, ctx.gradients, ctx.at = ids, gradients, at
        return functional.embedding(at, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flat = gradients[0].detach().reshape(-1, gradients[0].shape[-1]).numpy()
        sums = row_kernels().sum_at(flat, ctx.at.view(-1).numpy(), len(ctx.ids))
        return ctx.gradients.add(ctx.ids, torch.from_numpy(sums)), None, None, None, None


class _Found(NamedTuple):
    """Rows of a forward pass."""

    ids: Ids
    """Distinct ones, ascending, without padding."""
    rows: torch.Tensor
    """By id."""
    at: torch.Tensor
    """By id of the script: the position of its row."""
    padding: int | None
    """Position of padding, after the rows."""
    is_training: bool


def _eager(function: Callable[..., _T]) -> Callable[..., _T]:
    """Return a function that torch.compile leaves as it is."""
    if not torch.compiler.is_compiling():
        return function
    wrapped: Callable[..., _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call] # torch's
    return wrapped


class Table(torch.nn.Module):
    """The common part of both modules."""

    def __init__(
        self,
        num_rows: int | None,
        dim: int,
        *,
        optimizer: RowOptimizer | None = None,
        init: float | None = None,
        padding_idx: int | None = None,
        admit: int = 0,
        evict: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = TableSpec(
            name=type(self).__name__,
            num_rows=num_rows,
            dim=dim,
            optimizer="",
            scale=1 / math.sqrt(dim) if init is None else float(init),
            admit=admit,
            evict=evict,
        )
        if problem := self.spec.problem():
            raise UsageError(f"psdist.{type(self).__name__}({num_rows}, {dim}, ...): {problem}")
        if evict:
            parse_eviction(evict)
        if padding_idx is not None and num_rows is not None:
            if not -num_rows <= padding_idx < num_rows:
                raise UsageError(
                    f"psdist.{type(self).__name__}({num_rows}, {dim}, ...): padding_idx is "
                    f"{padding_idx}; expected {-num_rows} to {num_rows - 1}"
                )
            padding_idx %= num_rows
        self.optimizer = optimizer
        self.padding_idx = padding_idx
        self.rows_on_servers = torch.nn.Parameter(torch.zeros(1, device=device))
        self.gradients = RowGradients(self.rows_on_servers)
        self._source: RowSource = LocalRows(self.spec)
        self._number = 0

    def attach(self, source: RowSource, number: int, spec: TableSpec) -> None:
        """The table is prepared: number ``number`` of the job's, with this description."""
        self._source, self._number, self.spec = source, number, spec

    def detach(self) -> None:
        """The job has ended."""
        self._source = ended = LocalRows(self.spec)
        ended.refusal = (
            "a table is used after job.close(): the servers that had its rows have ended; evaluate "
            "before it"
        )

    def prefetch(self, ids: torch.Tensor) -> None:
        """Say which ids the next forward pass will have, before ``optimizer.step()``: their rows
        come with the answer to the step. Rows of other ids cost a message and its answer. psdist
        finds out by itself which tensors of a loader's batches are ids."""
        self._source.prefetch(self._number, np.unique(self._checked(ids)))

    def extra_repr(self) -> str:
        return f"{self.spec.num_rows}, {self.spec.dim}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_source"], state["gradients"]  # a copy is no table of the job
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch's
        self.gradients = RowGradients(self.rows_on_servers)
        self._source = LocalRows(self.spec)

    def _checked(self, ids: torch.Tensor) -> Ids:
        """Return the ids, flat, on the host."""
        if ids.dtype not in _INTEGERS:
            raise UsageError(
                f"table {self.spec.name}: ids of {ids.dtype}; ids are int64 or int32: ids.long()"
            )
        found: Ids = ids.detach().reshape(-1).cpu().long().numpy()
        return found

    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the distinct rows, the position among them of each id, and that of padding."""
        found = self._found(ids)
        rows = found.rows
        if found.is_training:
            rows = _Bring.apply(self.rows_on_servers, rows, found.ids, self.gradients)  # type: ignore[no-untyped-call] # torch's
        if found.padding is not None or not len(rows):  # torch wants a row for it, and one at all
            rows = torch.cat([rows, rows.new_zeros(1, self.spec.dim)])
        return rows, found.at, found.padding

    def _found(self, ids: torch.Tensor) -> _Found:
        chosen, at_each = row_kernels().distinct(self._checked(ids))
        self._require_known(chosen)
        local, padding = torch.from_numpy(at_each).view(ids.shape), None
        if self.padding_idx is not None:
            at = int(np.searchsorted(chosen, self.padding_idx))
            if at < len(chosen) and chosen[at] == self.padding_idx:
                chosen, padding = np.delete(chosen, at), len(chosen) - 1
                local = torch.where(local == at, padding, local - (local > at).long())
        is_training = torch.is_grad_enabled() and self.rows_on_servers.requires_grad
        rows = self._source.look_up(self._number, chosen, given=ids, is_training=is_training)
        return _Found(
            chosen,
            torch.from_numpy(rows).to(ids.device),
            local.to(ids.device),
            padding,
            is_training,
        )

    def only_known(self, ids: Ids) -> Ids:
        """Return these of ``ids`` that are rows of the table."""
        if self.spec.num_rows is not None:
            first, end = np.searchsorted(ids, [0, self.spec.num_rows])
            ids = ids[first:end]
        return ids if self.padding_idx is None else ids[ids != self.padding_idx]

    def _require_known(self, ids: Ids) -> None:
        num_rows = self.spec.num_rows
        if num_rows is not None and len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows):
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise UsageError(
                f"table {self.spec.name}: id {wrong}; it has {num_rows} rows, ids 0 to "
                f"{num_rows - 1}. psdist.{type(self).__name__}(None, ...) takes any id"
            )


class Embedding(Table):
    """A table of ``num_rows`` rows of ``dim`` float32 values, as torch.nn.Embedding; its rows live
    on the servers of the job.

    - ``num_rows``: ids are 0 to ``num_rows`` - 1. None: any 64-bit id, for hashed features; rows
      exist once they were trained.
    - ``optimizer``: psdist.RowSGD, RowWiseAdagrad, RowAdagrad, LazyAdam or FTRL. By default that of
      the torch optimizer with the model's parameters: SGD, Adagrad or (lazy) Adam. Learning rates
      come from the table's parameter group, where the optimizer here has none of its own.
    - ``init``: first values are uniform in [-init, init); default 1 / sqrt(dim).
    - ``padding_idx``: this id has zeros, and no gradient.
    - ``admit``: an id gets a row at its ``admit``-th occurrence, and has its first values before.
    - ``evict``: "lru:CAP", "lfu:CAP" or "age:N"; an evicted row begins again with first values.

    Norms of gradients (``max_grad_norm``, ``job.clip_grad_norm_``) leave rows out; torch's
    ``clip_grad_value_`` and hooks of parameters do not reach them. Without a job the table has its
    first values, which no optimizer trains: call psdist.init() and job.prepare, which need no
    launcher. Under torch.compile the look-up breaks the graph.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids`` (int64 or int32, any shape): float32, with a last dimension of
        ``dim``. Raises :class:`UsageError` for ids that are no integers, or not below
        ``num_rows``."""
        return _eager(Embedding._vectors)(self, ids)

    def _vectors(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.is_cuda or not ids.numel() or self.padding_idx is not None:
            rows, at, padding = self._look_up(ids)
            return functional.embedding(at, rows, padding)
        found = self._found(ids)
        if not found.is_training:
            return functional.embedding(found.at, found.rows)
        gathered: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call] # torch's
            self.rows_on_servers, found.rows, found.ids, self.gradients, found.at
        )
        return gathered


class EmbeddingBag(Table):
    """As :class:`Embedding`, and sums, means or maxima of rows, as torch.nn.EmbeddingBag."""

    def __init__(
        self,
        num_rows: int | None,
        dim: int,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        """``options``: of :class:`Embedding`; ids of padding are left out of bags."""
        super().__init__(num_rows, dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return float32 [bags, dim]. ``ids``: [bags, n], or one-dimensional with the ``offsets``
        of the bags; ``per_sample_weights``: by id, in mode sum. Errors as :class:`Embedding`'s."""
        rows, local, padding = _eager(Table._look_up)(self, ids)
        return functional.embedding_bag(
            local,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
