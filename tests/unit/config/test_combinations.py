"""Which codecs go with what else a run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from psdist.config.codec_specs import codecs_of, text_of
from psdist.config.compatibility import refusal
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError
from psdist.mode_names import MODES

EXAMPLES = (
    *("none", "fp16", "bf16", "int8", "int8:stochastic", "int4", "int2", "sign"),
    *("topk:0.01", "randk:0.01", "lowrank:4", "module:name", "bf16+zstd", "int4+zstd"),
    *("topk:0.01+burst:20", "skip:0.001", "int8+skip:0.001"),
)
PUSHES_ALONE = ("lowrank:4", "topk:0.01+burst:20", "skip:0.001", "int8+skip:0.001")
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "guides" / "communication.md"


def names(codec: str | None, push: str | None, pull: str | None) -> tuple[str, str]:
    found = codecs_of(codec=codec, push_codec=push, pull_codec=pull)
    return text_of(found.push), text_of(found.pull)


def test_one_codec_is_for_both_directions_and_each_may_have_its_own() -> None:
    assert names(None, None, None) == ("none", "none")
    assert names("int8", None, None) == ("int8", "int8")
    assert names("int4/sign", None, None) == ("int4", "sign")
    assert names("int8", "topk:0.01", None) == ("topk:0.01", "int8")
    assert names("int4+zstd", None, "bf16+zstd") == ("int4+zstd", "bf16+zstd")
    assert names("int8", None, "none") == ("int8", "none")
    assert names(None, "int4:stochastic", "fp16") == ("int4:stochastic", "fp16")
    assert names("skip:0.01/sign", None, None) == ("skip:0.01", "sign")
    assert names(None, "int2+skip:0.01:5", None) == ("int2+skip:0.01:5", "none")
    assert names(None, "int4+zstd+burst:20+skip:0.1", None) == (
        "int4+zstd+burst:20+skip:0.1",
        "none",
    )
    assert names("lowrank:2/a.b:c", None, None) == ("lowrank:2", "a.b:c")


def refused(**given: Any) -> str:
    try:
        return contradiction(RunConfig(**given))
    except ValidationError as error:
        return str(error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pull", EXAMPLES)
def test_pushes_take_any_codec_and_pulls_in_ssp_and_async_casts(pull: str, mode: str) -> None:
    casts = ("none", "fp16", "bf16", "bf16+zstd")
    is_known = pull in casts or (mode == "sync" and pull not in PUSHES_ALONE)
    for push in EXAMPLES:
        wrong = refused(push_codec=push, pull_codec=pull, mode=mode)
        assert bool(wrong) != is_known, push
        if pull in PUSHES_ALONE:
            assert f"{pull!r} is a codec of pushes alone" in wrong
        elif wrong:
            assert wrong.startswith(f"codec.pull = {pull} with mode = {mode}: a relative reply")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pull", [each for each in EXAMPLES if each not in PUSHES_ALONE])
def test_with_copies_pulls_take_any_codec_but_not_a_pipeline(pull: str, mode: str) -> None:
    given = {"pull_codec": pull, "mode": mode, "pull_copies": "on"}
    assert not refused(**given)
    wrong = refused(**given, pipeline=1)
    other = "mode = sync" if mode == "sync" else "codec.pull_copies = on"
    assert wrong.startswith(f"consistency.pipeline = 1 with {other}")


@pytest.mark.parametrize("push", ["skip:0.001", "int8+skip:0.001:3"])
def test_what_is_left_for_later_needs_feedback(push: str) -> None:
    assert not refused(push_codec=push)
    wrong = refused(push_codec=push, feedback="off")
    assert wrong.startswith(
        f"codec.push = {push} with codec.feedback = off: a push that is skipped"
    )


def test_float64_has_no_codec() -> None:
    script = {"float64 parameters": "parameters of float64"}
    assert not refusal(RunConfig(), script=script)
    for key in ("codec_push", "codec_pull"):
        wrong = refusal(RunConfig(**{key: "int8"}), script=script)  # type: ignore[arg-type]
        assert wrong.startswith(
            f"parameters of float64 with {key.replace('_', '.')} = int8: codecs compute in float"
        )


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    given = {"mode": "ssp", "codec": "int8"}
    with pytest.raises(ConfigError, match=r"codec\.pull = int8 with mode = ssp"):
        resolve(command_line=given, environment={})
    assert resolve(command_line={**given, "pull_copies": "on"}, environment={})
    with pytest.raises(ConfigError, match=r"push_codec = int9 \(command line\): .*topk:R"):
        resolve(command_line={"push_codec": "int9"}, environment={})
    config = resolve(command_line={"codec": "int4/sign"}, environment={}).config
    assert (config.codec, config.push_codec, config.feedback) == (None, "int4", "on")


@pytest.mark.parametrize(
    ("text", "patterns"),
    [("vectors", ("vectors",)), ("vectors, *head*", ("vectors", "*head*")), ("", ())],
)
def test_what_codecs_leave_alone_is_set_with_commas_between(
    text: str, patterns: tuple[str, ...]
) -> None:
    config = resolve(command_line={"codec_exact": text}, environment={}).config
    assert config.codec_exact == patterns
    if text:
        environment = {"PSDIST_CODEC_EXACT": text}
        assert resolve(command_line={}, environment=environment).config.codec_exact == patterns


def cells_of(codec: str) -> list[str]:
    """Return where a codec works, as a row of the page: pushes, pulls in sync, other pulls."""
    pushes = {"no" if refused(push_codec=codec, mode=mode) else "yes" for mode in MODES}
    pulls = []
    for mode in MODES:
        pull: dict[str, Any] = {"pull_codec": codec, "mode": mode}
        with_copies = "no" if refused(**pull, pull_copies="on") else "`codec.pull_copies = on`"
        pulls.append(with_copies if refused(**pull) else "yes")
    (push,), (other,) = pushes, set(pulls[1:])
    return [push, pulls[0], other]


def test_the_page_says_where_each_codec_works() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    _, below = text.split("| codec | pushes, all modes | pulls, sync | pulls, ssp and async |\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")][1:]
        for line in below.split("\n\n")[0].splitlines()[1:]
    ]
    casts, coded, of_pushes = rows
    for codec in EXAMPLES:
        row = of_pushes if codec in PUSHES_ALONE else coded
        if codec.partition("+")[0] in {"none", "fp16", "bf16"}:
            row = casts
        assert cells_of(codec) == row, codec
