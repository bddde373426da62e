"""README.md and docs/ are compared with the code: settings, paths, names, commands, links.

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
from psdist.config.old_names import MERGED
from psdist.config.outer import parse_outer
from psdist.config.settings import (
    KEYS,
    NAMES,
    TABLES,
    RunConfig,
    allowed_values,
    needs_of,
    unit_of,
)
from psdist.config.sources import PROFILES
from psdist.job import Job
from psdist.protocol.control import Control
from psdist.protocol.header import HEADER_BYTES, PROTOCOL_VERSION, Header
from psdist.protocol.optimizers import ACCEPTED, REFUSED, OptimizerKind

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("tests/data/*/*.md"),
    )
)
PATH = re.compile(
    r"`((?:psdist|servers|workers|topology|examples|tests|slurm|docs|\.ci)/[\w./-]*)`"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHOWING_COMMANDS = [
    page
    for page in PAGES
    if page.startswith(
        ("README.md", "docs/start/", "docs/tutorials/", "docs/guides/your-script.md")
    )
]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def settings_tables() -> str:
    """The tables of docs/reference/settings.md, from the settings themselves."""
    parts = []
    for table in TABLES:
        rows = ["| setting | default | allowed | needs | |", "|---|---|---|---|---|"]
        for key in (each for each in KEYS if NAMES[each].rpartition(".")[0] == table):
            field = RunConfig.model_fields[key]
            default = {"None": "unset", "()": "none", "False": "false"}.get(
                str(field.default), str(field.default)
            )
            # The largest number that fits says nothing to a reader.
            allowed = re.sub(r"from (\d+) to \d{9,}", r"from \1 up", allowed_values(key))
            allowed = re.sub(r" and <= \d{9,}", "", allowed)
            allowed = "as codec.push" if key == "codec_pull" else allowed
            cells = [f"`{NAMES[key]}`", f"{default} {unit_of(key)}".strip(), allowed]
            cells += [needs_of(key), field.description or ""]
            rows.append(f"| {' | '.join(cell.replace('<', '&lt;') for cell in cells)} |")
        heading = f"### `[{table}]`" if table else "### Without a table"
        parts.append("\n".join([heading, "", *rows]))
    return "\n\n".join(parts)


def optimizers_table() -> str:
    """The table of docs/reference/optimizers.md, from the table that servers use."""
    rows = [
        "| `torch.optim` | sync | ssp, async | local steps | outer | cut |",
        "|---|---|---|---|---|---|",
    ]
    for traits in ACCEPTED.values():
        name = traits.name.rpartition(".")[2]
        try:
            parse_outer(name.lower())
            outer = "yes"
        except ValueError:
            outer = "no"
        stale = "yes" if traits.lr_scales else f"no: {traits.reason}"
        cut = "anywhere" if traits.kind is OptimizerKind.ELEMENTWISE else "never"
        rows.append(f"| {name} | yes | {stale} | yes | {outer} | {cut} |")
    for full, reason in REFUSED.items():
        name = full.rpartition(".")[2]
        if name != "Optimizer":
            rows.append(f"| {name} | no: {reason} | no | no | no | |")
    return "\n".join(rows)


def test_the_page_of_optimizers_has_the_table_that_servers_use() -> None:
    wanted = optimizers_table()
    page = "docs/reference/optimizers.md"
    assert wanted in read(page), f"{page} wants this table:\n\n{wanted}\n"


def test_a_page_names_every_setting_with_its_default_and_what_is_allowed() -> None:
    wanted = settings_tables()
    page = "docs/reference/settings.md"
    assert wanted in read(page), f"{page} wants these tables:\n\n{wanted}\n"


def test_the_page_of_settings_has_every_old_name_and_every_profile() -> None:
    rows = [
        line for line in read("docs/reference/settings.md").splitlines() if line.startswith("| `")
    ]
    for old, merged in MERGED.items():
        assert any(
            row.startswith(f"| `{old}` |")
            and all(f"`{name}`" in row for name in merged.instead.split(" and "))
            for row in rows
        ), old
    for name, profile in PROFILES.items():
        settings = ", ".join(
            f"`{key} = {str(value).lower()}`" for key, value in profile.settings.items()
        )
        assert any(row.startswith(f"| `{name}` | {profile.purpose} | {settings} |") for row in rows)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    text = read(page)
    named = set(PATH.findall(text))
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing


def anchors(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them of headings, and those that it sets itself."""
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", text), re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "", heading).strip().lower()
        anchor = name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while anchor in found:
            number += 1
            anchor = f"{name}-{number}"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_page_begins_with_a_percent_sign(page: str) -> None:
    # MyST takes such a line for a comment and leaves it out of the site without a warning.
    swallowed = re.findall(r"^\s*%.*", CODE_BLOCK.sub("", read(page)), re.MULTILINE)
    assert not swallowed


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    broken = []
    for link in LINK.findall(CODE_BLOCK.sub("", read(page))):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert not broken


def test_every_page_that_code_names_exists() -> None:
    folders = ("psdist", "servers", "workers", "topology", "tests", "slurm", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    missing = [
        f"{path.relative_to(ROOT)}: {page}"
        for path in files
        if path.suffix in {".py", ".sh", ".sbatch", ""} and path != Path(__file__)
        for page in re.findall(r"docs/[\w/-]{2,}\.md", path.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    ]
    assert not missing


def test_the_readme_is_short_and_begins_with_one_sentence_and_a_picture() -> None:
    text = read("README.md")
    assert 1000 <= len(text.split()) <= 1250
    title, sentence, picture = text.split("\n\n")[:3]
    assert title == "# psdist"
    assert sentence.count(". ") == 0
    assert picture.startswith("![")


def test_the_readme_shows_a_script_as_a_diff_of_four_new_lines() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", read("README.md"), re.DOTALL)
    new = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(new) == 4
    assert len([line for line in diff.splitlines() if line.startswith("-")]) == 1
    script = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    ast.parse(script)


def test_the_readme_shows_the_steps_that_the_test_command_prints() -> None:
    shown = re.search(r"\$ bash tests/run\.sh\n(.*?)\n\n", read("README.md"), re.DOTALL)
    assert shown is not None
    script = read("tests/run.sh")
    for line in shown.group(1).splitlines():
        step = line.strip().removeprefix("== ")
        assert step == "..." or f"check {step}\n" in script or f"== {step}\\n" in script, line


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


def test_the_tour_points_to_the_places_where_a_push_is_made_sent_and_applied() -> None:
    named = set(places_named("docs/dev/tour.md"))
    assert ("workers/pushes.py", "frame") in named
    assert ("workers/loop.py", "_send_push") in named
    assert ("servers/protocol/rules/gathering.py", "proceed") in named
    assert ("servers/protocol/rules/on_arrival.py", "proceed") in named


@pytest.mark.parametrize("page", SHOWING_COMMANDS)
def test_every_command_and_option_in_a_page_exists(page: str) -> None:
    commands = typer.main.get_command(app)
    text = read(page)
    used = set(re.findall(r"(?:`|^    )psdist ([a-z]+)", text, re.MULTILINE))
    known = set(commands.commands)  # type: ignore[attr-defined]
    assert used <= known
    run = commands.commands["run"]  # type: ignore[attr-defined]
    options = {name for parameter in run.params for name in getattr(parameter, "opts", ())}
    # Options of psdist run come before the script; what follows it is the script's own.
    for line in re.findall(r"psdist run (.*?)\w+\.py", text):
        given = re.findall(r"(?<!\S)(--?[a-z][\w-]*)", line)
        assert set(given) <= options, line


def test_every_attribute_of_a_job_is_named_in_the_script_guide() -> None:
    text = read("docs/guides/your-script.md")
    public = {name for name in vars(Job) if not name.startswith("_")} - {"finish"}
    missing = [name for name in sorted(public) if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_the_page_of_the_wire_lists_every_control_message() -> None:
    text = read("docs/reference/wire.md")
    names = [cls.__name__ for cls in Control.SENT.values()]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_page_of_the_wire_has_the_version_and_the_header() -> None:
    page = read("docs/reference/wire.md")
    assert f"protocol version {PROTOCOL_VERSION}." in page
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
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
    table = read("docs/dev/design.md").split("| layer | rooms and modules |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    wanted = re.findall(r"\w+", layers)
    assert named == wanted  # in the same order, too


def test_the_changelog_begins_with_this_version_or_what_follows_it() -> None:
    from psdist import __version__

    headings = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == __version__
    assert "Unreleased" not in headings[1:]
