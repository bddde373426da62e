"""Broken and malicious lstopo files: a machine, or one line; in little time and memory.

10,000 texts, made from good ones by a seeded generator (2,000 of them in the usual run), and some
that were thought out. They are read in a process of their own, which tells how much memory and
time it took.

    python -m tests.topology.machine.test_hostile_xml 2000     # the process; prints a JSON line

Longer than other modules: every mutation starts from the same files.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace

import pytest

from psdist.errors import PlacementError
from psdist.topology import machine as machine_codec
from psdist.topology.machine import hwloc as hwloc_xml
from tests.support.mpirun import REPOSITORY

NUM_USUAL = 2_000
NUM_ALL = 10_000
SEED = 20250302
MAX_RSS_BYTES = 200 * 10**6
MAX_CPU_S = 20.0  # a quadratic reader takes minutes, a linear one up to 2 s

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
CORES = """\
      <object type="Core" os_index="0" cpuset="0x00000003" nodeset="0x1" gp_index="5">
        <object type="PU" os_index="0" cpuset="0x00000001" nodeset="0x1" gp_index="6"/>
        <object type="PU" os_index="1" cpuset="0x00000002" nodeset="0x1" gp_index="7"/>
      </object>
      <object type="Core" os_index="1" cpuset="0x0000000c" nodeset="0x1" gp_index="8">
        <object type="PU" os_index="2" cpuset="0x00000004" nodeset="0x1" gp_index="9"/>
        <object type="PU" os_index="3" cpuset="0x00000008" nodeset="0x1" gp_index="10"/>
      </object>
"""
VERSION_2 = f"""{HEAD}<topology version="2.0">
  <object type="Machine" os_index="0" cpuset="0xf" complete_cpuset="0xf" allowed_cpuset="0xf"
   nodeset="0x3" complete_nodeset="0x3" allowed_nodeset="0x3" gp_index="1">
    <info name="HostName" value="n1"/>
    <object type="Package" os_index="0" cpuset="0xf" nodeset="0x3" gp_index="2">
      <object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1" gp_index="3"
       local_memory="1073741824"><page_type size="4096" count="262144"/></object>
      <object type="NUMANode" os_index="1" cpuset="0xf" nodeset="0x2" gp_index="4"
       local_memory="2073741824"/>
{CORES}      <object type="Bridge" gp_index="20" bridge_type="0-1" bridge_pci="0000:[00-ff]">
        <object type="PCIDev" gp_index="21" pci_busid="0000:3b:00.0" pci_link_speed="15.753846"
         pci_type="0302 [10de:1db8] [10de:131d] a1">
          <object type="OSDev" gp_index="22" name="cuda0" subtype="CUDA" osdev_type="5"/>
          <object type="OSDev" gp_index="23" name="nvml0" subtype="NVML" osdev_type="1">
            <info name="NVIDIAUUID" value="GPU-affad486-897e-9778-18e8-26a7127927a8"/>
          </object>
        </object>
        <object type="PCIDev" gp_index="24" pci_busid="0000:3c:00.0" pci_link_speed="15.753846"
         pci_type="0207 [15b3:1017] [15b3:0003] 00">
          <object type="OSDev" gp_index="25" name="ib0" osdev_type="2"/>
          <object type="OSDev" gp_index="26" name="mlx5_0" osdev_type="3">
            <info name="Port1GID0" value="fe80:0000:0000:0000:ec0d:9a03:0067:fdd4"/>
          </object>
        </object>
      </object>
    </object>
  </object>
  <distances2hetero nbobjs="2" kind="25" name="NVLinkBandwidth">
    <indexes length="17">OSDev:23 Package:2 </indexes>
    <u64values length="26">1000000 40000 40000 1000000 </u64values>
  </distances2hetero>
  <cpukind cpuset="0x3"><info name="CoreType" value="IntelCore"/></cpukind>
  <cpukind cpuset="0xc"><info name="CoreType" value="IntelAtom"/></cpukind>
  <memattr name="Bandwidth" flags="5">
    <memattr_value target_obj_type="NUMANode" target_obj_gp_index="3" value="22500"
     initiator_cpuset="0xf"/>
    <memattr_value target_obj_type="NUMANode" target_obj_gp_index="4" value="90000"
     initiator_cpuset="0xf"/>
  </memattr>
</topology>
"""
VERSION_3 = VERSION_2.replace('version="2.0"', 'version="3.0"').replace(
    'osdev_type="3"', 'osdev_type="48"'
)
VERSION_1 = f"""{HEAD}<topology>
  <object type="Machine" os_index="0" cpuset="0xf" online_cpuset="0xf" allowed_cpuset="0xf">
    <object type="NUMANode" os_index="0" cpuset="0xf" nodeset="0x1" local_memory="1073741824">
      <object type="Socket" os_index="0" cpuset="0xf" nodeset="0x1">
        <object type="Cache" cpuset="0xf" cache_size="16777216" depth="3" cache_type="0">
{CORES}        </object>
      </object>
    </object>
  </object>
</topology>
"""
GOOD = tuple(text.encode() for text in (VERSION_1, VERSION_2, VERSION_3))

Mutation = Callable[[random.Random, bytes], bytes]


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def with_nul(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + b"\0" * rng.randint(1, 3) + data[at:]


def without_slice(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(200) :]


def with_line_again(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    start = rng.randrange(len(lines))
    part = lines[start : start + rng.randint(1, 12)]
    at = rng.choice((start, rng.randrange(len(lines))))
    return b"".join(lines[:at] + part + lines[at:])


def with_subtree_again(rng: random.Random, data: bytes) -> bytes:
    found = list(
        re.finditer(rb'<object type="(?:Core|Socket|PCIDev)".*?\n {6,8}</object>', data, re.S)
    )
    if not found:
        return data
    one = rng.choice(found)
    return data[: one.end()] + one[0] * rng.randint(1, 40) + data[one.end() :]


def with_lines_moved(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def with_values(pattern: bytes, values: tuple[bytes, ...]) -> Mutation:
    """Some of the attributes that match get another value."""

    def mutation(rng: random.Random, data: bytes) -> bytes:
        share = rng.choice((0.1, 0.5, 1.0))

        def changed(match: re.Match[bytes]) -> bytes:
            if rng.random() > share:
                return match[0]
            return match[1] + b'="' + rng.choice(values) + b'"'

        return re.sub(pattern + rb'="[^"]*"', changed, data)

    return mutation


def with_attributes_shuffled(rng: random.Random, data: bytes) -> bytes:
    def shuffled(match: re.Match[bytes]) -> bytes:
        attributes = re.findall(rb'\s[a-z_0-9]+="[^"]*"', match[2])
        rng.shuffle(attributes)
        return match[1] + b"".join(attributes) + match[3]

    return re.sub(rb'(<[a-z0-9]+)((?:\s[a-z_0-9]+="[^"]*")+)(\s*/?>)', shuffled, data)


def without_attributes(rng: random.Random, data: bytes) -> bytes:
    names = sorted(set(re.findall(rb'\s([a-z_0-9]+)="', data)))
    name = rng.choice(names) if names else b"none"
    return re.sub(rb"\s" + name + rb'="[^"]*"', b"", data)


def with_declarations(rng: random.Random, data: bytes) -> bytes:
    declared = rng.choice(
        (
            b'<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;">',
            b'<!ENTITY x SYSTEM "file:///etc/passwd">',
            b'<!ENTITY % x SYSTEM "http://127.0.0.1:9/x.dtd"> %x;',
            b"<!ATTLIST object subtype CDATA '" + b"x" * 10_000 + b"'>",
            b"<!ELEMENT object ANY>",
            b'<!NOTATION n SYSTEM "n">',
        )
    )
    data = re.sub(rb"<!DOCTYPE[^>]*>", lambda _: b"<!DOCTYPE topology [" + declared + b"]>", data)
    used = rng.choice((b"&c;", b"&x;", b"n1"))
    return data.replace(b"n1", used) if rng.random() < 0.5 else data.replace(b"40000 ", used)


def in_another_encoding(rng: random.Random, data: bytes) -> bytes:
    text = data.decode("utf-8", "replace")
    encoding = rng.choice(
        ("utf-16", "utf-16-le", "utf-32", "utf-7", "cp037", "latin-1", "shift-jis")
    )
    declared = rng.choice(
        ("UTF-8", "UTF-16", "utf-7", "cp037", "nonsense", "idna", "rot13", "shift-jis", encoding)
    )
    text = text.replace('encoding="UTF-8"', f'encoding="{declared}"').replace("n1", "n\u00e9")
    return text.encode(encoding, "replace")


BITMAPS = (
    b"0xf...f", b"0xf...f,0x0", b"", b",", b",,,", b"0x", b"x", b"-1", b"0x100000000", b"0x0",
    b"0xffffffff", b"0xffffffff," * 300 + b"0x1", b"," * 100_000, b"0x1," + b"," * 2047,
    b"0x1," + b"," * 2046, b"0x1" * 1000, b"4294967295", b"0xg", "0x\u0661".encode(),
)  # fmt: skip
NUMBERS = (
    b"-1", b"0", b"1", b"2", b"3", b"65535", b"65536", b"4294967295", b"9" * 19, b"9" * 30, b"",
    b"9" * 5000, b"1e9", b"0x10", "\u0663".encode(), b" 1", b"-5",
)  # fmt: skip
KINDS = (
    b"Machine", b"System", b"Package", b"Socket", b"Die", b"Group", b"NUMANode", b"MemCache",
    b"L3Cache", b"Cache", b"Core", b"PU", b"Bridge", b"PCIDev", b"OSDev", b"Misc", b"", b"X" * 3000,
)  # fmt: skip
MUTATIONS: tuple[Mutation, ...] = (
    truncated,
    flipped,
    with_nul,
    without_slice,
    with_line_again,
    with_subtree_again,
    with_lines_moved,
    with_values(rb"(\w*cpuset|\w*nodeset)", BITMAPS),
    with_values(rb"(os_index|depth|local_memory|gp_index|osdev_type|cache_type|value)", NUMBERS),
    with_values(rb"(\btype)", KINDS),
    with_values(rb"(pci_busid|pci_type|pci_link_speed)", (b"", b"nan", b"inf", b"-1", b"1" * 999)),
    with_values(rb"(version)", (b"", b"0", b"1.0", b"2.0", b"3.9", b"4.0", b"x" * 999)),
    with_values(
        rb"(\bname|value|subtype)", (b"", b"$(id)", b"-n", b"a&#10;b", b"Die", b"x" * 9999)
    ),
    with_attributes_shuffled,
    without_attributes,
    with_declarations,
    in_another_encoding,
)


def mutated(count: int) -> Iterator[bytes]:
    rng = random.Random(SEED)
    for _ in range(count):
        data = rng.choice(GOOD)
        for _ in range(rng.randint(1, 3)):
            data = rng.choice(MUTATIONS)(rng, data) or b"<"
        yield data


ALL_PUS = b"".join(b'<object type="PU" os_index="%d"/>' % cpu for cpu in range(16_384))
ALL_BITS = b",".join([b"0xffffffff"] * 512)
DEEP = 200_000


def machine_of(inside: bytes, *, after: bytes = b"") -> bytes:
    start = b'<topology version="2.0"><object type="Machine">'
    return b"".join((HEAD.encode(), start, inside, b"</object>", after, b"</topology>"))


def of_kind(kind: str, count: int, attributes: bytes = b"", content: bytes = b"") -> bytes:
    """Beside each other; %d in the attributes and the content is the number of each."""
    one = b'<object type="%s" %s>%s</object>' % (kind.encode(), attributes, content)
    return b"".join(one.replace(b"%d", b"%d" % number) for number in range(count))


def flood_of_functions(count: int) -> bytes:
    return b"".join(
        b'<object type="PCIDev" pci_busid="%06x:00:00.0" pci_type="0200 [8086:1521]">'
        b'<object type="OSDev" name="eth%d" osdev_type="2"/></object>' % (number, number)
        for number in range(count)
    )


def billion_laughs() -> bytes:
    more = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(1, 10))
    start = f'<!DOCTYPE topology [<!ENTITY e1 "0123456789">{more}]>'
    return f"{start}<topology>&e10;</topology>".encode()


def matrix(size: int) -> bytes:
    """In pieces, as hwloc writes them."""
    indexes = b"<indexes>%s</indexes>" % (b"OSDev:1 " * 1000) * (size // 1000)
    values = b"<u64values>%s</u64values>" % (b"1 " * 1000) * (size * size // 1000)
    return b'<distances2 name="NVLinkBandwidth">' + indexes + values + b"</distances2>"


def many_attributes(count: int) -> bytes:
    return (
        b'<object type="Core" ' + b" ".join(b'a%d=""' % number for number in range(count)) + b"/>"
    )


ONE_PU = b'<object type="PU" os_index="0"/>'
OPEN_GROUP = b'<object type="Group">'
THOUGHT_OUT: dict[str, Callable[[], bytes]] = {
    "deep objects": lambda: machine_of(OPEN_GROUP * DEEP + b"</object>" * DEEP),
    "deep and never closed": lambda: machine_of(OPEN_GROUP * DEEP)[:-20],
    "deep elements": lambda: HEAD.encode() + b"<a>" * DEEP,
    "as deep as can be": lambda: machine_of(OPEN_GROUP * 250 + ONE_PU + b"</object>" * 250),
    "all PUs that can be": lambda: machine_of(ALL_PUS),
    "nodes with all PUs": lambda: machine_of(
        ALL_PUS + of_kind("NUMANode", 1000, b'os_index="%d" cpuset="' + ALL_BITS + b'"')
    ),
    "groups with different PUs": lambda: machine_of(
        ALL_PUS + of_kind("Group", 2000, b'cpuset="0x%d,' + ALL_BITS[11:] + b'"')
    ),
    "sparse bitmaps": lambda: machine_of(of_kind("Group", 30_000, b'cpuset="%s"' % (b"," * 511))),
    "fewer sparse bitmaps": lambda: machine_of(
        of_kind("Group", 15_000, b'cpuset="%s"' % (b"," * 511))
    ),
    "one long bitmap": lambda: machine_of(b'<object cpuset="%s0x1"/>' % (b"0x1," * 3_900_000)),
    "one long name": lambda: machine_of(b'<object type="%s"/>' % (b"x" * 15_000_000)),
    "one long text": lambda: machine_of(b"x" * 15_000_000),
    "many long names": lambda: machine_of(of_kind("x" * 100_000, 150)),
    "too many bytes": lambda: b"<" * (17 << 20),
    "only opened": lambda: b"<" * (16 << 20),
    "many objects": lambda: machine_of(b'<object type="Core"/>' * 49_000),
    "too many objects": lambda: machine_of(b'<object type="Core"/>' * 700_000),
    "too many elements": lambda: machine_of(b'<info name="x" value="y"/>' * 600_000),
    "many attributes": lambda: machine_of(many_attributes(300_000)),
    "all of them with many attributes": lambda: machine_of(many_attributes(60) * 30_000),
    "a flood of functions": lambda: machine_of(flood_of_functions(24_000) + ONE_PU),
    "a huge matrix": lambda: machine_of(flood_of_functions(1), after=matrix(1000)),
    "too huge a matrix": lambda: machine_of(ONE_PU, after=matrix(2000)),
    "many kinds": lambda: machine_of(ALL_PUS, after=b'<cpukind cpuset="%s"/>' % ALL_BITS * 2500),
    "a billion laughs": billion_laughs,
    "default attributes": lambda: (
        b"<!DOCTYPE topology [<!ATTLIST object name CDATA '%s'>]><topology>" % (b"x" * 100_000)
        + b"<object/>" * 90_000
    ),
    "a long comment": lambda: b"<topology><!--" + b"- " * 8_000_000,
    "many comments": lambda: b"<topology>" + b"<!---->" * 2_300_000,
    "UTF-16": lambda: machine_of(many_attributes(100_000)).decode().encode("utf-16"),
    "spaces": lambda: b"<topology " + b" " * 16_000_000,
    "zeros": lambda: bytes(16_000_000),
}


@dataclass(kw_only=True)
class Report:
    counts: dict[str, int] = field(
        default_factory=lambda: {"machine": 0, "refused": 0, "failed": 0}
    )
    slowest_s: float = 0.0
    slowest: str = ""
    peak_rss_bytes: int = 0


def outcome(data: bytes) -> str | None:
    """``machine`` or ``refused``; None and a line on stderr where it is neither."""
    try:
        machine = hwloc_xml.parse(data, where="hostile.xml")
    except PlacementError as error:
        text = str(error)
        if len(text) < 500 and text.isprintable() and text.startswith("hostile.xml"):
            return "refused"
        print(f"not one short line: {text[:600]!r}", file=sys.stderr)
        return None
    except Exception as error:
        print(f"{type(error).__name__}: {error} for {data[:3000]!r}", file=sys.stderr)
        return None
    if not machine.cores or not all("\n" not in note for note in machine.notes):
        print(f"no such machine: {machine!r:.600}", file=sys.stderr)
        return None
    return "machine"


def read_all(named: Iterable[tuple[str, bytes]]) -> Report:
    """Reads each, and tells what became of them and which took longest (processor time)."""
    report = Report()
    for name, data in named:
        start = time.process_time()
        report.counts[outcome(data) or "failed"] += 1
        taken = time.process_time() - start
        if taken > report.slowest_s:
            report.slowest_s, report.slowest = taken, name
    return report


def in_child(named: Callable[[], Iterable[tuple[str, bytes]]]) -> Report:
    """The same in a child process, whose peak of memory is its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, json.dumps(asdict(read_all(named()))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise RuntimeError(f"the reading process ended with wait status {status}")
    return replace(Report(**json.loads(found)), peak_rss_bytes=usage.ru_maxrss * 1024)


def main(count: int) -> None:
    # This process stays small: a child's ru_maxrss begins with what its parent has.
    if count:
        reports = [
            in_child(lambda: ((f"mutated {n}", data) for n, data in enumerate(mutated(count))))
        ]
    else:
        reports = [
            in_child(lambda name=name, make=make: [(name, make())])  # type: ignore[misc]
            for name, make in THOUGHT_OUT.items()
        ]
    slowest = max(reports, key=lambda report: report.slowest_s)
    total = {key: sum(report.counts[key] for report in reports) for key in slowest.counts}
    largest = max(report.peak_rss_bytes for report in reports)
    print(json.dumps(asdict(replace(slowest, counts=total, peak_rss_bytes=largest))))


def run(count: int) -> Report:
    done = subprocess.run(
        [sys.executable, "-m", "tests.topology.machine.test_hostile_xml", str(count)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    report = Report(**json.loads(done.stdout))
    assert report.counts["failed"] == 0, done.stderr[:5000]
    assert report.slowest_s < MAX_CPU_S, report
    assert report.peak_rss_bytes < MAX_RSS_BYTES, report
    return report


def check_mutated(count: int) -> None:
    counts = run(count).counts
    assert counts["machine"] + counts["refused"] == count
    # Neither all refused nor all taken: the mutations reach both ends.
    assert min(counts["machine"], counts["refused"]) > count // 20


def test_mutated_files_end_in_a_machine_or_in_one_line() -> None:
    check_mutated(NUM_USUAL)


@pytest.mark.slow
def test_ten_thousand_mutated_files_end_in_a_machine_or_in_one_line() -> None:
    check_mutated(NUM_ALL)


def test_files_at_and_beyond_the_caps_take_little_time_and_memory() -> None:
    counts = run(0).counts
    assert sum(counts.values()) == len(THOUGHT_OUT)
    assert counts["machine"] >= 5  # those within the caps


def test_the_good_files_that_mutations_start_from_are_machines() -> None:
    for data in GOOD:
        machine = hwloc_xml.parse(data)
        assert [core.cpus for core in machine.cores] == [(0, 1), (2, 3)]


def test_shuffled_attributes_change_nothing() -> None:
    rng = random.Random(SEED)
    for data in GOOD:
        shuffled = with_attributes_shuffled(rng, data)
        assert shuffled != data
        assert hwloc_xml.parse(shuffled) == hwloc_xml.parse(data)


def test_a_mutated_machine_still_travels_between_ranks() -> None:
    num_machines = 0
    for data in mutated(300):
        try:
            machine = hwloc_xml.parse(data)
        except PlacementError:
            continue
        num_machines += 1
        assert machine_codec.unpack(machine_codec.pack(machine)) == machine
    assert num_machines > 15


if __name__ == "__main__":
    main(int(sys.argv[1]))
