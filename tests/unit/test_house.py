"""The core stays as small as it has been, and what measures it sees what it is to see."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from textwrap import dedent

import pytest

from tests import house
from tests.support import sources

RULES = {
    "parameters": "a feature is a part that its own folder builds, not a parameter of the core",
    "conditions": "a feature changes the core by a rule or a part, not by a condition in it",
    "branches": "_on_push is the plain path; what else may happen to a push is the rule's",
    "dispatchers": "one function applies the records of a shard; a second one would drift from it",
    "lines": "a feature lies in its own folder; the core does not grow by it",
}


@pytest.fixture(scope="module")
def core() -> dict[str, int]:
    files = house.read_sources()
    return house.measure_core(house.parse(files), files)


def complaints(measured: dict[str, int], best: dict[str, int]) -> list[str]:
    """Return a sentence for each figure that differs from the best value reached."""
    said = []
    for name in sorted(measured.keys() | best.keys()):
        now, was = measured.get(name, 0), best.get(name, 0)
        if now > was:
            said.append(f"{name}: {now}, and it has been {was}: {RULES[name.split()[0]]}")
        elif now < was:
            said.append(f"{name}: {now}, better than {was}: run `python -m tests.house --ratchet`")
    return said


def test_the_core_knows_no_more_of_features_than_it_has(core: dict[str, int]) -> None:
    best = json.loads(house.RATCHET.read_text(encoding="utf-8"))
    assert complaints(core, best) == []


def test_a_worse_value_names_the_rule_and_a_better_one_asks_to_lower_the_ratchet() -> None:
    said = complaints({"branches of _on_push": 9}, {"branches of _on_push": 8})
    assert said == [f"branches of _on_push: 9, and it has been 8: {RULES['branches']}"]
    (better,) = complaints({"branches of _on_push": 7}, {"branches of _on_push": 8})
    assert "--ratchet" in better


def test_every_figure_of_the_core_has_its_rule(core: dict[str, int]) -> None:
    assert {name.split()[0] for name in core} == set(RULES)


def test_the_table_fits_a_terminal_and_imports_nothing_of_psdist() -> None:
    program = (
        "import sys; from tests import house; house.main()\n"
        "assert not {'psdist', 'torch'} & set(sys.modules), 'imported'"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=house.REPOSITORY, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "conditions on a feature in the core" in done.stdout


def trees(source: str) -> dict[str, ast.Module]:
    return {"made.py": ast.parse(dedent(source))}


def hidden(source: str, name: str = "Made") -> list[str]:
    made = trees(source)
    return sources.hidden_parameters(sources.class_named(made["made.py"], name), {"made"}, made)


def test_variable_arguments_are_parameters() -> None:
    made = ast.parse("class Made:\n def __init__(self, a, /, b, *more, c=1, **rest): ...")
    found = sources.declared_parameters(sources.class_named(made, "Made"))
    assert [each.arg for each in found] == ["a", "b", "c", "more", "rest"]


def test_fields_of_a_data_class_that_is_passed_are_parameters() -> None:
    made = """
        class Options:
            first: int
            second: int = 0
        class Part:
            first: int
            second: int
            def act(self): ...
        class Made:
            def __init__(self, options: Options | None, part: Part): ...
    """
    assert hidden(made) == ["options.second"]


def test_what_is_assigned_after_construction_is_a_parameter() -> None:
    made = """
        class Made:
            def __init__(self):
                self.rule = self.later = None
            def use(self, later):
                self.later = later
            def act(self, value):
                self.later = value + 1
        made.rule = 1
        made.use(2)
        made.act(3)
        made.unknown = 4
        other.rule = 5
    """
    assert hidden(made) == [".rule", ".use"]


def test_variables_around_a_class_that_it_reads_are_parameters() -> None:
    made = """
        def build(backup, unused):
            every = 3
            class Made:
                def __init__(self): ...
                def act(self):
                    return backup + every
            return Made()
    """
    assert hidden(made) == ["backup", "every"]


@pytest.mark.parametrize(
    ("source", "num"),
    [
        ("if a: ...\nelif b: ...\nelse: ...", 2),
        ("while a: ...", 1),
        ("c = 1 if a else 2", 1),
        ("[c for c in b if c if a]", 2),
        ("match a:\n case 1: ...\n case C(): ...\n case _: ...", 2),
        ("match a:\n case c if b: ...", 1),
        ("a and b()", 1),
        ("table[a](1)", 1),
        ("table.get(a)(1)", 1),
        ("getattr(a, b)(1)", 1),
        ("getattr(a, 'b', None)", 1),
        ("getattr(a, 'b')", 0),
        ("c = table[a]", 0),
        ("c = a and b", 0),
    ],
)
def test_conditions_are_counted_whatever_they_are_written_as(source: str, num: int) -> None:
    assert len(list(sources.conditions(ast.parse(source)))) == num


@pytest.mark.parametrize(
    ("source", "feature"),
    [
        ("if self._backed is not None: ...", "backup groups"),
        ("if isinstance(a, ShardState): ...", "second copies"),
        ("getattr(self, 'rollback', None)", "rollback"),
        ("match self.kind:\n case 'spares': ...", "spares"),
        ("if clock <= newest: ...", ""),
        ("if self.background: ...", ""),
    ],
)
def test_a_condition_is_on_the_feature_whose_word_it_reads(source: str, feature: str) -> None:
    (condition,) = sources.conditions(ast.parse(source))
    assert house.feature_of(condition) == feature


def test_methods_that_a_subclass_overrides_are_found() -> None:
    made = trees("""
        class Core:
            def __init__(self): ...
            def act(self): ...
        class Backed(Core):
            def __init__(self): ...
            def act(self): ...
            def own(self): ...
    """)
    parent = sources.class_named(made["made.py"], "Core")
    assert sources.overridden(parent, made) == ["made.py: Backed.act"]


def test_branches_of_a_function_are_its_ifs_loops_and_cases() -> None:
    made = "def f(a):\n for b in a:\n  if b: return 1 if a else 2\n match a:\n  case 1: ..."
    (function,) = ast.parse(made).body
    assert isinstance(function, ast.FunctionDef)
    assert sources.num_branches(function) == 4


def test_lines_of_code_and_of_docstrings_are_told_apart() -> None:
    made = '"""One.\n\nTwo."""\n\na = 1  # with a comment\n"""Of a."""\n# Only a comment.\n'
    assert sources.count_lines(made, ast.parse(made)) == (7, 1, 4)


def test_of_a_notebook_only_the_markdown_cells_are_words_by_hand() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["Two words\n", "and three more."]},
        {"cell_type": "code", "source": ["a = 1"]},
    ]
    text = house.cells_of(json.dumps({"cells": cells}))
    assert house.words_by_hand({"docs/a.ipynb": text}) == {"docs/a.ipynb": 5}
    assert "docs/tutorials/staleness.ipynb" in house.pages()


def test_refusals_are_rows_with_a_reason_and_texts_with_a_remedy() -> None:
    made = dict(house.parse({house.SETTINGS: "class RunConfig:\n  backup: int\n  mode: str"}))
    made |= trees("""
        _TRIED = "not tried yet"
        MADE = Feature("made", needs=[Need(["x"], f"{_TRIED}")], conflicts=[Conflict("y", "no")])
        def f(config):
            if config.mode:
                return f"backup = {config.backup} with mode: no; set mode = sync"
            raise ValueError("no backup there")
    """)
    assert sorted(house.rows_of_tables(made)) == ["no", "not tried yet"]
    assert house.refusals_elsewhere(made) == ["made.py:6"]


def test_a_module_that_tells_records_apart_is_a_dispatcher() -> None:
    names = [f"R{number}" for number in range(10)]
    records = "\n".join(f"class {name}(Record): ..." for name in names)
    one, all_of_them = names[0], "\n".join(names)
    made = house.parse({house.RECORD_CLASSES: records, "a.py": all_of_them, "b.py": one})
    assert house.dispatchers(made) == ["a.py"]


def test_private_attributes_of_other_files_count() -> None:
    source = """
        import torch
        from torch import nn
        from psdist.made import Loop, Point

        class Fake:
            def __init__(self):
                self._own = Fake._count or super()._hidden

        def test_it(loop: Loop, point: Point, fake: Fake):
            assert loop._core._slots == fake._own
            assert point._replace(x=1) and torch._dynamo.config and nn.Linear._version
            assert loop.__class__
        """
    (tree,) = trees(source).values()
    found = [each.attr for each in sources.private_attributes(tree)]
    assert sorted(found) == ["_core", "_own", "_slots"]
    reads = house.private_reads({"tests/test_made.py": tree})
    assert sorted(reads)[0] == "tests/test_made.py:11: _core"
