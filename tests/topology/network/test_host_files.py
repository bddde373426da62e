"""Host files: names in order, slots, and one line with its number for what is none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.network import host_files
from psdist.topology.network.host_files import MAX_SLOTS, HostFile, begins_one, parse, read
from psdist.topology.text.hostlist import compress
from tests.support.mpirun import environment_prefix, require, run_program

# As `flux resource list` of flux-core 0.4x and 0.7x prints it.
FLUX_TABLE = """\
     STATE NNODES   NCORES    NGPUS NODELIST
      free      3       12        0 corona[36,11-12]
 allocated      1        4        0 corona2
      down      0        0        0
"""
FLUX_QUEUES = """\
     STATE QUEUE      PROPERTIES NNODES NCORES NGPUS NODELIST
     avail debug      debug           1     48     4 tioga10
     avail batch                      2     96     8 tioga[12-13]
   drained batch      pbatch          2     96     8 tioga[14,9]
"""


def given_text(text: str) -> HostFile:
    return parse(text.encode(), where="hosts")


def resources(ranks: list[str], nodelist: list[str], **more: Any) -> str:
    execution = {
        "R_lite": [{"rank": rank, "children": {"core": "0-3", "gpu": "0"}} for rank in ranks],
        "nodelist": nodelist,
        "starttime": 1.5,
        "properties": {"debug": "0"},
    }
    return json.dumps({"version": 1, "execution": execution, "scheduling": {"graph": {}}} | more)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("n2 slots=4\nn1 slots=2 max_slots=8\n", {"n2": 4, "n1": 2}),
        ("# operator\nj-worker-0.j.ns.svc slots=8\nj-worker-1.j.ns.svc slots=8 # two\n",
         {"j-worker-0.j.ns.svc": 8, "j-worker-1.j.ns.svc": 8}),
        ("j-worker-0.j:8\nj-worker-1.j:8\n", {"j-worker-0.j": 8, "j-worker-1.j": 8}),
        ("n1:2\nn2:1\nn1:3\n", {"n1": 5, "n2": 1}),
        ("n1:2 binding=user:0,1 ifname=ib0\n", {"n1": 2}),
        ("n1\nn1\nn2\nn1\n", {"n1": 3, "n2": 1}),
        ("n1\nn2 Slots=3\nn3:2\n", {"n1": 1, "n2": 3, "n3": 2}),
        ("\ufeff\n\n  n1\t slots=2 \r\nn2 binding=rr\r\n", {"n1": 2, "n2": 1}),
        ("10.0.0.1 slots=2\n", {"10.0.0.1": 2}),
        (f"n1 slots={MAX_SLOTS}\n", {"n1": MAX_SLOTS}),
    ],
)  # fmt: skip
def test_hosts_are_in_the_order_of_the_file_with_their_slots(
    text: str, slots: dict[str, int]
) -> None:
    found = given_text(text)
    assert found.names == tuple(slots)
    assert found.slots == slots
    assert found.source == "hosts"
    assert found.notes == ()


def test_flux_names_hosts_by_rank_and_no_slots() -> None:
    found = given_text(resources(["0-2", "3,5"], ["n[9-10]", "n1", "gpu[0-1]"]))
    assert found.names == ("n9", "n10", "n1", "gpu0", "gpu1")
    assert set(found.slots.values()) == {0}


def test_a_table_of_flux_leaves_out_what_is_down_and_sorts_as_people_count() -> None:
    assert given_text(FLUX_TABLE).names == ("corona2", "corona11", "corona12", "corona36")
    found = given_text(FLUX_QUEUES)
    assert found.names == ("tioga10", "tioga12", "tioga13")
    assert found.notes == ("hosts: without tioga[9,14], which are down or drained",)
    assert given_text(FLUX_TABLE).notes == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts: nothing in it but comments"),
        ("# only\n\n", "hosts: nothing in it but comments"),
        ("n1\nn 2\n", "hosts:2: '2' is not known here: expected slots=N after the host"),
        ("n1\n-n2\n", "hosts:2: '-n2' is not a host"),
        ("n1;rm\n", "hosts:1: 'n1;rm' is not a host: expected lines like 'n1 slots=8'"),
        ("a@me@n1\n", "hosts:1: 'a@me@n1' is not a host"),
        ("me@\n", "hosts:1: 'me@' is not a host"),
        ("n1 cpu=2 slots=2\n", "hosts:1: n1 has two numbers of slots"),
        ("n1 max_slots=x\n", "hosts:1: max_slots='x' is not a whole number: write max_slots=8"),
        ("me@2001:db8::1\n", "hosts:1: 'me@2001:db8::1' is an IPv6 address: write the name of"),
        ("fe80::1:2 slots=2\n", "hosts:1: 'fe80::1:2' is an IPv6 address"),
        ("+n0\n", "hosts:1: '+n0' is not a host"),
        ("/* n1\n\n*/ n2 x\n", "hosts:3: 'x' is not known here"),
        ("/* n1\n", "hosts: nothing in it but comments"),
        ("n[1-2]\n", "hosts:1: 'n[1-2]' is not a host"),
        ("n1:\n", "hosts:1: 'n1:' is not a host"),
        ("n1 slots=\n", "hosts:1: 'slots=' is not known here"),
        ("n1 slots=x\n", "hosts:1: slots='x' is not a whole number"),
        ("n1 slots=-1\n", "hosts:1: slots='-1' is not a whole number"),
        ("n1 slots=2 slots=3\n", "hosts:1: n1 has two numbers of slots"),
        ("n1:2 slots=2\n", "hosts:1: n1 has two numbers of slots"),
        ("n1 slots=0\n", "hosts:1: n1 has 0 slots: give it 1 to 65,536"),
        (f"n1\nn1:{MAX_SLOTS}\n", "hosts:2: n1 has 65,537 slots"),
        ("n1 speed=2\n", "hosts:1: 'speed=2' is not known here"),
        ("n1\n\0", "hosts: a NUL byte at offset 3"),
        ("{", "hosts:1: no JSON"),
        ("{}", "hosts: the content has no key 'version': give what `flux job info ID R`"),
        (resources(["0"], ["n1"], version=2), "hosts: version 2 of Flux's R"),
        (resources(["0"], ["n1"], version="1"), "hosts: version is '1', not a whole number"),
        (resources(["0"], ["n1"], execution=[]), "hosts: execution is a list, not an object"),
        (resources(["0"], ["n[1-2]"]), "hosts: R_lite has 1 ranks and nodelist 2 hosts"),
        (resources(["0-1"], ["n1"]), "hosts: R_lite has 2 ranks and nodelist 1 hosts"),
        (resources(["x"], ["n1"]), "hosts: execution.R_lite[0].rank: 'x' is no set of ranks"),
        (resources(["0", "2-1"], ["n1"]), "execution.R_lite[1].rank: '2-1' goes down, or there"),
        (resources(["0-100000"], ["n1"]), "'0-100000' goes down, or there are more than 100,000"),
        (resources(["0"], ["n[1-"]), "hosts: execution.nodelist: host list: "),
        (resources(["0-1"], ["n[1-100001]"]), "hosts: execution.nodelist: host list: "),
        (resources([], []), "hosts: no host in it"),
        ("STATE NCORES NODELIST\nfree 4 n1\n", "hosts:1: no column NNODES"),
        (FLUX_TABLE.replace("corona2", "corona[2+"), "hosts:3: host list: "),
        (FLUX_TABLE.replace("corona2", "corona[2-3]"), "hosts:3: NNODES does not count the hosts"),
        ("STATE NNODES NODELIST\nfree n1\n", "hosts:2: NNODES does not count"),
        ("STATE NNODES NODELIST\nn1\n", "hosts:2: NNODES does not count"),
        ("STATE NNODES NODELIST\ndown 1 n1\n", "hosts: no host in it"),
        ("STATE NNODES NODELIST\n", "hosts: no host in it"),
    ],
)  # fmt: skip
def test_what_is_no_host_file_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        given_text(text)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


HOSTS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
SLOTS = st.dictionaries(HOSTS, st.integers(1, 9), min_size=1, max_size=6)


@given(SLOTS, st.data())
def test_all_forms_of_a_host_file_say_the_same(slots: dict[str, int], data: st.DataObject) -> None:
    lines = []
    for host, count in slots.items():
        form = data.draw(st.sampled_from(("slots", "colon", "lines")))
        lines += {
            "slots": [f"{host} slots={count}"],
            "colon": [f"{host}:{count}"],
            "lines": [host] * count,
        }[form]
    assert given_text("\n".join(lines)).slots == slots
    assert begins_one(lines[0])
    extra = data.draw(st.sampled_from(sorted(slots)))
    again = given_text("\n".join([*lines, f"{extra}:2"]))
    assert again.names == tuple(slots)
    assert again.slots == slots | {extra: slots[extra] + 2}


@given(st.lists(HOSTS, unique=True, min_size=1, max_size=8))
def test_flux_and_its_table_name_the_same_hosts(hosts: list[str]) -> None:
    found = given_text(resources([f"0-{len(hosts) - 1}"], [compress(hosts)]))
    assert found.names == tuple(hosts)
    table = f"STATE NNODES NCORES NODELIST\nfree {len(hosts)} 8 {compress(hosts)}\n"
    assert set(given_text(table).names) == set(hosts)


@given(st.text(max_size=40))
def test_any_text_is_a_host_file_or_one_line(text: str) -> None:
    said = ""
    try:
        found = given_text(text)
        assert found.names
        assert set(found.names) == set(found.slots)
    except PlacementError as error:
        said = str(error)
    assert said.isprintable()


def test_a_host_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("n1:3\n")
    assert read(path).slots == {"n1": 3}
    assert read(path).source == str(path)
    with pytest.raises(PlacementError, match="cannot be read"):
        read(tmp_path / "none")


def test_what_may_begin_a_host_file_is_told_from_other_text() -> None:
    for line in (
        "n1",
        "n1 slots=2",
        "n1:4 ifname=ib0",
        "{",
        ' {"version": 1',
        "STATE NNODES NODELIST",
        "n1 slots = 2",
        "me@n1 cpu =2",
        "rank 0=n1 slot=0",
    ):
        assert begins_one(line), line
    for line in ("", "n1 and n2", "SwitchName", "n[1-2]", "STATE NODES", "- n1", "n1 slots=2 x"):
        assert begins_one(line) == (line == "SwitchName"), line


def test_slots_may_come_behind_other_options() -> None:
    assert given_text("n1 user=me slots=3 port=22\n").slots == {"n1": 3}


@pytest.mark.parametrize("line", ["me@n1", "n1 username=me", "n1 user_name = me", "n1 port=22"])
def test_logins_are_read_and_a_note_says_where_they_belong(line: str) -> None:
    found = given_text(f"{line}\nn2\n")
    assert found.slots == {"n1": 1, "n2": 1}
    assert found.notes == (
        "hosts: user names and ports are not kept in the files of --emit: put them into "
        "~/.ssh/config",
    )


# Hosts that mpirun gives slots: where a line has none, it counts the cores of this machine.
LINES_OF_OPEN_MPI = """\
n1 slots = 4
n2 cpu=2
me@n3 slots=2
n4\tslots\t=\t4
n5 count =3
n6 cpu = 2 max_cpu=3
n7 max-slots=4
n8 count-max = 3
n9 username=me slots=2
n10 user-name = me port=22 slots=2
n11 slots=2 // how many
n12 slots=2# as many
/* n13 slots=1
n14 slots=1 */
n15 slots=2 /* the last */
me@10.0.0.1 slots=2
5 slots=2
// rank by rank
n16
n16
# and as in a rankfile
rank 0=n17 slot=0:1
rank 1=me@n17 slot=0:2
n18 slots=5 username="me"
"""
_ALLOCATED = re.compile(r"^ +(\S+): slots=(\d+) ", re.MULTILINE)


@pytest.mark.mpi
def test_lines_for_open_mpi_give_the_slots_that_its_mpirun_gives(tmp_path: Path) -> None:
    require("openmpi")
    path = tmp_path / "hostfile"
    path.write_text(LINES_OF_OPEN_MPI)
    argv = [str(environment_prefix("openmpi") / "bin" / "mpirun"), "-n", "1"]
    argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    argv += ["--hostfile", str(path), "--display", "allocation"]
    argv += ["--runtime-options", "donotlaunch", "hostname"]
    done = run_program(argv, timeout_s=60)
    assert done.returncode == 0, done.text
    assert read(path).slots == {host: int(slots) for host, slots in _ALLOCATED.findall(done.text)}
    assert "n13" not in read(path).names


def test_more_hosts_than_any_cluster_has_are_refused_at_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_files, "MAX_NODES", 2)
    assert given_text("n1\nn2\nn1\n").slots == {"n1": 2, "n2": 1}
    with pytest.raises(PlacementError, match="hosts:3: more than 2 hosts: give the right file"):
        given_text("n1\nn2\nn3\n")
    assert given_text(resources(["0-1"], ["n[1-2]"])).names == ("n1", "n2")
    with pytest.raises(PlacementError, match=r"R_lite\[0\]\.rank: '0-2' goes down, or .* 2: "):
        given_text(resources(["0-2"], ["n1"]))
    with pytest.raises(PlacementError, match=r"R_lite has 3 ranks and nodelist 1 hosts"):
        given_text(resources(["0-1", "2"], ["n1"]))
    table = "STATE NNODES NODELIST\nfree 1 n1\ndown 1 n2\nfree 1 n3\n"
    with pytest.raises(PlacementError, match="hosts:4: host list"):
        given_text(table)
