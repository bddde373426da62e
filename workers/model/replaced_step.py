"""Check that an optimizer's step is that of its class, which servers run.

    refuse_replaced_step(optimizer)              # OptimizerRefusedError

A script may assign to ``optimizer.step`` or to ``torch.optim.SGD.step``. torch itself wraps both:
schedulers the one of an object, the profiler's hook and the compiler those of classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

import torch

from psdist.errors import OptimizerRefusedError
from psdist.workers.model.optimizer import is_refusal


def refuse_replaced_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`OptimizerRefusedError` if the script has replaced ``step`` or a method that it
    calls, on this object or on a class of torch. Servers run the class's own step()."""
    kind = type(optimizer)
    for name, value in vars(optimizer).items():
        is_method = callable(value) and hasattr(kind, name) and name != "zero_grad"
        if is_method and not _is_of_schedulers(value, kind) and not is_refusal(value):
            raise _replaced(f"this {kind.__name__} object has a {name}() of the script's own")
    if not kind.__module__.startswith("torch.optim"):
        return  # the class is the script's own: servers import it, with its step()
    step = kind.step
    if any(not _is_torchs(each) for each in _chain(step)) or not _is_own(step, kind):
        raise _replaced(f"the script has replaced {kind.__module__}.{kind.__name__}.step()")


def _replaced(what: str) -> OptimizerRefusedError:
    return OptimizerRefusedError(
        f"{what}, which would never be called: servers run the step() of torch; to change "
        "gradients use optimizer.register_step_pre_hook(), or write a class of optimizers and name "
        "it in the setting training.optimizers"
    )


def _is_of_schedulers(value: object, kind: type[torch.optim.Optimizer]) -> bool:
    """True if a scheduler of torch has wrapped the class's own step, to see that it is called."""
    return (
        isinstance(value, FunctionType)
        and value.__globals__["__name__"] == "torch.optim.lr_scheduler"
        # torch may have wrapped the class's step again since.
        and getattr(value, "__wrapped__", None) in _chain(kind.step)
    )


def _chain(function: object) -> Iterator[object]:
    """The function and what functools.wraps says that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_torchs(function: object) -> bool:
    # Not __module__, which functools.wraps copies.
    return isinstance(function, FunctionType) and str(function.__globals__["__name__"]).startswith(
        "torch."
    )


def _is_own(step: object, kind: type) -> bool:
    """True if the innermost function is the step() of ``kind`` or of one of its base classes."""
    *_, innermost = _chain(step)
    own = {f"{base.__qualname__}.step" for base in kind.__mro__}
    return getattr(innermost, "__qualname__", "") in own
