"""The plot of a benchmark: what stands where, and what it says."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from psdist.commands.bench import group, plot, quartiles, step_report
from psdist.commands.bench.plot import COLOURS, LEFT, RIGHT, WIDTH, Size, Way, short_time, time_axis
from psdist.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str) -> dict[str, list[tuple[float, float, str]]]:
    """By what hovering shows: left, right and colour of the bar of quartiles and of the dot."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
            found.setdefault(title.text, []).append((x, x + width, rect.attrib["fill"]))
    return found


def test_every_way_has_a_bar_of_its_quartiles_a_dot_and_its_figures() -> None:
    seconds = [0.001, 0.002, 0.003, 0.004, 0.005]
    svg = plot.plot("title", [Size("4 KiB", [Way("slow", seconds)])], note="where")
    assert {"title", "where", "4 KiB", "slow", "3 ms (2 ms to 4 ms)"} <= set(words(svg))
    ((bar, dot),) = bars(svg).values()
    assert quartiles(seconds) == (0.002, 0.003, 0.004)
    scale = time_axis(0.002, 0.004)
    assert bar == (round(scale.place(0.002), 1), round(scale.place(0.004), 1), COLOURS[0])
    assert sum(dot[:2]) / 2 == pytest.approx(scale.place(0.003), abs=0.1)


def test_a_way_has_one_colour_at_all_sizes_and_no_two_ways_share_one() -> None:
    sizes = [
        Size("1 MiB", [Way("a", [0.1]), Way("b", [0.2])]),
        Size("2 MiB", [Way("b", [0.3]), Way("c", [0.2])]),
    ]
    found = bars(plot.plot("t", sizes, note="n"))
    colours = {title: its[0][2] for title, its in found.items()}
    assert [colours[each] for each in sorted(colours)] == [COLOURS[at] for at in (0, 1, 1, 2)]


def test_a_limit_is_a_line_that_says_what_it_is() -> None:
    svg = plot.plot("t", [Size("1 MiB", [Way("a", [0.1])], limit_s=0.05)], note="n")
    ((left, right, colour),) = bars(svg)["limit: 50 ms"]
    assert colour == plot.LIMIT
    assert (left + right) / 2 == pytest.approx(time_axis(0.05, 0.1).place(0.05), abs=0.1)
    assert "dot: median; bar: quartiles; line: what the link allows" in words(svg)


def test_times_that_differ_much_stand_on_a_logarithmic_scale() -> None:
    scale = time_axis(50e-6, 20e-3)
    assert scale.is_logarithmic
    assert scale.place(1e-3) - scale.place(1e-4) == pytest.approx(
        scale.place(1e-2) - scale.place(1e-3)
    )
    assert scale.ticks() == [pytest.approx(1e-4), pytest.approx(1e-3), pytest.approx(1e-2)]
    plain = time_axis(0.5, 1.0)
    assert not plain.is_logarithmic
    assert plain.place(0) == LEFT
    assert plain.place(1.0) < WIDTH - RIGHT
    assert plain.ticks() == [pytest.approx(0.2 * each) for each in range(6)]
    assert time_axis(1e-3, 15e-3).ticks()[0] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5, "1.5 s"), (0.0123456, "12.3 ms"), (77e-6, "77 us"), (0.9999, "1 s"),
        (0.9994e-3, "999 us"), (0.0, "0"), (4e-7, "0.4 us"), (1234.0, "1234 s"),
    ],
)  # fmt: skip
def test_a_time_is_told_in_three_digits(seconds: float, text: str) -> None:
    assert short_time(seconds) == text


def test_a_step_is_drawn_with_the_limit_of_its_link() -> None:
    rows = [{"way": way, "all_s": [0.1 + at / 10]} for at, way in enumerate(step_report.WAYS)]
    result = {
        "rows": rows, "num_bytes": 1 << 20, "link_limit_s": 0.08, "ranks_to_cores": (8, 2),
        "servers": 4, "workers": 4, "hosts": 4, "mode": "sync", "compute_s": 0.5, "mpi": "Open MPI",
        "repeats": 3, "date": "2026-01-01",
    }  # fmt: skip
    svg = step_report.drawn(result)
    assert set(step_report.WAYS) | {"1 MiB"} <= set(words(svg))
    assert "limit: 80 ms" in bars(svg)
    assert "8 ranks on 2 cores" in " ".join(words(svg))


def test_a_group_is_drawn_with_the_ways_that_were_measured() -> None:
    rows = [group.Row(num_bytes=1024, times_s={group.TORCH: [0.1], group.STEP: [0.2]})]
    told = words(group.drawn(rows, note="2 workers"))
    assert {"1 KiB", group.TORCH, group.STEP, "2 workers"} <= set(told)
    assert group.SHARED not in told


def test_a_plot_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--plot: cannot write .*/a.svg: No such file"):
        plot.write(tmp_path / "no" / "a.svg", "<svg/>")
