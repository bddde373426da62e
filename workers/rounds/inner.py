"""The optimizer that a user holds after ``job.prepare`` with local steps on this worker.

As :class:`psdist.workers.model.optimizer.ServedOptimizer`, but the state is this worker's own, so
that ``state_dict()`` and ``load_state_dict()`` are torch's.

    optimizer = LocalOptimizer(torch.optim.AdamW(...), step=run_one_step)
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from psdist.config.outer import parse_outer
from psdist.errors import ConfigError, OptimizerRefusedError
from psdist.protocol.memory import as_bytes
from psdist.protocol.optimizers import canonical_name
from psdist.workers.model.optimizer import ServedOptimizer


class LocalOptimizer(ServedOptimizer):
    def __init__(
        self,
        original: torch.optim.Optimizer,
        *,
        step: Callable[[float, bool, bool], None],
    ) -> None:
        """Takes the original's hooks over: they run around this one's ``step()``. Raises
        :class:`OptimizerRefusedError` for one that evaluates the loss itself."""
        if isinstance(original, torch.optim.LBFGS):
            raise OptimizerRefusedError(
                "torch.optim.LBFGS with local.steps: it evaluates the loss several times in a "
                "step, and the workers of a group reduce gradients once; use torch.optim.AdamW"
            )
        super().__init__(original, step=step)
        original._optimizer_step_pre_hooks = OrderedDict()
        original._optimizer_step_post_hooks = OrderedDict()
        self.state = original.state

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, which is the same on all workers of its group."""
        return self._original.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, the same on every worker of the group. The groups stay the same dicts: if
        they were replaced, other holders (a checkpoint, the script) would see no later change."""
        groups = self._original.param_groups
        self._original.load_state_dict(state_dict)
        for group, loaded in zip(groups, self._original.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self._original.param_groups = groups
        self.state = self._original.state

    @property
    def name(self) -> str:
        return canonical_name(type(self._original))

    def told(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the state of each parameter that has some, by its number, for a checkpoint, which
        has the groups elsewhere."""
        state: Mapping[int, dict[str, Any]] = self._original.state_dict()["state"]
        return [(number, dict(its)) for number, its in sorted(state.items())]

    def take(self, told: Sequence[Sequence[Any]]) -> None:
        """Restore what :meth:`told` has returned; the groups stay as they are."""
        whole = self._original.state_dict()
        whole["state"] = {int(number): dict(its) for number, its in told}
        self.load_state_dict(whole)


def digest_of_state(optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the optimizer's state; "" if it has none."""
    state = optimizer.state_dict()["state"]
    if not state:
        return ""
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(part)
    return digest.hexdigest()


def _parts(tree: Any) -> Iterator[bytes | memoryview]:
    if isinstance(tree, torch.Tensor):
        yield f"{tree.dtype}{list(tree.shape)}".encode()
        yield as_bytes(tree.detach().cpu().contiguous().clone().view(-1))
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=repr):
            yield repr(key).encode()
            yield from _parts(tree[key])
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _parts(each)
    else:
        yield repr(tree).encode()


def make_outer(text: str, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the servers' optimizer, with one parameter group: the groups of ``inner`` stay on the
    workers. Raises :class:`ConfigError` for numbers that the optimizer does not take."""
    outer = parse_outer(text)
    parameters = [each for group in inner.param_groups for each in group["params"]]
    kind = getattr(torch.optim, outer.name)
    try:
        made = kind(parameters, **outer.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"local.outer = {text!r}: torch.optim.{outer.name} says: {error}"
        ) from None
    assert isinstance(made, torch.optim.Optimizer)
    return made
