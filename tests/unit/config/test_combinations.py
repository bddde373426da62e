"""Which codecs go with what else a run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.config.codec_specs import parse_codec
from psdist.config.combinations import EXAMPLES, MODES, codecs_of, refusal, table, text_of
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

PUSHES_ALONE = {
    "lowrank:4": "goes with pushes alone",
    "topk:0.01+burst:20": "only pushes go in full now and then",
    "skip:0.001": "only pushes are left for later",
    "int8+skip:0.001": "only pushes are left for later",
}
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "communication.md"


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pull", EXAMPLES)
def test_pushes_take_any_codec_and_pulls_in_ssp_and_async_casts(pull: str, mode: str) -> None:
    casts = ("none", "fp16", "bf16", "bf16+zstd")
    is_known = pull in casts or (mode == "sync" and pull not in PUSHES_ALONE)
    for push in EXAMPLES:
        wrong = refusal(parse_codec(push), parse_codec(pull), mode=mode)
        assert bool(wrong) != is_known, push
        if pull in PUSHES_ALONE:
            assert wrong.startswith(f"pull_codec = {pull}: {PUSHES_ALONE[pull]}")
        elif wrong:
            assert wrong.startswith(f"pull_codec = {pull} with mode = {mode}: ")
        config = RunConfig(push_codec=push, pull_codec=pull, mode=mode)  # type: ignore[arg-type]
        assert contradiction(config) == wrong, push


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pull", [each for each in EXAMPLES if each not in PUSHES_ALONE])
def test_with_copies_pulls_take_any_codec_but_not_a_pipeline(pull: str, mode: str) -> None:
    none, spec = parse_codec("none"), parse_codec(pull)
    assert not refusal(none, spec, mode=mode, has_copies=True)
    config = RunConfig(pull_codec=pull, mode=mode, pull_copies="on")  # type: ignore[arg-type]
    assert not contradiction(config)
    pipelined = config.model_copy(update={"pipeline": 1})
    wrong = contradiction(pipelined)
    assert wrong.startswith(f"pipeline = 1 with {'mode = sync' if mode == 'sync' else 'pull_cop'}")


@pytest.mark.parametrize("push", ["skip:0.001", "int8+skip:0.001:3"])
def test_what_is_left_for_later_needs_feedback(push: str) -> None:
    config = RunConfig(push_codec=push)
    assert not contradiction(config)
    wrong = contradiction(config.model_copy(update={"feedback": "off"}))
    assert wrong.startswith(f"push_codec = {push} with feedback = off: what is left for later")


def test_float64_has_no_codec() -> None:
    none, int8 = parse_codec("none"), parse_codec("int8")
    assert not refusal(none, none, mode="sync", has_float64=True)
    for push, pull in ((int8, none), (none, int8)):
        assert "codecs compute in float32" in refusal(push, pull, mode="sync", has_float64=True)


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    given = {"mode": "ssp", "codec": "int8"}
    with pytest.raises(ConfigError, match="pull_codec = int8 with mode = ssp"):
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


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")
