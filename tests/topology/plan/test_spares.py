"""Which ranks wait as spares, and a plan that has them, in its file and its drawings."""

from __future__ import annotations

import pytest

from psdist.errors import PlacementError
from psdist.topology.draw import svg as draw_svg
from psdist.topology.draw import text as draw_text
from psdist.topology.network import one_rack
from psdist.topology.plan import decode, encode
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_job
from psdist.topology.plan.spares import choose_spares, with_spares
from tests.topology.plan.test_seating import machine


@pytest.mark.parametrize(
    ("hosts", "count", "expected"),
    [
        pytest.param("aabbc", 1, (4,), id="a host of its own"),
        pytest.param("cabab", 1, (0,), id="wherever its rank is"),
        pytest.param("aabbcd", 2, (4, 5), id="two hosts of their own"),
        pytest.param("aabbcd", 1, (5,), id="of two small hosts the last"),
        pytest.param("aabbcc", 2, (4, 5), id="a whole host of several"),
        pytest.param("aabbcc", 1, (5,), id="none is as small: the last rank of the last"),
        pytest.param("aaab", 1, (2,), id="servers need two hosts"),
        pytest.param("ab" * 4, 3, (5, 6, 7), id="in turn from both"),
        pytest.param("aaaaa", 2, (3, 4), id="one host"),
        pytest.param("aab", 0, (), id="none"),
    ],
)
def test_spares_have_hosts_of_their_own_where_there_are_enough(
    hosts: str, count: int, expected: tuple[int, ...]
) -> None:
    assert choose_spares(list(hosts), count) == expected


def test_too_few_ranks_beside_them_are_refused() -> None:
    assert choose_spares(["a"] * 5, 2) == (3, 4)
    with pytest.raises(
        PlacementError,
        match=r"failures.spares = 3 with 5 ranks: .* start 6 ranks or more",
    ):
        choose_spares(["a"] * 5, 3)


def test_the_plan_is_that_of_the_others_and_is_written_and_drawn_with_them() -> None:
    here = machine(cores=4)
    hosts = ["n1", "n1", "n2", "n2", "n3"]
    cluster = one_rack(["n1", "n2", "n3"], here)
    spares = choose_spares(hosts, 1)
    others = [
        RankFacts(rank=rank, host=host, cpus=here.cpus)
        for rank, host in enumerate(hosts)
        if rank not in spares
    ]
    request = PlanRequest(servers=2)
    plan = with_spares(plan_job(cluster, others, request), hosts, spares)
    assert (plan.server_ranks, plan.worker_ranks, plan.spare_ranks) == ((0, 2), (1, 3), (4,))
    assert [each.rank for each in plan.ranks] == [0, 1, 2, 3, 4]
    assert (plan.ranks[4].host, plan.ranks[4].cpus, plan.ranks[4].group) == ("n3", (), -1)
    assert decode(encode(plan), where="a test") == plan
    text = draw_text.tree(plan, cluster)
    assert "2 servers, 2 workers, 1 spare" in text
    assert "rank 4    spare 0" in text
    assert "spare 0" in draw_svg.picture(plan, cluster)
