"""The mutation tool itself: what its operators make, what it draws, plays, kills and reports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import FrameType

import pytest

from tests.mutation import equivalent, session
from tests.mutation.__main__ import LIST
from tests.mutation.children import Job, run_all
from tests.mutation.coverage_map import CoverageMap
from tests.mutation.mutants import Mutant, is_same_program
from tests.mutation.neighbours import Neighbours
from tests.mutation.operators import mutants_of
from tests.mutation.probes import PROBE, Probed
from tests.mutation.scope import HOUSE, Scope


def made(source: str) -> dict[str, list[str]]:
    """Operator -> the mutated sources, without the indentation that they share."""
    text = textwrap.dedent(source).lstrip("\n")
    mutants = mutants_of("toy.py", text, Neighbours.of([text]))
    result: dict[str, list[str]] = {}
    for mutant in mutants:
        result.setdefault(mutant.operator, []).append(mutant.applied_to(text))
    return result


def lines(source: str, operator: str, number: int = 1) -> list[str]:
    """What becomes of one line."""
    return [text.splitlines()[number - 1].strip() for text in made(source).get(operator, [])]


def test_bounds_are_one_off_in_comparisons_numbers_and_ranges() -> None:
    assert lines("x = a < b", "bound") == ["x = a <= b"]
    assert lines("x = a < b <= c", "bound") == ["x = a <= b <= c", "x = a < b < c"]
    assert sorted(lines("x = 3", "bound")) == ["x = 2", "x = 4"]
    assert sorted(lines("x = f(n - 1)", "bound")) == [
        "x = f(n + 1)",
        "x = f(n - 0)",
        "x = f(n - 2)",
    ]
    assert lines("x = range(n)", "bound") == ["x = range(n + 1)", "x = range(n - 1)"]
    assert lines("x = y[:n]", "bound") == ["x = y[:n + 1]", "x = y[:n - 1]"]


def test_conditions_are_decided_negated_and_lose_operands() -> None:
    found = lines("if a == b:\n    f()\n", "condition")
    assert sorted(found) == ["if False:", "if True:", "if a != b:"]
    assert sorted(lines("x = a and (b or c)", "condition")) == [
        *("x = (b or c)", "x = a", "x = a and (b)", "x = a and (c)"),
    ]
    assert lines("x = not a", "condition") == ["x = a"]
    assert "x = [a for a in b if True]" in lines("x = [a for a in b if a]", "condition")
    assert lines("for a in b:\n    break\n", "condition", 2) == ["continue", "pass"]


def test_an_endless_loop_is_not_made_of_every_condition() -> None:
    assert lines("while a:\n    f()\n", "condition") == ["while False:"]


def test_orders_are_turned_round() -> None:
    assert lines("x = sorted(a, key=k)", "order") == [
        *("x = list(a)", "x = sorted(a, key=k)[::-1]"),
    ]
    assert lines("a.append(b)", "order") == ["a.insert(0, b)"]
    assert lines("x = a.popleft()", "order") == ["x = a.pop()"]
    assert lines("for a in b:\n    f(a)\n", "order") == ["for a in list(b)[::-1]:"]
    assert "order" not in made("for a in b:\n    if a:\n        findings.add(a)\n")
    swapped = "a.f(2)\na.f(1)\n"
    assert swapped in made("a.f(1)\na.f(2)\n")["order"]
    assert "order" not in made("a.f(1)\nb.f(2)\n")


def test_counts_are_not_kept() -> None:
    assert sorted(lines("a += b", "count")) == ["a += b; a += b", "a -= b", "pass"]


def test_statements_are_left_out() -> None:
    source = """
        class Toy:
            def change(self, slot):
                self.slot = slot
                self.free(slot)
                del self.used[slot]
                if not slot:
                    raise ValueError(f"slot {slot}")
        """
    found = made(source)["statement"]
    assert len(found) == 4
    assert [text.splitlines()[2].strip() for text in found].count("pass") == 1
    assert all("pass" in text for text in found)


def test_a_neighbour_stands_in_for_a_field_a_member_a_parameter_or_an_argument() -> None:
    source = """
        class Kind:
            PUSH = 1
            PULL = 2

        class Header:
            clock: int
            group: int
            weight: float

        def handle(header: Header, first: int, second: int):
            return f(header.clock, Kind.PUSH, first, clock=header.group, last=second)
        """
    assert sorted(lines(source, "neighbour", 11)) == [
        "return f(Kind.PUSH, header.clock, first, clock=header.group, last=second)",
        "return f(header.clock, Kind.PULL, first, clock=header.group, last=second)",
        "return f(header.clock, Kind.PUSH, first, clock=header.clock, last=second)",
        "return f(header.clock, Kind.PUSH, first, clock=header.group, last=first)",
        "return f(header.clock, Kind.PUSH, first, clock=second, last=header.group)",
        "return f(header.clock, Kind.PUSH, second, clock=header.group, last=second)",
        "return f(header.clock, first, Kind.PUSH, clock=header.group, last=second)",
        "return f(header.group, Kind.PUSH, first, clock=header.group, last=second)",
    ]


def test_another_result_is_returned() -> None:
    assert lines("def f() -> bool:\n    return a\n", "result", 2) == ["return not (a)"]
    assert lines("def f() -> list[int]:\n    return a\n", "result", 2) == ["return []"]
    assert lines("def f() -> int | None:\n    return a\n", "result", 2) == ["return None"]
    assert "result" not in made("def f() -> list[int]:\n    return []\n")


def test_texts_annotations_and_what_only_tools_read_stay_as_they_are() -> None:
    source = '''
        """A docstring of 3 words."""
        from a import b

        Alias = int | tuple[int, int]
        TEXT = "some words"

        @dataclass(slots=True)
        class Toy:
            __slots__ = ("a",)
            field: list[int]

            def __repr__(self):
                return 3

            def f(self, a: Literal[1]):
                g(f"{a + 1}")
        '''
    assert made(source).keys() == {"statement"}


def test_what_only_people_read_is_left_out_by_name() -> None:
    text = "WIDTH = 3\nLIMIT = 4\ndef draw():\n    f(5)\ndef decide():\n    f(6)\n"
    mutants = mutants_of("toy.py", text, Neighbours(), leave_out=("WIDTH", "draw"))
    assert {mutant.line for mutant in mutants} == {2, 6}


@pytest.mark.slow
def test_every_mutant_of_the_house_is_a_program() -> None:
    sources = session.read_sources(HOUSE)
    mutants = session.all_mutants(HOUSE, sources)
    assert {path.split("/")[0] for path in sources} == {"psdist", "servers", "workers"}
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 2000
    for mutant in mutants[::5]:
        compile(mutant.applied_to(sources[mutant.path]), mutant.path, "exec", dont_inherit=True)


def test_what_is_drawn_depends_on_the_seed_alone_and_is_never_the_same_program() -> None:
    text = "def f(a, b):\n" + "".join(f"    a.f({n})\n    b += {n} - b\n" for n in range(9))
    sources = {"toy.py": text}
    mutants = mutants_of("toy.py", text, Neighbours())
    drawn = session.draw(mutants, sources, seed=7, count=20)
    assert session.draw(mutants, sources, seed=7, count=20) == drawn
    assert session.draw(mutants, sources, seed=7, count=10) == drawn[:10]
    assert session.draw(mutants, sources, seed=8, count=20) != drawn
    edited = [mutant for mutant in mutants if mutant != drawn[3]]
    assert session.draw(edited, sources, seed=7, count=19) == drawn[:3] + drawn[4:]
    assert session.draw(mutants, sources, seed=7, count=None)[:20] == drawn
    assert is_same_program("a = 1 # one\n", "\na = (1)\n")
    assert not is_same_program("a = 1\n", "a = 1.0\n")


PATHS = '''\
class Toy:
    size = 3

    def at(self, n):
        """One line."""
        if n > 2:
            return self.size
        elif n == 2:
            return (
                n
            )
        for each in range(n):
            try:
                n = {0: 1}[each]
            except KeyError:
                n = 7
            else:
                n += each
            finally:
                with open("/dev/null"):
                    n += 1
        while n > 9:
            n -= 1; self.size = n
        match n:
            case 0:
                kept = "none"
            case _:
                def kept(m):
                    return m if m else -m
                class Inner:
                    x = 5
                    def own(self):
                        return self.x
                kept = kept(n) + Inner().own()
        return [kept for _ in range(2)]


def never():
    return 4
'''


def test_probes_stand_at_the_lines_that_run_and_at_no_other() -> None:
    probed = Probed.of(PATHS, "toy.py", first=5)
    assert probed.end == 5 + len({probe for each in probed.lines.values() for probe in each})
    names = ["return self.size", "n = 7", "n += each", 'kept = "none"', "return self.x"]
    for n, marks in ((3, "10000"), (2, "00000"), (0, "00010"), (1, "00101"), (2 - 3, "00001")):
        reached: set[int] = set()
        found: dict[str, type] = {PROBE: reached.add}  # type: ignore[dict-item] # a function
        exec(probed.code, found)  # the text of PATHS above, with probes
        assert not reached
        traced: set[int] = set()

        def trace(frame: FrameType, event: str, _: object, traced: set[int] = traced) -> object:
            if frame.f_code.co_filename != "toy.py":
                return None
            if event == "line" and frame.f_code.co_name != "Inner":
                traced.add(frame.f_lineno)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found["Toy"]().at(n)
        finally:
            sys.settrace(before)
        lines = {line for line, probes in probed.lines.items() if probes & reached}
        assert traced <= lines
        shown = [PATHS.splitlines()[line - 1].strip() for line in lines]
        assert "".join(str(int(name in shown)) for name in names) == marks
        assert "return 4" not in shown


def test_a_mutant_is_tried_on_the_tests_that_reach_its_line_the_likeliest_first() -> None:
    text = "A = 1\ndef f():\n    g(\n        2\n    )\n"
    mutants = {m.change: m for m in mutants_of("x/toy.py", text, Neighbours())}
    reached = CoverageMap(
        {"t/test_long.py::a": 2.0, "t/test_short.py::b": 1.0, "t/test_toy.py::c": 3.0,
         "t/test_long.py::d": 1.5, "t/test_other.py::e": 0.1},
        {"x/toy.py": {3: frozenset({"t/test_long.py::a", "t/test_short.py::b"}),
                      4: frozenset({"t/test_long.py::a"}),
                      9: frozenset({"t/test_toy.py::c"})}},
    )  # fmt: skip
    assert reached.tests_of(mutants["2 -> 3"]) == ["t/test_long.py::a"]
    assert reached.tests_of(mutants["g(2) -> pass"]) == ["t/test_short.py::b", "t/test_long.py::a"]
    everything = ["t/test_toy.py::c", "t/test_short.py::b", "t/test_long.py::d",
                  "t/test_long.py::a"]  # fmt: skip
    assert reached.tests_of(mutants["1 -> 2"]) == everything


def test_the_list_of_equivalent_mutants_names_mutants_that_exist() -> None:
    equivalent.read(LIST, session.all_mutants(HOUSE, session.read_sources(HOUSE)))


def entry(mutant: Mutant, **other: str) -> str:
    values = {
        "file": mutant.path,
        "function": mutant.function,
        "operator": mutant.operator,
        "line": mutant.source_line,
        "change": mutant.change,
        "reason": "because",
        **other,
    }
    return "[[mutant]]\n" + "".join(f"{key} = {value!r}\n" for key, value in values.items())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"change": "2 -> 9"}, "names no mutant any more"),
        ({"reason": " "}, "gives no reason"),
        ({"why": "because"}, "has the keys"),
    ],
)
def test_an_entry_of_the_list_that_names_nothing_or_no_reason_is_an_error(
    tmp_path: Path, wrong: dict[str, str], said: str
) -> None:
    mutants = mutants_of("toy.py", "A = 1\n", Neighbours())
    file = tmp_path / "list.toml"
    file.write_text(entry(mutants[0]), encoding="utf-8")
    assert equivalent.read(file, mutants) == {mutants[0].key: "because"}
    file.write_text(entry(mutants[0], **wrong), encoding="utf-8")
    with pytest.raises(equivalent.BadList, match=said):
        equivalent.read(file, mutants)
    file.write_text(entry(mutants[0]) * 2, encoding="utf-8")
    with pytest.raises(equivalent.BadList, match="twice"):
        equivalent.read(file, mutants)


def test_a_child_that_never_ends_is_killed_and_so_is_what_it_has_started() -> None:
    def hang(say_to: int, _scratch: str) -> int:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.write(say_to, b'{"pid": %d}\n' % sleeper.pid)
        time.sleep(600)
        return 0

    outcomes = list(run_all([Job("hang", hang, 2.0), Job("end", lambda *_: 3, 60.0)], at_once=2))
    assert [(each.what, each.status, each.has_hung) for each in outcomes] == [
        ("end", 3, False),
        ("hang", -9, True),
    ]
    (started_pid,) = [said["pid"] for said in outcomes[1].said]
    for _ in range(200):
        if not is_running(started_pid):
            break
        time.sleep(0.05)
    assert not is_running(started_pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").split()[2] != "Z"
    except OSError:
        return False


TOY = '''\
"""Counts."""

FIRST = 0


def count_to(end: int) -> int:
    at = FIRST
    while at < end:
        at += 1
    return at


def is_noted(value: int) -> bool:
    return value > 3


def is_forgotten(value: int) -> bool:
    return value > 3
'''
TESTS = """\
from toy import count_to, is_noted


def test_it_counts():
    assert count_to(3) == 3
    assert count_to(0) == 0


def test_that_can_hardly_fail():
    is_noted(3)
"""
RUN = """\
import sys
from pathlib import Path
from tests.mutation.__main__ import main
from tests.mutation.scope import Scope

root = Path(sys.argv[1])
sys.path.insert(0, str(root))
scope = Scope(root=root, package="", subjects=("toy.py",), tests=(".",),
              patience_s=0.3, sources=("toy.py", "test_toy.py"))
sys.exit(main(sys.argv[2:], scope=scope, list_file=root / "equivalent.toml"))
"""


def play_toy(root: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(root), *arguments],
        cwd=HOUSE.root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    (tmp_path / "test_toy.py").write_text(TESTS, encoding="utf-8")
    return tmp_path


@pytest.mark.slow  # CI plays mutants of psdist itself
def test_faults_are_killed_hung_or_survive_and_survivors_are_shown_as_a_diff(toy: Path) -> None:
    status, text = play_toy(toy, "--all")
    assert status == 1, text
    assert "toy.py:7" not in text.partition("survived:")[2], text
    killed, _, survived = text.partition("\nsurvived:")
    assert "at += 1 -> pass\n          killed by test_toy.py::test_it_counts, which never" in killed
    assert "at < end: < -> <=\n          killed by test_toy.py::test_it_counts\n" in killed
    assert "toy.py:3 bound: 0 -> 1\n          killed by" in killed
    shown = "toy.py:14 bound: value > 3: > -> >=\n--- toy.py\n+++ toy.py\n"
    assert f" {shown}" in f" survived:{survived}"
    assert "-    return value > 3\n+    return value >= 3" in survived
    assert "toy.py:18 result: value > 3 -> not (value > 3)  (no test reaches it)" in survived
    assert (toy / "toy.py").read_text("utf-8") == TOY
    assert {path.name for path in toy.iterdir()} == {"toy.py", "test_toy.py", ".mutation"}


@pytest.mark.slow
def test_the_score_and_the_list_decide_the_exit_status(toy: Path) -> None:
    assert play_toy(toy, "--all", "--line", "9", "--operator", "count")[0] == 0
    status, text = play_toy(toy, "--all", "--line", "14", "--quiet")
    assert status == 1, text
    assert play_toy(toy, "--all", "--line", "14", "--quiet", "--require", "0")[0] == 0

    mutants = mutants_of("toy.py", TOY, Neighbours())
    (listed,) = [m for m in mutants if m.line == 9 and m.change == "at += 1 -> pass"]
    (toy / "equivalent.toml").write_text(entry(listed), encoding="utf-8")
    status, text = play_toy(toy, "--all", "--line", "9", "--operator", "count")
    assert status == 1, text
    assert "more than 5% of the sample is listed as equivalent" in text
    (toy / "equivalent.toml").write_text(entry(listed, line="at += 2"), encoding="utf-8")
    status, text = play_toy(toy, "--all", "--line", "9")
    assert status == 2, text
    assert "names no mutant any more" in text


@pytest.mark.slow
def test_tests_that_fail_without_a_fault_measure_nothing(toy: Path) -> None:
    with (toy / "test_toy.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef test_that_fails():\n    assert count_to(1) == 7\n")
    status, text = play_toy(toy, "--all")
    assert status == 2
    assert "test_toy.py: fails without any fault" in text


def test_what_is_near_is_named_after_the_file_or_else_speaks_of_it(tmp_path: Path) -> None:
    for name, text in {
        "test_toy.py": "",
        "test_toy_twice.py": "",
        "test_toys.py": "import toy",
        "test_more.py": "toy.other, others",
        "test_rest.py": "others",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    near = {"a/toy.py": ("test_rest.py",), "rest.py": ("test_more.py",)}
    scope = Scope(root=tmp_path, package="", subjects=(), tests=(".",), near=near, sources=())
    named = ["test_toy.py", "test_toy_twice.py"]
    assert scope.test_files_near(["toy.py"]) == named
    assert scope.test_files_near(["a/toy.py"]) == ["test_rest.py", *named]
    assert scope.test_files_near(["rest.py"]) == ["test_more.py", "test_rest.py"]
    assert scope.test_files_near(["other.py"]) == ["test_more.py"]
    assert scope.test_files_near(["toy.py", "none.py"]) == named


@pytest.mark.slow
def test_what_near_tests_miss_is_played_by_all(toy: Path) -> None:
    (toy / "test_more.py").write_text(
        "from toy import is_noted\n\n\n"
        "def test_more():\n    assert is_noted(4) and not is_noted(3)\n",
        encoding="utf-8",
    )
    arguments = ("--all", "--line", "14", "--operator", "bound", "--require", "100")
    status, text = play_toy(toy, *arguments, "--near-first")
    missed, _, again = text.partition("3 fast tests pass")
    assert missed.startswith("2 fast tests pass"), text
    assert "toy.py:14 bound: value > 3: > -> >=\n          SURVIVED" in missed, text
    assert "toy.py:14 bound: value > 3: > -> >=\n          killed by test_more.py" in again, text
    assert "survived:" not in again, text
    assert "3 killed, 0 survived" in again, text
    assert play_toy(toy, *arguments)[0] == status
    # What survives all is told, as without.
    assert "\nsurvived: toy.py:18" in play_toy(toy, "--all", "--line", "18", "--near-first")[1]
