"""Which optimizers a server runs, by name and with reasons, and how hyperparameters travel.

Owns the allow-list (the classes of torch.optim as data, plus classes that a server's own
configuration names) and the wire form of hyperparameters. It never imports torch or an optimizer: a
name that arrives is only looked up here; psdist.servers.shard.chunk_optimizer makes the optimizer.

    accepted = traits(canonical_name(type(optimizer)))           # or OptimizerRefusedError
    check_mode(accepted, "async")
    sent = pack_hyperparameters(hyperparameters(optimizer.param_groups, known=optimizer.defaults))
    unpack_hyperparameters(sent)                                  # -> [{"lr": 0.1, ...}, ...]

**Which keys of an optimizer group matter.** A worker leaves out `LOCAL_KEYS` (they choose how a
step is computed on *its* device) and, given ``known=optimizer.defaults``, all that is not the
optimizer's own: what schedulers add (initial_lr, max_lr, base_momentum, ...) and users' labels. A
server, which trusts no key, passes to the constructor only what its signature names, and later
changes only keys that the optimizer itself put into its group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgpack

from psdist.errors import ConfigError, OptimizerRefusedError, ProtocolError

HyperValue: TypeAlias = "bool | int | float | tuple[HyperValue, ...] | None"

LOCAL_KEYS: Final = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "initial_lr",
    }
)

_WITH_SECOND_MOMENT: Final = ("torch.optim.Adam", "torch.optim.AdamW")
_MAX_BYTES: Final = 8 * 2**20
_MAX_GROUPS: Final = 65_536
_MAX_KEYS: Final = 256
_MAX_KEY_CHARACTERS: Final = 128
_MAX_TUPLE: Final = 1024
_MAX_DEPTH: Final = 4
_MAX_DIFFERENCES_TOLD: Final = 3


class OptimizerKind(StrEnum):
    ELEMENTWISE = "elementwise"
    """A step on a flat concatenation gives what it gives tensor by tensor."""
    WHOLE_TENSOR = "whole"
    """It needs the original shape: its pieces stay whole."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """Properties of an optimizer that psdist accepts.

    ``lr_scales``: lr * w moves the parameters w times as far in one step, as ssp and async need
    (each group's update is applied with lr x its weight); ``reason`` says why where it does not.
    """

    name: str
    kind: OptimizerKind
    lr_scales: bool
    reason: str = ""


def _accepted(
    name: str, kind: OptimizerKind = OptimizerKind.ELEMENTWISE, *, lr_does_not_scale: str = ""
) -> tuple[str, OptimizerTraits]:
    full = f"torch.optim.{name}"
    return full, OptimizerTraits(
        name=full, kind=kind, lr_scales=not lr_does_not_scale, reason=lr_does_not_scale
    )


# Each entry was read in torch's source and is repeated as an experiment in
# tests/unit/protocol/test_optimizers.py (kind, lr_scales); a class that a newer torch adds fails
# that test until it is entered here.
ACCEPTED: Final[Mapping[str, OptimizerTraits]] = dict(
    [
        _accepted("SGD"),
        _accepted("Adam"),
        _accepted("AdamW"),
        _accepted("Adagrad"),
        _accepted("Adadelta"),
        _accepted("Adamax"),
        _accepted("NAdam"),
        _accepted("RAdam"),
        _accepted("RMSprop"),
        _accepted(
            "Rprop",
            lr_does_not_scale="its lr is only the first step size; later step sizes follow the "
            "signs of the gradients",
        ),
        _accepted(
            "ASGD",
            lr_does_not_scale="its lr enters the decay of eta, and a step moves by the eta of the "
            "step before",
        ),
        _accepted(
            "Adafactor",
            OptimizerKind.WHOLE_TENSOR,
            lr_does_not_scale="its step size is min(lr, 1/sqrt(t)), so a smaller lr need not make "
            "a smaller step",
        ),
        _accepted("Muon", OptimizerKind.WHOLE_TENSOR),
    ]
)

REFUSED: Final[Mapping[str, str]] = {
    "torch.optim.LBFGS": "it evaluates the loss several times in a step, and a server has "
    "gradients only; use torch.optim.SGD or torch.optim.AdamW",
    "torch.optim.SparseAdam": "it takes sparse gradients only, and psdist sends dense ones; use "
    "torch.optim.Adam",
    "torch.optim.Optimizer": "it is the abstract base class; pass one of its subclasses",
}


def canonical_name(optimizer_class: type) -> str:
    """``torch.optim.AdamW``, whichever module of torch.optim defines it; else ``module:Class``."""
    module, name = optimizer_class.__module__, optimizer_class.__qualname__
    if module == "torch.optim" or module.startswith("torch.optim."):
        return f"torch.optim.{name}"
    return f"{module}:{name}"


def traits(name: str, *, extra: Sequence[str] = ()) -> OptimizerTraits:
    """Return the traits of optimizer ``name``; raises OptimizerRefusedError if it cannot run.

    ``extra`` are entries of the server's own configuration: ``module:Class``, with a mark
    ``module:Class=elementwise`` or ``=whole``, followed by ``+lr_scales`` where that holds.
    Without a mark the safe choice is taken: whole tensors, and sync mode only. An entry cannot
    change what this table says of torch's own classes.
    """
    if name in ACCEPTED:
        return ACCEPTED[name]
    if name in REFUSED:
        raise OptimizerRefusedError(f"{name} cannot run on a parameter server: {REFUSED[name]}")
    if name.startswith("torch.optim."):
        raise OptimizerRefusedError(
            f"{name} cannot run on a parameter server: this psdist does not know it; known are "
            f"{', '.join(sorted(ACCEPTED))}"
        )
    for entry in extra:
        declared = _declared(entry)
        if declared.name == name:
            return declared
    raise OptimizerRefusedError(
        f"{name} cannot run on a parameter server: servers construct the optimizers of torch.optim "
        "and those that their own configuration names; to allow this one, add "
        f'"{name}" to the setting training.optimizers'
    )


def _declared(entry: str) -> OptimizerTraits:
    name, _, mark = entry.partition("=")
    kind, _, scaling = mark.partition("+")
    module, _, qualified = name.partition(":")
    is_name = all(part.isidentifier() for part in (*module.split("."), *qualified.split(".")))
    if (
        not is_name
        or kind not in ("", *OptimizerKind)
        or scaling not in ("", "lr_scales")
        or entry.endswith(("=", "+"))
    ):
        raise ConfigError(
            f"setting training.optimizers: {entry!r} is not of the form module:Class, "
            "module:Class=elementwise or module:Class=whole (with +lr_scales after the mark if a "
            "step's movement is proportional to lr)"
        )
    return OptimizerTraits(
        name=name,
        kind=OptimizerKind(kind) if kind else OptimizerKind.WHOLE_TENSOR,
        lr_scales=bool(scaling),
        reason=""
        if scaling
        else "the server's configuration does not say that its movement is proportional to lr "
        f'("{name}={kind or OptimizerKind.WHOLE_TENSOR}+lr_scales" says so)',
    )


def check_mode(accepted: OptimizerTraits, mode: str) -> None:
    """Refuse in ssp and async an optimizer whose updates cannot be weighted through lr."""
    if mode != "sync" and not accepted.lr_scales:
        raise OptimizerRefusedError(
            f"{accepted.name} cannot run in {mode} mode, where each group's update is applied with "
            f"lr x the group's weight: {accepted.reason}; use mode sync or another optimizer"
        )


def has_second_moment(name: str, param_groups: Iterable[Mapping[str, Any]]) -> bool:
    """True if the setting ``freeze_step`` can keep the second moment of this optimizer. amsgrad
    divides by the largest second moment so far instead."""
    return name in _WITH_SECOND_MOMENT and not any(group["amsgrad"] for group in param_groups)


class _UnfitError(Exception):
    """A value that cannot be a hyperparameter; the text says why."""


def hyperparameters(
    param_groups: Iterable[Mapping[str, Any]], *, known: Collection[str] | None = None
) -> list[dict[str, HyperValue]]:
    """An optimizer's groups as plain data, keys sorted; see the module's docstring for which keys.

    A tensor or numpy scalar (``lr=torch.tensor(0.1)``) becomes a number, a list a tuple. Raises
    OptimizerRefusedError naming the key and the type of anything else, and on NaN.
    """
    groups = [
        {
            key: value
            for key, value in group.items()
            if key not in LOCAL_KEYS and (known is None or key in known)
        }
        for group in param_groups
    ]
    try:
        return _plain_groups(groups)
    except _UnfitError as error:
        raise OptimizerRefusedError(str(error)) from None


def pack_hyperparameters(groups: Sequence[Mapping[str, HyperValue]]) -> bytes:
    """Canonical msgpack: equal values of equal types give equal bytes, floats are exact."""
    try:
        return _pack(_plain_groups(groups))
    except _UnfitError as error:
        raise OptimizerRefusedError(str(error)) from None


def unpack_hyperparameters(packed: bytes) -> list[dict[str, HyperValue]]:
    """Return the packed hyperparameters; raises ProtocolError on any other bytes."""
    try:
        if len(packed) > _MAX_BYTES:
            raise _UnfitError(f"{len(packed)} bytes, allowed are {_MAX_BYTES}")
        received = msgpack.unpackb(packed, use_list=False)
        if not isinstance(received, tuple) or not all(isinstance(g, dict) for g in received):
            raise _UnfitError("not a list of maps")
        groups = _plain_groups(received)
        # Also turns away doubled or unsorted keys and short floats, so that bytes can be compared.
        if _pack(groups) != packed:
            raise _UnfitError("not in canonical form")
    except (_UnfitError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed hyperparameters in a message: {error}") from None
    return groups


def lr_of_groups(packed: bytes) -> list[float]:
    """Return the ``lr`` of each optimizer group, as packed; 1 where the optimizer has none."""
    found = (group.get("lr", 1.0) for group in unpack_hyperparameters(packed))
    return [float(lr) if isinstance(lr, int | float) else 1.0 for lr in found]


def difference(
    first: Sequence[Mapping[str, HyperValue]], second: Sequence[Mapping[str, HyperValue]]
) -> str:
    """Where two sets of hyperparameters differ, ``lr 0.1 against 0.05 in optimizer group 1``.

    Empty exactly when both pack to the same bytes.
    """
    if len(first) != len(second):
        return f"{len(first)} optimizer groups against {len(second)}"
    differences = []
    pairs = zip(_plain_groups(first), _plain_groups(second), strict=True)
    for index, (one, other) in enumerate(pairs):
        for key in sorted({*one, *other}):
            # repr, because 1, 1.0 and True are equal to Python and different to an optimizer.
            left, right = (
                repr(group[key]) if key in group else "nothing" for group in (one, other)
            )
            if left != right:
                differences.append(f"{key} {left} against {right} in optimizer group {index}")
    if len(differences) > _MAX_DIFFERENCES_TOLD:
        more = len(differences) - _MAX_DIFFERENCES_TOLD
        differences[_MAX_DIFFERENCES_TOLD:] = [f"and {more} more"]
    return "; ".join(differences)


def _pack(groups: Sequence[Mapping[str, HyperValue]]) -> bytes:
    packed: bytes = msgpack.packb(groups)
    if len(packed) > _MAX_BYTES:
        raise _UnfitError(f"hyperparameters take {len(packed)} bytes, allowed are {_MAX_BYTES}")
    return packed


def _plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, HyperValue]]:
    if len(groups) > _MAX_GROUPS:
        raise _UnfitError(f"{len(groups)} optimizer groups, allowed are {_MAX_GROUPS}")
    return [_plain_group(index, group) for index, group in enumerate(groups)]


def _plain_group(index: int, group: Mapping[str, Any]) -> dict[str, HyperValue]:
    if len(group) > _MAX_KEYS:
        raise _UnfitError(f"optimizer group {index}: {len(group)} keys, allowed are {_MAX_KEYS}")
    for key in group:
        if not isinstance(key, str) or not key.isidentifier() or len(key) > _MAX_KEY_CHARACTERS:
            raise _UnfitError(
                f"optimizer group {index}: the key {key!r:.200} is not a name of at most "
                f"{_MAX_KEY_CHARACTERS} characters"
            )
    plain = {}
    for key in sorted(group):
        try:
            plain[key] = _plain(group[key], 0)
        except _UnfitError as error:
            raise _UnfitError(f"optimizer group {index}: {key} is {error}") from None
    return plain


def _plain(value: object, depth: int) -> HyperValue:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise _UnfitError(f"{value}, which does not fit into 64 bits")
        return int(value)
    if isinstance(value, float):
        if value != value:
            raise _UnfitError("nan; look at the schedule that computed it")
        return float(value) + 0.0  # equal values, equal bytes: -0.0 becomes 0.0
    if isinstance(value, list | tuple):
        if depth == _MAX_DEPTH or len(value) > _MAX_TUPLE:
            raise _UnfitError(f"nested too deeply or has more than {_MAX_TUPLE} members")
        return tuple(_plain(member, depth + 1) for member in value)
    item = getattr(value, "item", None)
    if callable(item):  # a tensor or a numpy scalar; item() is what torch's own step uses
        try:
            number = item()
        except (RuntimeError, ValueError, TypeError):  # it has more than one element
            number = value
        if isinstance(number, bool | int | float):
            return _plain(number, depth)
    shown = " ".join(repr(value).split())  # a tensor's repr has many lines
    raise _UnfitError(
        f"{shown:.80} ({type(value).__name__}); what goes to a server may only be bool, int, "
        "float, None or a tuple of these"
    )
