"""How long links are idle, from counters of interfaces (psdist.commands.bench.links)."""

import time

from rich.console import Console

from psdist.commands.bench import carried
from psdist.commands.bench.links import LinkSampler, table

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:    9      1    0    0    0     0          0         0      9      1    0    0    0  0  0  0
  eth0: 1500      2    0    0    0     0          0         0    700      3    0    0    0  0  0  0
"""


def test_bytes_are_those_of_each_interface_except_loopback() -> None:
    assert carried(DEV) == {"eth0": (700, 1500)}


def test_a_direction_is_idle_while_it_carries_little_of_what_the_link_can() -> None:
    sampler = LinkSampler()
    sent = received = 0
    for sample in range(100):
        before = {"eth0": (sent, received), "eth1": (0, 0)}
        sent += 1_000_000
        received += 1_000_000 if sample % 4 == 0 else 50_000
        sampler.add(before, {"eth0": (sent, received), "eth1": (0, 10)}, 0.01)
    (idle,) = sampler.idle().values()  # eth1 carried nothing to speak of
    assert idle == (0.0, 0.75, 8e8)


def test_an_interface_that_carried_nothing_has_no_row_and_a_turn_may_be_short() -> None:
    sampler = LinkSampler(interval_s=0.001)
    with sampler:
        pass
    with sampler:
        time.sleep(0.02)
    assert set(sampler.idle()) <= set(carried())


def test_the_table_names_each_way_once() -> None:
    each = {"sent": 0.25, "received": 0.5, "rate": 256e6}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table({"psdist step": {"h1 eth0": each, "h2 eth0": each}, "DDP": {}}))
    text = captured.get()
    assert text.count("psdist step") == 1
    assert all(each in text for each in ("256 Mbit/s", "25%", "50%"))
