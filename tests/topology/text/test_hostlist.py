"""Host lists with brackets, both ways, and against Slurm's own reading of them.

Of hostlist; bitmap is in machine/test_hwloc.py, untrusted wherever a file is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.text.hostlist import compress, expand, natural_key

LISTS = [
    "n[1-3,07-12],gpu[0-1]-ib[0-3],login",
    "n[001-10]",
    "n[9-11]",
    "n[08-9]",
    "n[1,3,2],n2",
    "a-1.b_c,a[0-1]b[1-2]",
    "n1,,n2 n3,",
    "10.140.71.[99-101]",
    "rack1-n[0-1]x[00-01]",
]

NAMES = st.lists(
    st.one_of(
        st.from_regex(r"[a-z]{1,2}[0-9]{1,3}", fullmatch=True),
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,12}", fullmatch=True),
        st.from_regex(r"n[0-9]{17,21}", fullmatch=True),
    ),
    max_size=30,
)


def test_brackets_are_expanded_in_order_with_their_zeros_kept() -> None:
    assert expand("n[1-3,07-12],gpu[0-1]-ib[0-3],login") == [
        *("n1", "n2", "n3", "n07", "n08", "n09", "n10", "n11", "n12"),
        *("gpu0-ib0", "gpu0-ib1", "gpu0-ib2", "gpu0-ib3"),
        *("gpu1-ib0", "gpu1-ib1", "gpu1-ib2", "gpu1-ib3"),
        "login",
    ]


def test_a_domain_may_follow_the_bracket() -> None:
    assert expand("n[1-2].example.org") == ["n1.example.org", "n2.example.org"]


def test_neighbours_with_following_numbers_share_a_bracket() -> None:
    names = ["n3", "n1", "n2", "a", "n08", "n09", "n10", "n1.example.org", "n99", "n100"]
    assert compress(names) == "n[3,1-2],a,n[08-10],n1.example.org,n[99-100]"


def test_nothing_is_an_empty_list() -> None:
    assert compress([]) == ""
    assert expand("") == expand(" , ") == []


@given(NAMES)
def test_what_was_compressed_expands_to_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert expand(compress(names)) == names


@given(NAMES)
def test_a_sorted_list_without_repeats_compresses_to_every_name_once(names: list[str]) -> None:
    ordered = sorted(set(names))
    assert sorted(expand(compress(ordered))) == ordered


@given(st.text(alphabet="n01-9[],. \t-a;\x00é", max_size=40))
def test_any_text_is_a_list_of_names_or_one_line_of_complaint(text: str) -> None:
    complaint = ""
    names: list[str] = []
    try:
        names = expand(text, max_hosts=1000)
    except PlacementError as error:
        complaint = str(error)
    assert complaint.isprintable()
    assert all(name and name.isascii() for name in names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n[1-999999999999]", "stands for 999,999,999,999 names"),
        ("n[0-9][0-9][0-9][0-9][0-9][0-9]", "stands for 1,000,000 names"),
        ("n[1-99999],m[1-2]", "stands for 2 names, with those before it more than the limit"),
        ("n[" + "1," * 200_000 + "1]", "has 200,001 ranges"),
        ("n[3-1]", "'3-1' in 'n[3-1]' is no range"),
        ("n[1-2-3]", "is no range"),
        ("n[" + "9" * 30 + "]", "is no range"),
        ("n[]", "'' in 'n[]' is no range"),
        ("n[1-3", "a bracket without its other half"),
        ("n1]", "a bracket without its other half"),
        ("n[[1]]", "a bracket without its other half"),
        ("n" + "[1]" * 9, "has 9 brackets"),
        ("-n1", "'-n1' is no host name"),
        ("n1;reboot", "'n1;reboot' is no host name"),
        ("$(x)", "is no host name"),
        ("n" * 256, "is no host name"),
        ("n" * 2_000_000, "more than 1,048,576"),
    ],
)
def test_a_wrong_list_is_refused_with_what_is_wrong_with_it(text: str, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        expand(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_range_that_is_too_long_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PlacementError):
            expand("n[1-999999999]")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_name_with_a_blank_in_it_is_not_compressed() -> None:
    with pytest.raises(PlacementError, match="'n 1' is no host name"):
        compress(["n 1"])


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's scontrol is not installed")
def test_slurm_reads_the_same_names(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"  # scontrol wants one, even where it asks nobody
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")

    def slurms(text: str) -> list[str]:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.split()

    for text in LISTS:
        assert expand(text) == slurms(text), text
        assert slurms(compress(expand(text))) == expand(text), text


def test_reading_host_lists_imports_no_torch_and_no_mpi() -> None:
    code = (
        "import sys, psdist.topology.network.sources, psdist.topology.network.catalogue\n"
        "print(sorted({'torch', 'mpi4py', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_names_are_sorted_as_people_count() -> None:
    names = ["n10", "n2", "n1", "gpu", "rack2-n10", "rack2-n9", "rack10-n1", "n02", "n"]
    assert sorted(names, key=natural_key) == [
        "gpu", "n", "n1", "n2", "n02", "n10", "rack2-n9", "rack2-n10", "rack10-n1",
    ]  # fmt: skip
    assert sorted(["7", "n", "10", ""], key=natural_key) == ["", "7", "10", "n"]
