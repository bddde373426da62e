"""Measure the architecture of psdist: how much its core modules know of each feature.

Reads the sources and imports nothing of psdist.

    python -m tests.house                # the table: figure, today, target
    python -m tests.house --parts        # and the places that each figure counts
    python -m tests.house --ratchet      # write the figures of the core to tests/house.json

tests/unit/test_house.py fails where a figure of the core is worse than in tests/house.json.

tests/support/sources.py says what counts as a parameter and as a condition. A condition is on an
optional feature if it reads an identifier with one of the feature's words (FEATURES). A flag with a
neutral name is not seen, so a new flag of the core must get its word there.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.sources import (
    Condition,
    Trees,
    as_words,
    class_named,
    classes_of,
    conditions,
    constants_of,
    count_lines,
    declared_parameters,
    hidden_parameters,
    identifiers,
    last_name,
    methods_of,
    nodes_of,
    num_branches,
    overridden,
    private_attributes,
    text_of,
)

REPOSITORY = Path(__file__).resolve().parents[1]
RATCHET = REPOSITORY / "tests" / "house.json"
PRODUCT = ("psdist", "servers", "workers", "topology")
NOT_WRITTEN_BY_HAND = (
    *("docs/reference/settings.md", "docs/reference/conflicts.md", "docs/reference/json.md"),
    *("docs/reference/api.md", "docs/reference/cli.md", "docs/reference/optimizers.md"),
)
"""Pages that a test compares as a whole with the code, or that the build of the site fills."""
SPECIFICATION = "docs/reference/history.md"
"""What the checker proves: it may be as long as it must."""
COLUMNS = 120


class Core(NamedTuple):
    """A core class."""

    path: str
    most: int
    """Parameters that it should have at most."""
    instances: set[str]
    """Usual names of variables and attributes that hold an instance."""


CLASSES = {
    "ServerCore": Core("servers/protocol/state.py", 8, {"core", "_core"}),
    "Coordinator": Core("servers/protocol/coordinator.py", 8, {"coordinator", "_coordinator"}),
    "Trainer": Core("workers/trainer.py", 10, {"trainer", "_trainer", "trainers"}),
    "ServerLoop": Core("servers/loop.py", 10, {"server_loop", "hosted"}),
}

CORE = (
    "servers/loop.py",
    "servers/set_loop.py",
    "servers/set_store.py",
    "servers/protocol/",
    "workers/assembly.py",
    "workers/blocking.py",
    "workers/loop.py",
    "workers/push_transforms.py",
    "workers/pushes.py",
    "workers/reduction.py",
    "workers/replies.py",
    "workers/trainer.py",
    "workers/values.py",
    "workers/protocol/",
)
"""The plain path: receive, clock, rule, shard, reply; collect, group, push, receive, place."""

FEATURE_MODULES = (
    "servers/protocol/losses.py",
    "servers/protocol/joins.py",
    "servers/protocol/modes.py",
    "servers/protocol/regroups.py",
    "servers/protocol/replication/",
    "servers/protocol/round_control.py",
    "servers/protocol/rules/backup.py",
    "servers/protocol/rules/changes.py",
    "servers/protocol/rules/clipping.py",
    "servers/protocol/rules/closing.py",
    "servers/protocol/rules/switching.py",
    "servers/protocol/steps.py",
    "servers/protocol/failover/",
    "servers/protocol/takeovers.py",
    "workers/protocol/codec_levels.py",
    "workers/protocol/joining.py",
    "workers/protocol/resending.py",
)
"""Modules in the core's folders that belong to one feature each."""

FEATURES = {
    "backup groups": "backed backup may_miss miss missed misses wait_every",
    "bound that moves": "bound_control",
    "changing codecs": "codec_control tuning_state level levels",
    "changing modes": "change changes changing control mode_control modes set_mode",
    "checkpoints": "checkpoint checkpoints keeper kept restore restored restores resumed snapshot",
    "checksums": "checks checksum checksummed damaged",
    "clipping": "clip clipped clips coefficient max_norm norm squares sums_of_squares",
    "codecs": "codec codecs coded decoding encoder encoding feedback is_relative residual",
    "frozen moments": "freeze freeze_step frozen",
    "shrinking groups": "goes_on gone_on reform reforms regroup regroups",
    "history and spans": "history record recorded records trace tracer",
    "local steps": "ask_steps local_steps loss loss_reported loss_step_control paces round_took"
    " step_control steps_by term terms",
    "overlap": "beside driver early half_pushed in_group late overlap progress sums",
    "pipeline": "ahead pipeline pipelined",
    "rollback": "rollback",
    "second copies": "buddies buddy displaced fill hosted inherit inherited coordinator_log outbox"
    " picture replica replicas replication shard_state standby survives_servers take_over"
    " taken_over takeover takeovers",
    "spares": "admit admits join joined joining joins may_begin_late spare spares substitute"
    " substitutes",
    "stale lr": "compensation lr_scale stale stale_lr",
    "versions for readers": "copies is_copying keeps_versions pull_copies",
}
"""Optional feature -> the words of its identifiers."""

BACKUP = {"backup", "backup_every", "may_miss"}
"""Names by which the setting ``backup`` is handed on."""
OF_BACKUP = (
    "psdist/features/",
    "psdist/history/rules/log/missed.py",
    "servers/protocol/rules/backup.py",
    "servers/protocol/rules/closing.py",
)

SETTINGS = "psdist/config/settings.py"
MERGED = "psdist/config/old_names.py"
ROWS = ("Need", "Conflict")
"""Classes of psdist.features: an instance of one is a row of the table."""
RECORD_CLASSES = "servers/protocol/replication/records.py"
NAMES_OF_A_DISPATCHER = 8
"""A module that names so many classes of records tells them apart."""
SHORT = 60


class Figure(NamedTuple):
    name: str
    today: str
    target: str
    parts: Sequence[str]
    """Places that the figure counts."""


def read_sources(tops: Sequence[str] = PRODUCT) -> dict[str, str]:
    """Return the text of each file below ``tops`` by its path; links to folders are left out."""
    paths = (path for top in tops for path in (REPOSITORY / top).rglob("*.py"))
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.resolve() == path
    }


def parse(sources: dict[str, str]) -> dict[str, ast.Module]:
    """Return the syntax tree of each file. They stay, and the collector is kept off a million
    nodes: it would take longer than the rest."""
    gc.disable()
    try:
        trees = {path: ast.parse(source) for path, source in sources.items()}
        for tree in trees.values():
            nodes_of(tree)
    finally:
        gc.freeze()
        gc.enable()
    return trees


def is_core(path: str) -> bool:
    return path.startswith(CORE) and not path.startswith(FEATURE_MODULES)


def parameters_of(name: str, trees: Trees) -> tuple[list[str], list[str]]:
    """Return the declared parameters of a core class, and the hidden ones."""
    cls = class_named(trees[CLASSES[name].path], name)
    declared = [each.arg for each in declared_parameters(cls)]
    return declared, hidden_parameters(cls, CLASSES[name].instances, trees)


def feature_of(condition: Condition) -> str:
    """Return the feature that a condition is on, "" if it is on none."""
    words = {as_words(each) for each in identifiers(condition.reads)}
    for feature, listed in FEATURES.items():
        if any(f"_{word}_" in each for word in listed.split() for each in words):
            return feature
    return ""


def conditions_of_core(trees: Trees) -> tuple[int, list[str]]:
    """Return how many conditions the core modules have, and where those on a feature are: with the
    methods of core classes that subclasses override."""
    found, total = [], 0
    for path, tree in trees.items():
        for each in conditions(tree) if is_core(path) else ():
            total += 1
            if feature := feature_of(each):
                found.append(f"{path}:{each.line}: {feature}")
    for name, core in CLASSES.items():
        found += overridden(class_named(trees[core.path], name), trees)
    return total, found


def branches_of_on_push(trees: Trees) -> int:
    core = class_named(trees[CLASSES["ServerCore"].path], "ServerCore")
    return num_branches(methods_of(core)["_on_push"])


def files_of_backup(trees: Trees) -> list[str]:
    return [
        path
        for path, tree in trees.items()
        if not path.startswith(OF_BACKUP)
        and BACKUP & {each.removeprefix("_") for each in identifiers(tree.body)}
    ]


def dispatchers(trees: Trees) -> list[str]:
    """Return the modules that tell the records of a shard apart."""
    records = {cls.name for _, cls in classes_of({"": trees[RECORD_CLASSES]})} - {"Record"}
    most = min(len(records), NAMES_OF_A_DISPATCHER)
    found = []
    for path, tree in trees.items():
        used = {each.id for each in nodes_of(tree) if isinstance(each, ast.Name)}
        if path != RECORD_CLASSES and len(used & records) >= most:
            found.append(path)
    return found


def setting_names(trees: Trees) -> list[str]:
    config = class_named(trees[SETTINGS], "RunConfig")
    targets = [each.target for each in config.body if isinstance(each, ast.AnnAssign)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def merged_names(trees: Trees) -> list[str]:
    """Return the old names of settings that another setting has replaced."""
    tables = [
        node.value
        for node in (nodes_of(trees[MERGED]) if MERGED in trees else ())
        if isinstance(node, ast.AnnAssign) and last_name(node.target) == "MERGED"
    ]
    return [
        str(key.value)
        for table in tables
        if isinstance(table, ast.Dict)
        for key in table.keys
        if isinstance(key, ast.Constant)
    ]


def rows_of_tables(trees: Trees) -> list[str]:
    """Return the reason of each need and each conflict that a feature declares."""
    return [
        text_of(node.args[1], constants_of(tree))
        for tree in trees.values()
        for node in nodes_of(tree)
        if isinstance(node, ast.Call) and last_name(node.func) in ROWS
    ]


def refusals_elsewhere(trees: Trees) -> list[str]:
    """Return where else a text is raised or returned that names a setting, something that it does
    not go with, and a remedy."""
    keys = "|".join((*setting_names(trees), *merged_names(trees)))
    pattern = re.compile(rf"\b({keys})\b( = ?\S*)? (with|without|and)\b.*\b(set|leave|train)\b")
    return [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in nodes_of(tree)
        if isinstance(node, ast.Raise | ast.Return)
        and pattern.search(text_of(node, constants_of(tree)))
    ]


def private_reads(tests: Trees) -> list[str]:
    """Return where tests read private attributes of objects that their file does not define."""
    return [
        f"{path}:{node.lineno}: {node.attr}"
        for path, tree in tests.items()
        for node in private_attributes(tree)
    ]


def pages() -> dict[str, str]:
    """Return the text of each page of the documentation, README.md included, by path. A notebook's
    text is that of its Markdown cells."""
    docs = REPOSITORY / "docs"
    paths = [*REPOSITORY.glob("*.md"), *docs.glob("**/*.md"), *docs.glob("**/*.ipynb")]
    shown = (path for path in sorted(paths) if "_build" not in path.parts)
    texts = {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in shown
    }
    return {
        path: cells_of(text) if path.endswith(".ipynb") else text for path, text in texts.items()
    }


def cells_of(notebook: str) -> str:
    """Return the Markdown cells of a notebook."""
    cells = json.loads(notebook)["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def words_by_hand(texts: dict[str, str]) -> dict[str, int]:
    """Return the words of each page of docs/ that is written by hand. A word has a letter
    or a digit; the bars of tables have none."""
    left_out = (*NOT_WRITTEN_BY_HAND, SPECIFICATION)
    return {
        path: sum(1 for each in text.split() if re.search(r"\w", each))
        for path, text in texts.items()
        if path.startswith("docs/") and path not in left_out
    }


def long_lines(texts: dict[str, str]) -> list[str]:
    """Return where a line of a page is too long to read in a terminal; rows of tables may be."""
    return [
        f"{path}:{number}"
        for path, text in texts.items()
        if path.endswith(".md")
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > COLUMNS and not line.lstrip().startswith("|")
    ]


def measure_core(trees: Trees, sources: dict[str, str]) -> dict[str, int]:
    """Return the figures that the ratchet holds; lines are rounded up to whole hundreds."""
    figures = {}
    for name in CLASSES:
        declared, hidden = parameters_of(name, trees)
        figures[f"parameters of {name}"] = len(declared) + len(hidden)
    _, on_features = conditions_of_core(trees)
    core = filter(is_core, trees)
    lines = sum(count_lines(sources[path], trees[path]).code for path in core)
    return figures | {
        "conditions on a feature": len(on_features),
        "branches of _on_push": branches_of_on_push(trees),
        "dispatchers over records": len(dispatchers(trees)),
        "lines of code of the core": 100 * -(-lines // 100),
    }


def figures(trees: Trees, sources: dict[str, str]) -> Iterable[Figure]:
    """Yield the rows of the table."""
    for name, core in CLASSES.items():
        declared, hidden = parameters_of(name, trees)
        today = f"{len(declared)} + {len(hidden)} hidden"
        yield Figure(f"parameters of {name}", today, f"<= {core.most}", [*declared, *hidden])
    total, on_features = conditions_of_core(trees)
    today = f"{len(on_features)} of {total:,}"
    yield Figure("conditions on a feature in the core", today, "<= 60", on_features)
    yield Figure("branches of _on_push", str(branches_of_on_push(trees)), "<= 8", [])
    files = files_of_backup(trees)
    yield Figure("files that backup touches", str(len(files)), "<= 6", files)
    rows = rows_of_tables(trees)
    elsewhere = refusals_elsewhere(trees)
    yield Figure("rows of needs and conflicts", str(len(rows)), "<= 60", rows)
    untried = [each for each in rows if "tried" in each]
    yield Figure("... because they were not tried", str(len(untried)), "0", untried)
    yield Figure("refusals elsewhere", str(len(elsewhere)), "0", elsewhere)
    yield Figure("settings", str(len(setting_names(trees))), "<= 58", [])
    telling = dispatchers(trees)
    yield Figure("dispatchers over records of a shard", str(len(telling)), "1", telling)
    counts = {path: count_lines(source, trees[path]) for path, source in sources.items()}
    total, code, docstrings = map(sum, zip(*counts.values(), strict=True))
    yield Figure("product lines", f"{total:,}", "<= 84,000", [])
    yield Figure("... of code", f"{code:,}", "", [])
    yield Figure("... of docstrings", f"{docstrings:,}", "", [])
    short = [path for path, each in counts.items() if each.total < SHORT]
    today = f"{len(short)} of {len(counts)}"
    yield Figure(f"files below {SHORT} lines", today, "<= 40", short)
    reads = private_reads(parse(read_sources(("tests",))))
    today = f"{len(reads)} in {len({each.partition(':')[0] for each in reads})} files"
    yield Figure("private attributes that tests read", today, "<= 300", reads)
    texts = pages()
    words = words_by_hand(texts)
    today = f"{sum(words.values()):,}"
    listed = [f"{path}: {number}" for path, number in words.items()]
    yield Figure("words of docs written by hand", today, "<= 47,500", listed)
    long = long_lines(texts)
    yield Figure(f"lines of pages above {COLUMNS} columns", str(len(long)), "0", long)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--parts", action="store_true", help="the places that a figure counts")
    parser.add_argument("--ratchet", action="store_true", help=f"write {RATCHET.name}")
    given = parser.parse_args()
    sources = read_sources()
    trees = parse(sources)
    if given.ratchet:
        RATCHET.write_text(json.dumps(measure_core(trees, sources), indent=2) + "\n")
    print(f"{'figure':<40} {'today':>20} {'target':>12}")
    for figure in figures(trees, sources):
        print(f"{figure.name:<40} {figure.today:>20} {figure.target:>12}")
        for part in figure.parts if given.parts else ():
            print(f"    {part}")


if __name__ == "__main__":
    main()
