"""A dozen virtual jobs decide and compute what they did when their digests were written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests import digests
from tests.support.virtual.job import Schedule, VirtualJob, play


@pytest.mark.parametrize("name", digests.QUICK)
def test_a_job_has_the_digest_that_was_recorded(name: str) -> None:
    recorded = json.loads(digests.DIGESTS.read_text(encoding="utf-8"))
    assert digests.differences(digests.play_all([name]), recorded) == []


def test_every_job_has_a_record_and_every_record_a_job() -> None:
    recorded = json.loads(digests.DIGESTS.read_text(encoding="utf-8"))
    assert list(recorded) == [digests.TORCH, *digests.all_names()]


def test_jobs_that_differ_are_named_with_what_differs() -> None:
    recorded = {"a/1": {"bits": "1", "decisions": "1"}, "a/2": {"bits": "1", "decisions": "1"}}
    found = {"a/1": {"bits": "1", "decisions": "2"}, "a/2": {"bits": "1", "decisions": "1"}}
    assert digests.differences(found, recorded) == ["a/1: other decisions"]
    assert digests.differences({"a/3": {"bits": "1"}}, recorded) == ["a/3: other bits"]
    assert digests.differences({"a/3": {"bits": "1"}}, recorded, has_bits=False) == []


SCHEDULE = Schedule(seed=3, num_chunks=3, servers=2, iterations=(5, 5))


def played(**changes: object) -> VirtualJob:
    return play(replace(SCHEDULE, **changes))  # type: ignore[arg-type]


def test_other_values_change_the_bits_alone() -> None:
    one, other = digests.digest_of(played()), digests.digest_of(played(lr=0.25))
    assert one["bits"] != other["bits"]
    assert one["decisions"] == other["decisions"]


def test_another_order_of_messages_changes_nothing_in_sync_and_decisions_in_async() -> None:
    uneven = (1e-3, 1e-5)
    assert digests.digest_of(played()) == digests.digest_of(played(compute_s=uneven))
    one = digests.digest_of(played(mode="async"))
    other = digests.digest_of(played(mode="async", compute_s=uneven))
    assert one["decisions"] != other["decisions"]


def test_tensors_are_found_wherever_scripts_return_them() -> None:
    first, second = torch.ones(2), torch.zeros(1)
    found = list(digests.tensors_in([{"b": second, "a": [first, 3.0]}, {"took_s": 1.0}]))
    assert [id(each) for each in found] == [id(first), id(second)]
