"""The stages between the wire and the optimizer: which there are, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.codecs import RAW
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import InvariantError
from psdist.protocol.memory import allocate
from psdist.servers.protocol.actions import Reply, ReplyToken
from psdist.servers.shard.given import Given
from psdist.servers.shard.reader_copies import ReaderCopies
from psdist.servers.shard.replies import ChangeReplies, CodedReplies, RawReplies
from psdist.servers.shard.tensors import TensorShard, replies_of, stages_of
from tests.support.rounding import Rounding
from tests.unit.servers.test_executors import spec

CODED = Wire(push=RAW, reply=Rounding("float16"), seed=0)
CHANGES = replace(CODED, is_relative=True)
COPIES = replace(CHANGES, has_copies=True)


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (RAW_WIRE, RawReplies),
        (CODED, CodedReplies),
        (CHANGES, ChangeReplies),
        (COPIES, ReaderCopies),
    ],
)
def test_the_wire_decides_how_replies_are_written(wire: Wire, kind: type[RawReplies]) -> None:
    assert type(replies_of(spec(wire=wire))) is kind


def test_a_plain_shard_has_no_stages_and_compensation_comes_before_replies() -> None:
    plain = spec()
    assert stages_of(plain, replies_of(plain)) == []
    both = replace(spec(wire=COPIES), compensation=0.5)
    assert [type(each) for each in stages_of(both, replies_of(both))] == [Given, ReaderCopies]


def test_raw_replies_are_never_encoded() -> None:
    shard = TensorShard(spec())
    reply = Reply(ReplyToken(1, 0, 0, 0), 0, 0, 0, 0, 1)
    with pytest.raises(InvariantError, match="chunk 0: its replies"):
        shard.encode(reply, into=allocate(8))
    with pytest.raises(InvariantError, match="chunk 0: replies of round 3 are raw"):
        shard.replies.coding(0, 3)
