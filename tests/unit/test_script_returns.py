"""Samples of the dead as a script meets them: when a worker holds for them, what it brings, and
what people hear."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.returns import RETURN as RETURN_CALL
from psdist.protocol.returns import (
    DataStanding,
    Return,
    pack_refusal,
    pack_return,
    unpack_standing,
)
from psdist.script_returns import ScriptReturns
from psdist.workers.data.seen import Pass
from psdist.workers.group.channel import CALLS

STANDING = DataStanding(12, 1, 0, True, 2, 10, (2,))
RETURN = Return(
    dataset=0,
    ordinal=1,
    at=2,
    num_batches=10,
    living=(0, 2),
    brought=((1, 2),),
    lost=0,
    counts=(2,),
)


class Job:
    """All that a script's end of it has to do with."""

    def __init__(
        self,
        *,
        worker: int = 0,
        answer: bytes = pack_return(RETURN),
        standing: DataStanding | str = STANDING,
        survives: bool = True,
        substitutes: int = 0,
        **settings: Any,
    ) -> None:
        self.brought: list[tuple[str, DataStanding | str | None]] = []
        self.dealt: list[tuple[Return, Pass | None]] = []
        self.answers = [answer]
        self.core = SimpleNamespace(dead=set(), chief=0, seat=SimpleNamespace(worker=worker))
        loop = SimpleNamespace(core=self.core, wait_for_deaths=lambda: self.core.dead.add(1))
        config = {"samples_of_dead": "return", "local_steps": 1, **settings}
        context = SimpleNamespace(
            survives_workers=survives,
            config=SimpleNamespace(**config),
            roles=SimpleNamespace(num_substitutes=substitutes),
        )
        loaders = SimpleNamespace(
            standing=lambda _pass, *, clock: (
                standing if isinstance(standing, str) else standing._replace(clock=clock)
            ),
            deal_anew=self.deal_anew,
        )
        self.returns = ScriptReturns(
            context,  # type: ignore[arg-type]
            loop,  # type: ignore[arg-type]
            loaders,  # type: ignore[arg-type]
            collective=self.bring,
        )

    def deal_anew(self, told: Return, a_pass: Pass | None) -> None:
        self.dealt.append((told, a_pass))
        if a_pass is not None:
            a_pass.is_cut_anew = True

    def bring(self, name: str, payload: bytes) -> Any:
        self.brought.append((name, unpack_standing(payload)))
        return SimpleNamespace(payloads=self.answers)


def lines(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_worker_holds_once_for_each_death(caplog: pytest.LogCaptureFixture) -> None:
    job, a_pass = Job(), Pass(epoch=4, can_be_cut=True)
    assert job.returns.is_on
    assert not job.returns.is_due
    job.returns.wait_for_deaths()
    assert job.returns.is_due
    with caplog.at_level(logging.WARNING, logger="psdist"):
        job.returns.meet(a_pass, [17])
    assert job.brought == [("return", STANDING._replace(clock=17))]
    assert job.dealt == [(RETURN, a_pass)]
    assert lines(caplog) == [
        "what worker 1 had not brought of epoch 4 goes back to it: all that is left behind batch 2 "
        "is dealt to 2 workers"
    ]
    assert not job.returns.is_due
    job.core.dead.add(2)
    assert job.returns.is_due


def test_between_two_passes_later_ones_are_dealt_and_what_is_lost_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(answer=pack_return(RETURN._replace(at=0, lost=3, living=(0,))))
    job.core.dead.add(1)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        job.returns.meet(None, [17])
    assert lines(caplog) == [
        "worker 1 had brought its part of the epoch: from the next one on all is dealt to 1 "
        "worker; 3 batches of passes that somebody had ended are lost"
    ]


@pytest.mark.parametrize(
    "changed",
    [{"survives": False}, {"substitutes": 1}, {"samples_of_dead": "drop"}],
    ids=["no deaths", "spares", "drop"],
)
def test_where_nothing_goes_back_nobody_holds(changed: dict[str, Any]) -> None:
    job = Job(**changed)
    job.core.dead.add(1)
    assert not job.returns.is_due
    assert not job.returns.is_on


@pytest.mark.parametrize(
    ("changed", "clocks", "why"),
    [
        ({"standing": "of its own"}, [3], "of its own"),
        ({}, [3, 3], "the job has several optimizers"),
        ({"local_steps": 2}, [3], "a round of local steps takes several batches"),
    ],
    ids=["batches", "optimizers", "local steps"],
)
def test_why_nothing_can_go_back_is_brought_and_told_once(
    changed: dict[str, Any], clocks: list[int], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(**changed, answer=pack_refusal(why))
    job.core.dead.add(1)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        job.returns.meet(None, clocks)
        job.returns.give_up()
    assert job.brought == [("return", why)]
    assert job.dealt == []
    assert lines(caplog) == [f"what worker 1 would have seen nobody sees: {why}"]
    assert not job.returns.is_due


def test_where_somebodys_script_has_finished_there_is_no_meeting_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    job.returns.give_up()
    job.core.dead.add(1)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        job.returns.give_up()
    assert lines(caplog) == [
        "what worker 1 would have seen nobody sees: a worker's script has finished"
    ]
    assert not job.returns.is_due


def test_the_chief_alone_tells(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(worker=2)
    job.core.dead.add(1)
    with caplog.at_level(logging.WARNING, logger="psdist"):
        job.returns.meet(Pass(epoch=0), [2])
    assert lines(caplog) == []
    assert len(job.dealt) == 1


def test_who_has_come_and_died_since_is_of_the_next_meeting() -> None:
    job = Job()
    job.core.dead |= {1, 2}
    job.returns.meet(None, [2])
    assert job.returns.is_due


def test_workers_of_a_group_may_meet_in_it() -> None:
    assert RETURN_CALL in CALLS


def test_an_answer_that_is_none_is_the_protocols_end() -> None:
    job = Job(answer=b"what")
    with pytest.raises(ProtocolError, match="answered a return with what is none"):
        job.returns.meet(None, [2])
