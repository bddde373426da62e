"""Which codecs go with what else a run is: one function decides, and docs/communication.md has its
table.

    codecs_of(codec="int8", push_codec=None, pull_codec="sign")      # what each direction has
    refusal(push, pull, mode="ssp")                                  # "" where it works

    python -m psdist.config.combinations                             # the table
"""

from __future__ import annotations

from typing import Final, NamedTuple

from psdist.config.codec_specs import BURST, ZSTD, CodecSpec, parse_codec, parse_codecs
from psdist.mode_names import MODES

EXAMPLES: Final = (
    *("none", "fp16", "bf16", "int8", "int8:stochastic", "int4", "int2", "sign"),
    *("topk:0.01", "randk:0.01", "lowrank:4", "module:name", "bf16+zstd", "int4+zstd"),
    *("topk:0.01+burst:20", "skip:0.001", "int8+skip:0.001"),
)
"""One of each kind, for the table."""


class Codecs(NamedTuple):
    push: CodecSpec
    pull: CodecSpec


def parse_both(text: str) -> Codecs:
    """Of the setting ``codec``: one for both directions, or ``PUSH/PULL``."""
    push, pull = parse_codecs(text if "/" in text else f"{text}/{text}")
    return Codecs(parse_codec(push), parse_codec(pull))


def codecs_of(*, codec: str | None, push_codec: str | None, pull_codec: str | None) -> Codecs:
    """``codec`` is for both directions; the others go before it, each for its own."""
    both = parse_both(codec or "none")
    return Codecs(
        parse_codec(push_codec) if push_codec is not None else both.push,
        parse_codec(pull_codec) if pull_codec is not None else both.pull,
    )


def refusal(
    push: CodecSpec,
    pull: CodecSpec,
    *,
    mode: str,
    has_copies: bool = False,
    pipeline: int = 0,
    has_float64: bool = False,
    has_feedback: bool = True,
    is_mixed: bool = False,
) -> str:
    """Why a run cannot have these, and what to do; "" where it can. ``has_copies``: the setting
    ``pull_copies``; ``has_float64``: whether the model has such parameters, which is known when it
    is prepared; ``is_mixed``: whether the mode is sync in some rounds and another one in others."""
    if pull.skip is not None:
        return (
            f"pull_codec = {text_of(pull)}: only pushes are left for later; set another pull_codec "
            "(a server answers with nothing where nothing has changed)"
        )
    if pull.burst:
        return (
            f"pull_codec = {text_of(pull)}: only pushes go in full now and then; set another "
            "pull_codec (what a reply leaves out is in the next one)"
        )
    if push.skip is not None and not has_feedback:
        return (
            f"push_codec = {text_of(push)} with feedback = off: what is left for later would be "
            "lost; set feedback = on"
        )
    if pull.rank:
        return (
            f"pull_codec = {text_of(pull)}: goes with pushes alone, since it goes on from its last "
            "encoding, which servers do not keep; set another pull_codec, such as int8 or sign"
        )
    if mode != "sync" and not has_copies and not (pull.is_none or pull.is_cast):
        return (
            f"pull_codec = {text_of(pull)} with mode = {mode}: groups hold different versions, so "
            "a reply cannot be relative to what was sent before; set pull_copies = on, with which "
            "servers keep what each group holds, or pull_codec = none, fp16 or bf16, or mode = sync"
        )
    if is_mixed and mode == "sync" and not (pull.is_none or (pull.is_cast and not has_copies)):
        allowed = "none" if has_copies else "none, fp16 or bf16"
        return (
            f"pull_codec = {text_of(pull)} with mode = sync in a run that has other modes, too: "
            "there groups hold different versions, so a reply to all of them cannot be relative to "
            f"what was sent before; in rounds of sync set pull_codec = {allowed}"
        )
    if has_copies and pipeline:
        return (
            "pipeline = 1 with pull_copies = on: the next push leaves while a reply is under way, "
            "so no reply could be relative to the one before; set pipeline = 0, or pull_copies = "
            "off and pull_codec = none, fp16 or bf16"
        )
    if has_float64 and not (push.is_none and pull.is_none):
        return (
            f"codecs {text_of(push)}/{text_of(pull)} for parameters of float64: codecs compute in "
            "float32; set push_codec = none and pull_codec = none, or train in float32"
        )
    return ""


def text_of(spec: CodecSpec) -> str:
    """As users write it."""
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
    """As a schedule writes them."""
    push, pull = map(text_of, codecs)
    return push if codecs.pull.is_none else f"{push}/{pull}"


def table() -> str:
    """Of all codecs and modes, as Markdown."""
    none = parse_codec("none")
    lines = [
        "| codec | " + " | ".join(f"push, {mode}" for mode in MODES) + " | "
        + " | ".join(f"pull, {mode}" for mode in MODES) + " | float64 |",
        "|---" * (2 * len(MODES) + 2) + "|",
    ]  # fmt: skip
    for example in EXAMPLES:
        spec = parse_codec(example)
        cells = [refusal(spec, none, mode=mode) for mode in MODES]
        cells += [refusal(none, spec, mode=mode) for mode in MODES]
        words = ["no" if cell else "yes" for cell in cells]
        for number, mode in enumerate(MODES):
            if cells[len(MODES) + number] and not refusal(none, spec, mode=mode, has_copies=True):
                words[len(MODES) + number] = "pull_copies"
        words.append("no" if refusal(spec, spec, mode="sync", has_float64=True) else "yes")
        lines.append(f"| {example} | " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
