"""Codecs as users write them: ``int8``, ``topk:0.01``, ``int4/sign``.

    parse_codec("topk:0.01")         # CodecSpec(name="topk", ratio=0.01)
    parse_codec("int4+zstd")         # CodecSpec(name="int4", is_packed=True)
    parse_codec("sign+burst:20")     # CodecSpec(name="sign", burst=20)
    parse_codec("my_codecs:Halves")  # CodecSpec(name="own", target="my_codecs:Halves")
    parse_codecs("int4/sign")        # ("int4", "sign"): of pushes and of pulls
    parse_codecs("int8")             # ("int8", "none")

psdist.codecs implements them.
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
"""Zstandard saves hardly a byte of the others."""
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
    """A push of a chunk is left for later while it would move little."""

    threshold: float
    """||lr p|| / ||parameters||, below which it is."""
    most: int = 10
    """Most rounds in a row."""

    def __str__(self) -> str:
        """Return it as users write it."""
        most = "" if self.most == Skip(0).most else f":{self.most}"
        return f"{SKIP}:{self.threshold:g}{most}"


class CodecSpec(NamedTuple):
    name: str
    ratio: float = 0.0
    """topk, randk: the part of the values that is sent."""
    is_stochastic: bool = False
    """int8, int4, int2: rounded up or down by chance, right on average."""
    rank: int = 0
    """lowrank: the rank of the matrices."""
    target: str = ""
    """A codec of your own: ``module:name``."""
    is_packed: bool = False
    """True if Zstandard packs what the codec gives."""
    skip: Skip | None = None
    """Pushes that are left for later; the codec is for the others."""
    burst: int = 0
    """Every N-th round has a push without codec; 0: no round has."""

    @property
    def is_none(self) -> bool:
        return self.name == "none" and self.skip is None

    @property
    def is_cast(self) -> bool:
        return self.name in CASTS


def parse_codec(text: str) -> CodecSpec:
    """Return the codec. Raises :class:`ValueError`, whose text says what is allowed."""
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


def parse_pull(text: str) -> CodecSpec:
    """Return the codec of pulls. Raises :class:`ValueError` also for a codec of pushes
    alone: a server stores no earlier encoding, and its reply contains all that the last one left
    out."""
    spec = parse_codec(text)
    if spec.skip is not None or spec.burst or spec.rank:
        raise ValueError(f"{text!r:.60} is a codec of pushes alone; a codec is {ALLOWED}")
    return spec


def parse_codecs(text: str) -> tuple[str, str]:
    """Return the codecs of pushes and pulls: ``A`` is for pushes alone, ``A/B`` for both."""
    push, slash, pull = text.partition("/")
    parse_codec(push)
    if slash:
        parse_codec(pull)
    return push, pull if slash else "none"


class Codecs(NamedTuple):
    push: CodecSpec
    pull: CodecSpec


def parse_both(text: str) -> Codecs:
    """Return the codecs of the setting ``codec``: one for both directions, or ``PUSH/PULL``."""
    push, pull = parse_codecs(text if "/" in text else f"{text}/{text}")
    return Codecs(parse_codec(push), parse_pull(pull))


def codecs_of(*, codec: str | None, push_codec: str | None, pull_codec: str | None) -> Codecs:
    """Return the codecs of three settings: ``codec`` is for both directions, and the others replace
    it, each for its own."""
    both = parse_both(codec or "none")
    return Codecs(
        parse_codec(push_codec) if push_codec is not None else both.push,
        parse_pull(pull_codec) if pull_codec is not None else both.pull,
    )


def text_of(spec: CodecSpec) -> str:
    """Return the codec as users write it."""
    if spec.skip is not None:
        plain = spec._replace(skip=None)
        return f"{spec.skip}" if plain.is_none else f"{text_of(plain)}+{spec.skip}"
    if spec.burst:
        return f"{text_of(spec._replace(burst=0))}+{BURST}:{spec.burst}"
    if spec.is_packed:
        return f"{text_of(spec._replace(is_packed=False))}+{ZSTD}"
    if spec.target:
        return spec.target
    if spec.rank:
        return f"{spec.name}:{spec.rank}"
    if spec.ratio:
        return f"{spec.name}:{spec.ratio:g}"
    return f"{spec.name}:stochastic" if spec.is_stochastic else spec.name


def text_of_both(codecs: Codecs) -> str:
    """Return the codecs as a schedule writes them."""
    push, pull = map(text_of, codecs)
    return push if codecs.pull.is_none else f"{push}/{pull}"


def _count(text: str, most: int) -> int:
    """Return a number from 1 to ``most``; 0 for any other text."""
    is_count = re.fullmatch("[1-9][0-9]{0,6}", text, re.ASCII) and int(text) <= most
    return int(text) if is_count else 0


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
