"""Optimizers of rows: how a server updates the rows that a push has gradients of.

    RowWiseAdagrad(lr=0.01)                              # an argument of psdist.Embedding
    chosen = following("torch.optim.Adam", group)        # LazyAdam with the group's betas and eps
    again = row_optimizer(chosen.name, chosen.arguments()) # on a server
    kernels.update(memory, again.rule, slots, gradients, again.numbers(lr), again.sizes())

Only touched rows change: those that a push names. g is the sum of a row's gradients in one
iteration, w its values; all are float32. Where ``lr`` is None, the learning rate is that of the
parameter group which has the table. Schedulers may change it; other arguments never change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from psdist.errors import OptimizerRefusedError, ProtocolError, UsageError

_MOST_STEPS: Final = 1 << 20
"""Steps of a row with a correction of its own; later steps have the last one."""


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Base of the optimizers of rows. Raises :class:`UsageError` for a value out of its range."""

    lr: float | None = None
    """Learning rate; None: that of the parameter group."""

    sync_only: ClassVar[str] = ""
    """Reason why the optimizer needs mode sync; "": it does not."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "lr" and value is None:
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            most = 1.0 if each.name == "betas" else math.inf
            if not all(isinstance(v, int | float) and 0 <= v < most for v in numbers):
                expected = "from 0 to below 1" if most == 1 else "of at least 0, and finite"
                raise UsageError(
                    f"{self.name}: {each.name} is {value!r}; expected numbers {expected}"
                )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def rule(self) -> str:
        """Name of the pass over rows in psdist.tables.kernels."""
        raise NotImplementedError

    @property
    def words(self) -> tuple[int, int]:
        """float32 values of state: by value of a row, and by row."""
        return 0, 0

    @property
    def fill(self) -> float:
        """First value of each word of state."""
        return 0.0

    def state_words(self, dim: int) -> int:
        """Return the float32 values of state that a row of ``dim`` values has."""
        by_value, by_row = self.words
        return by_value * dim + by_row

    def arguments(self) -> dict[str, float]:
        """Return the arguments except ``lr``, as numbers by name."""
        return {each.name: float(getattr(self, each.name)) for each in fields(self)[1:]}

    def numbers(self, lr: float) -> tuple[float, ...]:
        """Return the numbers of an update, as the kernels take them."""
        return lr, *self.arguments().values()

    def sizes(self) -> npt.NDArray[np.float64]:
        """Return, by step of a row, what the learning rate is multiplied by."""
        return np.ones(1)


@dataclass(frozen=True, kw_only=True)
class RowSGD(RowOptimizer):
    """w -= lr g, as torch.optim.SGD without momentum. No state."""

    rule = "sgd"


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """One accumulator a row: s += mean(g^2); w -= lr g / (sqrt(s) + eps).

    Source: ``rowwise_adagrad`` of fbgemm_gpu (EXACT_ROWWISE_ADAGRAD of its table-batched
    embeddings) without weight decay. State: 1 value a row.
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    rule = "row_wise_adagrad"
    words = 0, 1

    @property
    def fill(self) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True, kw_only=True)
class RowAdagrad(RowWiseAdagrad):
    """One accumulator a value: s += g^2; w -= lr g / (sqrt(s) + eps), as torch.optim.Adagrad
    without lr_decay and weight_decay. State: ``dim`` values a row."""

    eps: float = 1e-10

    rule = "adagrad"
    words = 1, 0


@dataclass(frozen=True, kw_only=True)
class LazyAdam(RowOptimizer):
    """Adam of touched rows: m += (1 - b1)(g - m); v += (1 - b2)(g^2 - v);
    w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    Source: torch.optim.SparseAdam, except that t counts the steps of the row, not of the table.
    ``row_wise``: v is one value a row, of mean(g^2), as in fbgemm's PARTIAL_ROWWISE_ADAM. State:
    2 ``dim`` + 1 values a row; ``row_wise``: ``dim`` + 2.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    row_wise: bool = False

    @property
    def rule(self) -> str:
        return "row_wise_adam" if self.row_wise else "adam"

    @property
    def words(self) -> tuple[int, int]:
        return (1, 2) if self.row_wise else (2, 1)

    def arguments(self) -> dict[str, float]:
        numbers = map(float, (*self.betas, self.eps, self.row_wise))
        return dict(zip(("beta1", "beta2", "eps", "row_wise"), numbers, strict=True))

    def numbers(self, lr: float) -> tuple[float, ...]:
        return lr, self.eps, 1 - self.betas[0], 1 - self.betas[1]

    def sizes(self) -> npt.NDArray[np.float64]:
        return _corrections(*self.betas)


@cache
def _corrections(beta1: float, beta2: float) -> npt.NDArray[np.float64]:
    """Return sqrt(1 - b2^t) / (1 - b1^t) for t = 1, 2, ... until float32 gives 1."""
    slowest = max(beta1, beta2)
    most = math.log(2.0**-26) / math.log(slowest) if slowest > 0 else 0
    steps = np.arange(1, 2 + min(_MOST_STEPS, math.ceil(most)), dtype=np.float64)
    return np.asarray(np.sqrt(1 - beta2**steps) / (1 - beta1**steps))


@dataclass(frozen=True, kw_only=True)
class FTRL(RowOptimizer):
    """FTRL-proximal by coordinate: z += g - (sqrt(n + g^2) - sqrt(n)) w / lr; n += g^2;
    w = -sign(z) max(abs(z) - l1, 0) / ((beta + sqrt(n)) / lr + l2). In mode sync only.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), algorithm 1.
    There w begins with 0; here z begins where the formula gives the first value of w, so that a
    first, small gradient moves it little. State: 2 ``dim`` values a row.
    """

    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    rule = "ftrl"
    words = 2, 0
    sync_only = "its step is not proportional to the learning rate, which divides sums of all steps"


ROW_OPTIMIZERS: Final[Mapping[str, type[RowOptimizer]]] = {
    each.__name__: each for each in (RowSGD, RowWiseAdagrad, RowAdagrad, LazyAdam, FTRL)
}


def row_optimizer(name: str, arguments: Mapping[str, float]) -> RowOptimizer:
    """Return the optimizer that has these ``name`` and ``arguments()``. Raises
    :class:`ProtocolError`: a table's description with others is damaged."""
    kind = ROW_OPTIMIZERS.get(name)
    given: dict[str, Any] = dict(arguments)
    try:
        if kind is LazyAdam:
            given["betas"] = given.pop("beta1"), given.pop("beta2")
            given["row_wise"] = bool(given["row_wise"])
        if kind is None or given.keys() != {each.name for each in fields(kind)[1:]}:
            raise KeyError(name)
        return kind(**given)
    except (KeyError, UsageError):
        raise ProtocolError(
            f"a table with the optimizer {name!r:.80} and arguments {dict(arguments)!r:.200}"
        ) from None


_FOLLOWED: Final = {
    "torch.optim.SGD": ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "torch.optim.Adagrad": ("lr_decay", "weight_decay", "maximize"),
    "torch.optim.Adam": ("weight_decay", "amsgrad", "maximize"),
    "torch.optim.AdamW": ("weight_decay", "amsgrad", "maximize"),
    "torch.optim.SparseAdam": ("maximize",),
}
"""Optimizers of torch -> options of a parameter group that rows have no counterpart of."""


def following(name: str, group: Mapping[str, Any], *, table: str = "a table") -> RowOptimizer:
    """Return the optimizer for a table in a parameter group of the torch optimizer ``name``
    (psdist.protocol.optimizers.canonical_name). Raises :class:`OptimizerRefusedError` where a row
    cannot follow the group; the error names the choices."""
    choices = f"give {table} optimizer=, one of psdist.{', psdist.'.join(ROW_OPTIMIZERS)}"
    if name not in _FOLLOWED:
        raise OptimizerRefusedError(f"{table}: {name} has no counterpart for rows; {choices}")
    for option in _FOLLOWED[name]:
        if group.get(option):
            raise OptimizerRefusedError(
                f"{table}: {option} is {group[option]!r} in its parameter group of {name}, and "
                f"servers step the touched rows without it; set it to {type(group[option])()!r} in "
                f"a parameter group of the table, or {choices}"
            )
    if name == "torch.optim.SGD":
        return RowSGD()
    if name == "torch.optim.Adagrad":
        initial = float(group.get("initial_accumulator_value", 0.0))
        return RowAdagrad(eps=float(group["eps"]), initial_accumulator_value=initial)
    beta1, beta2 = map(float, group["betas"])
    return LazyAdam(betas=(beta1, beta2), eps=float(group["eps"]))
