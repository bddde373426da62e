"""The setting ``outer``: the optimizer that servers run after local steps; text only.

    parse_outer("average")                              # Outer("SGD", {"lr": 1.0})
    parse_outer("nesterov:lr=0.7,momentum=0.9")         # Outer("SGD", {..., "nesterov": True})
    parse_outer("adam:lr=0.001")                        # Outer("Adam", {"lr": 0.001})

``average`` moves every group to the mean of all groups (Local SGD: Stich, 2019);
``nesterov`` is the outer optimizer of DiLoCo (Douillard et al., 2023), by default with its lr 0.7
and momentum 0.9. With ``accumulate`` no optimizer steps on workers: their gradients of a round are
summed, and servers run the script's own optimizer. The module imports nothing of psdist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

MOST_CHARACTERS: Final = 200
ACCUMULATE: Final = "accumulate"

_CLASSES: Final = MappingProxyType(
    {
        name.lower(): name
        for name in (
            *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta"),
            *("Adamax", "NAdam", "RAdam", "RMSprop"),
        )
    }
)
ALLOWED: Final = (
    "average, nesterov[:lr=0.7,momentum=0.9], an optimizer with its numbers "
    "(sgd:lr=0.9,momentum=0.5, adam:lr=0.001, ...), or accumulate"
)
_OPTION: Final = re.compile(r"([a-z_][a-z_0-9]{0,31})=([-+.0-9a-zA-Z]{1,32})")
_WORDS: Final = MappingProxyType({"true": True, "false": False})


def has_rounds(config: RunConfig) -> bool:
    """True if a round has several steps."""
    return config.local_steps != 1


def counted_steps(config: RunConfig) -> int:
    """Return the steps of a round, where the settings give a number."""
    assert config.local_steps != "epoch"
    return config.local_steps


def steps_on_workers(config: RunConfig) -> bool:
    """True if the script's optimizer steps on workers, and another one on servers."""
    return has_rounds(config) and config.outer != ACCUMULATE


@dataclass(frozen=True)
class Outer:
    """``name``: a class of torch.optim; ``options``: the arguments of its constructor."""

    name: str
    options: dict[str, bool | float] = field(default_factory=dict)


def parse_outer(text: str) -> Outer:
    """Return the outer optimizer. Raises :class:`ValueError` for a text that names none."""
    name, colon, rest = text.partition(":")
    options: dict[str, bool | float] = {}
    if len(text) > MOST_CHARACTERS or (colon and not rest):
        raise ValueError(ALLOWED)
    for part in rest.split(",") if rest else ():
        found = _OPTION.fullmatch(part)
        if found is None or found[1] in options:
            raise ValueError(ALLOWED)
        options[found[1]] = _WORDS[found[2]] if found[2] in _WORDS else _number(found[2])
    if name == "average" and not options:
        return Outer("SGD", {"lr": 1.0})
    if name == "nesterov" and options.keys() <= {"lr", "momentum"}:
        return Outer("SGD", {"lr": 0.7, "momentum": 0.9, **options, "nesterov": True})
    if name not in _CLASSES:
        raise ValueError(ALLOWED)
    return Outer(_CLASSES[name], options)


def _number(text: str) -> float:
    value = float(text)
    if not abs(value) < float("inf"):
        raise ValueError(ALLOWED)
    return value
