"""`psdist bench convergence` without ranks: schemes, what is computed, and the curves."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from psdist.commands.bench import Counts, HostCpu, plot, sees_all, sent, ticks_of
from psdist.commands.bench.convergence_report import (
    busiest,
    compare,
    drawn,
    header,
    reached,
    table,
)
from psdist.commands.bench.learning import task_of
from psdist.commands.bench.plot import Line, Panel
from psdist.commands.bench.schemes import (
    baseline,
    require_different,
    require_task,
    rival_of,
    rivals_of,
    scheme_of,
)
from psdist.config.codec_rounds import coded
from psdist.errors import ConfigError, UsageError
from psdist.protocol.roles import Place, Roles
from psdist.topology.draw.svg_canvas import Axis

SVG = "{http://www.w3.org/2000/svg}"


def roles_on(hosts: list[str], servers: tuple[int, ...], weights: tuple[float, ...] = ()) -> Roles:
    workers = tuple(rank for rank in range(len(hosts)) if rank not in servers)
    return Roles(
        places=tuple(
            Place(rank=rank, host=host, pid=rank, cores=(0,)) for rank, host in enumerate(hosts)
        ),
        server_ranks=servers,
        worker_ranks=workers,
        groups=tuple((worker,) for worker in range(len(workers))),
        weights=weights,
    )


# --- schemes --------------------------------------------------------------------------------------


def test_a_scheme_is_settings_with_spaces_between_and_named_by_them() -> None:
    scheme = scheme_of(" codec=int4/sign  local-steps=2 ")
    assert scheme.name == "codec=int4/sign local_steps=2"
    config = scheme.resolved({"seed": "7"}, {}).config
    push, pull = coded(config)
    assert (push.name, pull.name, config.local_steps) == ("int4", "sign", 2)
    assert (config.mode, config.seed) == ("sync", 7)


def test_the_baseline_is_sync_without_codec_whatever_the_environment_says() -> None:
    environment = {
        "PSDIST_MODE": "ssp",
        "PSDIST_CODEC": "int8",
        "PSDIST_PUSH_CODEC": "sign",
        "PSDIST_LOCAL_STEPS": "4",
    }
    config = baseline().resolved({}, environment).config
    assert (config.mode, config.local_steps) == ("sync", 1)
    assert all(each.is_none for each in coded(config))


def test_what_a_scheme_leaves_out_is_plain_and_what_it_says_goes_first() -> None:
    push_only = scheme_of("push_codec=topk:0.01 mode=ssp staleness=3").resolved(
        {}, {"PSDIST_PULL_CODEC": "fp16", "PSDIST_MODE": "async"}
    )
    push, pull = coded(push_only.config)
    assert (push.name, pull.is_none) == ("topk", True)
    assert (push_only.config.mode, push_only.config.staleness) == ("ssp", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has at least one setting"),
        ("int8", "'int8' is none of a scheme's settings"),
        ("servers=2", "'servers=2' is none of a scheme's settings"),
        ("codec=int8 codec=none", "codec is given twice"),
    ],
)
def test_what_is_no_scheme_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        scheme_of(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_that_do_not_go_together_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="a relative reply needs the version"):
        scheme_of("codec=int8 mode=async").resolved({}, {})


def test_rivals_are_ddp_and_its_hooks() -> None:
    assert rivals_of("none") == []
    assert [each.name for each in rivals_of("plain, fp16,powersgd:4")] == [
        "DDP",
        "DDP, fp16",
        "DDP, PowerSGD rank 4",
    ]
    assert rival_of("powersgd:4").rank == 4
    for wrong in ("powersgd", "powersgd:0", "powersgd:100", "bf16", ""):
        with pytest.raises(UsageError, match="none of DDP's ways"):
            rival_of(wrong)


def test_nothing_is_measured_twice_under_one_name() -> None:
    require_different(["a", "b"])
    with pytest.raises(UsageError, match="b is to be measured twice"):
        require_different(["a", "b", "c", "b"])


# --- what is computed -----------------------------------------------------------------------------


def test_the_busiest_link_of_ranks_on_one_host_is_that_of_the_only_server() -> None:
    assert busiest(roles_on(["a"] * 5, (0,))) == (1.0, 1.0)


def test_of_four_hosts_with_a_server_and_a_worker_each_a_link_has_three_of_sixteen_parts() -> None:
    hosts = ["a", "b", "c", "d"] * 2
    part, _ = busiest(roles_on(hosts, (0, 1, 2, 3)))
    assert part == pytest.approx(3 / 16)


def test_a_worker_far_from_both_servers_has_its_whole_part_on_its_link() -> None:
    part, _ = busiest(roles_on(["a", "b", "c", "c"], (0, 1), weights=(3.0, 1.0)))
    # both workers' halves leave host c
    assert part == pytest.approx(1.0)


def row(**more: Any) -> dict[str, Any]:
    return {
        "name": "none",
        "loss": 2.0,
        "seconds": 100.0,
        "curve": [(50, 50.0, 3.0), (100, 100.0, 2.0)],
        "bytes": 1000,
        "link_bytes": 400.0,
        "staleness": 0,
        "left_out": None,
        "cpu_s": 50.0,
        **more,
    }


def result() -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": "2026-11-23",
        "mpi": "an MPI",
        "servers": 1,
        "workers": 4,
        "groups": 4,
        "hosts": 1,
        "ranks_to_cores": (5, 2),
        "load": 0.1,
        "task": "chars",
        "parameters": 75_984,
        "unit": "bits",
        "steps": 100,
        "batch_size": 16,
        "seed": 0,
        "alone_s": 0.2,
        "links": {"8bit": 1.0},
        "rows": [
            row(),
            row(name="a", loss=2.02, seconds=40.0, bytes=250, link_bytes=100.0, left_out=0.25,
                cpu_s=None, curve=[(50, 20.0, 2.03), (100, 40.0, 2.02)]),
            row(name="b", loss=2.2, seconds=200.0, curve=[(50, 1.0, 2.0), (100, 2.0, 2.2)]),
        ],
    }  # fmt: skip
    compare(found)
    return found


def test_rows_are_compared_with_the_first_and_computed_over_the_links() -> None:
    base, a, b = result()["rows"]
    assert (base["against"], base["ratio"], base["faster"], base["bound"]) == (0, 1, 1, 1)
    assert a["against"] == pytest.approx(0.01)
    assert (a["ratio"], a["faster"], a["step_s"]) == (4, 2.5, 0.4)
    # 0.2 s of computation, 0.8 s of network, a quarter of the bytes
    assert a["bound"] == pytest.approx(1.0 / (0.2 + 0.8 / 4))
    # 0.2 s, and a hundredth of 100 bytes at 1 byte a second
    assert a["at_link"] == {"8bit": pytest.approx(1.2)}
    assert (base["reached_step"], a["reached_step"], b["reached_step"]) == (100, 50, None)
    assert (a["reached_s"], b["reached_s"]) == (pytest.approx(20.0), None)


def test_a_loss_that_rises_again_has_not_been_reached() -> None:
    assert reached([(1, 0.0, 1.0), (2, 0.0, 3.0), (3, 0.0, 1.0)], 2.0) == 3
    assert reached([(1, 0.0, 1.0), (2, 0.0, 3.0)], 2.0) is None


def test_the_table_and_the_header_say_what_was_measured_and_what_computed() -> None:
    found = result()
    assert "5 ranks share 2 cores: they take turns" in header(found)
    made = table(found)
    assert "computed, not measured (8bit)" in str(made.title)
    cells = [list(column.cells) for column in made.columns]
    by_name = {str(column.header): its for column, its in zip(made.columns, cells, strict=True)}
    assert by_name["x fewer"] == ["1.0", "4.0", "1.0"]
    assert by_name["s to 1.02 x"] == ["100.0", "20.0", "never"]
    assert by_name["left out"] == ["", "0.25", ""]
    assert by_name["CPU s"] == ["0.5000", "", "0.5000"]


# --- curves ---------------------------------------------------------------------------------------


def polylines(svg: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Those with a title, which are curves."""
    found = []
    for each in ET.fromstring(svg).iter(f"{SVG}polyline"):
        title = each.find(f"{SVG}title")
        if title is not None and title.text:
            places = [tuple(map(float, at.split(","))) for at in each.attrib["points"].split()]
            found.append((title.text, [(x, y) for x, y in places]))
    return found


def test_a_curve_is_drawn_to_scale() -> None:
    svg = plot.curves(
        "t", [Panel("s", [Line("a", [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)])])], note="n"
    )
    ((title, points),) = polylines(svg)
    assert title == "a: 2 at 2"
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 < y2 < y0  # upwards on the screen is less
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2)


def test_every_panel_has_every_line_and_a_name_below() -> None:
    svg = drawn(result())
    assert len(polylines(svg)) == 3 * 3  # measured, bytes, a link
    words = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {"none", "a", "b", "seconds, measured", "seconds at 8bit, computed"} <= set(words)


def test_an_axis_has_round_ticks_within_its_ends() -> None:
    assert Axis(0.0, 10.0, start=0, stop=1).ticks() == pytest.approx([0, 2, 4, 6, 8, 10])
    assert Axis(1.93, 2.08, start=0, stop=1).ticks() == pytest.approx([1.95, 2.0, 2.05])
    tens = Axis(0.5, 2000.0, start=0, stop=1, is_logarithmic=True)
    assert tens.ticks() == pytest.approx([1, 10, 100, 1000])
    few = Axis(3.0, 40.0, start=0, stop=1, is_logarithmic=True)
    assert few.ticks() == pytest.approx([5, 10, 20])
    assert tens.place(math.sqrt(0.5 * 2000.0)) == pytest.approx(0.5)


def test_a_flat_curve_stands_in_the_middle() -> None:
    flat = Axis(2.0, 2.0, start=0.0, stop=1.0)
    assert flat.place(2.0) == pytest.approx(0.5)
    assert flat.ticks()


# --- the rest -------------------------------------------------------------------------------------


def test_interfaces_count_what_they_send_but_loopback() -> None:
    text = (
        "Inter-|   Receive  |  Transmit\n face |bytes packets |bytes packets\n"
        "    lo: 1 1 0 0 0 0 0 0 900 90 0 0 0 0 0 0\n"
        "  eth0: 5 6 0 0 0 0 0 0 1000 10 0 0 0 0 0 0\n"
        "  eth1: 5 6 0 0 0 0 0 0 20 2 0 0 0 0 0 0\n"
    )
    assert sent(text) == Counts(1020, 12)
    assert Counts(1020, 12) - Counts(20, 2) == Counts(1000, 10)


def test_cpu_time_is_that_of_all_ranks_of_the_host_and_read_by_one() -> None:
    me = os.getpid()
    places = [Place(rank=rank, host=host, pid=me, cores=(0,)) for rank, host in enumerate("aabb")]
    roles = dataclasses.replace(roles_on([*"aabb"], servers=(0,)), places=tuple(places))
    assert HostCpu(roles, 3).seconds() == 0
    before, lowest = time.process_time(), HostCpu(roles, 2)
    seen = lowest.seconds()
    assert 2 * (before - 0.05) < seen < 2 * (time.process_time() + 0.05)  # ticks of 10 ms, twice me
    assert sees_all(roles)
    assert not sees_all(roles_on([*"aab"], servers=(2,)))


def test_ticks_are_found_behind_any_name() -> None:
    fields = " ".join(str(each) for each in range(4, 30))
    assert ticks_of(f"77 (a) b (c) S {fields}") == 14 + 15


@pytest.mark.parametrize(
    ("task", "width", "said"),
    [
        ("words", None, "neither digits nor chars"),
        ("digits", 64, "the model of digits has none"),
        ("chars", 50, "no multiple of 4"),
    ],
)
def test_a_task_or_width_that_is_none_is_refused(task: str, width: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_task(task, width)


def test_a_wider_model_of_chars_is_asked_for() -> None:
    values = task_of("chars", 64).make_model(1).parameters()
    assert sum(each.numel() for each in values) == 128_928


def test_every_scheme_sees_the_same_samples_and_every_worker_others() -> None:
    task = task_of("chars")

    def first(worker: int, seed: int = 3) -> Any:
        return next(task.batches(seed=seed, worker=worker, batch_size=4))

    x, y = first(0)
    assert x.shape == y.shape == (4, 64)
    assert x.equal(first(0)[0])
    assert y.equal(first(0)[1])
    assert not x.equal(first(1)[0])
    assert not x.equal(first(0, seed=4)[0])
    values = [each.detach() for each in task.make_model(1).parameters()]
    again = [each.detach() for each in task.make_model(1).parameters()]
    assert all(one.equal(other) for one, other in zip(values, again, strict=True))
    assert sum(each.numel() for each in values) == 75_984
