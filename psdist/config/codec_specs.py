"""Codecs as users write them: ``int8``, ``topk:0.01``, ``int4/sign``.

    parse_codec("topk:0.01")         # CodecSpec(name="topk", ratio=0.01)
    parse_codec("int4+zstd")         # CodecSpec(name="int4", is_packed=True)
    parse_codec("sign+burst:20")     # CodecSpec(name="sign", burst=20)
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
ZSTD: Final = "zstd"
PACKABLE: Final = (*CASTS, *QUANTIZED, "topk")
"""Of the others hardly a byte is saved."""
OWN: Final = "own"
SKIP: Final = "skip"
BURST: Final = "burst"
MOST_SKIPPED: Final = 1000
MOST_BURST: Final = 1_000_000
MOST_RANK: Final = 256
_STOCHASTIC: Final = "stochastic"
_OTHERS: Final = ("none", "sign", *CASTS)
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_OWN: Final = re.compile(f"{_DOTTED}:{_DOTTED}", re.ASCII)

ALLOWED: Final = (
    "none, fp16, bf16, int8, int4, int2 (each of these three also as int8:stochastic), sign, "
    "topk:R or randk:R (R: the part of the values that is sent, such as 0.01), lowrank:K (pushes "
    f"alone; K: 1 to {MOST_RANK}), or module:name of your own; +zstd after {', '.join(PACKABLE)}; "
    f"of pushes also +burst:N after a codec (N: 2 to {MOST_BURST}), and skip:THETA, or "
    "skip:THETA:ROUNDS, alone or after a codec: int8+skip:0.001"
)


class Skip(NamedTuple):
    """A push of a chunk is left for later while what it would move is small."""

    threshold: float
    """||lr p|| / ||parameters||, below which it is."""
    most: int = 10
    """How many rounds running, at most."""

    def __str__(self) -> str:
        """As users write it."""
        most = "" if self.most == Skip(0).most else f":{self.most}"
        return f"{SKIP}:{self.threshold:g}{most}"


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
    is_packed: bool = False
    """Whether what the codec gives is made smaller without loss (Zstandard)."""
    skip: Skip | None = None
    """Which pushes are left for later; the codec is of the others."""
    burst: int = 0
    """Every so many rounds a push has no codec; 0: none has."""

    @property
    def is_none(self) -> bool:
        return self.name == "none" and self.skip is None

    @property
    def is_cast(self) -> bool:
        return self.name in CASTS


def parse_codec(text: str) -> CodecSpec:
    """Raises :class:`ValueError`, whose text names what is wrong and what is allowed."""
    spec = _parse(text)
    if spec is None:
        raise ValueError(f"{text!r:.60} is no codec; a codec is {ALLOWED}")
    return spec


def _parse(text: str) -> CodecSpec | None:
    base, plus, rest = text.rpartition("+")
    name, colon, argument = rest.partition(":")
    if name == SKIP:
        spec, skip = _parse(base) if plus else CodecSpec("none"), _skip(argument)
        # none+skip would be another name of skip, and nothing is left for later twice.
        is_whole = spec is not None and spec.skip is None and skip and base != "none"
        return spec._replace(skip=skip) if spec is not None and is_whole else None
    if plus and name == BURST:
        spec, every = _parse(base), _count(argument, MOST_BURST)
        is_whole = spec is not None and not (spec.burst or spec.skip or spec.is_none)
        return spec._replace(burst=every) if spec is not None and is_whole and every > 1 else None
    if plus:
        spec = _parse(base) if rest == ZSTD else None
        if spec is None or spec.name not in PACKABLE or spec.is_packed or spec.skip or spec.burst:
            return None
        return spec._replace(is_packed=True)
    if name in QUANTIZED and (not colon or argument == _STOCHASTIC):
        return CodecSpec(name, is_stochastic=bool(colon))
    if name in _OTHERS and not colon:
        return CodecSpec(name)
    if name in SPARSE and (ratio := _number(argument)) is not None and 0 < ratio <= 1:
        return CodecSpec(name, ratio=ratio)
    if name == LOW_RANK and (rank := _count(argument, MOST_RANK)):
        return CodecSpec(name, rank=rank)
    if name not in (*QUANTIZED, *_OTHERS, *SPARSE, LOW_RANK, SKIP, BURST) and _OWN.fullmatch(text):
        return CodecSpec(OWN, target=text)
    return None


def _skip(text: str) -> Skip | None:
    threshold, colon, most = text.partition(":")
    number = _number(threshold)
    if number is None or not 0 < number < 1:
        return None
    if not colon:
        return Skip(number)
    count = _count(most, MOST_SKIPPED)
    return Skip(number, count) if count else None


def parse_codecs(text: str) -> tuple[str, str]:
    """``A`` for pushes alone, ``A/B`` for pushes and pulls."""
    push, slash, pull = text.partition("/")
    parse_codec(push)
    if slash:
        parse_codec(pull)
    return push, pull if slash else "none"


def _count(text: str, most: int) -> int:
    """From 1 to ``most``; 0 for anything else."""
    is_count = re.fullmatch("[1-9][0-9]{0,6}", text, re.ASCII) and int(text) <= most
    return int(text) if is_count else 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
