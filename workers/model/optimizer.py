"""The optimizer that a user holds after ``job.prepare``: one ``step()`` is one iteration.

A torch Optimizer that shares ``param_groups`` by identity with the user's own, so schedulers made
before or after work; it has no state: that lives on the servers. ``step()`` hands the gradients
to the job and returns with the parameters that the mode allows.

    optimizer = ServedOptimizer(torch.optim.SGD(...), step=run_one_iteration)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psdist.errors import UsageError


class ServedOptimizer(torch.optim.Optimizer):
    # torch.amp.GradScaler hands us scale and found_inf instead of skipping the step itself: a
    # skipped step must still advance the group's clock.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        original: torch.optim.Optimizer,
        *,
        step: Callable[[float, bool], None],
    ) -> None:
        """``step(gradient_scale, is_skipped)`` runs one iteration; the user's ``original`` is used
        for its ``param_groups`` and ``defaults`` only."""
        super().__init__(original.param_groups, original.defaults)
        # The constructor copies the list of groups: share the original's, by identity.
        self.param_groups = original.param_groups
        self._original = original
        self._run_step = step
        self._is_ready = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration: push the gradients, return with new parameters in place.

        ``closure``, if given, is called once with gradients enabled; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        is_skipped = found_inf is not None and float(found_inf) > 0
        self._run_step(1.0 if scale is None else 1.0 / float(scale), is_skipped)
        # A scheduler made on the original looks there for evidence that a step came before it.
        self._original._opt_called = True  # type: ignore[attr-defined] # schedulers add it
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_ready", False):
            raise UsageError(
                "add_param_group after job.prepare: the servers' shards are cut already; add the "
                "group before prepare"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        raise UsageError(
            "the optimizer's state lives on the servers, this rank has none of it; save the "
            "model with job.save(path)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 - the base class's
        raise UsageError(
            "the optimizer's state lives on the servers and cannot be loaded into a worker; load "
            "the model's parameters before job.prepare"
        )
