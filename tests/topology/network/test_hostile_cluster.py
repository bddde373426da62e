"""Broken and malicious files of racks: a tree, or one line; in little time and memory.

2,000 texts, made from good ones by a seeded generator, and some that were thought out. They are
read in a process of their own, which tells how much memory and time it took.

    python -m tests.topology.network.test_hostile_cluster     # the process; prints a JSON line
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from psdist.errors import PlacementError
from psdist.topology.machine import flat_machine
from psdist.topology.network import host_files
from psdist.topology.network.sources import build_cluster, parse_tree
from psdist.topology.text import hostlist
from tests.support.mpirun import REPOSITORY

NUM_MUTATED = 2_000
SEED = 20250301
MAX_RSS_BYTES = 200 * 10**6
MAX_CPU_S = 20.0  # a quadratic reader takes minutes, a linear one up to 2 s

CONF = b"""\
# racks
SwitchName=s0 Nodes=n[1-2] LinkSpeed=900
SwitchName=s1 \\
    Nodes="n[3-4],gpu[0-1]-ib[0-3]"
SwitchName=s2 Switches=s[0-1]
"""
SHOWN = b"""\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
"""
BLOCKS = b"BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n"
FABRIC = b"""\
#
# Topology file: generated on Wed Aug  6 16:11:23 2025
#
vendid=0x2c9
devid=0xd2f2
switchguid=0xa1(a1)
Switch\t65 "S-00000000000000a1"\t\t# "MF0;leaf1:MQM9701/U1" enhanced port 0 lid 73 lmc 0
[1]\t"H-00000000000000b1"[1](b1) \t\t# "n1 mlx5_0" lid 647 4xNDR
[2]\t"H-00000000000000b2"[1](b2) \t\t# "n2 mlx5_0" lid 641 4xNDR
[35]\t"S-00000000000000a2"[32]\t\t# "MF0;spine1:MQM9701/U1" lid 236 4xNDR

switchguid=0xa2(a2)
Switch\t65 "S-00000000000000a2"\t\t# "MF0;spine1:MQM9701/U1" enhanced port 0 lid 74 lmc 0
[32]\t"S-00000000000000a1"[35]\t\t# "MF0;leaf1:MQM9701/U1" lid 236 4xNDR

caguid=0xb1
Ca\t1 "H-00000000000000b1"\t\t# "n1 mlx5_0"
[1](b1) \t"S-00000000000000a1"[1]\t\t# lid 693 lmc 0 "MF0;leaf1:MQM9701/U1" lid 73 4xNDR
"""
TABLE = b"""\
[[switch]]
name = "spine"

[[switch]]
name = "rack1"
parent = "spine"
nodes = "n[1-16]"
link = "25Gbit"
uplink = 12.5e9
"""
YAML = b"""\
---
- topology: slow
  flat: true
- topology: fast
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - {switch: s1, nodes: "n[1-4]"}
      - switch: s2
        nodes: n[5-8]
"""
HOST_FILE = b"# of an MPI job\nn1.job slots=8 max_slots=9\nn2.job slots=8\nn3:4\nn3\n"
FLUX = b"""\
{"version": 1, "execution": {"R_lite": [{"rank": "0-3", "children": {"core": "0-15"}}],
 "nodelist": ["n[1-4]"], "starttime": 0}}
"""
FLUX_LIST = b"""\
     STATE NNODES   NCORES    NGPUS NODELIST
      free      3       12        0 n[1-3]
      down      1        4        0 n4
"""
HOSTS = b"n[1-3,07-12],gpu[0-1]-ib[0-3],login"
GOOD = (CONF, SHOWN, BLOCKS, FABRIC, TABLE, HOSTS, YAML, HOST_FILE, FLUX, FLUX_LIST)

TOKENS = (
    *(b"[", b"]", b"[[", b",", b"-", b"\\\n", b"\n", b"\0", b"\xff\xfe", b"\xc3\x28", b'"', b"'"),
    *(b"[1-999999999999]", b"[0-99999]", b"[1-9][1-9][1-9]", b"9" * 400, b"1e999", b"=", b"#"),
    *(b"Switches=s2", b"SwitchName=s0", b"Nodes=", b'parent = "rack1"', b"{", b"\xf0\x9f\x8e\x89"),
    *(b"&x ", b"*x", b"!!int ", b"- ", b": ", b"? ", b"slots=", b"slots=99999999", b":0", b"\t"),
)


def mutated(source: bytes, draw: random.Random) -> bytes:
    """``source`` with one or two wounds."""
    text = bytearray(source)
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(text) + 1)
        wound = draw.randrange(8)
        if wound == 0:
            del text[at:]
        elif wound == 1 and at < len(text):
            text[at] ^= 1 << draw.randrange(8)
        elif wound == 2:
            text[at:at] = draw.choice(TOKENS)
        elif wound == 3:
            text[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(20)))
        elif wound == 4:
            del text[at : at + draw.randrange(40)]
        elif wound == 5:
            text[at:at] = text[at : at + draw.randrange(200)] * draw.randrange(40)
        elif wound == 6:
            lines = text.split(b"\n")
            draw.shuffle(lines)
            text = bytearray(b"\n".join(lines))
        else:
            text += draw.choice(GOOD)
    if draw.randrange(12):
        return bytes(text)
    return bytes(text).decode("latin-1").encode(draw.choice(("utf-16", "utf-32", "cp500")))


def chain(length: int, *, is_closed: bool) -> bytes:
    lines = [f"SwitchName=s{index} Switches=s{index + 1}" for index in range(length)]
    lines.append(f"SwitchName=s{length} " + ("Switches=s0" if is_closed else "Nodes=n[1-9]"))
    return "\n".join(lines).encode()


def tangle(num_switches: int, num_cards: int) -> bytes:
    """Every switch has its own choice of hosts, and cables to a hundred others."""
    draw = random.Random(SEED)
    text = []
    for switch in range(num_switches):
        text.append(f'Switch\t65 "S-{switch:x}"\t\t# "MF0;s{switch}:X/U1" enhanced port 0')
        for _ in range(num_cards):
            host = draw.randrange(2 * num_cards)
            text.append(
                f'[1]\t"H-{draw.randrange(1 << 60):x}"[1](1) \t# "n{host} mlx5_0" lid 1 4xNDR'
            )
        for _ in range(100):
            text.append(
                f'[1]\t"S-{draw.randrange(num_switches):x}"[1]\t\t# "MF0;s:X/U1" lid 1 4xNDR'
            )
    return "\n".join(text).encode()


def thought_out() -> Iterator[tuple[str, bytes]]:
    yield "200,000 switches deep", chain(200_000, is_closed=False)
    yield "19,999 switches deep", chain(19_998, is_closed=False)
    yield "a circle of 19,999 switches", chain(19_998, is_closed=True)
    yield "a circle of 200,000 switches", chain(200_000, is_closed=True)
    yield (
        "a thousand switches above twenty thousand",
        b"".join(b"SwitchName=t%d Switches=s[0-19999]\n" % index for index in range(1000)),
    )
    yield "100,000 nodes", b"SwitchName=a Nodes=n[0-99999]"
    yield (
        "100,000 nodes 200 times",
        b"".join(
            b"SwitchName=s%d Nodes=n[%d-%d]\n" % (i, i * 10**5, i * 10**5 + 99999)
            for i in range(200)
        ),
    )
    yield "a range of 10^12", b"SwitchName=a Nodes=n[1-999999999999]"
    yield "10^48 names", b"SwitchName=a Nodes=n" + b"[0-999999]" * 8
    yield "half a million ranges", b"SwitchName=a Nodes=n[" + b"1," * 500_000 + b"1]"
    yield "half a million brackets", b"SwitchName=a Nodes=" + b"n[1]" * 250_000
    yield "half a million open brackets", b"SwitchName=a Nodes=" + b"[" * 1_000_000
    yield "one line of 24 MB", b"SwitchName=a Nodes=" + b"n" * 24_000_000
    yield "24 MB of keys", b"SwitchName=a " + b"Nodes=n1 " * 2_600_000
    yield "half a million comments", b"# nothing but a remark that goes on and on\n" * 500_000
    yield "half a million continuations", b"SwitchName=a \\" + b"\n\\" * 490_000
    yield "millions of empty lines", b"\n" * 24_000_000 + b"SwitchName=a Nodes=n1"
    yield "half a million empty lines", b"\n" * 490_000 + b"SwitchName=a Nodes=n1"
    yield "half a million carriage returns", b"SwitchName=a Nodes=n1\r\n" + b"\r\n" * 490_000
    yield "more than 24 MiB", b"x" * 26_000_000
    yield "a fabric of one huge line", b"vendid=0\n" + b"[1]" * 8_000_000
    cable = b'[1]\t"H-b1"[1](b1) \t\t# "n1 mlx5_0" lid 647 4xNDR\n'
    yield "a fabric of one huge switch", FABRIC + b'Switch\t1 "S-a3"\n' + cable * 240_000
    yield "a fabric of too many ports", FABRIC + b'Switch\t1 "S-a3"\n' + cable * 460_000
    yield (
        "a fabric of 100,000 switches",
        b"".join(b'Switch\t1 "S-%x"\t\t# "s"\n' % index for index in range(100_000)),
    )
    yield "a fabric without racks", tangle(1000, 40)
    yield "a fabric of switches only", tangle(2000, 0)
    yield "a key of 300,000 parts", b"a" + b".a" * 300_000 + b" = 1"
    yield "a table 100,000 lists deep", b"switch = " + b"[" * 100_000
    yield "a table 50,000 tables deep", b"switch = " + b"{a=" * 50_000
    yield (
        "20,000 switches in a table",
        b"".join(b'[[switch]]\nname = "s%d"\nparent = "s0"\n' % index for index in range(20_000)),
    )
    yield "a table of 90,000 keys", b"".join(b"k%d=1\n" % index for index in range(90_000))
    yield "a table of 300,000 quotes", b"a = '" + b"\\\"'" * 300_000
    yield "a table of 500,000 escapes", b'a = "' + b'\\"' * 500_000 + b"." * 40
    yield "a table of 500,000 quotes and no string", b"a = " + b"." * 40 + b"\"'" * 250_000
    yield "YAML a million lists deep", b"- " * 1_000_000
    yield "YAML a million brackets deep", b"- " + b"[" * 1_000_000
    yield "YAML half a million mappings deep", b"- " + b"{a: " * 500_000
    yield "YAML of a million lines", b"- a\n" * 490_000
    yield "YAML of a million keys", b"- a\n" + b"? " * 1_000_000
    yield "YAML of one word", b"- " + b"a" * 4_000_000
    yield "YAML of quotes", b"- '" + b"''" * 1_900_000
    yield "YAML of anchors", b"- " + b"&a " * 1_000_000
    yield "YAML of tags", b"- " + b"!" * 3_000_000
    yield "YAML of directives", b"%TAG ! a\n" * 400_000
    yield (
        "YAML of 30,000 switches",
        b"- topology: a\n  tree:\n    switches:\n"
        + b"".join(b"    - {switch: s%d, nodes: n%d}\n" % (i, i) for i in range(30_000)),
    )
    yield "a host file of 490,000 hosts", b"".join(b"n%d\n" % i for i in range(490_000))
    yield "a host file of one host", b"n1 slots=1\n" * 490_000
    yield "a host file of one line", b"n1" + b" user=me" * 900_000
    yield "Flux with a huge set", FLUX.replace(b"0-3", b"0-1," * 1_000_000 + b"5")
    yield "Flux with a huge range", FLUX.replace(b"0-3", b"0-999999999")
    yield "Flux with a huge list", FLUX.replace(b"n[1-4]", b"n[1-999999999]")
    yield "a million unclosed brackets", b"n[" * 500_000
    yield "a bracket that is closed and one that is not", b"n[1-2]" * 160_000 + b"["


def outcome(action: Callable[[], object]) -> str:
    """ "" for a result, else the complaint; anything else that is raised comes through."""
    try:
        action()
    except PlacementError as error:
        return str(error)
    return ""


def plan_with(data: bytes) -> None:
    tree = parse_tree(data, where="racks")
    build_cluster([node.name for node in tree.nodes[:20]], flat_machine([0]), tree=tree)


def peak_rss_bytes() -> int:
    # Not ru_maxrss: a child of vfork begins with what its parent had.
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    return int(match[1]) * 1024 if match else 0


def main() -> None:
    draw = random.Random(SEED)
    report: dict[str, list[str]] = {"slow": [], "bad": [], "big": []}
    num_trees = num_complaints = num_host_files = 0

    def read(name: str, data: bytes) -> None:
        nonlocal num_trees, num_complaints, num_host_files
        before = time.process_time()
        said = [outcome(lambda: plan_with(data))]
        said.append(outcome(lambda: hostlist.expand(data.decode("latin-1"))))
        said.append(outcome(lambda: host_files.parse(data, where="hosts")))
        took = time.process_time() - before
        if took >= MAX_CPU_S:
            report["slow"].append(f"{name}: {took:.1f} s")
        report["bad"] += [
            f"{name}: {each!r:.300}" for each in said if not each.isprintable() or len(each) > 500
        ]
        if not report["big"] and peak_rss_bytes() >= MAX_RSS_BYTES:
            report["big"].append(f"{name}: {peak_rss_bytes() / 1e6:.0f} MB")
        num_trees += not said[0]
        num_complaints += bool(said[0])
        num_host_files += not said[2]

    for number in range(NUM_MUTATED):
        read(f"mutation {number}", mutated(GOOD[number % len(GOOD)], draw))
    for name, data in thought_out():
        read(name, data)
    found = {"trees": num_trees, "complaints": num_complaints, "host files": num_host_files}
    print(json.dumps({**report, **found}))


def test_hostile_files_of_racks_end_in_a_tree_or_in_one_line_within_time_and_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.topology.network.test_hostile_cluster"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["bad"] == []
    assert report["slow"] == []
    assert report["big"] == []
    assert report["trees"] > 120  # the wounds are not all deadly, and not all harmless
    assert report["complaints"] > 800
    assert report["host files"] > 80


if __name__ == "__main__":
    main()
