"""What goes over the wire, as the settings have it: the codecs of a run that chooses them."""

from __future__ import annotations

from psdist.config.codec_rounds import ladder_of
from psdist.config.combinations import text_of_both
from psdist.config.settings import RunConfig
from psdist.ranks.wire import codecs_of_ladder, codecs_of_rounds, wire_of


def test_a_run_that_chooses_its_codecs_begins_with_the_first_and_may_have_them_all() -> None:
    config = RunConfig(codec="auto")
    wire = wire_of(config)
    assert wire.is_ladder
    assert wire.is_shared
    assert [each.push.name for each in wire.later] == ["fp16", "int8", "int4", "int4"]
    assert [each.exact_in_pushes for each in wire.later[:2]] == [(), config.codec_exact]
    assert [(each.round, each.push, each.push_code) for each in codecs_of_rounds(config)] == [
        (0, "none", wire.push.code),
    ]
    ladder = codecs_of_ladder(config)
    assert [each.name for each in ladder] == [text_of_both(each) for each in ladder_of(config)]
    assert [each.push_code for each in ladder[1:]] == [each.push.code for each in wire.later]
    assert codecs_of_ladder(RunConfig(codec="int8")) == ()
