"""Where pushes are encoded: which codecs have a form for devices, in words and in the codecs."""

from __future__ import annotations

import pytest

from psdist.codecs import OnDevice
from psdist.codecs.schemes import codec_of
from psdist.codecs.schemes.plain import Plain
from psdist.config.codec_rounds import why_on_host
from psdist.config.codec_specs import parse_codec
from psdist.config.settings import RunConfig, contradiction
from psdist.ranks.wire import wire_of
from tests.unit.config.test_combinations import EXAMPLES

OWN = "tests.support.own_codecs:Halves"
CODECS = [OWN if each == "module:name" else each for each in EXAMPLES if each != "none"]


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_said_of_a_codec_is_what_it_has(codec: str) -> None:
    config = RunConfig(push_codec=codec, encode_on="device")
    spec = parse_codec(codec)
    made = codec_of(spec, has_feedback=True)
    is_skipped = spec.skip is not None
    has_form = isinstance(made, OnDevice) and made.has_device_form and not is_skipped
    assert (why_on_host(config) == "") == has_form
    wrong = contradiction(config)
    assert bool(wrong) != has_form
    if wrong:
        assert wrong.startswith(
            f"codec.encode_on = device with codec.push = {codec}: each other codec"
        )
        assert wrong.endswith("or set codec.encode_on = auto")
    assert wire_of(RunConfig(push_codec=codec)).encode_on == "host"
    auto = RunConfig(push_codec=codec, encode_on="auto")
    assert not contradiction(auto)
    assert wire_of(auto).encode_on == ("auto" if has_form else "host")


def test_where_nothing_is_encoded_no_device_encodes() -> None:
    assert contradiction(RunConfig(encode_on="device")).startswith(
        "codec.encode_on = device without codec.push"
    )
    assert contradiction(RunConfig(encode_on="device", pull_codec="int8"))
    assert wire_of(RunConfig(pull_codec="int8")).encode_on == "host"


def test_every_codec_that_may_come_counts() -> None:
    story = "0: sync none; 5: sync sign; 9: sync {}"
    assert not contradiction(RunConfig(encode_on="device", schedule=story.format("int8")))
    wrong = contradiction(RunConfig(encode_on="device", schedule=story.format("randk:0.1")))
    assert wrong.startswith(
        "codec.encode_on = device with consistency.schedule = 0: sync none; 5: sync sign"
    )
    assert wire_of(RunConfig(codec="auto", encode_on="auto")).encode_on == "auto"
    assert wire_of(RunConfig(codec="auto", encode_on="host")).encode_on == "host"


def test_no_codec_without_feedback_is_another_one() -> None:
    config = RunConfig(push_codec="sign", feedback="off", encode_on="device")
    assert not contradiction(config)
    assert wire_of(config).encode_on == "device"
    assert not isinstance(Plain(), OnDevice)
