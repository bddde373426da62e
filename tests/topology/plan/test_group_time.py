"""What a group's collectives on its host are predicted to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.topology.machine import Machine, flat_machine
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.network import one_rack
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import Grouping, PlanRequest, plan_ahead
from tests.support.machine_files import machine_file

MACHINE = hwloc_xml.read(machine_file("nvlink-to-processors.xml"))
"""Two processors with two GPUs each, which are linked with 40 GB/s."""


def planned(workers: int, *, group: Grouping = "node", has_links: bool = True) -> Plan:
    machine = MACHINE if has_links else replace(MACHINE, links=())
    return on_two_hosts(machine, PlanRequest(group=group, model_bytes=4e9), workers)


def on_two_hosts(machine: Machine, request: PlanRequest, workers: int) -> Plan:
    """With a third one that has cores for servers."""
    machines = {"n1": machine, "n2": machine, "n3": flat_machine(range(8))}
    cluster = one_rack(list(machines), machines)
    return plan_ahead(cluster, request, workers=[workers, workers, 0], server_nodes=["n3"])


def test_two_workers_send_half_of_the_model_twice_over_their_link() -> None:
    assert planned(2).groups_s == pytest.approx(4e9 / 40e9)


def test_four_workers_go_over_pci_between_the_processors() -> None:
    assert planned(4).groups_s == pytest.approx(1.5 * 4e9 / 12e9)


def test_a_group_on_each_socket_stays_on_its_link() -> None:
    assert planned(4, group="socket").groups_s == pytest.approx(4e9 / 40e9)


def test_without_links_pci_carries_all() -> None:
    assert planned(2, has_links=False).groups_s == pytest.approx(4e9 / 12e9)


def test_it_is_not_known_where_workers_share_a_gpu_or_are_alone() -> None:
    assert planned(1).groups_s == 0
    assert planned(4, group="rank").groups_s == 0
    few = replace(MACHINE, devices=MACHINE.gpus[:1], links=())
    assert on_two_hosts(few, PlanRequest(), 2).groups_s == 0


def test_it_is_no_part_of_the_exchange() -> None:
    with_links, without = planned(2), planned(2, has_links=False)
    assert with_links.exchange_s == without.exchange_s
