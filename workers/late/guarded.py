"""Parameters whose values have not come yet: a read of one waits for them first.

A guarded parameter is of the class :class:`Guarded` for a while. So torch hands every operation on
it, wherever it was found (a list, a closure, an optimizer), to ``__torch_function__``, which waits
and then runs the operation on a plain parameter. Readers below torch's Python side (a C++
extension, a function of torch.jit) get the parameter by ``module.weight``: a table instead of
``module._parameters`` waits there. The old values lie elsewhere meanwhile: a reader that bypasses
both, with a list of its own, finds NaN, never the old values.

    guard = Guard(parameters, on_read=lambda index: ...)   # must open() it
    guard.use_tables(module)
    guard.close()
    guard.open([0, 3])                       # their values are in place
    guard.remove_tables()

Operations that read no value (``p.grad``, ``p.shape``) do not wait. Copies of a guarded parameter,
and of a module with tables, are plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from psdist.errors import InvariantError

_ATTRIBUTES: Final = (
    *("shape", "dtype", "device", "layout", "ndim", "_version", "is_leaf", "grad_fn", "names"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_mkldnn", "is_nested"),
    *("grad", "requires_grad", "retains_grad", "output_nr", "_backward_hooks", "itemsize"),
    *("_post_accumulate_grad_hooks", "nbytes"),
)
_METHODS: Final = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset"),
    *("element_size", "is_floating_point", "is_complex", "is_contiguous", "get_device"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__"),
)


def _without_values() -> Iterator[Any]:
    for name in _ATTRIBUTES:
        attribute: Any = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            yield attribute.__get__
    for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        yield getattr(torch.Tensor, name).__set__
    for name in _METHODS:
        yield getattr(torch.Tensor, name)


_READS_NO_VALUE: Final = frozenset(_without_values())

_READERS: Final[dict[int, tuple[Callable[[int], None], int]]] = {}
"""Id of a guarded parameter -> (``on_read``, index)."""


def _read(parameter: Guarded) -> None:
    on_read, index = _READERS[id(parameter)]
    on_read(index)
    if type(parameter) is Guarded:
        raise InvariantError(f"parameter {index} was awaited, and is not there")


def _there(value: Any) -> Any:
    if type(value) is Guarded:
        _read(value)
    return value


def plainly() -> ExitStack:
    """Return a context in which values are put in place unseen by a transformation that follows
    the computation (torch.func, a trace, fake tensors)."""
    stack = ExitStack()
    stack.enter_context(torch._C._DisableFuncTorch())
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch.inference_mode(False))
    if torch._C._len_torch_dispatch_stack():
        stack.enter_context(_disable_current_modes())
    if (tracing := torch._C._get_tracing_state()) is not None:
        c: Any = torch._C  # its functions are not declared
        stack.callback(c._set_tracing_state, tracing)
        c._set_tracing_state(None)
    return stack


def _guarded_in(tree: Any) -> Iterator[Guarded]:
    if isinstance(tree, Guarded):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _guarded_in(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _guarded_in(each)


class Guarded(Parameter):
    """The class of a parameter until its values are in place; no object is constructed with it."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Make a plain parameter, for code that has kept ``type(p)``."""
        return Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for parameter in _guarded_in([args, kwargs]):
            if type(parameter) is cls:  # else an earlier read has opened it
                _read(parameter)
        return func(*args, **(kwargs or {}))

    # These ask for the class before they read.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _read(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes the contents, too
        _read(self)
        return repr(self)


class ParameterTable(dict[str, "Parameter | None"]):
    """``module._parameters``; a look-up of an item waits for its values. Iteration does not wait:
    ``model.zero_grad()`` iterates over all, and reads none."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        return _there(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return _there(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        return _there(super().pop(name, *default))

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (dict(self),)


class Guard:
    def __init__(self, parameters: Sequence[Parameter], *, on_read: Callable[[int], None]) -> None:
        """``on_read(index)`` returns when that parameter is open, with its values in place."""
        self._parameters = parameters
        self._on_read = on_read
        self._with_tables: list[torch.nn.Module] = []
        self._values: dict[int, torch.Tensor] = {}
        """The memory with the values of guarded parameters."""
        self._nothing: list[torch.Tensor] | None = None
        """NaN, in the shape of each."""

    def use_tables(self, module: torch.nn.Module) -> None:
        """Put a table into ``module`` and each module below it that has none."""
        for each in module.modules():
            if type(each._parameters) is dict:
                each._parameters = ParameterTable(each._parameters)
                self._with_tables.append(each)

    def remove_tables(self) -> None:
        for module in self._with_tables:
            if type(module._parameters) is ParameterTable:
                module._parameters = dict(module._parameters)
        self._with_tables.clear()

    def close(self) -> None:
        """Guard all parameters: each read calls ``on_read`` from now on."""
        if self._nothing is None:
            self._nothing = self._made_nothing()
        for index, parameter in enumerate(self._parameters):
            self._values[index] = parameter.data
            parameter.data = self._nothing[index]
            _READERS[id(parameter)] = self._on_read, index
            parameter.__class__ = Guarded

    def open(self, indices: Iterable[int]) -> None:
        """Open these parameters: their values are in place."""
        for index in indices:
            parameter = self._parameters[index]
            parameter.__class__ = Parameter
            del _READERS[id(parameter)]
            parameter.data = self._values.pop(index)

    def _made_nothing(self) -> list[torch.Tensor]:
        """Return NaN in the shape of each parameter; all of a dtype share their memory."""
        numbers: dict[torch.dtype, int] = {}
        for each in self._parameters:
            numbers[each.dtype] = max(numbers.get(each.dtype, 0), each.numel())
        nan = {dtype: torch.full((n,), math.nan, dtype=dtype) for dtype, n in numbers.items()}
        return [nan[each.dtype].as_strided(each.shape, each.stride()) for each in self._parameters]
