"""Valid entries of run.json for rounds in which pushes have another codec."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from psdist.history.run_record import CodecsSince, LevelCodecs, RunRecord

NONE = LevelCodecs(push="none", pull="none", push_code=11)


def record(ladder: tuple[LevelCodecs, ...] = (), **given: Any) -> RunRecord:
    return RunRecord(
        psdist="test",
        mode="sync",
        groups=((0,), (1,)),
        slices=((),),
        num_servers=1,
        num_chunks=0,
        owners=(),
        codecs=(CodecsSince(round=0, **NONE.model_dump(), **given),),
        ladder=ladder,
    )


def test_bursts_have_a_codec_of_their_own() -> None:
    (codecs,) = record(burst=2, burst_code=11).codecs
    assert (codecs.burst, codecs.burst_code) == (2, 11)
    (codecs,) = record(ladder=(NONE,)).codecs
    assert (codecs.burst, codecs.burst_code) == (0, 0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"burst": 1, "burst_code": 11}, "bursts every 1 rounds by codec 11"),
        ({"burst": 3}, "bursts every 3 rounds by codec 0"),
        ({"burst_code": 11}, "bursts every 0 rounds by codec 11"),
        ({"burst": 3, "burst_code": 11, "ladder": (NONE,)}, "bursts with a ladder of 1 codecs"),
        ({"burst": -2, "burst_code": 11}, "greater than or equal to 0"),
    ],
)
def test_what_no_run_has_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        record(**given)
