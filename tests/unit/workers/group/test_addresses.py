"""The interface over which a group's hosts talk: one that joins all of them, or an error."""

from __future__ import annotations

from contextlib import closing

import pytest

from psdist.errors import UsageError
from psdist.workers.group import addresses, meeting
from psdist.workers.group.addresses import Address, At, Offer, choose
from psdist.workers.group.channel import GroupChannel
from tests.support.process_groups import run_in_group

DOCKER = Address("docker0", "172.17.0.1", "172.17.0.0/16", 0)


def host(number: int, *, wanted: str = "", fast: int = -100_000) -> Offer:
    """With a bridge that all have, a slow network and a fast one."""
    return Offer(
        f"h{number}",
        wanted,
        [
            DOCKER,
            Address("eth0", f"10.0.0.{number}", "10.0.0.0/24", -1000),
            Address(f"ib{number}", f"10.1.0.{number}", "10.1.0.0/24", fast),
        ],
    )


def chosen(offers: list[Offer], hosts: list[int]) -> list[At]:
    return [choose(offers, hosts, place) for place in range(len(offers))]


def test_the_fastest_network_that_joins_all_hosts_is_taken_whatever_its_interfaces_are_called() -> (
    None
):
    offers = [host(1), host(1), host(2)]
    assert chosen(offers, [0, 0, 1]) == [
        At("ib1", "10.1.0.1"),
        At("ib1", "10.1.0.1"),
        At("ib2", "10.1.0.2"),
    ]


def test_a_network_that_one_host_does_not_have_is_not_taken() -> None:
    third = host(3)
    del third.addresses[2]
    assert chosen([host(1), host(2), third], [0, 1, 2]) == [
        At("eth0", f"10.0.0.{number}") for number in (1, 2, 3)
    ]


def test_a_bridge_that_has_one_address_everywhere_joins_nothing() -> None:
    offers = [host(number)._replace(addresses=[DOCKER]) for number in (1, 2)]
    with pytest.raises(UsageError, match=r"a group over h1, h2: h1 has no address of its own"):
        choose(offers, [0, 1], 1)


def test_an_interface_that_the_user_names_is_taken_or_missed_by_name() -> None:
    offers = [host(number, wanted="eth0") for number in (1, 2)]
    assert chosen(offers, [0, 1]) == [At("eth0", "10.0.0.1"), At("eth0", "10.0.0.2")]
    offers = [host(number, wanted="eth9") for number in (1, 2)]
    with pytest.raises(
        UsageError, match=r"GLOO_SOCKET_IFNAME=eth9: h2 has no such interface .*docker0, eth0, ib2"
    ):
        choose(offers, [0, 1], 1)


def test_an_offer_travels_whole() -> None:
    assert Offer.decode(host(3).encode()) == host(3)


def test_loopback_is_offered_to_who_names_it_only_and_hints_come_first() -> None:
    plain = addresses.offer(host="h1", wanted="")
    assert "lo" not in {each.interface for each in plain.addresses}
    named = addresses.offer(host="h1", wanted="lo")
    (lo,) = (each for each in named.addresses if each.interface == "lo")
    assert (lo.ip, lo.network) == ("127.0.0.1", "127.0.0.0/8")
    for hint in ("lo", "mlx5_0:1,127.0.0.0/8"):
        hinted = addresses.offer(host="h1", wanted="lo", preferred=[hint])
        assert min(hinted.addresses, key=lambda each: each.rank).interface == "lo"


def test_a_host_that_nobody_answers_on_is_named_with_the_interface() -> None:
    with closing(addresses.listen(At("lo", "127.0.0.1"))) as server:
        there = server.getsockname()
        assert addresses.unreachable("h2", there, At("lo", "127.0.0.1"), 10.0) == ""
    told = addresses.unreachable("h2", there, At("lo", "127.0.0.1"), 10.0)
    assert told.startswith("h2 at 127.0.0.1 cannot be reached over lo (127.0.0.1): ")


def test_the_host_is_named_whose_address_torchs_words_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_names", {"10.0.0.1": "h1", "10.0.0.12": "h2"})
    said = "Read error [10.0.0.12]:10372: Connection reset by peer"
    assert meeting.host_named_in(said) == ", on h2,"
    assert meeting.host_named_in("Read error [10.0.0.7]:10372") == ""


def never(_channel: GroupChannel) -> None:
    raise AssertionError("there is no group")


def test_an_interface_that_is_not_there_is_one_error_on_all_workers() -> None:
    with pytest.raises(UsageError, match=r"needs a network.*GLOO_SOCKET_IFNAME=none9: h0 has no"):
        run_in_group(2, never, hosts=[0, 1], interface="none9")
