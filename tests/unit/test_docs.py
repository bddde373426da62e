"""What README.md and docs/ say is held against the code: settings, paths, names, commands.

A test that fails here means that a page is not true any more: mend the page.
"""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from psdist.commands.cli import app
from psdist.config.settings import KEYS, RunConfig, allowed_values
from psdist.job import Job
from psdist.protocol.control import Control
from psdist.protocol.header import HEADER_BYTES, Header

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/checkpoints.md",
    "docs/design.md",
    "docs/decisions.md",
    "docs/failures.md",
    "docs/memory.md",
    "docs/placement.md",
    "docs/replication.md",
    "docs/topology.md",
)
PATH = re.compile(r"`((?:psdist|servers|workers|topology|tests|slurm|docs|\.ci)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def settings_table() -> str:
    """The README's table, from the settings themselves."""
    rows = ["| setting | default | allowed | |", "|---|---|---|---|"]
    for key in KEYS:
        field = RunConfig.model_fields[key]
        default = {"None": "unset", "()": "none", "False": "false"}.get(
            str(field.default), str(field.default)
        )
        # The largest number that fits says nothing to a reader.
        allowed = re.sub(r"from (\d+) to \d{9,}", r"from \1 up", allowed_values(key))
        allowed = re.sub(r" and <= \d{9,}", "", allowed)
        cells = [f"`{key}`", default, allowed, field.description or ""]
        rows.append(f"| {' | '.join(cell.replace('<', '&lt;') for cell in cells)} |")
    return "\n".join(rows)


def test_the_readme_names_every_setting_with_its_default_and_what_is_allowed() -> None:
    wanted = settings_table()
    assert wanted in read("README.md"), f"README.md wants this table:\n\n{wanted}\n"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    text = read(page)
    named = set(PATH.findall(text))
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing
    links = [link for link in LINK.findall(text) if not link.startswith("http")]
    broken = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not broken


def defined_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def places_named(page: str) -> Iterator[tuple[str, str]]:
    """(path, name) of every "`path.py`: `name`, `name`" of a page."""
    pattern = re.compile(r"`([\w/]+\.py)`: ((?:`\w+`(?:[^`|;]{0,20})?)+)")
    for path, names in pattern.findall(read(page)):
        for name in re.findall(r"`(\w+)`", names):
            yield path, name


@pytest.mark.parametrize("page", PAGES)
def test_every_function_that_a_page_points_to_is_where_it_says(page: str) -> None:
    for path, name in places_named(page):
        assert name in defined_names(ROOT / path), f"{page}: no {name} in {path}"


def test_the_readme_points_to_the_places_where_a_push_is_made_sent_and_applied() -> None:
    named = set(places_named("README.md"))
    assert ("workers/pushes.py", "frame") in named
    assert ("workers/loop.py", "_send_push") in named
    assert ("servers/protocol/chunks/gathering.py", "proceed") in named
    assert ("servers/protocol/chunks/on_arrival.py", "proceed") in named


def test_every_command_and_option_in_the_readme_exists() -> None:
    commands = typer.main.get_command(app)
    text = read("README.md")
    used = set(
        re.findall(r"psdist ((?:run|check|checkpoint|doctor|bench|export)\b(?: pushpull)?)", text)
    )
    known = set(commands.commands)  # type: ignore[attr-defined]
    assert {use.split()[0] for use in used} <= known
    run = commands.commands["run"]  # type: ignore[attr-defined]
    options = {name for parameter in run.params for name in getattr(parameter, "opts", ())}
    # Options of psdist run come before the script; what follows it is the script's own.
    for line in re.findall(r"psdist run (.*?)\w+\.py", text):
        given = re.findall(r"(?<!\S)(--?[a-z][\w-]*)", line)
        assert set(given) <= options, line


def test_every_attribute_of_a_job_is_named_in_the_readme() -> None:
    text = read("README.md")
    public = {name for name in vars(Job) if not name.startswith("_")} - {"finish"}
    missing = [name for name in sorted(public) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_the_design_lists_every_control_message() -> None:
    text = read("docs/design.md")
    names = [cls.__name__ for cls in Control.__subclasses__()]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_designs_table_of_the_header_is_the_header() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", read("docs/design.md"), re.MULTILINE)
    table = {name: (int(offset), int(size)) for offset, size, name in rows}
    plain = packed(Header(kind=1, sender=0))
    for field in Header._fields:
        offset, size = table.pop(field)
        changed = packed(Header(kind=1, sender=0)._replace(**{field: 3}))
        differs = {
            at for at, (one, other) in enumerate(zip(plain, changed, strict=True)) if one != other
        }
        differs -= set(range(*crc_range(rows)))
        assert differs, field
        assert min(differs) >= offset, field
        assert max(differs) < offset + size, field
    assert set(table) == {"magic", "version", "crc"}


def packed(header: Header) -> bytes:
    data = bytearray(HEADER_BYTES)
    header.pack_into(data)
    return bytes(data)


def crc_range(rows: list[tuple[str, str, str]]) -> tuple[int, int]:
    (start, size) = next((int(at), int(size)) for at, size, name in rows if name == "crc")
    return start, start + size


def test_the_design_has_the_layers_of_the_import_contract() -> None:
    contract = configparser.ConfigParser()
    contract.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = contract["importlinter:contract:layers"]["layers"]
    table = read("docs/design.md").split("| layer | rooms and modules |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    wanted = re.findall(r"\w+", layers)
    assert named == wanted  # in the same order, too


def test_the_changelog_begins_with_this_version() -> None:
    from psdist import __version__

    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == __version__
