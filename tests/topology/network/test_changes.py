"""Two measurements compared: what counts as slower, with the scatter in mind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from psdist.errors import PlacementError
from psdist.topology.network.catalogue import Network, Pair
from psdist.topology.network.changes import Comparison, compare, lines
from tests.topology.network.test_catalogue import GB, NETWORK, NETWORKS, pair, speed


def told(old: Network, new: Network, *, threshold: float = 0.1) -> list[str]:
    return lines(compare(old, new, threshold=threshold))


@given(NETWORKS)
def test_nothing_changed_between_a_measurement_and_itself(network: Network) -> None:
    network = replace(network, hosts=("n1",))
    assert told(network, network) == []


def test_what_got_slower_comes_first_and_says_how_much() -> None:
    new = replace(
        NETWORK,
        hosts=("n4", "n5"),
        node_links={"n3": speed(bytes_per_s=15e9)},
        switch_uplinks={"rack1": speed(bytes_per_s=95e9)},
        pairs=(pair("n3", "n4", 4.1, 3), pair("n3/package0", "n3/package1", 18, 0.5, "socket")),
    )
    assert told(NETWORK, new) == [
        "n5: new",
        "n3: gone",
        "n3 -> n4: 11.2 -> 4.1 GB/s (2.7x slower)",
        "n3 -> n4: latency 2 -> 3 us (1.5x slower)",
        "n3/package0 -> n3/package1 (socket): 20 -> 18 GB/s (1.1x slower)",
        "link of n3: 12 -> 15 GB/s (1.2x faster)",
    ]


def test_a_change_below_the_threshold_is_not_told() -> None:
    slower = replace(NETWORK, switch_uplinks={"rack1": speed(bytes_per_s=80e9)})
    assert told(NETWORK, slower) == ["uplink of rack1: 100 -> 80 GB/s (1.2x slower)"]
    assert told(NETWORK, slower, threshold=0.3) == []


def test_what_only_one_of_them_measured_is_not_compared() -> None:
    less = replace(NETWORK, pairs=(), classes={"node": speed(latency_s=2e-6)})
    assert told(NETWORK, less) == told(less, NETWORK) == []


def uplink(gb_per_s: float, *, is_lower_bound: bool) -> Network:
    measured = speed(bytes_per_s=gb_per_s * GB, is_lower_bound=is_lower_bound)
    return replace(NETWORK, switch_uplinks={"rack1": measured})


def test_a_lower_bound_that_the_other_does_not_contradict_is_no_change() -> None:
    at_least_5, exactly_8 = uplink(5, is_lower_bound=True), uplink(8, is_lower_bound=False)
    assert told(at_least_5, exactly_8) == told(exactly_8, at_least_5) == []
    at_least_9, exactly_4 = uplink(9, is_lower_bound=True), uplink(4, is_lower_bound=False)
    assert told(exactly_8, at_least_9) == ["uplink of rack1: 8 -> 9 GB/s (1.1x faster)"]
    assert told(at_least_5, exactly_4) == ["uplink of rack1: 5 -> 4 GB/s (1.2x slower)"]


@pytest.mark.parametrize("bounds", [(True, False), (False, True), (True, True), (False, False)])
def test_equal_figures_are_compared_whichever_is_a_lower_bound(bounds: tuple[bool, bool]) -> None:
    one, other = (uplink(5, is_lower_bound=is_bound) for is_bound in bounds)
    assert "uplink of rack1" in {each.name for each in compare(one, other).compared}
    assert told(one, other) == []


def many(ratios: list[float]) -> tuple[Network, Network]:
    """Pairs whose bandwidth changes by these factors; latencies stay."""
    hosts = tuple(f"n{number}" for number in range(len(ratios) + 1))
    before, after = [], []
    for number, ratio in enumerate(ratios):
        made = pair(hosts[number], hosts[number + 1], 10.0, 2)
        before.append(made)
        after.append(replace(made, bytes_per_s=made.bytes_per_s * ratio))
    bare = replace(NETWORK, hosts=hosts, classes={}, node_links={}, switch_uplinks={})
    return replace(bare, pairs=tuple(before)), replace(bare, pairs=tuple(after))


def names(found: Comparison) -> list[str]:
    return [each.name for each in found.slower]


def test_one_slow_link_among_steady_ones_is_seen() -> None:
    old, new = many([1.0, 1.01, 0.99, 1.0, 0.8, 1.0, 1.0])
    assert names(compare(old, new)) == ["n4 -> n5"]


def test_among_links_that_scatter_the_same_change_is_none_and_a_great_one_is() -> None:
    old, new = many([1.3, 0.75, 1.2, 0.8, 0.7, 1.0, 1.25, 0.85])
    assert names(compare(old, new)) == []
    old, new = many([1.3, 0.75, 1.2, 0.8, 0.1, 1.0, 1.25, 0.85])
    assert names(compare(old, new)) == ["n4 -> n5"]


def test_four_links_are_too_few_to_tell_a_scatter() -> None:
    old, new = many([1.3, 0.75, 1.2, 0.8])
    assert names(compare(old, new)) == ["n1 -> n2", "n3 -> n4"]
    assert {each.limit for each in compare(old, new).compared} == {1.1, 1.25}


def test_a_change_that_all_links_share_is_no_scatter() -> None:
    old, new = many([0.8, 0.81, 0.79, 0.8, 0.8, 0.8])
    assert len(names(compare(old, new))) == 6


def test_the_typical_pair_scatters_as_a_median_does() -> None:
    draw = random.Random(7)
    old, new = many([0.75 * draw.uniform(0.7, 1.4) for _ in range(100)])
    classes = ({"node": speed(bytes_per_s=10 * GB)}, {"node": speed(bytes_per_s=7.5 * GB)})
    found = compare(replace(old, classes=classes[0]), replace(new, classes=classes[1]))
    typical = next(each for each in found.compared if each.is_typical)
    single = next(each for each in found.compared if each.quantity == "bandwidth"
                  and not each.is_typical)  # fmt: skip
    assert 1.5 < single.limit < 2.5
    assert typical.limit == 1.1
    assert "typical node pair" in names(found)


def test_latencies_have_a_threshold_of_their_own() -> None:
    def slow(us: float) -> Network:
        return replace(NETWORK, pairs=(pair("n3", "n4", 11.2, us),))

    assert told(slow(2.0), slow(2.4)) == []
    assert told(slow(2.0), slow(2.6)) == ["n3 -> n4: latency 2 -> 2.6 us (1.3x slower)"]
    assert told(slow(2.6), slow(2.0)) == ["n3 -> n4: latency 2.6 -> 2 us (1.3x faster)"]
    assert told(slow(2.0), slow(2.6), threshold=0.5) == []
    assert len(compare(slow(2.0), slow(2.4), latency_threshold=0.1).slower) == 1


def test_exactly_the_threshold_is_no_change() -> None:
    old = replace(NETWORK, pairs=(pair("n3", "n4", 2.0, 0),))
    new = replace(NETWORK, pairs=(pair("n3", "n4", 1.0, 0),))
    assert told(old, new, threshold=1.0) == []
    assert len(told(old, new, threshold=0.99)) == 1
    assert told(new, old, threshold=1.0) == []


def test_sections_are_by_kind_and_the_most_improved_comes_first() -> None:
    kinds = ("node", "rack", "socket", "core", "gpu")
    old = replace(NETWORK, pairs=tuple(pair("n3", f"n3/{at}", 1, 0, kind)
                                       for at, kind in enumerate(kinds)))  # fmt: skip
    new = replace(old, pairs=tuple(replace(each, bytes_per_s=each.bytes_per_s * (at + 2))
                                   for at, each in enumerate(old.pairs)),
                  switch_uplinks={"rack1": speed(bytes_per_s=1)},
                  node_links={"n3": speed(bytes_per_s=1)})  # fmt: skip
    found = compare(old, new)
    assert [each.group for each in found.faster] == ["gpu", "core", "socket", "rack", "node"]
    assert [each.section for each in found.faster] == [
        "host and GPU", "same host", "same host", "between hosts", "between hosts",
    ]  # fmt: skip
    assert {each.section for each in found.slower} == {"between hosts"}
    told_last = [line.partition(":")[0] for line in lines(found)[-5:]]
    assert told_last == [each.name for each in found.faster][::-1]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (("a",), ("b",), r"no host is in both measurements \(a; b\): give two of one cluster"),
        (("n1", "n2", "n3", "n4", "n5"), (), r"\(n1, n2, n3 and 2 more; no host\)"),
    ],
)
def test_measurements_of_different_clusters_are_not_compared(
    old: tuple[str, ...], new: tuple[str, ...], said: str
) -> None:
    with pytest.raises(PlacementError, match=said):
        compare(replace(NETWORK, hosts=old), replace(NETWORK, hosts=new))


def test_the_smallest_figures_have_ratios() -> None:
    def tiny(number: float) -> Network:
        these = Pair(first="n3", second="n4", kind="node", latency_s=number, bytes_per_s=number)
        return replace(NETWORK, pairs=(these,))

    assert len(told(tiny(5e-324), tiny(1e18))) == 2
    assert len(told(tiny(1e18), tiny(5e-324))) == 2


@given(NETWORKS, NETWORKS)
def test_what_one_way_is_slower_the_other_way_is_faster(one: Network, other: Network) -> None:
    one, other = replace(one, hosts=("n1",)), replace(other, hosts=("n1",))
    there, back = compare(one, other), compare(other, one)
    assert {(each.name, each.quantity) for each in there.slower} == {
        (each.name, each.quantity) for each in back.faster
    }
    assert len(there.compared) == len(back.compared)


def test_five_ratios_have_a_scatter_of_known_size() -> None:
    old, new = many([0.5, 0.8, 1.0, 1.25, 2.0])
    limits = [each.limit for each in compare(old, new).compared if each.quantity == "bandwidth"]
    # The median deviation of the logarithms is log 1.25; three standard deviations of that.
    assert limits == [pytest.approx(1.25 ** (3 * 1.4826))] * 5
    typical = ({"node": speed(bytes_per_s=GB)}, {"node": speed(bytes_per_s=GB)})
    found = compare(replace(old, classes=typical[0]), replace(new, classes=typical[1]))
    assert next(each.limit for each in found.compared if each.is_typical) == pytest.approx(
        1.25 ** (3 * 1.4826 * 1.2533 / 5**0.5)
    )


def test_links_and_uplinks_scatter_by_themselves() -> None:
    """Hosts' links that scatter say nothing of the uplinks, nor bandwidths of latencies."""
    factors = [0.5, 0.8, 1.0, 1.25, 2.0]
    hosts = tuple(f"n{number}" for number in range(5))
    bare = replace(NETWORK, hosts=hosts, classes={}, pairs=())
    old = replace(
        bare,
        node_links={host: speed(latency_s=1e-6, bytes_per_s=GB) for host in hosts},
        switch_uplinks={"rack1": speed(latency_s=1e-6, bytes_per_s=GB)},
    )
    new = replace(
        old,
        node_links={
            host: speed(latency_s=1e-6, bytes_per_s=GB * factor)
            for host, factor in zip(hosts, factors, strict=True)
        },
    )
    limits = {(each.group, each.quantity): each.limit for each in compare(old, new).compared}
    assert limits.pop(("link", "bandwidth")) > 2
    assert limits == {
        ("link", "latency"): 1.25,
        ("uplink", "bandwidth"): 1.1,
        ("uplink", "latency"): 1.25,
    }


def test_three_hosts_are_named_and_a_fourth_is_counted() -> None:
    def complaint(*hosts: str) -> str:
        with pytest.raises(PlacementError) as caught:
            compare(replace(NETWORK, hosts=hosts), NETWORK)
        return str(caught.value)

    assert "(a, b, c; n3, n4)" in complaint("a", "b", "c")
    assert "(a, b, c and 1 more; n3, n4)" in complaint("a", "b", "c", "d")


def test_gigabytes_begin_at_one() -> None:
    def told_of(before: float, after: float) -> str:
        old, new = (
            replace(NETWORK, pairs=(pair("n3", "n4", each, 0),)) for each in (before, after)
        )
        return told(old, new)[0]

    assert told_of(1.0, 0.5) == "n3 -> n4: 1 -> 0.5 GB/s (2x slower)"
    assert told_of(0.5, 0.25) == "n3 -> n4: 500 -> 250 MB/s (2x slower)"
    assert told_of(0.25, 0.5) == "n3 -> n4: 250 -> 500 MB/s (2x faster)"


def test_a_figure_that_only_one_has_is_no_change_of_the_other() -> None:
    old = replace(NETWORK, pairs=(pair("n3", "n4", 11.2, 0),))
    new = replace(NETWORK, pairs=(pair("n3", "n4", 5.6, 7),))
    assert told(old, new) == ["n3 -> n4: 11.2 -> 5.6 GB/s (2x slower)"]
    assert told(new, old) == ["n3 -> n4: 5.6 -> 11.2 GB/s (2x faster)"]


def test_parts_of_a_host_are_named_with_their_kind_and_only_classes_are_typical() -> None:
    kinds = ("node", "rack", "socket", "core", "gpu")
    network = replace(
        NETWORK, pairs=tuple(pair("n3", f"n3/{at}", 1, 0, kind) for at, kind in enumerate(kinds))
    )
    compared = compare(network, network).compared
    assert {each.name for each in compared if each.is_typical} == {"typical node pair"}
    assert {each.name for each in compared if not each.is_typical} == {
        *("n3 -> n3/0", "n3 -> n3/1", "n3 -> n3/2 (socket)", "n3 -> n3/3 (core)"),
        *("n3 -> n3/4 (gpu)", "link of n3", "uplink of rack1"),
    }
    assert {each.verdict for each in compared} == {"the same"}


def test_what_a_threshold_of_nothing_calls_the_same_is_the_same() -> None:
    same = compare(NETWORK, NETWORK, threshold=0.0, latency_threshold=0.0)
    assert same.compared
    assert same.slower == same.faster == ()


def test_noise_alone_makes_no_link_of_thousands_slower() -> None:
    draw = random.Random(3)
    old, new = many([draw.lognormvariate(0, 0.1) for _ in range(1000)])
    assert compare(old, new).slower == ()
    broken = replace(new, pairs=(replace(new.pairs[0], bytes_per_s=1 * GB), *new.pairs[1:]))
    assert len(compare(old, broken).slower) == 1
