"""Values a script reports and reads: lines of metrics.jsonl, means over all workers, flags.

A mean is of a tree: dicts, lists and tuples of numbers and tensors. A worker sends a row of float64
and a description of the tree, so that an error names where trees of workers differ. This module
sends nothing.

    logged({"loss/train": tensor}, {"epoch": 1})       # {"loss/train": 0.5, "epoch": 1}
    payload = pack({"loss": 0.5, "per_class": torch.zeros(10)}, num_workers=4)
    mean_of(tree, payloads)                            # the same tree, of means
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from psdist.errors import CollectiveError, UsageError
from psdist.protocol.collected import Brought
from psdist.protocol.control import CONTROL_LIMIT_BYTES
from psdist.protocol.ids import describe_workers

Row = npt.NDArray[np.float64]

TRUE: Final = b"1"
FALSE: Final = b"0"
OWN_NAMES: Final = ("time_s", "rank", "worker", "group", "clock")
"""Names that every line of metrics.jsonl has."""


def logged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one ``job.log``, in a dict and by keyword. Raises :class:`UsageError`."""
    if not isinstance(values, Mapping):
        raise UsageError(
            f"job.log takes names with their values, job.log(loss=x) or job.log({{'loss': x}}); it "
            f"was given a {type(values).__name__}"
        )
    plain: dict[str, Any] = {}
    for name, value in [*values.items(), *more.items()]:
        if not isinstance(name, str):
            raise UsageError(
                f"job.log: the name {name!r} is of type {type(name).__name__}; names "
                "must be strings"
            )
        if name in OWN_NAMES:
            raise UsageError(
                f"job.log({name}=...): every line has a {name} of its own; choose another name"
            )
        if name in plain:
            raise UsageError(f"job.log: {name} is given twice, in the dict and by keyword")
        plain[name] = _plain(name, value)
    return plain


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if size != 1:
            raise UsageError(
                f"job.log({name}=...): the tensor has {size} values, job.log takes one: log its "
                "mean"
            )
        value = value.item()
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    raise UsageError(f"job.log({name}=...): a {type(value).__name__}; numbers and strings only")


def pack(tree: Any, *, num_workers: int) -> tuple[bytes, bytes]:
    """Return this worker's contribution: a description of the tree, and its values. Raises
    :class:`UsageError` for what is neither number, tensor, dict, list nor tuple, and where the
    values of all workers exceed what the server that sums them stores."""
    leaves = _sorted_leaves(tree)
    values = np.concatenate([np.empty(0), *(_row(leaf) for leaf in leaves.values())])
    described = [f"{place or 'it'} is {_describe(leaf)}" for place, leaf in leaves.items()]
    packed: bytes = msgpack.packb(described)
    if (len(packed) + values.nbytes) * num_workers > CONTROL_LIMIT_BYTES // 2:
        raise UsageError(
            f"job.mean of {len(values):,} numbers on {num_workers} workers: it goes through one "
            "server and is for metrics; reduce them first"
        )
    return packed, values.astype("<f8").tobytes()


def number(call: str, value: Any) -> float:
    """``value`` of ``call``: a number, or a tensor of one. Raises :class:`UsageError`."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if size != 1:
            raise UsageError(f"{call}: the tensor has {size} values, it takes one: their mean")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{call}: a {type(value).__name__}; it takes a number")
    try:
        return float(value)
    except OverflowError:  # an int that no float is near
        return math.inf if value > 0 else -math.inf


def packed_flag(call: str, flag: Any) -> bytes:
    """Return this worker's flag for ``job.any`` or ``job.all``. Raises :class:`UsageError`."""
    if isinstance(flag, torch.Tensor | np.ndarray | np.generic):
        size = flag.numel() if isinstance(flag, torch.Tensor) else flag.size
        if size != 1:
            raise UsageError(
                f"job.{call}: the tensor has {size} values, job.{call} takes one: reduce it first, "
                f"job.{call}(flags.{call}())"
            )
        flag = flag.item()
    if not isinstance(flag, bool | int | float):
        raise UsageError(
            f"job.{call}: a {type(flag).__name__}; it takes a bool, a number or a tensor of one "
            "value"
        )
    return TRUE if flag else FALSE


def mean_of(tree: Any, brought: Brought) -> Any:
    """``tree`` with the means of what all workers have brought.

    A tensor with dimensions stays one, of its dtype (float64 for integers) and device; every other
    leaf is a float. Summed in float64 in worker order: the same bits on all workers. Raises
    :class:`CollectiveError`, the same on all, where the trees differ.
    """
    if len(brought.payloads) > 1:
        first, second = map(msgpack.unpackb, brought.payloads[:2])
        other = brought.unlike(brought.payloads[0])[0]
        raise CollectiveError(_difference(first, second, other))
    means = np.frombuffer(brought.values, dtype="<f8") / brought.num_workers
    of_place: dict[str, Row] = {}
    start = 0
    for place, leaf in _sorted_leaves(tree).items():
        end = start + (leaf.numel() if isinstance(leaf, torch.Tensor) else 1)
        of_place[place] = means[start:end]
        start = end
    return _rebuilt(tree, "", of_place)


def _sorted_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by place, such as ``['loss'][0]``, in an order that no dict's insertions decide."""
    return dict(sorted(_leaves(tree, ""), key=lambda item: item[0]))


def _leaves(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{place}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{place}[{index}]")
    elif isinstance(tree, bool | int | float | np.number | np.bool_):
        yield place, float(tree)
    elif isinstance(tree, torch.Tensor) and not tree.is_complex():
        yield place, tree.detach()
    else:
        kind = f"{tree.dtype} tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__
        raise UsageError(
            f"job.mean: {place or 'its argument'} is a {kind}; it takes numbers and tensors, and "
            "dicts, lists and tuples of them"
        )


def _rebuilt(tree: Any, place: str, means: Mapping[str, Row]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _rebuilt(tree[key], f"{place}[{key!r}]", means) for key in tree}
    if isinstance(tree, list | tuple):
        items = [_rebuilt(each, f"{place}[{index}]", means) for index, each in enumerate(tree)]
        if hasattr(tree, "_fields"):  # a namedtuple takes its items one by one
            return type(tree)(*items)
        return items if isinstance(tree, list) else tuple(items)
    if not isinstance(tree, torch.Tensor) or not tree.dim():
        return float(means[place][0])
    dtype = tree.dtype if tree.is_floating_point() else torch.float64
    mean = torch.from_numpy(means[place].copy()).reshape(tree.shape)
    return mean.to(device=tree.device, dtype=dtype)


def _row(leaf: float | torch.Tensor) -> Row:
    if isinstance(leaf, float):
        return np.array([leaf])
    row: Row = leaf.cpu().to(torch.float64).reshape(-1).numpy()
    return row


def _describe(leaf: float | torch.Tensor) -> str:
    if isinstance(leaf, float) or not leaf.dim():
        return "a number"
    return f"a {str(leaf.dtype).removeprefix('torch.')} tensor of shape {list(leaf.shape)}"


def _difference(first: Sequence[str], other: Sequence[str], worker: int) -> str:
    left, right = next(pair for pair in zip_longest(first, other) if pair[0] != pair[1])
    return (
        f"job.mean was called with different trees: on {describe_workers([0])} "
        f"{left or 'it ends'}, on {describe_workers([worker])} {right or 'it ends'}; every worker "
        "must bring the same names and shapes"
    )
