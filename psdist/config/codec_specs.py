"""Codecs as users write them: ``int8``, ``topk:0.01``, ``int4/sign``.

    parse_codec("topk:0.01")         # CodecSpec(name="topk", ratio=0.01)
    parse_codec("my_codecs:Halves")  # CodecSpec(name="own", target="my_codecs:Halves")
    parse_codecs("int4/sign")        # ("int4", "sign"): of pushes and of pulls
    parse_codecs("int8")             # ("int8", "none")

What they do is psdist.codecs.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

CASTS: Final = ("fp16", "bf16")
QUANTIZED: Final = ("int8", "int4", "int2")
SPARSE: Final = ("topk", "randk")
LOW_RANK: Final = "lowrank"
OWN: Final = "own"
MOST_RANK: Final = 256
_STOCHASTIC: Final = "stochastic"
_OTHERS: Final = ("none", "sign", *CASTS)
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_OWN: Final = re.compile(f"{_DOTTED}:{_DOTTED}", re.ASCII)

ALLOWED: Final = (
    "none, fp16, bf16, int8, int4, int2 (each of these three also as int8:stochastic), sign, "
    "topk:R or randk:R (R: the part of the values that is sent, such as 0.01), lowrank:K (pushes "
    f"alone; K: 1 to {MOST_RANK}), or module:name of your own"
)


class CodecSpec(NamedTuple):
    name: str
    ratio: float = 0.0
    """Of topk and randk: which part of the values is sent."""
    is_stochastic: bool = False
    """Of int8, int4 and int2: rounded up or down by chance, right on average."""
    rank: int = 0
    """Of lowrank."""
    target: str = ""
    """Of the user's own: ``module:name``."""

    @property
    def is_none(self) -> bool:
        return self.name == "none"

    @property
    def is_cast(self) -> bool:
        return self.name in CASTS


def parse_codec(text: str) -> CodecSpec:
    """Raises :class:`ValueError`, whose text names what is wrong and what is allowed."""
    name, colon, argument = text.partition(":")
    if name in QUANTIZED and (not colon or argument == _STOCHASTIC):
        return CodecSpec(name, is_stochastic=bool(colon))
    if name in _OTHERS and not colon:
        return CodecSpec(name)
    if name in SPARSE and (ratio := _number(argument)) is not None and 0 < ratio <= 1:
        return CodecSpec(name, ratio=ratio)
    if (
        name == LOW_RANK
        and re.fullmatch("[1-9][0-9]{0,2}", argument)
        and int(argument) <= MOST_RANK
    ):
        return CodecSpec(name, rank=int(argument))
    if name not in (*QUANTIZED, *_OTHERS, *SPARSE, LOW_RANK) and _OWN.fullmatch(text):
        return CodecSpec(OWN, target=text)
    raise ValueError(f"{text!r:.60} is no codec; a codec is {ALLOWED}")


def parse_codecs(text: str) -> tuple[str, str]:
    """``A`` for pushes alone, ``A/B`` for pushes and pulls."""
    push, slash, pull = text.partition("/")
    parse_codec(push)
    if slash:
        parse_codec(pull)
    return push, pull if slash else "none"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
