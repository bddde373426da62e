from __future__ import annotations

import pytest

from psdist.reach import SETTLE_S, End, Rank, Watch

RANKS = {
    2: Rank("h2", "worker 1 (rank 2 on h2)"),
    4: Rank("h3", "server 1 (rank 4 on h3)"),
    5: Rank("h3", "worker 3 (rank 5 on h3)"),
}
HUBS = {
    0: Rank("h1", "server 0 (rank 0 on h1)"),
    2: Rank("h2", "server 1 (rank 2 on h2)"),
}
NOBODY: frozenset[int] = frozenset()


def hub(*, timeout_s: float = 60.0) -> Watch:
    watch = Watch(RANKS, host="h1", timeout_s=timeout_s, is_hub=True)
    for rank in RANKS:
        watch.on_open(rank)
    return watch


def member(hubs: dict[int, Rank] = HUBS) -> Watch:
    watch = Watch(hubs, host="h4", timeout_s=60.0, is_hub=False)
    for rank in hubs:
        watch.on_open(rank)
    return watch


def test_while_lines_are_open_there_is_nothing_to_say() -> None:
    watch = hub()
    assert not watch.is_waiting
    assert watch.verdict(1e9, NOBODY) is None


def test_a_host_that_is_silent_is_named_with_its_ranks() -> None:
    watch = hub(timeout_s=45)
    watch.on_end(5, End.SILENT, 100.0)
    assert watch.is_waiting
    assert watch.verdict(100.0 + SETTLE_S - 0.01, NOBODY) is None
    watch.on_end(4, End.SILENT, 101.0)
    said = watch.verdict(100.0 + SETTLE_S, NOBODY)
    assert said is not None
    assert said.startswith(
        "h3 (server 1 (rank 4 on h3), worker 3 (rank 5 on h3)) has not answered for 45 s "
        "(failures.host_timeout_s): cut off, or gone; "
    )
    assert "--resume" in said


def test_a_hub_that_hears_nobody_any_more_is_the_one_that_is_cut_off() -> None:
    watch = hub()
    for rank in (2, 4, 5):
        watch.on_end(rank, End.SILENT, 10.0)
    said = watch.verdict(20.0, NOBODY)
    assert said is not None
    assert said.startswith(
        "no other host (h2, h3) has answered for 60 s (failures.host_timeout_s): h1 is "
    )


def test_many_ranks_are_counted_and_not_listed() -> None:
    ranks = {each: Rank("h2", f"rank {each}") for each in range(1, 9)}
    watch = Watch({**ranks, 9: Rank("h3", "rank 9")}, host="h1", timeout_s=60, is_hub=True)
    for each in range(1, 10):
        watch.on_open(each)
    for each in ranks:
        watch.on_end(each, End.SILENT, 0.0)
    said = watch.verdict(5.0, NOBODY)
    assert said is not None
    assert "h2 (rank 1, rank 2, rank 3, rank 4 and 4 more) has not" in said


def test_who_said_goodbye_is_missed_by_nobody() -> None:
    watch = hub()
    watch.on_end(4, End.GOODBYE, 0.0)
    assert not watch.is_waiting
    assert watch.verdict(1e9, NOBODY) is None


def test_a_process_that_has_ended_is_the_launcher_s_to_tell_for_a_while() -> None:
    watch = hub(timeout_s=30)
    watch.on_end(5, End.CLOSED, 100.0)
    assert watch.is_waiting
    assert watch.verdict(129.9, NOBODY) is None
    said = watch.verdict(130.0, NOBODY)
    assert said is not None
    assert said.startswith("worker 3 (rank 5 on h3) ended without a word, and for 30 s ")


@pytest.mark.parametrize("how", [End.CLOSED, End.SILENT])
def test_a_death_that_the_job_knows_of_and_survives_is_none_of_the_watch_s(how: End) -> None:
    watch = hub()
    watch.on_end(5, how, 0.0)
    assert watch.verdict(1e9, {5}) is None
    watch.on_end(4, End.SILENT, 0.0)
    said = watch.verdict(1e9, {5})
    assert said is not None
    assert "rank 5" not in said


def test_a_member_has_lost_the_job_only_with_its_last_line() -> None:
    watch = member()
    watch.on_end(0, End.SILENT, 5.0)
    assert watch.verdict(1e9, NOBODY) is None
    watch.on_end(2, End.SILENT, 6.0)
    said = watch.verdict(5.0 + SETTLE_S, NOBODY)
    assert said is not None
    assert said.startswith(
        "h4 has been cut off from server 0 (rank 0 on h1), server 1 (rank 2 on h2) for 60 s "
    )


def test_a_member_whose_hub_is_done_is_not_cut_off() -> None:
    watch = member()
    watch.on_end(0, End.GOODBYE, 5.0)
    watch.on_end(2, End.SILENT, 6.0)
    assert watch.verdict(1e9, NOBODY) is None


def test_a_member_waits_for_word_of_a_hub_that_has_died_and_then_ends() -> None:
    watch = member({0: HUBS[0]})
    watch.on_end(0, End.CLOSED, 5.0)
    assert watch.verdict(64.9, NOBODY) is None
    assert "server 0 (rank 0 on h1) ended without a word" in str(watch.verdict(65.0, NOBODY))


def test_a_member_that_outlives_its_hub_ends_for_silence_alone() -> None:
    """It may compute for as long as it likes before it hears that the hub has failed."""
    hubs = {0: Rank("h1", "server 0"), 1: Rank("h2", "server 1")}
    watch = Watch(hubs, host="h4", timeout_s=60.0, is_hub=False, outlives_hubs=True)
    for each in hubs:
        watch.on_open(each)
    watch.on_end(0, End.CLOSED, 10.0)
    assert not watch.is_waiting
    assert watch.verdict(1e6, ()) is None
    watch.on_end(1, End.SILENT, 20.0)
    assert watch.is_waiting
    assert "has been cut off from" in (watch.verdict(1e6, ()) or "")


def test_each_rank_has_one_line_once() -> None:
    watch = Watch(RANKS, host="h1", timeout_s=60.0, is_hub=True)
    assert watch.may_open(4)
    assert not watch.may_open(3)
    watch.on_open(4)
    assert not watch.may_open(4)
    for how in End:
        again = hub()
        again.on_end(4, how, 0.0)
        assert not again.may_open(4)


def test_hosts_whose_ranks_never_called_are_known() -> None:
    watch = Watch(RANKS, host="h1", timeout_s=60.0, is_hub=True)
    assert watch.unwatched == ["h2", "h3"]
    watch.on_open(2)
    assert watch.unwatched == ["h3"]
    watch.on_open(4)
    watch.on_end(4, End.GOODBYE, 0.0)
    assert watch.unwatched == ["h3"]
    watch.on_open(5)
    watch.on_end(5, End.SILENT, 0.0)
    assert watch.unwatched == []
