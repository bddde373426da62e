"""Codecs as users write them."""

from __future__ import annotations

import pytest

from psdist.config.codec_specs import CodecSpec, Skip, parse_codec, parse_codecs


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", CodecSpec("none")),
        ("fp16", CodecSpec("fp16")),
        ("int8", CodecSpec("int8")),
        ("int2:stochastic", CodecSpec("int2", is_stochastic=True)),
        ("sign", CodecSpec("sign")),
        ("topk:0.01", CodecSpec("topk", ratio=0.01)),
        ("randk:1", CodecSpec("randk", ratio=1.0)),
        ("lowrank:4", CodecSpec("lowrank", rank=4)),
        ("lowrank:256", CodecSpec("lowrank", rank=256)),
        ("my_codecs:Halves", CodecSpec("own", target="my_codecs:Halves")),
        ("skip:0.01", CodecSpec("none", skip=Skip(0.01, 10))),
        ("skip:0.01:4", CodecSpec("none", skip=Skip(0.01, 4))),
        ("topk:0.01+skip:1e-3", CodecSpec("topk", ratio=0.01, skip=Skip(0.001))),
        ("a.b:C+skip:0.5:1000", CodecSpec("own", target="a.b:C", skip=Skip(0.5, 1000))),
        ("fp16+skip:0.5", CodecSpec("fp16", skip=Skip(0.5))),
        ("int4+zstd", CodecSpec("int4", is_packed=True)),
        ("fp16+zstd", CodecSpec("fp16", is_packed=True)),
        ("topk:0.01+zstd+skip:0.1", CodecSpec("topk", 0.01, is_packed=True, skip=Skip(0.1))),
        ("int2:stochastic+zstd", CodecSpec("int2", is_stochastic=True, is_packed=True)),
        ("topk:0.01+burst:20", CodecSpec("topk", ratio=0.01, burst=20)),
        ("a.b:C+burst:2", CodecSpec("own", target="a.b:C", burst=2)),
        ("int4+zstd+burst:1000000", CodecSpec("int4", is_packed=True, burst=1_000_000)),
        ("sign+burst:3+skip:0.1", CodecSpec("sign", skip=Skip(0.1), burst=3)),
        ("a.b2:Outer.Inner", CodecSpec("own", target="a.b2:Outer.Inner")),
    ],
)
def test_a_codec_is_read(text: str, spec: CodecSpec) -> None:
    assert parse_codec(text) == spec
    assert spec.is_none == (text == "none")
    assert spec.is_cast == text.startswith("fp16")


@pytest.mark.parametrize(
    "text",
    ["", "int9", "INT8", "int8:", "int8:0.5", "fp16:stochastic", "sign:1", "topk",
     "topk:", "topk:0", "topk:1.5", "topk:-1", "topk:nan", "topk:inf", "randk:x", "none:1",
     "int8/sign", " int8", "lowrank", "lowrank:0", "lowrank:-1", "lowrank:1.5", "lowrank:257",
     "lowrank:04", "lowrank:K", "topk:R", "a:", ":b", "a:b:c", "a-b:c", "a:b()", "a.:b", "9a:b",
     "a:b ", "a:b\n",
     "skip", "skip:", "skip:0", "skip:1", "skip:nan", "skip:0.1:", "skip:0.1:0", "skip:0.1:1001",
     "skip:0.1:2:3", "+skip:0.1", "none+skip:0.1", "int9+skip:0.1", "skip:0.1+int8",
     "int8+skip:0.1+skip:0.1", "int8+sign",
     "zstd", "+zstd", "int8+zstd+zstd", "int8+zstd:1", "sign+zstd", "none+zstd", "a:b+zstd",
     "lowrank:2+zstd", "randk:0.1+zstd", "int8+skip:0.1+zstd",
     "burst", "burst:", "burst:2", "burst:x", "+burst:2", "none+burst:2", "sign+burst",
     "sign+burst:", "sign+burst:0", "sign+burst:1", "sign+burst:02", "sign+burst:-2",
     "sign+burst:2.5", "sign+burst:1000001", "sign+burst:2+burst:3", "int8+burst:2+zstd",
     "skip:0.1+burst:2", "int8+skip:0.1+burst:2"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no codec; a codec is none, fp16, .*topk:R") as seen:
        parse_codec(text)
    assert repr(text) in str(seen.value)


def test_a_slash_parts_pushes_from_pulls() -> None:
    assert parse_codecs("int4/sign") == ("int4", "sign")
    assert parse_codecs("topk:0.01") == ("topk:0.01", "none")
    for wrong in ("int4/", "/sign", "int4/sign/int8", "int4/foo"):
        with pytest.raises(ValueError, match="is no codec"):
            parse_codecs(wrong)
