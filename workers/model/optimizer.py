"""The optimizer that a user holds after ``job.prepare``: one ``step()`` is one iteration.

A torch Optimizer that shares ``param_groups`` by identity with the user's own, so schedulers made
before or after work; it has no state: that lives on the servers, which took over the original's.
``step()`` hands the gradients to the job and returns with the parameters that the mode allows. The
user's own optimizer would train this worker alone: from then on its ``step()`` is an error.

    optimizer = ServedOptimizer(torch.optim.SGD(...), step=run_one_iteration)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Final, NoReturn

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from psdist.errors import CheckpointError, UsageError
from psdist.protocol.ids import describe_workers
from psdist.workers.model.other_optimizers import OtherOptimizers

_LINE: Final = "model, optimizer = job.prepare(model, optimizer)"
"""The line that a script must have."""


class ServedOptimizer(torch.optim.Optimizer):
    # torch.amp.GradScaler hands us scale and found_inf instead of skipping the step itself: a
    # skipped step must still advance the group's clock.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        original: torch.optim.Optimizer,
        *,
        step: Callable[[float, bool, bool], None],
    ) -> None:
        """``step(gradient_scale, is_skipped, has_scaler)`` runs one iteration; the user's
        ``original`` is used for its ``param_groups`` and ``defaults`` only."""
        super().__init__(original.param_groups, original.defaults)
        # The constructor copies the list of groups: share the original's, by identity.
        self.param_groups = original.param_groups
        # Hooks that the script has registered on the original run as before, and so do later ones.
        self._optimizer_step_pre_hooks = original._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = original._optimizer_step_post_hooks
        self._original = original
        self._run_step = step
        parameters = [each for group in self.param_groups for each in group["params"]]
        self._gradients = _GradientWatch(parameters)
        self._others = OtherOptimizers(self, original)
        self.pending = PendingGradients(parameters)
        """Gradients for the next ``step()``."""
        self._is_ready = True
        # The compiler would trace psdist's own code, and recompile it in each iteration.
        self._step_uncompiled = torch.compiler.disable(self._iterate)  # type: ignore[no-untyped-call] # torch's
        # On the object, not its class: a copy of the original is the script's own affair.
        original.step = MethodType(_refuse_step, original)  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration: push the gradients, return with new parameters in place.

        ``closure``, if given, is called once with gradients enabled; its value is returned. A
        function compiled by torch.compile calls it between two graphs.
        """
        return self._step_uncompiled(closure)

    def _iterate(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients.stop()
        self._others.note_served_step()
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        is_skipped = found_inf is not None and float(found_inf) > 0
        has_scaler = found_inf is not None
        self._run_step(1.0 if scale is None else 1.0 / float(scale), is_skipped, has_scaler)
        self.pending.note_used()
        # A scheduler made on the original looks there for evidence that a step came before it.
        self._original._opt_called = True  # type: ignore[attr-defined] # schedulers add it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the original's, which may be the script's own: both have the same parameters."""
        self._original.zero_grad(set_to_none)

    def end(self) -> None:
        """The job is closed: from now on ``step()`` is an error."""
        self._gradients.stop()
        self._others.stop()
        self._run_step = _refuse_step_after_end

    @property
    def has_unused_gradients(self) -> bool:
        """True if the script has computed gradients and never called ``step()``."""
        return self._gradients.has_seen_one

    @property
    def is_bypassed(self) -> bool:
        """True if another optimizer has stepped these parameters since the last ``step()``."""
        return self._others.have_stepped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_ready", False):
            raise UsageError(
                "add_param_group after job.prepare: the servers' shards are cut already; add the "
                "group before prepare"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        raise UsageError(
            "optimizer.state_dict() is not available: the servers hold the optimizer's state; "
            "job.optimizer_state(), which every worker calls, returns it on the chief, and "
            "job.save(path) saves the model"
        )

    def as_plain(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> dict[str, Any]:
        """The ``state_dict()`` of a plain optimizer with this state of its parameters."""
        packed = super().state_dict()  # has no state, but the groups as they are now
        parameters = (each for group in self.param_groups for each in group["params"])
        packed["state"] = {
            number: state[each] for number, each in enumerate(parameters) if each in state
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002 - the base class's
        raise UsageError(
            "optimizer.load_state_dict() is not available: the servers hold the optimizer's state; "
            "load it into the optimizer that you pass to job.prepare, before job.prepare()"
        )


def refuse_untrained(where: str, workers: Sequence[int]) -> UsageError:
    """Return the error of a save or an end when these workers have trained past the servers."""
    return UsageError(
        f"{where}: {describe_workers(workers)} computed gradients and never called "
        "optimizer.step() of the prepared optimizer, so the servers hold older values; keep what "
        f"job.prepare returns ({_LINE}) and call step() of that optimizer in every iteration. To "
        "change hyperparameters, write to its param_groups instead of making another optimizer"
    )


def _refuse_step(_original: torch.optim.Optimizer, *_arguments: Any, **_options: Any) -> NoReturn:
    raise UsageError(
        "this optimizer was passed to job.prepare, and its own step() would train this worker "
        f"alone; keep what job.prepare returns ({_LINE}) and call step() of that optimizer"
    )


def is_refusal(step: object) -> bool:
    """True for the step() that an optimizer has after job.prepare. It may be prepared again in the
    next job."""
    return getattr(step, "__func__", None) is _refuse_step


def _refuse_step_after_end(*_arguments: Any) -> NoReturn:
    raise UsageError(
        "optimizer.step() was called after job.close(), which has ended the job; psdist.init() "
        "begins another one, whose prepare gives an optimizer that trains"
    )


# Schedulers mark the step that they have wrapped. One made before would warn that its own was
# replaced, one made later would wrap this.
_refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class _GradientWatch:
    """Whether autograd has computed a gradient of any of these parameters, until :meth:`stop`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.has_seen_one = False
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._note)  # type: ignore[no-untyped-call] # torch's
            for parameter in parameters
            if parameter.requires_grad
        ]

    # Copying and pickling a model leaves it behind, without a warning.
    @unserializable_hook  # type: ignore[untyped-decorator] # torch's
    def _note(self, _gradient: torch.Tensor) -> None:
        self.has_seen_one = True

    def stop(self) -> None:
        """From now on gradients are used; the hooks cost nothing any more."""
        self.has_seen_one = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class PendingGradients:
    """Accumulated gradients, which no ``step()`` has used.

    A gradient is used if it is still the tensor that step() has left, unwritten since. Nothing is
    copied and no hook is needed: an iteration looks once at each parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._used: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * len(parameters)
        """For each parameter the gradient that the last step() has left: the tensor and its
        version. An address is not enough: the next gradient may have the same."""

    def note_used(self) -> None:
        self._used = [
            None if each.grad is None else (weakref.ref(each.grad), each.grad._version)
            for each in self._parameters
        ]

    def collect(self) -> dict[int, torch.Tensor | None]:
        """By number of the parameter; None for zeros. The tensors are live ones."""
        found: dict[int, torch.Tensor | None] = {}
        for number, (parameter, used) in enumerate(zip(self._parameters, self._used, strict=True)):
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:  # step() refuses others
                continue
            if used is not None and used[0]() is gradient and used[1] == gradient._version:
                continue
            found[number] = gradient if gradient.count_nonzero() else None
        return found

    @property
    def is_any(self) -> bool:
        """True if there is a gradient that is not zero."""
        return any(each is not None for each in self.collect().values())

    def restore(self, told: Mapping[int, torch.Tensor | None]) -> None:
        """Make the gradients those that :meth:`collect` has told. Raises
        :class:`CheckpointError` where they are not of these parameters."""
        for number, gradient in told.items():
            if not 0 <= number < len(self._parameters):
                raise CheckpointError(
                    f"a gradient of parameter {number} of {len(self._parameters)}"
                )
            parameter = self._parameters[number]
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
                continue
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise CheckpointError(
                    f"the gradient of parameter {number} is {list(gradient.shape)}, "
                    f"{gradient.dtype}; the parameter {list(parameter.shape)}, {parameter.dtype}"
                )
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
